"""KV that is handed over on GPUs: interprocess events, waits of a device, and what is told where it cannot wait."""

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from dataplane.engines.torch.copies.base import Copy
from dataplane.engines.torch.copies.interprocess import CudaEvents
from dataplane.engines.torch.copies.open import make_stream, pinned, record_event, unpinned
from dataplane.engines.torch.memory.kv_file import host_memory
from dataplane.memory.events import PASSED
from ops.bench.engine.handover import measure_waits
from ops.profiling.checkpoints import Shape, build_checkpoints
from ops.profiling.handover import measure_handovers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
CUDA = torch.device("cuda", 0)
SIZE_BYTES = 2**28
SPAWN = multiprocessing.get_context("spawn")
SMALL = Shape(hidden=1024, layers=8, head_dim=64)
SPIN_CYCLES = 2 * 10**9


def export(connection: Connection, file: Path) -> None:
    """Write a file from a device that is busy for a second or so, and give away the event of its end."""
    memory = pinned(host_memory(SIZE_BYTES, file), CUDA)
    device = torch.full((SIZE_BYTES,), 7, dtype=torch.uint8, device=CUDA)
    stream, events = make_stream(CUDA, "out"), CudaEvents(CUDA, interprocess=True)
    torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]
    copied = stream.submit([Copy(device[: 2**20], memory[: 2**20])], after=[record_event(CUDA)])
    events.record(0, copied)
    connection.send(events.handle(0))
    events.synchronize(0)
    connection.send("passed")
    connection.recv()  # the event lives until the other process needs it no more
    stream.close()


def test_a_stream_waits_for_an_event_of_another_process(tmp_path: Path) -> None:
    """It is recorded but has not passed when it is opened; the copy behind it reads what was written before."""
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=export, args=(there, tmp_path / "kv"))
    process.start()
    handle = here.recv()
    memory = pinned(host_memory(0, tmp_path / "kv"), CUDA)
    events, stream = CudaEvents(CUDA, interprocess=True), make_stream(CUDA, "in")
    target = torch.zeros(2**20, dtype=torch.uint8, device=CUDA)

    class Waited:
        error = None

        def done(self) -> bool:
            return False

        def wait(self) -> None:
            assert events.wait_for(handle, memory)

    copied = stream.submit([Copy(memory[: 2**20], target)], after=[Waited()])
    assert here.recv() == "passed"
    while not copied.done():
        time.sleep(0.001)
    assert copied.error is None
    assert events.has_passed(handle)
    assert int(target.sum()) == 7 * 2**20
    here.send("")
    process.join()
    assert process.exitcode == 0
    events.forget([handle])
    torch.cuda.synchronize()
    stream.close()
    unpinned(memory, CUDA)


def test_memory_that_is_not_pinned_is_not_waited_for_on_the_device() -> None:
    """The host reads it when the copy is issued."""
    events = CudaEvents(CUDA, interprocess=True)
    events.record(0, PASSED)
    assert not events.wait_for(events.handle(0), torch.zeros(10, dtype=torch.uint8))


def test_a_handle_that_the_driver_refuses_is_not_waited_for() -> None:
    events = CudaEvents(CUDA, interprocess=True)
    source = torch.zeros(10, dtype=torch.uint8).pin_memory()
    assert not events.wait_for(bytes(64), source)
    assert CudaEvents(CUDA, interprocess=False).handle(0) == b""
    torch.ones(1, device=CUDA).add_(1)  # the refusal leaves no error behind
    torch.cuda.synchronize()


@pytest.mark.parametrize("kv_events", ["host", "device"])
def test_workers_hand_over_while_kv_is_transferred(kv_events: str, tmp_path: Path) -> None:
    """Two worker processes on one GPU. How often the device waits hangs on what is quicker, copies or messages."""
    (model,) = build_checkpoints(tmp_path / "checkpoints", [SMALL], "bfloat16", device="cuda")
    kv_token_bytes = 2 * SMALL.layers * SMALL.config["num_key_value_heads"] * SMALL.head_dim * 2
    found = measure_handovers(
        model,
        tmp_path,
        devices=("cuda:0", "cuda:0"),
        dtype="bfloat16",
        kv_events="device" if kv_events == "device" else "host",
        requests=16,
        prompt_tokens=3000,
        kv_token_bytes=kv_token_bytes,
        rounds=3,
    )
    assert sum(found.waited_for.values()) == 4 * 16
    assert kv_events == "device" or found.waited_for["device"] == 0


def test_the_bench_tells_all_three(tmp_path: Path) -> None:
    (model,) = build_checkpoints(tmp_path / "checkpoints", [SMALL], "bfloat16", device="cuda")
    rows = list(
        measure_waits(
            model,
            SMALL,
            tmp_path,
            ways=("device", "host", "off"),
            device="cuda",
            dtype="bfloat16",
            requests=8,
            prompt_tokens=1000,
            rounds=1,
        )
    )
    assert [row["kv_events"] for row in rows] == ["device", "host", "off"]
