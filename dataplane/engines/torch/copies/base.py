"""Copy streams: transfers that are concurrent with the computation, each submission tracked by an event.

A stream executes its submissions in order. On the CPU (`cpu.py`) its thread copies. On CUDA (`cuda.py`) its thread only
issues copies, and copies itself only where the host side is not pinned.
The caller must not modify the source, nor free source or target, before the event has passed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

import torch

from dataplane.memory.events import Event, FlagEvent, TransferError

CHUNK_BYTES = 4 * 2**20
STAGING_BYTES = 64 * 2**20


@dataclass(frozen=True, eq=False)
class Copy:
    """All bytes of `source` into `target`: both contiguous and of equally many bytes; shapes and dtypes may differ."""

    source: torch.Tensor
    target: torch.Tensor


class CopyStream(Protocol):
    """Executes submissions in order."""

    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> Event:
        """Copy once all of `after` have passed; fail if one of them failed. Later submissions run in either case."""
        ...

    def close(self) -> None:
        """End the stream's threads. The submission that runs is finished, those after it fail."""
        ...


class Line:
    """A thread that runs one task after another and finishes the event of each."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._closed = False

    def submit(self, task: Callable[[], None]) -> FlagEvent:
        """Run the task after those before it; an exception becomes the event's error."""
        event = FlagEvent()
        self._thread.submit(self._do, task, event)
        return event

    def close(self) -> None:
        """Wait for the task that runs; those after it fail."""
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
        """Execute all copies. torch releases the interpreter lock meanwhile. When this raises, no copy is running."""
        if self._pool is None:
            for copy in copies:
                _move(copy)
            return
        moves = [self._pool.submit(_move, piece) for piece in cut(copies, CHUNK_BYTES)]
        wait(moves)
        for move in moves:
            move.result()

    def close(self) -> None:
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
    """Assert the contract of `Copy`, on the caller's thread, whose stack shows who broke it."""
    for copy in copies:
        assert copy.source.is_contiguous(), "the source is not contiguous"
        assert copy.target.is_contiguous(), "the target is not contiguous"
        assert copy.source.nbytes == copy.target.nbytes, (copy.source.nbytes, copy.target.nbytes)


def _move(copy: Copy) -> None:
    flat_bytes(copy.target).copy_(flat_bytes(copy.source))
