"""Copy streams on the CPU: every byte arrives, in order, after what it waits for; a failure stays where it is."""

import mmap
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from queue import Queue
from random import Random
from typing import ClassVar

import pytest
import torch
from structlog.testing import capture_logs

from dataplane.engines.torch.copies import base
from dataplane.engines.torch.copies import cuda as cuda_copies
from dataplane.engines.torch.copies import open as opening
from dataplane.engines.torch.copies.base import Copy, CopyStream, cut
from dataplane.engines.torch.copies.cpu import ThreadStream
from dataplane.engines.torch.copies.open import Pins, make_stream, pinned, record_event, unpinned
from dataplane.memory.events import PASSED, Event, FlagEvent, TimedEvent, TransferError
from tests.dataplane.engines.torch.faults import FaultyStream

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 3])
def stream(request: pytest.FixtureRequest) -> Iterator[CopyStream]:
    opened = make_stream(CPU, "test", threads=request.param)
    yield opened
    opened.close()


class WatchedGate(FlagEvent):
    """Tells when somebody waits at it."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()

    def wait(self) -> None:
        self.reached.set()
        super().wait()


def numbers(count: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + count)


def test_all_bytes_arrive_whatever_the_shapes_and_sizes(stream: CopyStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "CHUNK_BYTES", 100)
    sources = [numbers(count, 7 * count) for count in (1, 12, 13, 1000)]
    targets = [torch.zeros_like(source) for source in sources]
    grid = torch.zeros(5, 8, dtype=torch.int32)
    copies = [Copy(source, target) for source, target in zip(sources, targets, strict=True)]
    event = stream.submit([*copies, Copy(numbers(20), grid), Copy(torch.empty(0), torch.empty(0))])
    event.wait()
    assert event.done()
    assert event.error is None
    assert all(target.equal(source) for source, target in zip(sources, targets, strict=True))
    assert grid.view(-1).view(torch.int64).equal(numbers(20))


def test_submissions_run_in_order(stream: CopyStream) -> None:
    target = torch.zeros(1000, dtype=torch.int64)
    events = [stream.submit([Copy(numbers(1000, turn), target)]) for turn in range(50)]
    events[-1].wait()
    assert all(event.done() for event in events)
    assert target.equal(numbers(1000, 49))


def test_a_submission_waits_for_what_it_comes_after(stream: CopyStream) -> None:
    target, gate = torch.zeros(4, dtype=torch.int64), FlagEvent()
    copied = stream.submit([Copy(numbers(4), target)], after=[PASSED, gate])
    behind = stream.submit([])
    assert not copied.done()
    assert not behind.done()
    assert target.equal(torch.zeros(4, dtype=torch.int64))
    gate.finish()
    behind.wait()
    assert copied.done()
    assert target.equal(numbers(4))


def test_a_chain_over_two_streams() -> None:
    here, there = ThreadStream("here"), ThreadStream("there")
    tensors = [numbers(500)] + [torch.zeros(500, dtype=torch.int64) for _ in range(40)]
    event: Event = PASSED
    for turn in range(40):
        copy = Copy(tensors[turn], tensors[turn + 1])
        event = (here, there)[turn % 2].submit([copy], after=[event])
    event.wait()
    assert tensors[-1].equal(tensors[0])
    here.close()
    there.close()


def test_a_failure_stays_with_its_submission_and_with_those_that_wait_for_it(stream: CopyStream) -> None:
    target, gate = torch.zeros(4, dtype=torch.int64), FlagEvent()
    failed = stream.submit([Copy(numbers(4), target)], after=[gate])
    follower = stream.submit([Copy(numbers(4), target)], after=[failed])
    gate.finish(OSError("the source is gone"))
    with pytest.raises(TransferError):
        follower.wait()
    with pytest.raises(TransferError, match="the source is gone"):
        failed.wait()
    assert failed.done()
    assert isinstance(failed.error, TransferError)
    assert target.sum() == 0
    stream.submit([Copy(numbers(4), target)]).wait()
    assert target.equal(numbers(4))


def test_a_copy_that_raises_fails_its_event_when_its_other_copies_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, move, broken = ThreadStream("test", threads=2), base._move, torch.zeros(4, dtype=torch.int64)

    def slow_or_broken(copy: Copy) -> None:
        if copy.target.data_ptr() == broken.data_ptr():
            raise OSError("no such memory")
        time.sleep(0.05)
        move(copy)

    monkeypatch.setattr(base, "_move", slow_or_broken)
    target = torch.zeros(4, dtype=torch.int64)
    event = stream.submit([Copy(numbers(4), broken), Copy(numbers(4), target)])
    with pytest.raises(TransferError, match="no such memory"):
        event.wait()
    assert isinstance(event.error, OSError)
    assert target.equal(numbers(4))
    stream.close()


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (torch.zeros(4, 4).T, torch.zeros(16), "source is not contiguous"),
        (torch.zeros(16), torch.zeros(8, 4)[:, ::2], "target is not contiguous"),
        (torch.zeros(4), torch.zeros(4, dtype=torch.float16), r"\(16, 8\)"),
    ],
)
def test_a_bad_copy_is_refused_when_it_is_submitted(
    stream: CopyStream, source: torch.Tensor, target: torch.Tensor, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        stream.submit([Copy(source, target)])


def test_closing_finishes_what_runs_fails_the_rest_and_ends_the_threads(stream: CopyStream) -> None:
    stream.submit([Copy(numbers(4), torch.zeros(4, dtype=torch.int64))]).wait()
    assert any(thread.name.startswith("test") for thread in threading.enumerate())
    target, gate = torch.zeros(4, dtype=torch.int64), WatchedGate()
    running = stream.submit([Copy(numbers(4), target)], after=[gate])
    gate.reached.wait()
    behind = stream.submit([Copy(numbers(4), target)])
    closing = threading.Thread(target=stream.close)
    closing.start()
    while not stream._line._closed:  # type: ignore[attr-defined]
        pass
    gate.finish()
    closing.join()
    running.wait()
    with pytest.raises(TransferError, match="the stream test was closed"):
        behind.wait()
    assert not any(thread.name.startswith("test") for thread in threading.enumerate())


def test_the_cpu_is_never_behind() -> None:
    assert record_event(CPU).done()


def test_pieces_cover_a_copy_once() -> None:
    source = numbers(100)
    pieces = list(cut([Copy(source, torch.zeros(100, dtype=torch.int64))], 333))
    assert [piece.source.nbytes for piece in pieces] == [333, 333, 134]
    assert torch.cat([piece.source for piece in pieces]).view(torch.int64).equal(source)


def test_faults_are_late_out_of_order_never_too_many_and_the_same_for_the_same_seed() -> None:
    outcomes = []
    for _ in range(2):
        faulty = FaultyStream(
            [ThreadStream("a"), ThreadStream("b")], Random(3), delay_s=0.002, fail_share=0.5, fails_in_a_row_max=2
        )
        targets = [torch.zeros(8, dtype=torch.int64) for _ in range(60)]
        events = [faulty.submit([Copy(numbers(8), target)]) for target in targets]
        out_of_order = 0
        for place, event in enumerate(events):
            out_of_order += any(later.done() for later in events[place + 1 :]) and not event.done()
            try:
                event.wait()
            except TransferError:
                continue
            assert targets[place].equal(numbers(8))
        failed = [event.error is not None for event in events]
        assert faulty.failed == sum(failed)
        assert faulty.submitted == 60
        assert out_of_order > 0
        outcomes.append(failed)
        faulty.close()
    runs = "".join(" x"[failed] for failed in outcomes[0]).split()
    assert outcomes[0] == outcomes[1]
    assert {len(run) for run in runs} == {1, 2}


def test_faults_honour_what_a_submission_comes_after() -> None:
    faulty = FaultyStream([ThreadStream("a"), ThreadStream("b")], Random(5), delay_s=0.002)
    target = torch.zeros(8, dtype=torch.int64)
    event: Event = PASSED
    for turn in range(40):
        event = faulty.submit([Copy(numbers(8, turn), target)], after=[event])
    event.wait()
    assert target.equal(numbers(8, 39))
    faulty.close()


class Driver:
    """A driver that pins at most so many bytes, and each page once. `pinned`: sizes by address; `calls`: the size of
    each call and the thread that made it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bytes_max: int) -> None:
        self.pinned: dict[int, int] = {}
        self.calls: list[tuple[int, int]] = []
        self.bytes_max = bytes_max
        monkeypatch.setattr(opening, "pin", self.pin)
        monkeypatch.setattr(opening, "unpin", self.unpin)
        self.pins = Pins()
        monkeypatch.setattr(opening, "PINS", self.pins)

    @property
    def pages(self) -> list[int]:
        return [
            page
            for address, size in self.pinned.items()
            for page in range(address // mmap.PAGESIZE, -(-(address + size) // mmap.PAGESIZE))
        ]

    def pin(self, host: torch.Tensor) -> None:
        self.calls.append((host.nbytes, threading.get_ident()))
        if sum(self.pinned.values()) + host.nbytes > self.bytes_max:
            raise TransferError("cudaHostRegister: out of memory (CUDA error 2)")
        self.pinned[host.data_ptr()] = host.nbytes
        assert len(set(self.pages)) == len(self.pages), "a page is pinned twice"

    def unpin(self, host: torch.Tensor) -> None:
        self.calls.append((host.nbytes, threading.get_ident()))
        assert self.pinned.pop(host.data_ptr()) == host.nbytes


CUDA = torch.device("cuda")


def let_go(host: torch.Tensor) -> int:
    """Unpin, wait for the end, and say which thread came to it."""
    ended: Queue[int] = Queue()
    unpinned(host, CUDA, lambda: ended.put(threading.get_ident()))
    return ended.get(timeout=30)


def test_memory_is_pinned_in_small_pieces_by_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    piece_bytes = 2 * mmap.PAGESIZE
    monkeypatch.setattr(cuda_copies, "PIN_BYTES", piece_bytes)
    driver, size_bytes = Driver(monkeypatch, bytes_max=10**9), 7 * mmap.PAGESIZE + 100
    mapped = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
    elsewhere = torch.empty(size_bytes + 64, dtype=torch.uint8)[64:]  # begins within a page
    for host in (mapped, elsewhere):
        assert pinned(host, CUDA) is host
        places = sorted(driver.pinned.items())
        assert places[0][0] == host.data_ptr()
        assert all(at + size == behind for (at, size), (behind, _) in pairwise(places))
        assert sum(driver.pinned.values()) == size_bytes
        assert let_go(host) != threading.get_ident()
        assert driver.pinned == {}
    assert max(size for size, _ in driver.calls) == piece_bytes
    assert {thread for _, thread in driver.calls}.isdisjoint({threading.get_ident()}), "the engine's steps go on"


def test_a_direct_copy_is_cut_where_pinned_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver refuses a copy that reaches from one pinned range to the next one."""
    monkeypatch.setattr(cuda_copies, "PIN_BYTES", 2 * mmap.PAGESIZE)
    driver = Driver(monkeypatch, bytes_max=10**9)
    host = torch.frombuffer(mmap.mmap(-1, 7 * mmap.PAGESIZE), dtype=torch.uint8)
    pinned(host, CUDA)
    there = torch.zeros(6 * mmap.PAGESIZE, dtype=torch.uint8)
    parts = cuda_copies.direct_parts(Copy(host[100 : 100 + there.nbytes], there))
    for source, target in parts:
        target.copy_(source.new_full(source.shape, 1))
        (whole,) = [at for at, size in driver.pinned.items() if at <= source.data_ptr() < at + size]
        assert source.data_ptr() + source.nbytes <= whole + driver.pinned[whole]
    assert there.sum() == there.nbytes, "every byte is copied"
    let_go(host)


class FakeEvent:
    """An event that notes when it is waited for."""

    waited: ClassVar[list[int]] = []
    recorded: ClassVar[list[int]] = []

    def __init__(self, *, blocking: bool) -> None:
        assert blocking, "the thread must not spin"

    def record(self) -> None:
        self.number = len(self.recorded)
        self.recorded.append(self.number)

    def synchronize(self) -> None:
        self.waited.append(self.number)


def test_few_parts_of_a_direct_transfer_wait_in_the_queue_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs of the next step are copied between them."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "waited", [])
    monkeypatch.setattr(FakeEvent, "recorded", [])
    pace = cuda_copies.Pace()
    for size_bytes in [cuda_copies.DIRECT_BYTES, *[cuda_copies.DIRECT_BYTES // 2] * 2] * 4:
        pace.wait()
        assert len(FakeEvent.recorded) - len(FakeEvent.waited) < cuda_copies.DIRECT_AHEAD
        pace.add(size_bytes)
    assert FakeEvent.waited == list(range(len(FakeEvent.waited))), "in their order"
    assert len(FakeEvent.recorded) == 8, "halves make up a part together"


def test_memory_that_cannot_be_pinned_whole_is_not_pinned_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_copies, "PIN_BYTES", mmap.PAGESIZE)
    driver = Driver(monkeypatch, bytes_max=3 * mmap.PAGESIZE)
    host = torch.frombuffer(mmap.mmap(-1, 5 * mmap.PAGESIZE), dtype=torch.uint8)
    pinned(host, CUDA)
    assert driver.pinned == {}, "a copy is in pinned memory or outside of it, never in both"
    assert str(driver.pins.refused).startswith(f"{host.nbytes} bytes of host memory are not pinned")
    assert let_go(host) == threading.get_ident(), "there is nothing to wait for"


def test_a_refused_pin_is_logged_once_and_reported_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, bytes_max=100)
    hosts = [torch.frombuffer(mmap.mmap(-1, 80), dtype=torch.uint8) for _ in range(3)]
    with capture_logs() as logs:
        pinned(hosts[0], CUDA)
        assert driver.pins.refused is None
        for host in hosts[1:]:
            assert pinned(host, CUDA) is host
    (line,) = logs
    assert (line["log_level"], line["size_bytes"]) == ("warning", 80)
    assert driver.pins.refused == f"160 bytes of host memory are not pinned: {line['reason']}"
    assert "out of memory (CUDA error 2); ulimit -l is " in line["reason"]
    let_go(hosts[1])
    assert list(driver.pinned) == [hosts[0].data_ptr()], "what was refused is not undone"
    for _ in range(2):
        let_go(hosts[0])
    assert driver.pinned == {}


def test_nothing_is_pinned_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, bytes_max=100)
    pinned(torch.zeros(1000), CPU)
    unpinned(torch.zeros(10), CPU)
    assert (driver.pinned, driver.pins.refused) == ({}, None)


def test_an_event_knows_when_it_was_over(stream: CopyStream) -> None:
    target, gate = torch.zeros(4, dtype=torch.int64), FlagEvent()
    copied = stream.submit([Copy(numbers(4), target)], after=[gate])
    assert isinstance(copied, TimedEvent)
    assert copied.ended_s is None
    before_s = time.monotonic()
    gate.finish()
    copied.wait()
    assert copied.ended_s is not None
    assert before_s <= copied.ended_s <= time.monotonic()
