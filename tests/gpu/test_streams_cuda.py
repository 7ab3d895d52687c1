"""Copy streams of a CUDA device: pinned and staged, both ways, in order, against what the device computes."""

import threading
from collections.abc import Iterator

import pytest
import torch

from dataplane.engines.torch.copies import cuda as cuda_copies
from dataplane.engines.torch.copies import open as opening
from dataplane.engines.torch.copies.base import Copy, CopyStream
from dataplane.engines.torch.copies.cuda import pin, unpin
from dataplane.engines.torch.copies.open import make_stream, record_event
from dataplane.memory.events import FlagEvent, TransferError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
CUDA = torch.device("cuda", 0)
COUNT = 3_000_001


@pytest.fixture(params=[(1, 3 * 2**20), (4, 64 * 2**20)], ids=["small stage", "threads"])
def stream(request: pytest.FixtureRequest) -> Iterator[CopyStream]:
    threads, staging_bytes = request.param
    opened = make_stream(CUDA, "test", threads=threads, staging_bytes=staging_bytes)
    yield opened
    opened.close()


def numbers(count: int = COUNT, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + count)


@pytest.mark.parametrize("pinned", [False, True])
def test_bytes_go_there_and_back(stream: CopyStream, pinned: bool) -> None:
    sizes = [1, 5, COUNT, 4096, 2]
    sources = [numbers(size, 11 * size) for size in sizes]
    back = [torch.zeros(size, dtype=torch.int64) for size in sizes]
    if pinned:
        sources, back = [host.pin_memory() for host in sources], [host.pin_memory() for host in back]
    device = [torch.zeros(size, dtype=torch.int64, device=CUDA) for size in sizes]
    ready = record_event(CUDA)
    there = stream.submit([Copy(s, d) for s, d in zip(sources, device, strict=True)], after=[ready])
    doubled = stream.submit([Copy(d, b) for d, b in zip(device, back, strict=True)], after=[there])
    doubled.wait()
    torch.cuda.synchronize()
    assert doubled.done()
    assert all(b.equal(s) for s, b in zip(sources, back, strict=True))


def test_what_is_computed_next_waits_for_a_copy_and_a_copy_for_what_was_computed(stream: CopyStream) -> None:
    host, back = numbers(), torch.zeros(COUNT, dtype=torch.int64)
    device = torch.zeros(COUNT, dtype=torch.int64, device=CUDA)
    for turn in range(5):
        stream.submit([Copy(host, device)], after=[record_event(CUDA)]).wait()
        for _ in range(20):
            device += 1
        stream.submit([Copy(device, back)], after=[record_event(CUDA)]).wait()
        torch.cuda.synchronize()
        assert back.equal(host + 20), turn


def test_within_the_device_and_from_registered_memory(stream: CopyStream) -> None:
    host = numbers()
    pin(host)
    assert host.is_pinned()
    one, two = (torch.zeros(COUNT, dtype=torch.int64, device=CUDA) for _ in range(2))
    there = stream.submit([Copy(host, one)], after=[record_event(CUDA)])
    stream.submit([Copy(one, two)], after=[there]).wait()
    assert two.cpu().equal(host)
    unpin(host)
    assert not host.is_pinned()
    with pytest.raises(TransferError):
        unpin(host)


def test_a_copy_may_cross_the_pieces_in_which_memory_was_pinned(
    stream: CopyStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_copies, "PIN_BYTES", 2**20)
    host, ended = numbers(), threading.Event()
    opening.pinned(host, CUDA)
    assert opening.PINS.refused is None
    device = torch.zeros(COUNT, dtype=torch.int64, device=CUDA)
    stream.submit([Copy(host, device)], after=[record_event(CUDA)]).wait()
    assert device.cpu().equal(numbers())
    opening.unpinned(host, CUDA, ended.set)
    assert ended.wait(30)
    assert not host.is_pinned()


def test_a_failure_stays_with_its_submission(stream: CopyStream) -> None:
    gate = FlagEvent()
    device = torch.zeros(COUNT, dtype=torch.int64, device=CUDA)
    failed = stream.submit([Copy(numbers(), device)], after=[gate])
    assert not failed.done()
    gate.finish(OSError("gone"))
    with pytest.raises(TransferError, match="gone"):
        failed.wait()
    assert failed.done()
    stream.submit([Copy(numbers(), device)], after=[record_event(CUDA)]).wait()
    assert device.cpu().equal(numbers())
