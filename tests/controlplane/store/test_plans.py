"""Plans: one a window by the schedule, one in force, applied once, refused when the fleet has moved on."""

import threading
from typing import Any

import pytest
import uuid_utils
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError

from controlplane.errors import ConflictError, NotFoundError, StaleIndexError
from controlplane.policies.lifecycle import PlanState
from controlplane.store import fleet
from controlplane.store.plans import add_plan, apply_plan, entries_of, get_plan, is_planned, plan_in_force
from controlplane.store.tables import Plan, PlanEntry
from tests.controlplane.world import World

WINDOW_S = 3600


def a_plan(index: int, *, origin: str = "operator", **changes: Any) -> tuple[Plan, list[PlanEntry]]:
    plan_id = f"plan_{uuid_utils.uuid7().hex}"
    values: dict[str, Any] = {
        "id": plan_id,
        "state": PlanState.DRAFT,
        "origin": origin,
        "window_start_s": WINDOW_S,
        "fleet_index": index,
        "solver": "HiGHS",
        "status": "optimal",
        "solve_time_s": 0.1,
        "unserved": [],
        "reason": "",
        "created_by": "me",
    }
    entry = PlanEntry(plan_id=plan_id, model="tide", region="us-east", gpu_type="H800", before=0, after=2, reason="x")
    return Plan(**(values | changes)), [entry]


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
        return apply_plan(session, plan_id, index=index).state


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
    made: list[bool] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        made.append(add(world, origin="schedule")[2])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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
    plans = [add(world) for _ in range(2)]
    ends: list[str] = []
    start = threading.Barrier(2)

    def work(plan_id: str, index: int) -> None:
        start.wait()
        try:
            ends.append(apply(world, plan_id, index))
        except StaleIndexError as error:
            ends.append(error.code)

    threads = [threading.Thread(target=work, args=plan[:2]) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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
