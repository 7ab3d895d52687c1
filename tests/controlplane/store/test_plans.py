"""Plans: one a window by the schedule, one in force, applied once, refused when the fleet has moved on."""

from functools import partial
from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError

from controlplane.errors import ConflictError, NotFoundError, StaleIndexError
from controlplane.policies.lifecycle import PlanState
from controlplane.store import fleet
from controlplane.store.plans import (
    Plan,
    add_plan,
    apply_plan,
    approve_plan,
    entries_of,
    get_plan,
    is_planned,
    newest_scheduled,
    plan_in_force,
    reject_plan,
    roll_back,
    supersede_drafts,
)
from tests.controlplane.world import MODEL, World, a_plan, at_once

WINDOW_S = 3600


def index_of(world: World) -> int:
    with world.database.transaction() as session:
        return fleet.fleet_index(session)


def add(world: World, **changes: Any) -> tuple[str, int, bool]:
    """The plan's id, the index it was made at, and whether it was written."""
    index = index_of(world)
    plan, entries = a_plan(index, **changes)
    plan_id = plan.id
    with world.database.transaction() as session:
        return plan_id, index, add_plan(session, plan, entries)


def apply(world: World, plan_id: str, index: int) -> str:
    with world.database.transaction() as session:
        return apply_plan(session, plan_id, index=index, now_s=0.0).state


def state_of(world: World, plan_id: str) -> str:
    with world.database.transaction() as session:
        return get_plan(session, plan_id).state


def test_the_schedule_makes_one_plan_a_window(world: World) -> None:
    plan_id, _, made = add(world, origin="schedule")
    assert made
    other, _, made = add(world, origin="schedule")
    assert not made
    with world.database.transaction() as session:
        assert is_planned(session, WINDOW_S)
        assert not is_planned(session, 2 * WINDOW_S)
        assert [entry.after for entry in entries_of(session, plan_id)] == [2]
        assert entries_of(session, other) == []
        with pytest.raises(NotFoundError):
            get_plan(session, other)
    assert add(world, origin="operator")[2], "operators make as many as they like"


def test_two_writers_at_once_make_one_plan(world: World) -> None:
    made = at_once(*[lambda: add(world, origin="schedule")[2]] * 4)
    assert sorted(made) == [False, False, False, True]


def test_one_plan_is_in_force(world: World) -> None:
    first, index, _ = add(world)
    assert apply(world, first, index) == "applied"
    assert index_of(world) == index + 1
    second, index, _ = add(world)
    assert apply(world, second, index) == "applied"
    assert state_of(world, first) == "superseded"
    with world.database.transaction() as session:
        present = plan_in_force(session)
        assert present is not None
        assert (present.id, present.applied_at is not None) == (second, True)
    with pytest.raises(ConflictError):
        apply(world, first, index)
    with pytest.raises(IntegrityError), world.database.transaction() as session:
        session.execute(text("UPDATE plans SET state = 'applied'"))


def test_applying_twice_is_applying_once(world: World) -> None:
    plan_id, index, _ = add(world)
    assert apply(world, plan_id, index) == "applied"
    after = index_of(world)
    assert apply(world, plan_id, index) == "applied"
    assert index_of(world) == after


def test_two_at_once_apply_one(world: World) -> None:
    ends = at_once(*[partial(apply, world, *add(world)[:2]) for _ in range(2)])
    assert sorted(ends) == ["applied", "stale_index"]
    with world.database.transaction() as session:
        assert sorted(session.scalars(select(Plan.state))) == ["applied", "draft"]


def test_a_stale_index_is_refused(world: World) -> None:
    plan_id, index, _ = add(world)
    with pytest.raises(StaleIndexError):
        apply(world, plan_id, index - 1)
    world.add_model("new")
    with pytest.raises(StaleIndexError) as caught:
        apply(world, plan_id, index)
    assert caught.value.param == "index"
    assert state_of(world, plan_id) == "draft"


def test_a_failed_plan_is_never_applied(world: World) -> None:
    plan_id, index, _ = add(world, state=PlanState.FAILED)
    with pytest.raises(ConflictError):
        apply(world, plan_id, index)


