"""Layouts in the database: what is wanted, what is refused, and slots that change once they are empty."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import select, update

from controlplane.errors import ConflictError, InvalidValueError, NotFoundError
from controlplane.store.fleet import fleet_index
from controlplane.store.instances import desired_of, present_layout, set_desired
from controlplane.store.joining import join_node
from controlplane.store.keys import AuditEvent
from controlplane.store.layouts import models_without_slot, regroup, release_layout, want_layout, want_planned
from controlplane.store.tables import Desired, Instance, Node, Profile
from dataplane.protocol.joining import Join, SlotSpec
from dataplane.protocol.layouts import Layout, slots_of
from tests.controlplane.world import World, until


def join(world: World, layout: Layout, *, gpu_bytes: int = 100, **changes: Any) -> None:
    """Join node n1, whose GPUs may be regrouped."""
    slots = tuple(
        SlotSpec(gpus=gpus, memory_bytes=gpu_bytes * gpus, weights_bytes=gpu_bytes * gpus // 2, number=number)
        for number, gpus in slots_of(layout).items()
    )
    values: dict[str, Any] = {"slots": slots, "regroups": True}
    offered = {"node": "n1", "region": "us-east", "gpu_type": "H800", "url": "http://n1", "engine": "replay"}
    with world.database.transaction() as session:
        join_node(session, Join(**(offered | values | changes)))


def want(world: World, *layout: int) -> list[Any] | None:
    with world.database.transaction() as session:
        fleet_index(session, lock=True)
        return want_layout(session, "n1", layout, held=True).layout


def plan(world: World, *layout: int) -> None:
    """What a plan wants of n1."""
    with world.database.transaction() as session:
        fleet_index(session, lock=True)
        want_planned(
            session, "plan_1", [{"node": "n1", "after": list(layout), "reason": "of the test"}], actor="schedule"
        )


def apply(world: World) -> list[tuple[Layout, Layout]]:
    with world.database.transaction() as session:
        fleet_index(session, lock=True)
        return [(one.before, one.after) for one in regroup(session)]


def present(world: World) -> tuple[Layout, list[Any] | None, Layout | None]:
    """The slots of n1, the layout that is wanted of it, and the one that it is told."""
    with world.database.transaction() as session:
        wanted = session.get_one(Node, "n1").layout
        return present_layout(session, "n1"), wanted, desired_of(session, "n1").layout


def stop(world: World, instance_id: str) -> None:
    with world.database.transaction() as session:
        set_desired(session, [instance_id], Desired.STOPPED)


def test_blocks_change_one_after_the_other_as_they_get_empty(world: World) -> None:
    join(world, (4, 1, 1, 1, 1))
    on_four, on_last = world.place("n1", slot=0), world.place("n1", slot=7)
    assert want(world, 2, 2, 4) == [2, 2, 4]
    assert apply(world) == []
    stop(world, on_last)
    assert apply(world) == [((4, 1, 1, 1, 1), (4, 4))]
    assert present(world) == ((4, 4), [2, 2, 4], (4, 4))
    stop(world, on_four)
    assert apply(world) == [((4, 4), (2, 2, 4))]
    assert present(world) == ((2, 2, 4), None, (2, 2, 4)), "nothing more is wanted"
    assert apply(world) == []
    with world.database.transaction() as session:
        assert session.get(Instance, on_last) is None, "its slot is gone"
        assert session.get_one(Instance, on_four).desired == Desired.STOPPED, "its slot has fewer GPUs now"
        sizes = [(slot.index, slot.memory_bytes, slot.weights_bytes) for slot in _slots(session)]
    assert sizes == [(0, 200, 100), (2, 200, 100), (4, 400, 200)]


def test_a_wish_can_be_changed_and_withdrawn(world: World) -> None:
    join(world, (4,))
    world.place("n1")
    assert want(world, 1, 1, 1, 1) == [1, 1, 1, 1]
    assert want(world, 2, 2) == [2, 2]
    assert want(world, 4) is None
    assert present(world)[1] is None


def test_a_node_that_comes_back_finds_the_slots_it_was_grouped_into(world: World) -> None:
    join(world, (4,))
    want(world, 1, 1, 2)
    apply(world)
    instance = world.place("n1", slot=2)
    join(world, (4,))
    assert present(world) == ((1, 1, 2), None, (1, 1, 2))
    with world.database.transaction() as session:
        assert session.get_one(Instance, instance).desired == Desired.RUNNING
    join(world, (4, 4))
    assert present(world)[0] == (4, 4), "with other GPUs it begins anew"
    want(world, 8)
    join(world, (4,))
    assert present(world) == ((4,), None, (4,)), "what was wanted of other GPUs is void"


def test_a_node_that_regroups_no_more_has_its_own_slots(world: World) -> None:
    join(world, (4,))
    want(world, 2, 2)
    apply(world)
    join(world, (4,), regroups=False, slots=(SlotSpec(gpus=4, memory_bytes=400),))
    assert present(world) == ((4,), None, None)
    with pytest.raises(ConflictError, match="TIDEPOOL_AGENT_REGROUP"):
        want(world, 2, 2)
    join(world, (4,), regroups=False, slots=(SlotSpec(gpus=4, memory_bytes=400, hosts=2),))
    with pytest.raises(ConflictError, match="node 'n1' has a slot of 2 hosts, which stays as it is"):
        want(world, 2, 2)


def test_what_was_wanted_of_a_node_that_regroups_no_more_is_void(world: World) -> None:
    """Its agent, perhaps of the version before, would not follow."""
    join(world, (4,))
    instance = world.place("n1")
    assert want(world, 2, 2) == [2, 2]
    join(world, (4,), regroups=False, slots=(SlotSpec(gpus=4, memory_bytes=400),))
    stop(world, instance)
    assert apply(world) == []
    assert present(world) == ((4,), None, None)


def test_a_node_that_joins_while_it_is_regrouped_gets_the_new_slots(world: World) -> None:
    join(world, (4,))
    want(world, 2, 2)
    with ThreadPoolExecutor(1) as threads:
        with world.database.transaction() as session:
            fleet_index(session, lock=True)
            joining = threads.submit(join, world, (4,), url="http://n1-moved")
            until(world.is_waiting_for_a_lock)
            regroup(session)
        joining.result()
    assert present(world) == ((2, 2), None, (2, 2))


def test_what_cannot_be_is_refused_by_name(world: World) -> None:
    join(world, (4,))
    with pytest.raises(InvalidValueError, match="layout: the slots have 8 GPUs, the node has 4"):
        want(world, 4, 4)
    with pytest.raises(InvalidValueError, match="a slot of 2 GPUs begins at a multiple of 2"):
        want(world, 1, 2, 1)
    with world.database.transaction() as session, pytest.raises(NotFoundError):
        want_layout(session, "elsewhere", (4,), held=True)


def _slots(session: Any) -> list[Any]:
    from controlplane.store.fleet import slots_of as rows_of  # noqa: PLC0415 - the other one is of layouts

    return rows_of(session, ["n1"])["n1"]


def test_what_an_operator_chose_plans_leave_until_it_is_released(world: World) -> None:
    join(world, (4,))
    plan(world, 2, 2)
    apply(world)
    want(world, 1, 1, 2)
    plan(world, 4)
    apply(world)
    assert present(world) == ((1, 1, 2), None, (1, 1, 2)), "the operator's word wins"
    with world.database.transaction() as session:
        fleet_index(session, lock=True)
        assert not release_layout(session, "n1").layout_held
    assert apply(world) == [], "it stays until a plan says otherwise"
    plan(world, 4)
    assert apply(world) == [((1, 1, 2), (4,))]


def test_to_choose_what_there_is_holds_it_too(world: World) -> None:
    join(world, (4,))
    assert want(world, 4) is None
    plan(world, 2, 2)
    assert apply(world) == []


def test_a_plan_passes_over_nodes_that_are_not_as_it_knew_them(world: World) -> None:
    plan(world, 4)
    join(world, (4, 4))
    plan(world, 4)
    join(world, (4,), regroups=False, slots=(SlotSpec(gpus=4, memory_bytes=400),))
    plan(world, 2, 2)
    assert apply(world) == []


def test_what_plans_want_is_in_the_audit_log(world: World) -> None:
    join(world, (4,))
    plan(world, 2, 2)
    with world.database.transaction() as session:
        event = session.scalars(select(AuditEvent).where(AuditEvent.action == "node.layout")).one()
    assert (event.actor, event.subject, event.before) == ("schedule", "n1", {"layout": [4]})
    assert event.after == {"layout": [2, 2], "plan": "plan_1", "reason": "of the test"}


def test_models_that_would_have_no_slot_are_named(world: World) -> None:
    join(world, (4,))
    with world.database.transaction() as session:
        session.execute(update(Profile).values(gpus=4))
    instance = world.place("n1")
    want(world, 2, 2)
    with world.database.transaction() as session:
        [warning] = models_without_slot(session, session.get_one(Node, "n1"))
    assert warning == "tide takes 4 GPUs together, the largest slot of H800 in us-east has 2"
    stop(world, instance)
    apply(world)
    world.place("n1")
    with world.database.transaction() as session:
        assert models_without_slot(session, session.get_one(Node, "n1")) == [warning], "the slots are there now"
    want(world, 4)
    with world.database.transaction() as session:
        assert models_without_slot(session, session.get_one(Node, "n1")) == []
