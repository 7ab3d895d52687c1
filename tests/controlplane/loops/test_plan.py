"""Forecasts and plans from real rows: one plan an hour, whoever comes first, and a fleet that moves meanwhile."""

import threading
from typing import Any

import pytest
from sqlalchemy import delete, select

from controlplane.errors import StaleIndexError
from controlplane.loops import plan as planning
from controlplane.loops.forecast import forecast_one, series_to_forecast
from controlplane.loops.plan import draft_plan, gather_facts, plan_hour
from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, RegionGpu
from controlplane.settings import Settings
from controlplane.store.demand import IW, NIW, DemandRow, put_demand, read_forecasts
from controlplane.store.plans import add_plan, apply_plan, entries_of, plan_in_force
from controlplane.store.tables import Plan, PlanEntry
from tests.controlplane.world import World

EAST = Endpoint(model="tide", region="us-east")
NOW_S = 1_000_000_800  # a whole minute


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"forecast_history_s": 4 * 3600, "placement_time_limit_s": 10.0})


@pytest.fixture
def fleet(world: World) -> World:
    """A node of 4 GPUs, two hours of 1,500 tokens/s in us-east (one instance does 1,000), and some NIW."""
    world.join("n1")
    rows = [DemandRow(endpoint=EAST, kind=IW, start_s=NOW_S - 60 * n, tokens_per_s=1500.0) for n in range(1, 121)]
    rows += [DemandRow(endpoint=EAST, kind=NIW, start_s=NOW_S - 60 * n, tokens_per_s=100.0) for n in range(1, 61)]
    with world.database.transaction() as session:
        put_demand(session, rows)
    return world


def plans(world: World) -> list[str]:
    with world.database.transaction() as session:
        return list(session.scalars(select(Plan.state)))


def test_a_forecast_is_written_once_an_origin(fleet: World, settings: Settings) -> None:
    for _ in range(2):
        with fleet.database.transaction() as session:
            assert series_to_forecast(session, origin_s=NOW_S, settings=settings) == [EAST]
            made = forecast_one(session, EAST, origin_s=NOW_S, settings=settings)
            assert made.peak_upper >= made.peak_q50 >= 0
            assert made.peak_q50 == pytest.approx(1500, rel=0.05), "a constant series"
            assert made.reason
    with fleet.database.transaction() as session:
        assert len(read_forecasts(session, origin_s=NOW_S)) == 1
        assert read_forecasts(session, origin_s=None)[0].path == made.path


def test_what_the_placement_is_told(fleet: World, settings: Settings) -> None:
    fleet.place("n1")
    fleet.join("n2", region="us-west")
    with fleet.database.transaction() as session:
        facts = gather_facts(session, settings, now_s=NOW_S, origin_s=None)
    assert facts.regions == ("us-east", "us-west")
    assert facts.capacity == {RegionGpu(region=r, gpu_type="H800"): 4 for r in ("us-east", "us-west")}
    assert facts.present == {EndpointGpu(model="tide", region="us-east", gpu_type="H800"): 1}
    assert facts.limits[EAST] == (0, 4)
    assert facts.profiles[ModelGpu(model="tide", gpu_type="H800")].tokens_per_s == 1000.0
    assert set(facts.demand) == {EAST}
    assert min(facts.demand[EAST]) >= 1500 * 0.95 + 0.1 * 100, "the forecast and a tenth of NIW"


def test_a_plan_is_made_once_and_applied(fleet: World, settings: Settings) -> None:
    plan_id = plan_hour(fleet.database, settings, now_s=NOW_S)
    assert plan_id is not None
    assert plan_hour(fleet.database, settings, now_s=NOW_S + 60) is None
    with fleet.database.transaction() as session:
        present = plan_in_force(session)
        assert present is not None
        assert (present.id, present.window_start_s % 3600, present.unserved) == (plan_id, 0, [])
        assert present.window_start_s >= NOW_S
        after = {(e.model, e.region): e.after for e in entries_of(session, plan_id)}
    assert after[EAST.model, EAST.region] >= 2, "1,500 tokens/s at 1,000 an instance"


def test_two_at_once_make_one(fleet: World, settings: Settings) -> None:
    made: list[str | None] = []
    start = threading.Barrier(2)

    def work() -> None:
        start.wait()
        made.append(plan_hour(fleet.database, settings, now_s=NOW_S))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(plan is None for plan in made) == [False, True]
    assert plans(fleet) == ["applied"]