def test_a_failed_attempt_does_not_take_the_window(world: World) -> None:
    for _ in range(2):
        assert add(world, origin="schedule", state=PlanState.FAILED)[2]
    with world.database.transaction() as session:
        assert not is_planned(session, WINDOW_S)
        newest = newest_scheduled(session)
        assert newest is not None
        assert newest.state == PlanState.FAILED
    assert add(world, origin="schedule")[2]
    assert not add(world, origin="schedule")[2]


def approve(world: World, plan_id: str, now_s: float = WINDOW_S) -> Plan:
    with world.database.transaction() as session:
        return approve_plan(session, plan_id, now_s=now_s, approved_by="ann")


def test_an_approved_plan_is_in_force_and_says_who_agreed(world: World) -> None:
    first, index, _ = add(world)
    apply(world, first, index)
    waiting, index, _ = add(world, origin="schedule", approval_reason="moves 9 GPUs")
    approved = approve(world, waiting, WINDOW_S + 3599.0)
    assert (approved.state, approved.approved_by, approved.previous_plan_id) == ("applied", "ann", first)
    assert approved.approved_at == approved.applied_at
    assert approve(world, waiting).state == "applied", "saying yes twice is saying it once"
    assert index_of(world) == index + 1


def test_an_approval_that_comes_too_late(world: World) -> None:
    over, _, _ = add(world, origin="schedule")
    with pytest.raises(ConflictError, match="is over"):
        approve(world, over, WINDOW_S + 3600.0)
    world.add_model("new")
    with pytest.raises(StaleIndexError):
        approve(world, over, WINDOW_S)
    assert state_of(world, over) == "draft"


@pytest.mark.parametrize("origin", ["schedule", "operator"])
def test_no_plan_goes_in_force_when_its_hour_is_over(world: World, origin: str) -> None:
    plan_id, index, _ = add(world, origin=origin)
    with pytest.raises(ConflictError, match="is over"), world.database.transaction() as session:
        apply_plan(session, plan_id, index=index, now_s=WINDOW_S + 3600.0)
    assert state_of(world, plan_id) == "draft"


def reject(world: World, plan_id: str, note: str = "") -> Plan:
    with world.database.transaction() as session:
        return reject_plan(session, plan_id, rejected_by="ann", note=note)


def test_a_rejected_plan_stays_rejected_and_its_hour_planned(world: World) -> None:
    plan_id, index, _ = add(world, origin="schedule", reason="optimal")
    assert reject(world, plan_id, "a load test").reason == "optimal; rejected by ann: a load test"
    assert reject(world, plan_id).reason == "optimal; rejected by ann: a load test"
    with pytest.raises(ConflictError, match="is rejected"):
        approve(world, plan_id)
    with world.database.transaction() as session:
        assert is_planned(session, WINDOW_S)
    applied, index, _ = add(world)
    apply(world, applied, index)
    with pytest.raises(ConflictError, match="only a draft"):
        reject(world, applied)


def test_drafts_of_earlier_hours_are_superseded(world: World) -> None:
    early, _, _ = add(world, origin="schedule")
    later, _, _ = add(world, origin="schedule", window_start_s=2 * WINDOW_S)
    mine, _, _ = add(world, origin="operator")
    with world.database.transaction() as session:
        assert supersede_drafts(session, before_s=WINDOW_S) == []
        assert supersede_drafts(session, before_s=2 * WINDOW_S) == [early]
        assert supersede_drafts(session, before_s=2 * WINDOW_S) == []
        assert state_of(world, mine) == "draft", "its hour is not over when the next one is planned"
        assert supersede_drafts(session, before_s=2 * WINDOW_S + 3600) == [later, mine]
    assert {state_of(world, plan_id) for plan_id in (early, later, mine)} == {"superseded"}


def test_an_approval_and_the_end_of_the_hour_at_once(world: World) -> None:
    """Whichever comes first, the plan is in one state and the other is told."""
    for _ in range(3):
        plan_id, _, _ = add(world, origin="schedule")

        def end() -> None:
            with world.database.transaction() as session:
                supersede_drafts(session, before_s=2 * WINDOW_S)

        approved, _ = at_once(partial(approve, world, plan_id), end)
        expected = "superseded" if approved == "conflict" else "applied"
        assert state_of(world, plan_id) == expected
        with world.database.transaction() as session:
            session.execute(text("DELETE FROM plan_entries"))
            session.execute(text("DELETE FROM plans"))


