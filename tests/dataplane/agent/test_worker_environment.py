"""The environment of worker processes: each sees its own GPUs only. The tests need no GPU."""

import errno
from collections.abc import Mapping

import pytest

from dataplane.agent.worker_link import WorkerLink
from dataplane.agent.workers import worker_environment
from dataplane.worker.frames import Configure
from tests.dataplane.replay_node import running_node, settings, workers
from tests.event_loop import asynchronous

WORKERS = workers(1, 1)


@asynchronous
async def test_each_worker_is_started_with_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    started: set[tuple[str, ...]] = set()

    async def refuse(configure: Configure, environment: Mapping[str, str]) -> WorkerLink:
        started.add((environment["CUDA_VISIBLE_DEVICES"], environment["OMP_NUM_THREADS"], configure.device))
        raise OSError(errno.ENOMEM, "no memory for a process")

    given = settings(slots=WORKERS, device="cuda", engine="torch", profile=None)
    async with running_node(given, start_worker=refuse) as node:
        await node.until(lambda: len(started) == 2)
    assert started == {("4", "3", "cuda:0"), ("GPU-7", "3", "cuda:0")}, "the device is the first that the worker sees"


def test_workers_without_gpus_keep_the_agents_environment() -> None:
    for given in (settings(slots=WORKERS, device="cpu", engine="torch"), settings(slots=WORKERS, device="cuda")):
        made = worker_environment(given, 1, {"A": "b", "CUDA_VISIBLE_DEVICES": "3"})
        assert made == {"OMP_NUM_THREADS": "1", "A": "b", "CUDA_VISIBLE_DEVICES": "3"}
    assert worker_environment(given, 1, {"OMP_NUM_THREADS": "8"}) == {"OMP_NUM_THREADS": "8"}


@pytest.mark.parametrize(
    ("kv_events", "seen"), [("device", ["0", "1", "2,0,1", "3,0,1"]), ("host", ["0", "1", "2", "3"])]
)
def test_decode_workers_see_the_gpus_that_they_wait_for_behind_their_own(kv_events: str, seen: list[str]) -> None:
    given = settings(slots=workers(1, 1, 1, 1), device="cuda", engine="torch", profile=None, split=True)
    given = given.model_copy(update={"kv_events": kv_events})
    assert given.kinds == ("prefill", "prefill", "decode", "decode")
    assert [worker_environment(given, index, {})["CUDA_VISIBLE_DEVICES"] for index in range(4)] == seen


def test_workers_of_one_gpu_see_it_once() -> None:
    given = settings(slots=workers(1, 1), device="cuda:0", engine="torch", profile=None, split=True, kv_events="device")
    assert [worker_environment(given, index, {})["CUDA_VISIBLE_DEVICES"] for index in range(2)] == ["0", "0"]
