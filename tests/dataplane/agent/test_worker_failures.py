"""A slot that breaks takes no other down: it is started again, and the streams of the others go on."""

import asyncio
import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from dataplane.agent import worker_link
from dataplane.agent.settings import WorkerSettings
from dataplane.agent.worker_link import WorkerLink
from dataplane.agent.workers import BACKOFF_MIN_S, SILENT_LOOKS, WorkerSupervisor
from dataplane.engines.vllm.version import TESTED
from dataplane.protocol.messages import Finished, Sampling
from dataplane.worker.frames import LENGTH, Cancel, Configure
from tests.dataplane.agent.test_slot_hosts import write_checkpoint
from tests.dataplane.replay_node import (
    PROFILE,
    Node,
    OpenLink,
    desired,
    generate,
    install_vllm,
    instance,
    running_node,
    settings,
)
from tests.dataplane.streams import read, token_ids
from tests.event_loop import PATIENCE_S

SLOT = WorkerSettings(gpus=1, memory_bytes=2 * 2**20)
TOKENS = 400


def two_slots(**changes: Any) -> Any:
    return settings(slots=(SLOT, SLOT), replay_speed=2.0, worker_backoff_max_s=0.2, **changes)


def suspend(pid: int) -> None:
    """Stop a worker, and wait until all its threads have stopped: the signal alone lets one go on for a moment."""
    os.kill(pid, SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)


async def stream_beside(node: Node, break_slot: Callable[[], None], broken: Callable[[], bool]) -> None:
    """Break slot 0 while a stream runs on slot 1; that one's tokens come before, during and after."""
    made = lambda: node.agent.workers[1].stats.tokens_total  # noqa: E731
    pid = node.agent.workers[1].pid
    sampling = Sampling(max_tokens=TOKENS, temperature=0.0)
    stream = asyncio.create_task(read(node, generate("long", sampling=sampling, instance_id="i2", model="other")))
    await node.until(lambda: made() > 5)
    break_slot()
    await node.until(broken)
    at_break = made()
    assert at_break < TOKENS, "the stream still runs"
    await node.until(lambda: made() > at_break)
    events = await stream
    assert isinstance(events[-1], Finished), events[-1]
    assert len(token_ids(events)) == TOKENS
    assert node.agent.workers[1].pid == pid, "its worker is the one it had"


def test_a_worker_that_cannot_be_started_is_tried_again_and_reported() -> None:
    tries: list[float] = []
    may_start = True

    async def start(configure: Configure, environment: Mapping[str, str]) -> OpenLink:
        if may_start:
            return await OpenLink.start(configure, environment)
        tries.append(asyncio.get_running_loop().time())
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    async def scenario() -> None:
        nonlocal may_start
        async with running_node(two_slots(load_retry_s=3600.0), start_worker=start) as node:
            await node.hold(1, instance(), instance("i2", slot=1, name="other"))
            may_start, pid = False, node.agent.workers[0].pid
            assert pid is not None
            await stream_beside(node, lambda: os.kill(pid, SIGKILL), lambda: node.states()["i1"] == "failed")
            failed = next(report for report in node.agent.heartbeat().instances if report.instance_id == "i1")
            assert "ended at their start, the last by BlockingIOError" in (failed.error or "")
            assert "Resource temporarily unavailable" in (failed.error or "")
            await node.until(lambda: len(tries) >= 4)
            assert len(tries) - 1 <= (tries[-1] - tries[0]) / BACKOFF_MIN_S, "it pauses between two tries"
            may_start = True
            await node.until(lambda: node.states() == {"i1": "ready", "i2": "ready"})
            assert isinstance((await read(node, generate("again")))[-1], Finished)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "frame",
    [LENGTH.pack(2**32 - 1), LENGTH.pack(3) + b"\xc1\xc1\xc1", LENGTH.pack(1) + b"\x01"],
    ids=["no length", "no msgpack", "no report"],
)
def test_a_worker_whose_report_cannot_be_read_is_replaced(frame: bytes) -> None:
    links: dict[int, OpenLink] = {}

    async def start(configure: Configure, environment: Mapping[str, str]) -> OpenLink:
        link = await OpenLink.start(configure, environment)
        links[link.pid] = link
        return link

    async def scenario() -> None:
        async with running_node(two_slots(), start_worker=start) as node:
            await node.hold(1, instance(), instance("i2", slot=1, name="other"))
            slot = node.agent.workers[0]
            pid = slot.pid
            assert pid is not None
            with capture_logs() as logs:
                await stream_beside(node, lambda: links[pid].reader.feed_data(frame), lambda: slot.pid != pid)
            (line,) = [line for line in logs if line["event"] == "worker lost"]
            assert (line["worker"], line["end"].split(":")[0]) == (0, "by FrameError")
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
            await node.until(lambda: node.states() == {"i1": "ready", "i2": "ready"})
            assert isinstance((await read(node, generate("again")))[-1], Finished)

    asyncio.run(scenario())


