"""The environment of worker processes: each sees the GPUs of its slot as its first ones. No GPU is needed for it."""

import asyncio
import errno
from collections.abc import Mapping
from typing import Any

import pytest

from dataplane.agent import worker_link
from dataplane.agent.host_files import HostFiles
from dataplane.agent.settings import WorkerSettings
from dataplane.agent.workers import configure, worker_environment
from tests.dataplane.replay_node import running_node, settings

SLOTS = (WorkerSettings(gpus=1, memory_bytes=2**22), WorkerSettings(gpus=1, memory_bytes=2**22))


def test_each_worker_is_started_with_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    started: list[tuple[str, ...]] = []

    def refuse(command: list[str], *, env: Mapping[str, str], **_: Any) -> Any:
        started.append((env["CUDA_VISIBLE_DEVICES"], env["OMP_NUM_THREADS"]))
        raise OSError(errno.ENOMEM, "no memory for a process")

    monkeypatch.setattr(worker_link.subprocess, "Popen", refuse)
    given = settings(slots=SLOTS, device="cuda", engine="torch", profile=None)

    async def scenario() -> None:
        async with running_node(given) as node:
            await node.until(lambda: len(set(started)) == 2)

    asyncio.run(scenario())
    assert {visible for visible, _ in started} == {"4", "GPU-7"}
    assert {threads for _, threads in started} == {"3"}, "what the agent was given"
    for index in range(2):
        asked = configure(given, index, None, HostFiles(given, "boot"), given.engine)
        assert asked.device == "cuda:0", "the first one that it sees"


def test_workers_without_gpus_keep_the_agents_environment() -> None:
    for given in (settings(slots=SLOTS, device="cpu", engine="torch"), settings(slots=SLOTS, device="cuda")):
        made = worker_environment(given, 1, {"A": "b", "CUDA_VISIBLE_DEVICES": "3"})
        assert made == {"OMP_NUM_THREADS": "1", "A": "b", "CUDA_VISIBLE_DEVICES": "3"}
    assert worker_environment(given, 1, {"OMP_NUM_THREADS": "8"}) == {"OMP_NUM_THREADS": "8"}
