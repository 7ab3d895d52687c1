"""A node whose GPUs are regrouped: which workers end, which start, and which do not notice."""

import asyncio
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from dataplane.agent.heartbeats import join_message, slot_specs
from dataplane.agent.node import Agent
from dataplane.agent.settings import AgentSettings, WorkerSettings
from dataplane.protocol.layouts import Layout
from dataplane.protocol.messages import DesiredInstance, Failed, Finished
from tests.dataplane.replay_node import Node, desired, generate, instance, running_node, settings, workers
from tests.dataplane.streams import read
from tests.event_loop import asynchronous


def regrouping(*gpus: int, **changes: Any) -> AgentSettings:
    slots = tuple(WorkerSettings(gpus=count, memory_bytes=count * 2**20) for count in gpus)
    return settings(**({"slots": slots, "regroup": True} | changes))


def apply(node: Node, generation: int, layout: Layout, *instances: DesiredInstance) -> None:
    node.agent.apply(msgspec.structs.replace(desired(generation, *instances), layout=layout))


def is_running(pid: int | None) -> bool:
    """Whether a process of this machine exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@asynchronous
async def test_a_slot_becomes_others_and_those_beside_it_stay() -> None:
    async with running_node(regrouping(4, 2, 2)) as node:
        await node.hold(1, instance("i1", slot=0), instance("i2", slot=4, name="ebb"))
        former, beside, _ = node.agent.workers
        former_pid, beside_pid = former.pid, beside.pid
        assert [worker.index for worker in node.agent.workers] == [0, 4, 6]
        wanted = [instance("i2", slot=4, name="ebb"), instance("i3", slot=1), instance("i4", slot=2)]
        apply(node, 2, (1, 1, 2, 2, 2), *wanted)
        assert [(worker.index, worker.gpus) for worker in node.agent.workers] == [
            (0, 1),
            (1, 1),
            (2, 2),
            (4, 2),
            (6, 2),
        ]
        await node.until(lambda: node.states() == {"i2": "ready", "i3": "ready", "i4": "ready"})
        assert beside.pid == beside_pid, "the slot beside it did not notice"
        assert not is_running(former_pid), "its workers start when the former one has ended"
        for name in ("i3", "i4"):
            assert isinstance((await read(node, generate(f"r-{name}", instance_id=name)))[-1], Finished)


@asynchronous
async def test_slots_become_one_when_all_their_processes_have_ended() -> None:
    """Also where it is regrouped again before they have: the third waits for the first, whose memory it needs."""
    async with running_node(regrouping(1, 1, 1, 1)) as node:
        await node.hold(1, instance("i1", slot=3))
        first = {worker.pid for worker in node.agent.workers}
        apply(node, 2, (4,))
        apply(node, 3, (2, 2))
        apply(node, 4, (4,), instance("i2"))
        await node.until(lambda: node.agent.workers[0].pid is not None)
        assert not [pid for pid in first if is_running(pid)]
        await node.until(lambda: node.states() == {"i2": "ready"})


@asynchronous
async def test_what_still_runs_on_a_slot_that_goes_ends_with_an_error() -> None:
    """The control plane regroups empty slots only; one that it gave up as lost may still serve."""
    async with running_node(regrouping(2)) as node:
        await node.hold(1, instance("i1"))
        asking = asyncio.create_task(read(node, generate("r1", max_tokens=2000)))
        await node.until(lambda: node.in_flight() == 1)
        apply(node, 2, (1, 1))
        assert isinstance((await asking)[-1], Failed)
        await node.until(node.idle)


@asynchronous
async def test_counters_do_not_fall_when_workers_go() -> None:
    async with running_node(regrouping(2)) as node:
        await node.hold(1, instance("i1"))
        await read(node, generate("r1"))
        await node.until(lambda: node.agent.switches_total > 0)
        before = node.agent.switches_total
        apply(node, 2, (1, 1))
        assert node.agent.heartbeat().switches_total == before


@asynchronous
async def test_a_layout_that_the_node_cannot_have_changes_nothing() -> None:
    async with running_node(regrouping(2)) as node:
        await node.hold(1, instance("i1"))
        for generation, layout in enumerate([(4,), (1,), (3,), ()], start=2):
            apply(node, generation, layout, instance("i1"))
            assert node.states() == {"i1": "ready"}


@asynchronous
async def test_a_node_that_does_not_regroup_keeps_its_slots() -> None:
    async with running_node(settings(slots=workers(2))) as node:
        await node.hold(1, instance("i1"))
        apply(node, 2, (1, 1), instance("i1"))
        assert [worker.gpus for worker in node.agent.workers] == [2]


def test_a_node_joins_with_the_numbers_of_its_slots() -> None:
    given = regrouping(4, 1, 1, 2)
    assert [(spec.number, spec.gpus) for spec in slot_specs(given)] == [(0, 4), (4, 1), (5, 1), (6, 2)]
    assert join_message(Agent(given, boot_id="b"), "http://n").regroups
    assert [spec.number for spec in slot_specs(settings(slots=workers(4, 1)))] == [None, None]


def test_slots_of_a_layout_share_memory_and_ranks_as_the_settings_say() -> None:
    one = regrouping(4).regrouped((2, 1, 1))
    assert [(slot.gpus, slot.memory_bytes, slot.ranks) for slot in one.slots] == [
        (2, 2 * 2**20, None),
        (1, 2**20, None),
        (1, 2**20, None),
    ]
    slots = (WorkerSettings(gpus=4, memory_bytes=4 * 2**20, ranks=4),)
    split = regrouping(4, slots=slots, engine="torch").regrouped((2, 1, 1))
    assert [split.ranks_of(index) for index in range(3)] == [2, 1, 1]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"slots": (WorkerSettings(gpus=3, memory_bytes=3 * 2**20),)}, "slots: a slot has 1, 2, 4, 8, ... GPUs"),
        ({"slots": workers(1, 2)}, "slots: a slot of 2 GPUs begins at a multiple of 2"),
        ({"slots": workers(2, 1)}, "slots: memory_bytes must be the same for each GPU"),
        ({"slots": workers(1, 1), "together": True}, "regroup: must be false"),
        ({"slots": workers(1, 1), "split": True}, "regroup: must be false"),
        ({"slots": workers(1), "device": "cuda:1"}, "device must be cuda"),
    ],
)
def test_settings_that_cannot_be_regrouped_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        regrouping(1, **changes)
