"""Pooled instances on a node: several models on all GPUs of a worker, and their reports to the control plane."""

import asyncio

import msgspec
import pytest

from dataplane.protocol.messages import DesiredInstance
from tests.dataplane.replay_node import Node, desired, generate, instance, running_node
from tests.event_loop import asynchronous


def pooled(name: str) -> DesiredInstance:
    return msgspec.structs.replace(instance(name, name=name), gpus=0)


async def serve(node: Node, name: str) -> None:
    response = await node.post(generate(f"r-{name}", instance_id=name, model=name, max_tokens=3))
    assert response.status_code == 200, response.text


@asynchronous
async def test_models_share_a_slot_and_one_may_have_it_for_itself_at_once() -> None:
    async with running_node() as node:
        await node.hold(1, pooled("ebb"), pooled("flood"))
        for name in ("ebb", "flood"):
            await serve(node, name)
        node.agent.apply(desired(2, instance("ebb", name="ebb")))
        assert node.states() == {"ebb": "ready"}, "the same instance with a GPU of its own is not loaded anew"
        await serve(node, "ebb")


@pytest.mark.parametrize("beside", [pooled, lambda name: instance(name, name=name)])
@asynchronous
async def test_the_kv_of_a_pooled_instance_is_that_of_its_slot(beside: "type[DesiredInstance]") -> None:
    """An idle model on a busy slot is no place to send much to; one with a GPU of its own counts its own requests."""
    async with running_node() as node:
        busy, idle = pooled("busy"), beside("idle")  # type: ignore[call-arg]
        await node.hold(1, busy, idle)
        asking = asyncio.create_task(
            node.post(generate("r1", instance_id="busy", model="busy", max_tokens=1000, prompt="x " * 400))
        )
        await node.until(lambda: used(node, "busy") > 0)
        reports = {report.instance_id: report for report in node.agent.reports()}
        assert (used(node, "idle") > 0) == (idle.gpus == 0)
        if not idle.gpus:
            assert reports["idle"].kv_capacity_bytes == reports["busy"].kv_capacity_bytes
            assert reports["idle"].kv_used_bytes == reports["busy"].kv_used_bytes
            assert reports["idle"].remaining_tokens == 0, "but the work is not its own"
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await node.until(node.idle)


def used(node: Node, instance_id: str) -> int:
    return next(report.kv_used_bytes for report in node.agent.reports() if report.instance_id == instance_id)


@asynchronous
async def test_an_instance_reports_the_rate_of_the_prompts_that_it_received() -> None:
    async with running_node() as node:
        await node.hold(1, instance("ebb", name="ebb"), instance("flood", name="flood"))
        assert rate(node, "ebb") == 0.0
        await serve(node, "ebb")
        received = rate(node, "ebb")
        assert received > 0
        await serve_again(node, "ebb")
        assert rate(node, "ebb") == 2 * received
        assert rate(node, "flood") == 0.0


def rate(node: Node, instance_id: str) -> float | None:
    return next(one.input_tokens_per_s for one in node.agent.reports() if one.instance_id == instance_id)


async def serve_again(node: Node, name: str) -> None:
    response = await node.post(generate(f"again-{name}", instance_id=name, model=name, max_tokens=3))
    assert response.status_code == 200, response.text
