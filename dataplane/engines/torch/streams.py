"""Copy streams: bytes move beside the computation, each submission tracked by an event.

A stream works off its submissions in order. On the CPU its thread copies. On CUDA (`cuda_stream.py`) its thread only
issues copies, and moves bytes itself where the host side is not pinned.
Whoever submits leaves sources alone, and both sides allocated, until the event has passed.
"""

import resource
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import structlog
import torch

from dataplane.memory.events import PASSED, Event, FlagEvent, TransferError

log = structlog.get_logger()

CHUNK_BYTES = 4 * 2**20
STAGING_BYTES = 64 * 2**20


@dataclass(frozen=True, eq=False)
class Copy:
    """All bytes of `source` into `target`: both contiguous and of equally many bytes; shapes and dtypes may differ."""

    source: torch.Tensor
    target: torch.Tensor


class CopyStream(Protocol):
    """Copies in order of submission."""

    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> Event:
        """Copy once all of `after` have passed; fail when one of them failed. Later submissions run either way."""
        ...

    def close(self) -> None:
        """End the stream's threads. The submission that runs is finished, those behind it fail."""
        ...


def make_stream(device: torch.device, name: str, *, threads: int = 1, staging_bytes: int = STAGING_BYTES) -> CopyStream:
    """A stream between host memory and `device`. `threads` copy on the host; only CUDA takes pinned `staging_bytes`."""
    if device.type == "cuda":
        from dataplane.engines.torch.cuda_stream import CudaStream  # noqa: PLC0415 - imports this module

        return CudaStream(device, name, threads=threads, staging_bytes=staging_bytes)
    return ThreadStream(name, threads=threads)


class Pins:
    """The host memory that this process has pinned for CUDA. `refused` says why some is not, and how much: copies of
    it go through the stage buffer, at a fraction of the rate. Threads may share it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}
        self._refused_bytes = 0
        self._reason: str | None = None

    @property
    def refused(self) -> str | None:
        """The last refusal in words; None when there was none."""
        if self._reason is None:
            return None
        return f"{self._refused_bytes} bytes of host memory are not pinned: {self._reason}"

    def pin(self, host: torch.Tensor) -> None:
        """Pin, or note the refusal. The first one is logged."""
        from dataplane.engines.torch.cuda_stream import pin  # noqa: PLC0415 - imports this module

        try:
            pin(host)
        except TransferError as error:
            self._note_refusal(host, str(error))
        else:
            with self._lock:
                self._sizes[host.data_ptr()] = host.nbytes

    def unpin(self, host: torch.Tensor) -> None:
        """Undo `pin`; nothing happens where that was refused."""
        from dataplane.engines.torch.cuda_stream import unpin  # noqa: PLC0415 - imports this module

        with self._lock:
            size_bytes = self._sizes.pop(host.data_ptr(), None)
        if size_bytes is not None:
            with suppress(TransferError):  # the driver has let go of it by itself
                unpin(host)

    def _note_refusal(self, host: torch.Tensor, error: str) -> None:
        limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if limit_bytes == resource.RLIM_INFINITY else f"{limit_bytes} bytes"
        with self._lock:
            first = self._reason is None
            self._refused_bytes += host.nbytes
            self._reason = f"{error}; ulimit -l is {limit}"
        if first:
            log.warning("host memory is not pinned", size_bytes=host.nbytes, reason=self._reason)


PINS = Pins()


def pinned(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Host memory that CUDA copies directly, where it may be pinned; elsewhere, and refused (see `PINS`), as it is."""
    if device.type == "cuda" and host.nbytes:
        PINS.pin(host)
    return host


def unpinned(host: torch.Tensor, device: torch.device) -> None:
    """Undo `pinned`, before the memory goes. No copy may be under way."""
    if device.type == "cuda" and host.nbytes:
        PINS.unpin(host)


def mark(device: torch.device) -> Event:
    """An event of what the calling thread has given `device` to compute so far: later copies may wait for it."""
    if device.type == "cuda":
        from dataplane.engines.torch.cuda_stream import CudaMark  # noqa: PLC0415 - imports this module

        return CudaMark(torch.cuda.current_stream(device).record_event())
    return PASSED


class ThreadStream:
    """Copies between host tensors by a thread; with `threads` above 1, large copies are spread over that many."""

    def __init__(self, name: str, *, threads: int = 1) -> None:
        self._movers = Movers(name, threads)
        self._line = Line(name)

    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> Event:
        """See `CopyStream`."""
        check_copies(copies)

        def run() -> None:
            for event in after:
                event.wait()
            self._movers.move(copies)

        return self._line.submit(run)

    def close(self) -> None:
        """See `CopyStream`."""
        self._line.close()
        self._movers.close()


class Line:
    """A thread that does one task after the other and finishes the event of each."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._closed = False

    def submit(self, task: Callable[[], None]) -> FlagEvent:
        """Do the task after those before it; what it raises becomes the event's error."""
        event = FlagEvent()
        self._thread.submit(self._do, task, event)
        return event

    def close(self) -> None:
        """Wait for the task that runs; those behind it fail."""
        self._closed = True
        self._thread.shutdown()

    def _do(self, task: Callable[[], None], event: FlagEvent) -> None:
        try:
            if self._closed:
                raise TransferError(f"the stream {self._name} was closed")
            task()
        except Exception as error:
            event.finish(error)
        else:
            event.finish()


class Movers:
    """Threads that copy between host tensors. With one, the calling thread copies."""

    def __init__(self, name: str, threads: int) -> None:
        assert threads >= 1, threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"{name}-mover") if threads > 1 else None

    def move(self, copies: Iterable[Copy]) -> None:
        """Make all copies. torch lets go of the interpreter lock meanwhile. Nothing is in flight when this raises."""
        if self._pool is None:
            for copy in copies:
                _move(copy)
            return
        moves = [self._pool.submit(_move, piece) for piece in cut(copies, CHUNK_BYTES)]
        wait(moves)
        for move in moves:
            move.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def cut(copies: Iterable[Copy], chunk_bytes: int) -> Iterator[Copy]:
    """The same copies as flat uint8 pieces of at most `chunk_bytes`."""
    for copy in copies:
        source, target = flat_bytes(copy.source), flat_bytes(copy.target)
        for start in range(0, source.numel(), chunk_bytes):
            yield Copy(source[start : start + chunk_bytes], target[start : start + chunk_bytes])


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, in place: uint8, shape (nbytes,)."""
    return tensor.view(-1).view(torch.uint8)


def check_copies(copies: Iterable[Copy]) -> None:
    """Assert what a `Copy` promises; on the caller's thread, where the stack says who broke it."""
    for copy in copies:
        assert copy.source.is_contiguous(), "the source is not contiguous"
        assert copy.target.is_contiguous(), "the target is not contiguous"
        assert copy.source.nbytes == copy.target.nbytes, (copy.source.nbytes, copy.target.nbytes)


def _move(copy: Copy) -> None:
    flat_bytes(copy.target).copy_(flat_bytes(copy.source))
