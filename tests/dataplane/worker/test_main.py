"""A real worker process on the replay engine: a round trip, bad loads, and no orphans."""

import asyncio
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, TypeVar

import pytest

from dataplane.agent.host_files import HostFiles
from dataplane.agent.workers import configure
from dataplane.engines.interface import EngineRequest
from dataplane.worker import main
from dataplane.worker.frames import (
    LENGTH,
    Add,
    Cancel,
    Load,
    Loaded,
    LoadFailed,
    Outputs,
    Refused,
    Report,
    Stats,
    Unload,
    encode_frame,
)
from tests.dataplane.replay_node import PATIENCE_S, OpenLink, model, settings
from tests.event_loop import asynchronous

Kind = TypeVar("Kind")


def request(request_id: str, max_tokens: int = 3, instance_id: str = "i1") -> EngineRequest:
    return EngineRequest(
        request_id=request_id, instance_id=instance_id, tier="NIW", prompt=(1, 2), max_tokens=max_tokens
    )


async def start() -> tuple[OpenLink, AsyncIterator[Report]]:
    ours = settings()
    link = await OpenLink.start(configure(ours, 0, None, HostFiles(ours, "boot"), ours.engine), os.environ)
    return link, link.reports()


async def until(reports: AsyncIterator[Report], kind: type[Kind]) -> Kind:
    async with asyncio.timeout(60):
        async for report in reports:
            if isinstance(report, kind):
                return report
    raise AssertionError(f"the worker ended without {kind.__name__}")


@asynchronous
async def test_round_trip() -> None:
    link, reports = await start()
    hello = await until(reports, Stats)
    assert hello.stats.instances == ()
    link.send(Load(instance_id="i1", serial=7, model=model(), gpus=1))
    assert (await until(reports, Loaded)).serial == 7
    link.send(Add(request=request("r1")))
    made: list[int] = []
    while True:
        (output,) = (await until(reports, Outputs)).outputs
        made.extend(output.token_ids)
        if output.finish_reason is not None:
            break
    assert len(made) == 3
    link.send(Unload(instance_id="i1"))
    link.send(Unload(instance_id="i1"))
    link.send(Add(request=request("late")))
    refused = await until(reports, Refused)
    assert (refused.request_id, refused.status, refused.code) == ("late", 409, "instance_not_ready")
    assert await link.stop(PATIENCE_S) == 0


@asynchronous
async def test_a_failed_load_leaves_the_worker_working() -> None:
    link, reports = await start()
    link.send(Load(instance_id="big", serial=1, model=model(weights_bytes=10**12), gpus=1))
    failed = await until(reports, LoadFailed)
    assert failed.instance_id == "big"
    assert "weights_bytes" in failed.error
    link.send(Load(instance_id="i1", serial=2, model=model(), gpus=1))
    assert (await until(reports, Loaded)).instance_id == "i1"
    assert await link.stop(PATIENCE_S) == 0


@asynchronous
async def test_cancel_frees_the_kv() -> None:
    link, reports = await start()
    link.send(Load(instance_id="i1", serial=1, model=model(), gpus=1))
    await until(reports, Loaded)
    link.send(Add(request=request("r1", max_tokens=1000)))
    await until(reports, Outputs)
    link.send(Cancel(request_id="r1"))
    while True:
        stats = (await until(reports, Stats)).stats
        if stats.tokens_total and stats.instances[0].kv_used_bytes == 0:
            break
    await link.stop(PATIENCE_S)


@asynchronous
async def test_the_worker_ends_when_its_agent_is_gone_even_in_the_middle_of_work() -> None:
    link, reports = await start()
    link.send(Load(instance_id="i1", serial=1, model=model(), gpus=1))
    await until(reports, Loaded)
    link.send(Add(request=request("r1", max_tokens=1000)))
    await until(reports, Outputs)
    assert await link.stop(PATIENCE_S) == 0, "closing the socket was enough"
    try:
        os.kill(link.pid, 0)
    except ProcessLookupError:
        return
    raise AssertionError("the process is still there")


@asynchronous
async def test_a_worker_that_cannot_read_a_command_logs_that_and_ends(capfd: pytest.CaptureFixture[str]) -> None:
    link, reports = await start()
    await until(reports, Stats)
    link.writer.write(LENGTH.pack(3) + b"\xc1\xc1\xc1")
    async with asyncio.timeout(60):
        async for _ in reports:
            pass
    assert await link.stop(PATIENCE_S) == 1
    logged = capfd.readouterr().err
    assert "a command of the agent cannot be read" in logged
    assert "FrameError" in logged


def test_a_busy_worker_leaves_commands_unread_and_still_notices_the_end_of_its_agent() -> None:
    ended, commands = threading.Event(), queue.Queue[Any]()
    listen = partial(main.listen, grace_s=0.0, end_process=lambda status: ended.set())
    ours, theirs = socket.socketpair()
    with theirs, theirs.makefile("rb") as stream:
        threading.Thread(target=listen, args=(theirs, stream, commands), daemon=True).start()
        ours.settimeout(1.0)
        with pytest.raises(TimeoutError):
            ours.sendall(encode_frame(Cancel(request_id="r1")) * 10**6)
        assert commands.qsize() <= main.COMMANDS_MAX
        ours.close()
        assert ended.wait(30)


def test_a_worker_that_ends_ends_the_processes_of_its_ranks() -> None:
    """Also one that hangs, and would not see for a long time that its worker is gone: it has the pipe open."""
    code = (
        "import multiprocessing, time\n"
        "from dataplane.worker.main import end_with_ranks\n"
        "multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,), daemon=True).start()\n"
        "end_with_ranks(3)"
    )
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 3