def test_a_worker_that_hangs_while_it_has_requests_is_replaced_and_they_go_on() -> None:
    """One without work may be silent."""

    async def scenario() -> None:
        patient = {"worker_losses_max": 1000, "worker_wait_max_s": PATIENCE_S}  # a busy machine is silent at times, too
        patient["worker_start_max_s"] = 2 * SILENT_LOOKS * PATIENCE_S  # the limit of the start holds no more
        async with running_node(two_slots(worker_silent_max_s=5.0, **patient)) as node:
            await node.hold(1, instance(), instance("i2", slot=1, name="other"))
            busy, idle = node.agent.workers
            pid, idle_pid = busy.pid, idle.pid
            assert pid is not None
            assert idle_pid is not None
            sampling = Sampling(max_tokens=TOKENS, temperature=0.0)
            stream = asyncio.create_task(read(node, generate("long", sampling=sampling)))
            await node.until(lambda: busy.stats.tokens_total > 5)
            suspend(idle_pid)
            suspend(pid)
            with capture_logs() as logs:
                await node.until(lambda: busy.pid not in (None, pid))
            assert "worker is silent; ended" in [line["event"] for line in logs]
            assert idle.pid == idle_pid
            os.kill(idle_pid, SIGCONT)
            events = await stream
            assert isinstance(events[-1], Finished), events[-1]
            assert len(token_ids(events)) == TOKENS

    asyncio.run(scenario())


def test_a_worker_that_hangs_at_its_start_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[int]()

    async def start(configure: Configure, environment: Mapping[str, str]) -> OpenLink:
        link = await OpenLink.start(configure, environment)
        started.append(link.pid)
        if len(started) == 1:
            suspend(link.pid)
        else:
            monkeypatch.setattr(WorkerSupervisor, "_owes_report", lambda *_: False)  # a busy machine takes any time
        return link

    async def scenario() -> None:
        with capture_logs() as logs:
            async with running_node(settings(worker_start_max_s=0.2), start_worker=start) as node:
                await node.hold(1, instance())
        (line,) = [line for line in logs if line["event"] == "worker is silent; ended"]
        assert (line["pid"], line["worker_start_max_s"]) == (started[0], 0.2)

    asyncio.run(scenario())


def test_vllm_that_hangs_while_it_loads_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load is given as long as a start, however short the limit of a worker's silence is."""
    install_vllm(TESTED[0], tmp_path / "site", monkeypatch)
    long_s = 2 * SILENT_LOOKS * PATIENCE_S

    async def start(asked: Configure, environment: Mapping[str, str]) -> WorkerLink:
        return await WorkerLink.start(replace(asked, engine="replay", profile=str(PROFILE)), environment)

    async def scenario() -> None:
        given = settings(engine="vllm", profile=None, worker_start_max_s=long_s, worker_silent_max_s=5.0)
        async with running_node(given, start_worker=start) as node:
            (worker,) = node.agent.workers
            await node.until(lambda: worker.worker_start_s > 0)
            pid = worker.pid
            assert pid is not None
            suspend(pid)
            monkeypatch.setitem(vars(node.agent.settings), "worker_start_max_s", 0.2)
            with capture_logs() as logs:
                node.agent.apply(desired(1, instance(path=str(write_checkpoint(tmp_path / "tide")))))
                await node.until(lambda: worker.pid != pid)
            monkeypatch.setitem(vars(node.agent.settings), "worker_start_max_s", long_s)
            (line,) = [line for line in logs if line["event"] == "worker is silent; ended"]
            assert (line["pid"], line["worker_start_max_s"]) == (pid, 0.2)
            await node.until(lambda: node.states() == {"i1": "ready"})

    asyncio.run(scenario())


def test_a_worker_that_does_not_read_gets_no_new_requests_and_is_replaced_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with running_node(settings(unread_bytes_max=2**16)) as node:
            await node.hold(1, instance())
            slot, pid = node.agent.workers[0], node.agent.workers[0].pid
            assert pid is not None
            suspend(pid)
            while slot.unread_bytes < 2**16:
                slot.send(Cancel(request_id="x" * 1000))
            refused = await node.post(generate("r1"))
            assert refused.status_code == 429
            assert "unread_bytes_max=65536" in refused.text
            os.kill(pid, SIGCONT)
            await node.until(lambda: slot.unread_bytes == 0)
            assert isinstance((await read(node, generate("r2")))[-1], Finished)
            monkeypatch.setattr(worker_link, "UNREAD_BYTES_MAX", 2**17)
            suspend(pid)
            link = slot._link
            assert link is not None
            while not link._writer.is_closing():
                slot.send(Cancel(request_id="x" * 1000))
            await node.until(lambda: slot.pid not in (None, pid) and node.states() == {"i1": "ready"})
            assert isinstance((await read(node, generate("r3")))[-1], Finished)

    asyncio.run(scenario())
