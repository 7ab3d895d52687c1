"""A spot instance on a node: it finishes what runs, keeps its model, and serves nobody but its lessee."""

import asyncio
from typing import Any

import msgspec
import pytest

from dataplane.protocol.messages import DesiredInstance, Failed, Generate
from tests.dataplane.replay_node import Node, desired, generate, instance, running_node
from tests.event_loop import asynchronous


def lent(lease_id: str | None = None, **changes: Any) -> DesiredInstance:
    return msgspec.structs.replace(instance(**changes), spot=True, lease_id=lease_id)


async def refused(node: Node, body: Generate) -> Failed:
    response = await node.post(body)
    assert response.status_code == 409, response.text
    return msgspec.json.decode(response.content, type=Failed)


@asynchronous
async def test_a_spot_instance_drains_stays_loaded_and_comes_back_at_once() -> None:
    async with running_node() as node:
        await node.hold(1, instance())
        running = asyncio.create_task(node.post(generate(max_tokens=1000)))
        await node.until(lambda: node.in_flight() == 1)
        node.agent.apply(desired(2, lent()))
        assert node.states() == {"i1": "draining"}, "a request is left"
        assert (await refused(node, generate("r2"))).message == "instance i1 is lent out"
        assert (await running).status_code == 200, "it is finished, not cut off"
        await node.until(lambda: node.states() == {"i1": "spot"})
        worker = node.agent.workers[0]
        await node.until(lambda: worker.stats.tokens_total == 1000)
        switches = worker.switches_total
        node.agent.apply(desired(3, instance()))
        assert node.states() == {"i1": "ready"}, "no load lies between"
        assert (await node.post(generate("r3"))).status_code == 200
        await node.until(lambda: worker.stats.tokens_total > 1000)
        assert worker.switches_total == switches


@asynchronous
async def test_the_lessee_uses_it_until_the_lease_ends() -> None:
    async with running_node() as node:
        await node.hold(1, instance())
        node.agent.apply(desired(2, lent("lease_1")))
        await node.until(lambda: node.states() == {"i1": "spot"})
        running = asyncio.create_task(node.post(generate(lease_id="lease_1", max_tokens=1000)))
        await node.until(lambda: node.in_flight() == 1)
        assert node.states() == {"i1": "spot"}, "what its lessee does is not draining"
        assert (await running).status_code == 200
        other = await refused(node, generate("r2", lease_id="lease_2"))
        assert (other.code, other.param, other.retryable) == ("instance_not_ready", "lease_id", True)
        node.agent.apply(desired(3, lent()))
        assert "has ended" in (await refused(node, generate("r3", lease_id="lease_1"))).message
        node.agent.apply(desired(4, instance()))
        assert "has ended" in (await refused(node, generate("r4", lease_id="lease_1"))).message


@asynchronous
async def test_another_model_takes_its_place_in_one_go() -> None:
    async with running_node() as node:
        await node.hold(1, instance())
        node.agent.apply(desired(2, lent()))
        await node.until(lambda: node.states() == {"i1": "spot"})
        await node.hold(3, instance("i2", name="wave"))
        assert (await node.post(generate(instance_id="i2", model="wave"))).status_code == 200


@pytest.mark.parametrize("kind", ["mixed", "IW", "NIW"])
@asynchronous
async def test_a_report_tells_the_kind(kind: Any) -> None:
    async with running_node() as node:
        node.agent.apply(desired(1, msgspec.structs.replace(instance(), kind=kind)))
        assert [report.kind for report in node.agent.reports()] == [kind]