def roll_back_of(world: World, plan_id: str, window_start_s: int = WINDOW_S) -> Plan:
    with world.database.transaction() as session:
        return roll_back(session, plan_id, window_start_s=window_start_s, by="ann", note="too few")


def counts_of(world: World, plan_id: str) -> dict[str, tuple[int, int]]:
    with world.database.transaction() as session:
        return {entry.region: (entry.before, entry.after) for entry in entries_of(session, plan_id)}


def test_a_rollback_restores_the_plan_before_as_one_of_its_own(world: World) -> None:
    pool = {"region": "us-east", "gpu_type": "H800", "before": 0, "after": 2, "pooled": [{"model": "small"}]}
    pool |= {"reserve": {"gpus": 1, "held": [{"model": "large"}]}}
    first = world.in_force([(MODEL, "us-east", 3), (MODEL, "us-west", 1)], pools=[pool])
    second = world.in_force([(MODEL, "us-east", 1), (MODEL, "eu", 2)])
    index = index_of(world)
    restored = roll_back_of(world, second, window_start_s=7200)
    assert (restored.state, restored.origin, restored.status, restored.created_by) == (
        "applied",
        "operator",
        "restored",
        "ann",
    )
    assert (restored.previous_plan_id, restored.approved_by, restored.window_start_s) == (second, "ann", 7200)
    assert first in restored.reason
    assert "too few" in restored.reason
    assert counts_of(world, restored.id) == {"us-east": (1, 3), "us-west": (0, 1), "eu": (2, 0)}
    assert restored.pools == [pool], "none in the plan rolled back, two in the one before it"
    assert [state_of(world, plan_id) for plan_id in (first, second)] == ["superseded", "rolled_back"]
    assert index_of(world) == index + 1, "drafts made before it are stale"
    again = roll_back_of(world, restored.id)
    assert counts_of(world, again.id) == {"us-east": (3, 1), "us-west": (1, 0), "eu": (0, 2)}
    assert again.window_start_s == 7200, "never an hour earlier than what it takes back"
    with world.database.transaction() as session:
        assert is_planned(session, 7200)


def test_a_rollback_restores_the_pools_of_each_size(world: World) -> None:
    """Also where the plan before it is of a release whose pools had one size, and did not say which."""
    place = {"region": "us-east", "gpu_type": "H800", "before": 0}
    old = place | {"after": 2, "pooled": [{"model": "small"}]}
    small = place | {"worker_gpus": 1, "after": 3, "pooled": [{"model": "small"}]}
    large = place | {"worker_gpus": 4, "after": 8, "pooled": [{"model": "large"}]}
    world.in_force([(MODEL, "us-east", 1)], pools=[old])
    world.in_force([(MODEL, "us-east", 1)], pools=[small, large])
    second = world.in_force([(MODEL, "us-east", 1)], pools=[small | {"before": 3}])
    again = roll_back_of(world, second)
    assert again.pools == [small | {"before": 3}, large]
    third = world.in_force([(MODEL, "us-east", 1)], pools=[old])
    fourth = world.in_force([(MODEL, "us-east", 1)], pools=[small])
    assert third != fourth
    first = roll_back_of(world, fourth)
    gone = {"worker_gpus": 1, "before": 3, "after": 0, "pooled": []}
    assert first.pools == [old, place | gone]


def test_a_rollback_with_nowhere_to_go(world: World) -> None:
    with pytest.raises(NotFoundError):
        roll_back_of(world, "plan_none")
    draft, index, _ = add(world)
    with pytest.raises(ConflictError, match="is draft, not in force; no plan is"):
        roll_back_of(world, draft)
    apply(world, draft, index)
    with pytest.raises(ConflictError, match="nothing was in force before"):
        roll_back_of(world, draft)
    second = world.in_force([(MODEL, "us-east", 1)])
    with pytest.raises(ConflictError, match=f"'{second}' is"):
        roll_back_of(world, draft)


def test_two_rollbacks_at_once_take_back_one_plan(world: World) -> None:
    first = world.in_force([(MODEL, "us-east", 3)])
    second = world.in_force([(MODEL, "us-east", 1)])
    assert sorted(at_once(*[lambda: roll_back_of(world, second).state] * 2)) == ["applied", "conflict"]
    assert state_of(world, first) == "superseded"
