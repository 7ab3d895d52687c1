"""Forecasts and plans from real rows: one plan an hour, whoever comes first, and a fleet that moves meanwhile."""

import json
import threading
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import delete, select

from controlplane.planner import plan as planning
from controlplane.planner.draft import Draft, DraftOf
from controlplane.planner.expected import expected_demand
from controlplane.planner.forecast import forecast_one, series_to_forecast
from controlplane.planner.plan import draft_plan, hour_nearest, plan_hour
from controlplane.planner.snapshot import read_to_plan
from controlplane.policies import hour
from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, RegionGpu
from controlplane.policies.placement.choose import choose_placement
from controlplane.policies.placement.decision import Placement, PlacementStatus
from controlplane.policies.placement.document import parse
from controlplane.policies.snapshot import placement_facts
from controlplane.settings import Settings
from controlplane.store.demand import IW, NIW, DemandRow, Forecast, put_demand, put_forecasts, read_forecasts
from controlplane.store.fleet import put_endpoint
from controlplane.store.overrides import add_override
from controlplane.store.plans import (
    Plan,
    PlanEntry,
    add_plan,
    apply_plan,
    approve_plan,
    entries_of,
    get_plan,
    inputs_of,
    plan_in_force,
    roll_back,
)
from controlplane.store.tables import Desired, Instance
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


def expect(world: World, tokens_per_s: float) -> None:
    """A forecast of ten minutes ago for us-east, flat."""
    with world.database.transaction() as session:
        forecast = Forecast(
            model=EAST.model,
            region=EAST.region,
            origin_s=NOW_S - 600,
            forecaster="flat",
            peak_q50=tokens_per_s,
            peak_upper=tokens_per_s,
            quantile=0.9,
            path=[tokens_per_s] * 12,
            candidates={},
            reason="of the test",
        )
        put_forecasts(session, [forecast])


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
    lent = fleet.place("n1", slot=1)
    fleet.join("n2", region="us-west")
    with fleet.database.transaction() as session:
        row = session.get_one(Instance, lent)
        row.desired, row.spot_at = Desired.SPOT, datetime.fromtimestamp(NOW_S, UTC)
    expected = expected_demand(fleet.database, settings, now_s=NOW_S, origin_s=None)
    with fleet.database.transaction() as session:
        pin = {"endpoint": EAST, "instances": 3, "note": "", "created_by": "op"}
        add_override(session, until=datetime.fromtimestamp(NOW_S + 7200, UTC), **pin)
        snapshot = read_to_plan(session, settings, now_s=NOW_S, window_start_s=NOW_S + 3600)
    facts = placement_facts(snapshot, expected.demand, pool=None, stale_s=60.0)
    assert facts.regions == ("us-east", "us-west")
    assert facts.capacity == {RegionGpu(region=r, gpu_type="H800"): 4 for r in ("us-east", "us-west")}
    cell = EndpointGpu(model="tide", region="us-east", gpu_type="H800")
    assert (facts.present, facts.donated) == ({cell: 1}, {cell: 1}), "one serves, one is lent out"
    assert facts.limits[EAST] == (0, 4)
    assert facts.limits_of(EAST) == (3, 3), "an override replaces the limits"
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


