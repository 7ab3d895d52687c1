"""A node with a group of two workers and a group of one, which are the slots that the control plane knows."""

import asyncio

import msgspec

from dataplane.agent.settings import AgentSettings
from dataplane.protocol.messages import DesiredInstance, InstanceReport
from tests.dataplane.replay_node import Node, desired, generate, instance, running_node, settings, workers
from tests.dataplane.streams import read
from tests.event_loop import asynchronous


def together() -> AgentSettings:
    """A group of two workers with one GPU each, and a worker with two GPUs."""
    return settings(slots=workers(1, 2, 1), together=True)


def pooled(name: str) -> DesiredInstance:
    return msgspec.structs.replace(instance(name, name=name), gpus=0)


def reports(node: Node) -> dict[str, InstanceReport]:
    return {report.instance_id: report for report in node.agent.reports()}


async def hold_everywhere(node: Node, generation: int, *instances: DesiredInstance) -> None:
    """Wait for each instance on every worker of its group, with statistics from all of them."""
    await node.hold(generation, *instances)
    await node.until(
        lambda: all(
            worker.is_ready(one.instance_id) and worker.instance_stats(one.instance_id) is not None
            for one in instances
            for worker in node.agent.groups[one.slot].workers
        )
    )


@asynchronous
async def test_instances_are_on_the_workers_of_their_group() -> None:
    async with running_node(together()) as node:
        await hold_everywhere(node, 1, instance("i1", name="tide"), instance("i2", slot=1, name="ebb"))
        held = [[worker.hosted.get(name) is not None for worker in node.agent.workers] for name in ("i1", "i2")]
        assert held == [[True, False, True], [False, True, False]]
        assert {name: report.slot for name, report in reports(node).items()} == {"i1": 0, "i2": 1}
        for name, model in (("i1", "tide"), ("i2", "ebb")):
            await read(node, generate(f"r-{name}", instance_id=name, model=model))
        node.agent.apply(desired(2, instance("i3", slot=2)))
        assert [report.error for report in node.agent.reports()] == ["slot 2 does not exist; this node has 2"]


@asynchronous
async def test_kv_of_a_group_counts_once() -> None:
    """Instances of one model share the free KV of all workers; a pooled instance reports all of it."""
    async with running_node(together()) as node:
        await hold_everywhere(node, 1, instance("i1"))
        whole_bytes = reports(node)["i1"].kv_capacity_bytes
        assert whole_bytes == sum(w.stats.instances[0].kv_capacity_bytes for w in node.agent.groups[0].workers)
        await hold_everywhere(node, 2, instance("i1"), instance("i2"), pooled("ebb"))
        kv_bytes = {name: report.kv_capacity_bytes for name, report in reports(node).items()}
        assert kv_bytes == {"i1": whole_bytes // 2, "i2": whole_bytes // 2, "ebb": whole_bytes}
        asking = asyncio.create_task(node.post(generate("r1", instance_id="i1", max_tokens=1000, prompt="x " * 400)))
        await node.until(lambda: reports(node)["i1"].kv_used_bytes > 0)
        reported = reports(node)
        assert reported["i1"].kv_capacity_bytes + reported["i2"].kv_capacity_bytes <= whole_bytes
        assert reported["ebb"].kv_used_bytes == reported["i1"].kv_used_bytes
        assert reported["i2"].kv_used_bytes == 0
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await node.until(node.idle)
