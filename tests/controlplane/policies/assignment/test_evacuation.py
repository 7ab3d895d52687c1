"""Instances that must leave their node: successors first, drains after."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from controlplane.policies.assignment.choose import choose_slots
from controlplane.policies.assignment.evacuation import (
    Evacuation,
    NodePresence,
    choose_evacuation,
    choose_leaving,
    choose_overdue,
)
from controlplane.policies.assignment.facts import PlacedInstance, SlotFacts, SlotRoom, SlotSettings
from controlplane.policies.facts import ModelGpu
from controlplane.policies.fit import ModelSize, WeightsMemory
from tests.controlplane.policies.assignment.test_choose import B, donated, instance, names, slot

GOES = "node n1 is being drained"


def leaving(name: str, **changes: Any) -> PlacedInstance:
    return instance(name, leaving=GOES, **changes)


def evacuate(*instances: PlacedInstance) -> Evacuation:
    return choose_evacuation(instances)


def test_each_gets_one_successor_of_its_own_gpu_type() -> None:
    done = evacuate(leaving("i1"), leaving("i2"), instance("i3", node_id="n2"))
    assert [(step.delta, step.gpu_type, step.succeeds, step.reason) for step in done.steps] == [
        (1, "H", "i1", GOES),
        (1, "H", "i2", GOES),
    ]
    assert (done.drains, done.succeeded) == ((), frozenset())


@pytest.mark.parametrize(
    ("successor_ready", "own_ready", "drained"), [(False, True, []), (True, True, ["i1"]), (False, False, ["i1"])]
)
def test_it_drains_once_its_successor_is_ready_or_if_it_never_served(
    successor_ready: bool, own_ready: bool, drained: list[str]
) -> None:
    successor = instance("i9", node_id="n2", succeeds="i1", ready=successor_ready)
    done = evacuate(leaving("i1", ready=own_ready), successor)
    assert (done.steps, done.succeeded) == ((), {"i1"}), "one successor is enough"
    assert names(done.drains) == drained


def test_what_does_not_come_up_gets_no_row_of_successors() -> None:
    assert evacuate(leaving("i1", stuck=True, ready=False)).steps == ()
    stuck_successor = instance("i9", node_id="n2", succeeds="i1", ready=False, stuck=True)
    done = evacuate(leaving("i1"), stuck_successor)
    assert (done.steps, done.drains) == ((), ())


def test_what_drains_or_is_lent_out_needs_no_successor() -> None:
    lent = donated("i2", leaving=GOES)
    assert evacuate(leaving("i1", draining=True), lent) == Evacuation()


@pytest.mark.parametrize(
    ("successor", "drained"),
    [
        (None, ["i1"]),
        ({"ready": False}, []),
        ({"ready": False, "stuck": True}, ["i1"]),
        ({"draining": True}, ["i1"]),
    ],
)
def test_what_is_overdue_drains_unless_its_successor_is_being_started(
    successor: dict[str, Any] | None, drained: list[str]
) -> None:
    """Weights may take longer to load than the slots' patience."""
    instances = [leaving("i1", overdue=True), leaving("i2"), leaving("i3", overdue=True, draining=True)]
    if successor is not None:
        instances.append(instance("i9", node_id="n2", succeeds="i1", **successor))
    assert names(choose_overdue(instances, frozenset())) == drained
    assert choose_overdue(instances, {"i1"}) == (), "another decision lets it go"


@pytest.mark.parametrize(
    ("same_type", "node"),
    [
        (slot("n2"), "n2"),  # preferred, although less is free there
        (slot("n2", free=0), "n3"),
        (slot("n2", workers=4), "n3"),  # each of one GPU, and it takes two
        (structs.replace(slot("n2"), weights=WeightsMemory(weights_bytes=1)), "n3"),  # too small for its weights
        (structs.replace(slot("n2"), pooled=True), "n3"),
        (slot("n2", accepting=False), "n3"),
        (slot("n2", age_s=9.0), "n3"),
    ],
)
def test_another_gpu_type_where_the_same_has_no_slot_for_it(same_type: SlotRoom, node: str) -> None:
    mine = leaving("i1", endpoint=B, gpus=2)
    facts = SlotFacts(
        steps=evacuate(mine).steps,
        slots=(slot("n1", accepting=False), same_type, structs.replace(slot("n3", gpu_type="L"), gpus=8, gpus_free=8)),
        instances=(mine,),
        gpus={ModelGpu(model="b", gpu_type=gpu_type): 2 for gpu_type in "HL"},
        sizes={"b": ModelSize(weights_bytes=9)},
    )
    assert [add.node_id for add in choose_slots(facts, 0.0, SlotSettings()).adds] == [node]
    nowhere = choose_slots(replace(facts, slots=facts.slots[:1]), 0.0, SlotSettings())
    assert [each.reason for each in nowhere.unplaced] == [
        "GPUs full in west: 0 of 4 H or L free, needs 2 in one slot; 1 nodes silent or draining"
    ]


def test_a_node_that_stays_after_all_settles_its_successors() -> None:
    done = evacuate(instance("i1"), instance("i9", node_id="n2", succeeds="i1"))
    assert (done.settled, done.succeeded) == (("i9",), frozenset())


def presence(
    name: str, silent_s: float | None, *, draining: bool = False, is_leaving: bool = False, holds: bool = True
) -> NodePresence:
    return NodePresence(name=name, draining=draining, leaving=is_leaving, silent_s=silent_s, has_instances=holds)


def test_nodes_leave_by_order_by_themselves_and_by_silence() -> None:
    nodes = [
        presence("a", 1.0),
        presence("b", 1.0, draining=True),
        presence("c", 1.0, is_leaving=True),
        presence("d", 21.0),
        presence("never", None),
    ]
    assert choose_leaving(nodes, replace_after_s=20.0) == {
        "b": "node b is being drained",
        "c": "node c is shutting down",
        "d": "node d has been silent for over 20 s",
    }


def test_silence_of_most_nodes_is_an_outage_of_ours() -> None:
    nodes = [presence("a", 1.0), presence("b", 99.0), presence("c", 99.0)]
    assert choose_leaving(nodes, replace_after_s=20.0) == {}
    assert choose_leaving(nodes[:2], replace_after_s=20.0) == {"b": "node b has been silent for over 20 s"}


def test_nodes_that_are_long_gone_do_not_hide_one_that_falls_silent() -> None:
    gone = [presence(f"old{number}", 9e6, holds=False) for number in range(5)]
    assert choose_leaving([presence("a", 1.0), presence("b", 99.0), *gone], replace_after_s=20.0) == {
        "b": "node b has been silent for over 20 s"
    }


def test_idle_nodes_that_are_heard_of_prove_that_the_control_plane_is_not_away() -> None:
    nodes = [presence("idle", 1.0, holds=False), presence("b", 99.0)]
    assert choose_leaving(nodes, replace_after_s=20.0) == {"b": "node b has been silent for over 20 s"}