def test_a_minimum_that_gpus_do_not_hold_is_named_with_what_it_gets(fleet: World, settings: Settings) -> None:
    with fleet.database.transaction() as session:
        put_endpoint(session, model=EAST.model, region=EAST.region, minimum=6, maximum=6)
    plan_id = plan_hour(fleet.database, settings, now_s=NOW_S)
    assert plan_id is not None
    with fleet.database.transaction() as session:
        [short] = get_plan(session, plan_id).unserved
    assert short == {
        "model": "tide",
        "region": "us-east",
        "tokens_per_s": 0.0,
        "reason": "4 of 6 instances; GPUs full in us-east: H800 4 of 4",
    }


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
    """The plan is made anew, up to three times; then a failed plan says so."""
    calls = 0

    def draft_while_it_changes(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        draft = draft_plan(*args, **named)
        if calls <= changes:
            fleet.add_model(f"new-{calls}")
        return draft

    monkeypatch.setattr(planning, "draft_plan", draft_while_it_changes)
    made = plan_hour(fleet.database, settings, now_s=NOW_S)
    assert made is not None
    assert plans(fleet) == ["applied" if changes < 3 else "failed"]
    assert ("3 attempts went stale" in plan_of(fleet, made).reason) is (changes == 3)
    assert calls == 3


def test_a_waiting_plan_of_a_fleet_that_is_no_more_is_made_anew(fleet: World, settings: Settings) -> None:
    careful = settings.model_copy(update={"plan_approval": "always"})
    first = plan_hour(fleet.database, careful, now_s=NOW_S)
    assert plan_hour(fleet.database, careful, now_s=NOW_S) is None, "it waits, and counts as the hour's plan"
    fleet.add_model("new")
    second = plan_hour(fleet.database, careful, now_s=NOW_S)
    assert first is not None
    assert second is not None
    assert "the fleet changed" in plan_of(fleet, first).reason
    assert (plan_of(fleet, first).state, plan_of(fleet, second).state) == ("failed", "draft")
    with fleet.database.transaction() as session:
        approve_plan(session, second, now_s=NOW_S + 120, approved_by="ann")


def test_the_schedule_does_not_overrule_an_operator(fleet: World, settings: Settings) -> None:
    window_start_s = (int(NOW_S) + 1800) // 3600 * 3600
    for start_s, made in ((window_start_s - 3600, True), (window_start_s, False)):
        with fleet.database.transaction() as session:
            session.execute(delete(PlanEntry))
            session.execute(delete(Plan))
        of = DraftOf(window_start_s=start_s, origin="operator", created_by="someone")
        draft = draft_plan(fleet.database, settings, of, now_s=NOW_S)
        with fleet.database.transaction() as session:
            plan_id, index = draft.plan.id, draft.plan.fleet_index
            add_plan(session, draft.plan, draft.entries)
            apply_plan(session, plan_id, index=index, now_s=start_s)
        assert (plan_hour(fleet.database, settings, now_s=NOW_S) is not None) is made


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
        demand = expected_demand(fleet.database, settings, now_s=NOW_S + 60, origin_s=origin_s, keep=False).demand
        assert max(demand[west]) > 600


def test_a_forecast_from_the_future_blinds_nobody(fleet: World, settings: Settings) -> None:
    with fleet.database.transaction() as session:
        put_demand(session, [DemandRow(endpoint=EAST, kind=IW, start_s=NOW_S + 999_960, tokens_per_s=1.0)])
        forecast_one(session, EAST, origin_s=NOW_S + 999_960 + 60, settings=settings)
    demand = expected_demand(fleet.database, settings, now_s=NOW_S, origin_s=None).demand
    assert max(demand[EAST]) > 1000


def plan_of(world: World, plan_id: str) -> Plan:
    with world.database.transaction() as session:
        return get_plan(session, plan_id)


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({"plan_approval": "always"}, "every plan"),
        ({"plan_approval": "limits", "plan_gpus_moved_max": 1, "plan_share_moved_max": None}, "moves 2 GPUs"),
        ({"plan_approval": "limits", "plan_share_moved_max": 0.25}, "moves 50.0% of the fleet (2 of 4 GPUs)"),
        ({"plan_approval": "limits", "plan_share_moved_max": None, "plan_cost_change_max": 3.0}, "by 4.00"),
        ({"plan_approval": "limits", "plan_share_moved_max": 0.5, "plan_cost_change_max": 4.0}, None),
        ({}, None),
    ],
)
def test_a_plan_past_a_limit_waits_for_an_operator(
    fleet: World, settings: Settings, changes: dict[str, Any], waits: str | None
) -> None:
    """Two instances of one GPU each, of four GPUs, at 2.0 an hour."""
    expect(fleet, 1500.0)
    policy = settings.model_copy(update=changes)
    plan_id = plan_hour(fleet.database, policy, now_s=NOW_S)
    assert plan_id is not None
    plan = plan_of(fleet, plan_id)
    if waits is None:
        assert (plan.state, plan.approval_reason, plan.approved_by) == ("applied", None, "automatic")
        return
    assert (plan.state, plan.approved_by) == ("draft", None)
    assert plan.approval_reason is not None
    assert waits in plan.approval_reason
    assert plan_hour(fleet.database, policy, now_s=NOW_S + 60) is None, "a plan that waits is the hour's plan"
    with fleet.database.transaction() as session:
        approve_plan(session, plan_id, now_s=NOW_S + 120, approved_by="ann")
    assert plan_of(fleet, plan_id).state == "applied"


def test_a_plan_nobody_approved_gives_way_to_the_next_hour(fleet: World, settings: Settings) -> None:
    careful = settings.model_copy(update={"plan_approval": "always"})
    first = plan_hour(fleet.database, careful, now_s=NOW_S)
    assert first is not None
    second = plan_hour(fleet.database, careful, now_s=NOW_S + 3600)
    assert second is not None
    assert (plan_of(fleet, first).state, plan_of(fleet, second).state) == ("superseded", "draft")


def test_a_rollback_is_left_alone_for_its_hour(fleet: World, settings: Settings) -> None:
    before = plan_hour(fleet.database, settings, now_s=NOW_S)
    plan_id = plan_hour(fleet.database, settings, now_s=NOW_S + 3600)
    assert before is not None
    assert plan_id is not None
    later_s = NOW_S + 7200 + 60
    with fleet.database.transaction() as session:
        restored = roll_back(session, plan_id, window_start_s=hour_nearest(later_s), by="ann", note="").id
    assert plan_hour(fleet.database, settings, now_s=later_s) is None
    assert plan_of(fleet, restored).state == "applied"
    assert plan_hour(fleet.database, settings, now_s=later_s + 3600) is not None
    assert plan_of(fleet, restored).state == "superseded"


