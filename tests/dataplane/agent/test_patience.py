"""Workers that die before they serve: requests wait as long as their clients may, and no longer."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from dataplane.agent.settings import AgentSettings
from dataplane.agent.worker_link import WorkerLink
from dataplane.agent.workers import START_FAILURES_MAX
from dataplane.protocol.messages import Failed, Finished, Sampling
from dataplane.worker.frames import Configure, Loaded, LoadFailed, Report
from tests.dataplane.replay_node import Node, generate, instance, running_node, settings
from tests.dataplane.streams import read, token_ids
from tests.event_loop import asynchronous

LONG = Sampling(max_tokens=300, temperature=0.0)


def slow(**changes: Any) -> AgentSettings:
    """A node on which a long stream takes some seconds, and workers follow each other quickly."""
    return settings(replay_speed=2.0, worker_backoff_max_s=0.2, **changes)


class Starts:
    """Starts worker processes, of which the next `deaths` are killed before they report, and others fail all loads."""

    def __init__(self) -> None:
        self.deaths = self.died = 0
        self.link = WorkerLink

    async def start(self, configure: Configure, environment: Mapping[str, str]) -> WorkerLink:
        link = await self.link.start(configure, environment)
        if self.deaths:
            self.deaths -= 1
            self.died += 1
            os.kill(link.pid, signal.SIGKILL)
        return link


class FailingLoads(WorkerLink):
    """A worker that cannot load any model."""

    async def reports(self) -> AsyncIterator[Report]:
        async for report in super().reports():
            if isinstance(report, Loaded):
                yield LoadFailed(instance_id=report.instance_id, serial=report.serial, error="no such checkpoint")
            else:
                yield report


class EndlessLoads(WorkerLink):
    """A worker whose loads are not over, as far as the agent hears, while `endless`."""

    endless = True

    async def reports(self) -> AsyncIterator[Report]:
        async for report in super().reports():
            if not (isinstance(report, Loaded) and self.endless):
                yield report


def kill(node: Node) -> None:
    pid = node.agent.workers[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def in_the_middle(node: Node, request_id: str) -> "asyncio.Task[Any]":
    """A long stream that has begun."""
    stream = asyncio.create_task(read(node, generate(request_id, sampling=LONG)))
    worker = node.agent.workers[0]
    before = worker.stats.tokens_total
    await node.until(lambda: before + 5 < worker.stats.tokens_total)
    assert node.in_flight() == 1
    return stream


@asynchronous
async def test_workers_that_die_at_their_start_fail_no_request_that_can_wait() -> None:
    starts = Starts()
    async with running_node(slow(load_retry_s=3600.0), start_worker=starts.start) as node:
        await node.hold(1, instance())
        calm = await read(node, generate("calm", sampling=LONG))
        storm = await in_the_middle(node, "storm")
        starts.deaths = START_FAILURES_MAX + 2
        kill(node)
        await node.until(lambda: node.states() == {"i1": "failed"})
        refused = await read(node, generate("new"))
        assert isinstance(refused[0], Failed), "what is new had better go elsewhere"
        assert refused[0].retryable
        events = await storm
        assert isinstance(events[-1], Finished), "the next worker loads again at once, whatever load_retry_s says"
        assert token_ids(events) == token_ids(calm)
        assert starts.died == START_FAILURES_MAX + 2


@asynchronous
async def test_nobody_waits_longer_than_the_limit() -> None:
    starts = Starts()
    async with running_node(slow(worker_wait_max_s=0.5), start_worker=starts.start) as node:
        await node.hold(1, instance())
        storm = await in_the_middle(node, "storm")
        starts.deaths = 10**6
        kill(node)
        failed = (await storm)[-1]
        assert isinstance(failed, Failed)
        assert (failed.status, failed.code) == (503, "worker_lost")
        assert failed.message.endswith("no other took over within worker_wait_max_s=0.5")
        assert node.in_flight() == 0


@asynchronous
async def test_a_load_that_kills_workers_ends_no_request_before_it_was_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts = Starts()
    async with running_node(slow(load_retry_s=1.0), start_worker=starts.start) as node:
        await node.hold(1, instance())
        calm = await read(node, generate("calm", sampling=LONG))
        storm = await in_the_middle(node, "storm")
        hosted = node.agent.workers[0].hosted.get("i1")
        assert hosted is not None
        starts.link = EndlessLoads
        kill(node)
        while hosted.state != "failed":  # each process is killed while it loads
            if hosted.load_serial is not None and hosted.has_begun and node.agent.workers[0].pid is not None:
                kill(node)
            await asyncio.sleep(0)
        monkeypatch.setattr(EndlessLoads, "endless", False)
        assert "2 worker processes ended while they loaded this model" in str(hosted.error)
        events = await storm
        assert isinstance(events[-1], Finished)
        assert token_ids(events) == token_ids(calm)


@asynchronous
async def test_a_model_that_a_living_worker_cannot_load_keeps_nobody_waiting() -> None:
    starts = Starts()
    async with running_node(slow(), start_worker=starts.start) as node:
        await node.hold(1, instance())
        storm = await in_the_middle(node, "storm")
        starts.link = FailingLoads
        kill(node)
        failed = (await storm)[-1]
        assert isinstance(failed, Failed)
        assert failed.message == "instance i1 failed: no such checkpoint"
