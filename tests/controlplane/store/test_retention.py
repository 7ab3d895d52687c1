"""Old plans and forecasts are forgotten; what is in force, what waits, and what a rollback restores is not."""

from sqlalchemy import select, text

from controlplane.policies.facts import Endpoint
from controlplane.policies.lifecycle import PlanState
from controlplane.store.demand import (
    IW,
    DemandBucket,
    DemandRow,
    Forecast,
    ForecastScore,
    forget_demand,
    forget_forecasts,
    forget_measured_minutes,
    note_measured,
    put_demand,
    put_forecasts,
    read_demand,
)
from controlplane.store.fleet import fleet_index
from controlplane.store.plans import Plan, PlanEntry, add_plan, forget_plans
from tests.controlplane.world import World, a_plan

DAY_S = 86_400


def old_plan(world: World, state: PlanState, *, days: int, previous: str | None = None) -> str:
    with world.database.transaction() as session:
        plan, entries = a_plan(fleet_index(session), state=state, previous_plan_id=previous)
        assert add_plan(session, plan, entries)
        session.flush()
        session.execute(text(f"UPDATE plans SET created_at = now() - interval '{days} days' WHERE id = '{plan.id}'"))
        return str(plan.id)


def test_plans_that_ended_long_ago_go(world: World) -> None:
    oldest = old_plan(world, PlanState.SUPERSEDED, days=20)
    failed = old_plan(world, PlanState.FAILED, days=20)
    before = old_plan(world, PlanState.SUPERSEDED, days=19, previous=oldest)
    in_force = old_plan(world, PlanState.APPLIED, days=18, previous=before)
    waiting = old_plan(world, PlanState.DRAFT, days=18)
    young = old_plan(world, PlanState.REJECTED, days=9, previous=failed)
    with world.database.transaction() as session:
        assert forget_plans(session, keep_s=10 * DAY_S, count_max=1) == 1
        assert forget_plans(session, keep_s=10 * DAY_S, count_max=5) == 1
    with world.database.transaction() as session:
        left = {plan.id: plan.previous_plan_id for plan in session.scalars(select(Plan))}
        assert left == {before: None, in_force: before, waiting: None, young: None}
        assert set(session.scalars(select(PlanEntry.plan_id))) == set(left)
        assert forget_plans(session, keep_s=10 * DAY_S, count_max=5) == 0


def test_old_forecasts_go(world: World) -> None:
    def forecast(origin_s: int) -> Forecast:
        peak = {"forecaster": "x", "peak_q50": 1.0, "peak_upper": 2.0, "quantile": 0.9, "path": [], "candidates": {}}
        return Forecast(model="tide", region="us-east", origin_s=origin_s, reason="", state=None, **peak)

    with world.database.transaction() as session:
        put_forecasts(session, [forecast(0), forecast(3600)])
        score = {"hours": 1, "covered": 1, "error_sum": 0.0, "actual_sum": 1.0}
        session.add_all([ForecastScore(origin_s=0, **score), ForecastScore(origin_s=3600, **score)])
        assert forget_forecasts(session, before_s=3600, count_max=5) == 1
        assert list(session.scalars(select(Forecast.origin_s))) == [3600]
        assert list(session.scalars(select(ForecastScore.origin_s))) == [3600]


def minutes(*starts_s: int) -> list[DemandRow]:
    tide = Endpoint(model="tide", region="us-east")
    return [DemandRow(endpoint=tide, kind=IW, start_s=start_s, tokens_per_s=1.0) for start_s in starts_s]


def test_old_demand_goes_in_pieces_the_oldest_first(world: World) -> None:
    with world.database.transaction() as session:
        put_demand(session, minutes(240, 60, 180, 0, 120))
        assert forget_demand(session, before_s=240, count_max=3) == 3
        assert sorted(session.scalars(select(DemandBucket.start_s))) == [180, 240]
        assert forget_demand(session, before_s=240, count_max=3) == 1
        assert forget_demand(session, before_s=240, count_max=3) == 0


def test_an_imported_trace_is_kept_from_its_import_on(world: World) -> None:
    """However old it is; a minute that was measured later is a measured one."""
    with world.database.transaction() as session:
        put_demand(session, minutes(0, 60, 120), imported=True)
        put_demand(session, minutes(120))
        put_demand(session, minutes(60), imported=True)
        assert forget_demand(session, before_s=10 * DAY_S, count_max=5) == 1
        assert sorted(session.scalars(select(DemandBucket.start_s))) == [0, 60]
        session.execute(text(f"UPDATE demand_buckets SET imported_at = to_timestamp({9 * DAY_S}) WHERE start_s = 0"))
        assert forget_demand(session, before_s=10 * DAY_S, count_max=5) == 1
        assert list(session.scalars(select(DemandBucket.start_s))) == [60]


def test_old_measured_minutes_go(world: World) -> None:
    tide = Endpoint(model="tide", region="us-east")
    with world.database.transaction() as session:
        note_measured(session, [tide], minutes=[0, 60, 120])
        assert forget_measured_minutes(session, before_s=120, count_max=1) == 1
        assert forget_measured_minutes(session, before_s=120, count_max=5) == 1
        assert read_demand(session, kind=IW, since_s=0, until_s=999) == {tide: [(120, 0.0)]}