@pytest.mark.parametrize("changes", [2, 3])
def test_a_fleet_that_changes_while_the_solver_works(
    fleet: World, settings: Settings, monkeypatch: pytest.MonkeyPatch, changes: int
) -> None:
    """The plan is made anew, up to three times; then nothing is left behind."""
    calls = 0

    def draft_while_it_changes(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        draft = draft_plan(*args, **named)
        if calls <= changes:
            fleet.add_model(f"new-{calls}")
        return draft

    monkeypatch.setattr(planning, "draft_plan", draft_while_it_changes)
    if changes < 3:
        assert plan_hour(fleet.database, settings, now_s=NOW_S) is not None
        assert plans(fleet) == ["applied"]
    else:
        with pytest.raises(StaleIndexError):
            plan_hour(fleet.database, settings, now_s=NOW_S)
        assert plans(fleet) == []
    assert calls == 3


def test_the_schedule_does_not_overrule_an_operator(fleet: World, settings: Settings) -> None:
    window_start_s = (int(NOW_S) + 1800) // 3600 * 3600
    for start_s, made in ((window_start_s - 3600, True), (window_start_s, False)):
        with fleet.database.transaction() as session:
            session.execute(delete(PlanEntry))
            session.execute(delete(Plan))
        draft = draft_plan(
            fleet.database, settings, now_s=NOW_S, window_start_s=start_s, origin="operator", created_by="someone"
        )
        with fleet.database.transaction() as session:
            plan_id, index = draft.plan.id, draft.plan.fleet_index
            add_plan(session, draft.plan, draft.entries)
            apply_plan(session, plan_id, index=index)
        assert (plan_hour(fleet.database, settings, now_s=NOW_S) is not None) is made


def test_without_automatic_it_waits_for_an_operator(fleet: World, settings: Settings) -> None:
    careful = settings.model_copy(update={"plan_automatic": False})
    assert plan_hour(fleet.database, careful, now_s=NOW_S) is not None
    assert plans(fleet) == ["draft"]


def test_a_fleet_without_demand_or_nodes_has_a_plan_too(world: World, settings: Settings) -> None:
    assert plan_hour(world.database, settings, now_s=NOW_S) is not None
    assert plans(world) == ["applied"]


def test_a_late_task_plans_its_own_hour(fleet: World, settings: Settings) -> None:
    hour_s = NOW_S // 3600 * 3600
    for now_s, window_s in (
        (hour_s + 3480, hour_s + 3600),
        (hour_s + 3600 + 900, hour_s + 3600),
        (hour_s + 60, hour_s),
    ):
        made = plan_hour(fleet.database, settings, now_s=now_s)
        with fleet.database.transaction() as session:
            windows = {plan.window_start_s for plan in session.scalars(select(Plan))}
        assert window_s in windows, f"{now_s}: {made}"
    assert len(windows) == 2


def test_an_endpoint_whose_forecast_is_missing_is_forecast_not_taken_for_idle(fleet: World, settings: Settings) -> None:
    west = Endpoint(model=EAST.model, region="us-west")
    with fleet.database.transaction() as session:
        rows = [DemandRow(endpoint=west, kind=IW, start_s=NOW_S - 60 * n, tokens_per_s=700.0) for n in range(1, 121)]
        put_demand(session, rows)
        forecast_one(session, EAST, origin_s=NOW_S, settings=settings)
    for origin_s in (None, NOW_S):
        with fleet.database.transaction() as session:
            demand = gather_facts(session, settings, now_s=NOW_S + 60, origin_s=origin_s).demand
            assert max(demand[west]) > 600
            session.rollback()


def test_a_forecast_from_the_future_blinds_nobody(fleet: World, settings: Settings) -> None:
    with fleet.database.transaction() as session:
        put_demand(session, [DemandRow(endpoint=EAST, kind=IW, start_s=NOW_S + 999_960, tokens_per_s=1.0)])
        forecast_one(session, EAST, origin_s=NOW_S + 999_960 + 60, settings=settings)
        demand = gather_facts(session, settings, now_s=NOW_S, origin_s=None).demand
    assert max(demand[EAST]) > 1000