def test_a_failure_keeps_the_last_plan_says_so_and_is_tried_again(
    fleet: World, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = plan_hour(fleet.database, settings, now_s=NOW_S)
    assert last is not None

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the solver fell over")

    monkeypatch.setattr(hour, "choose_placement", broken)
    failed = [plan_hour(fleet.database, settings, now_s=NOW_S + 3600 + late_s) for late_s in (0, 300)]
    for plan_id in failed:
        assert plan_id is not None
        row = plan_of(fleet, plan_id)
        assert (row.state, row.status) == ("failed", "failed")
        assert "RuntimeError: the solver fell over" in row.reason
    assert plan_of(fleet, last).state == "applied"
    monkeypatch.undo()
    made = plan_hour(fleet.database, settings, now_s=NOW_S + 3600 + 600)
    assert made is not None
    assert (plan_of(fleet, made).state, plan_of(fleet, last).state) == ("applied", "superseded")
    assert plan_hour(fleet.database, settings, now_s=NOW_S + 3600 + 900) is None


def test_no_answer_from_a_solver_is_a_failed_plan(
    fleet: World, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_answer(_: Any, now_s: float, *__: Any, **___: Any) -> Placement:
        return Placement(
            at_s=now_s,
            status=PlacementStatus.FAILED,
            solver="none",
            objective_per_hour=None,
            bound_per_hour=None,
            gap=None,
            gpu_cost_per_hour=0.0,
            entries=(),
            unserved=(),
            below_minimum=(),
            reason="highs: out of memory",
        )

    monkeypatch.setattr(hour, "choose_placement", no_answer)
    plan_id = plan_hour(fleet.database, settings, now_s=NOW_S)
    assert plan_id is not None
    failed = plan_of(fleet, plan_id)
    assert (failed.state, failed.reason, failed.approval_reason) == ("failed", "highs: out of memory", None)
    with fleet.database.transaction() as session:
        assert plan_in_force(session) is None


def test_two_at_once_leave_one_that_waits(fleet: World, settings: Settings) -> None:
    """Several workers draft the same hour; one draft is written."""
    careful = settings.model_copy(update={"plan_approval": "always"})
    of = DraftOf(window_start_s=hour_nearest(NOW_S), origin="schedule", created_by="schedule")
    drafts = [draft_plan(fleet.database, careful, of, now_s=NOW_S) for _ in range(3)]
    kept: list[str | None] = []
    start = threading.Barrier(3)

    def work(draft: Draft) -> None:
        start.wait()
        kept.append(planning.write_draft(fleet.database, draft, now_s=NOW_S))

    threads = [threading.Thread(target=work, args=(draft,)) for draft in drafts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(plan is not None for plan in kept) == 1
    assert plans(fleet) == ["draft"]


def test_a_worker_killed_between_writing_and_applying_leaves_nothing(
    fleet: World, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "apply_plan", killed)
    with pytest.raises(KeyboardInterrupt):
        plan_hour(fleet.database, settings, now_s=NOW_S)
    monkeypatch.undo()
    assert plans(fleet) == []
    assert plan_hour(fleet.database, settings, now_s=NOW_S + 300) is not None
    assert plans(fleet) == ["applied"]


def test_a_pin_is_a_constraint_while_it_lasts(fleet: World, settings: Settings) -> None:
    until = datetime.fromtimestamp(NOW_S + 3 * 3600, UTC)
    with fleet.database.transaction() as session:
        add_override(session, endpoint=EAST, instances=4, until=until, note="", created_by="ann")
    for hours, count in ((0, 4), (2, 4), (4, 0)):
        plan_id = plan_hour(fleet.database, settings, now_s=NOW_S + 3600 * hours)
        assert plan_id is not None
        with fleet.database.transaction() as session:
            after = {(e.model, e.region): e.after for e in entries_of(session, plan_id)}
        assert after.get((EAST.model, EAST.region), 0) == count, hours


def test_a_plan_keeps_what_it_was_made_from(fleet: World, settings: Settings) -> None:
    plan_id = plan_hour(fleet.database, settings, now_s=NOW_S)
    assert plan_id is not None
    with fleet.database.transaction() as session:
        inputs = inputs_of(session, plan_id)
        rows = entries_of(session, plan_id)
    assert inputs is not None
    assert (inputs["forecasts"]["origin_s"], inputs["forecasts"]["quantile"]) == (NOW_S, 0.9)
    [series] = inputs["forecasts"]["series"]
    assert (series["model"], series["region"], series["stand_in"]) == ("tide", "us-east", None)
    assert series["peak_upper"] >= series["peak_q50"] > 1400
    facts, how = parse(json.dumps(inputs["problem"]))
    again = choose_placement(facts, NOW_S, how)
    assert [(e.endpoint.region, e.before, e.after) for e in again.entries] == [
        (row.region, row.before, row.after) for row in rows
    ], "a plan can be solved again from its record"
    [entry] = [row for row in rows if row.after]
    assert entry.constraint in {"home", "global"}
    assert entry.cost_if_not > 0
