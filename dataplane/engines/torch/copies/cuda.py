"""The copy stream of a CUDA device, with its pinned staging buffer (Aegaeon 5.2 and Table 2).

A thread issues the copies in order, so that submitting never blocks. Pinned or device memory is copied directly. The
rest goes through one of two halves of the staging buffer, chunk by chunk, so that host and link work at the same time:

    host to device    host fills half 0 | link takes half 0 | ...
                                        | host fills half 1 | link takes half 1 | ...
    device to host    link fills half 0 | host empties half 0 | ...
                                        | link fills half 1   | host empties half 1 | ...
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import cycle, groupby, pairwise
from typing import Any

import torch

from dataplane.engines.torch.copies.base import CHUNK_BYTES, Copy, Line, Movers, check_copies, cut, flat_bytes
from dataplane.memory.events import Event, TransferError

PIN_BYTES = 64 * 2**20
"""Bytes that one call of the driver pins or unpins, in some 6 ms: steps of the engine wait for the locks it holds."""
DIRECT_BYTES = 16 * 2**20
DIRECT_AHEAD = 2
"""A direct transfer is submitted in parts of so many bytes, of which so many wait in the device's queue at most, for
some 0.6 ms. All streams share the copy engine of a direction, which takes copies in the order of their submission: the
inputs of a step that is submitted while a model is loaded would wait for all of that model.
"""


class RecordedEvent:
    """A recorded CUDA event."""

    error: BaseException | None = None

    def __init__(self, recorded: torch.cuda.Event) -> None:
        self._recorded = recorded

    def done(self) -> bool:
        """Whether the device has passed it (`cudaEventQuery`)."""
        return bool(self._recorded.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Make the calling thread's current stream wait for it (`cudaStreamWaitEvent`); the thread continues."""
        torch.cuda.current_stream().wait_event(self._recorded)


class IssuedCopies:
    """The event of copies that a thread issues: passed when they are issued and the device has passed them.

    `ended_s`: when that was first seen by a poll, so that it is late by up to a step of the engine.
    """

    def __init__(self, issued: Event, recorded: torch.cuda.Event) -> None:
        self._issued = issued
        self._event = RecordedEvent(recorded)
        self.ended_s: float | None = None

    def done(self) -> bool:
        """Whether the copies have ended, or could not be issued."""
        over = self._issued.done() and (self.error is not None or self._event.done())
        if over and self.ended_s is None:
            self.ended_s = time.monotonic()
        return over

    def wait(self) -> None:
        """Block until the copies are issued, then make the current stream wait for them.

        Raises:
            TransferError: they could not be issued.
        """
        self._issued.wait()
        self._event.wait()

    @property
    def error(self) -> BaseException | None:
        """Why the copies could not be issued."""
        return self._issued.error


class CudaStream:
    """Copies between host tensors and tensors of one CUDA device, or within the device."""

    def __init__(self, device: torch.device, name: str, *, threads: int, staging_bytes: int) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stage = Stage(staging_bytes // 2, Movers(name, threads))
        self._line = Line(name)

    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> Event:
        check_copies(copies)
        assert all(copy.source.is_cuda or copy.target.is_cuda for copy in copies), "a copy between host tensors"
        recorded = torch.cuda.Event()  # type: ignore[no-untyped-call]

        def issue() -> None:
            with torch.cuda.stream(self._stream):
                for event in after:
                    event.wait()
                try:
                    self._issue(copies)
                except BaseException:
                    self._stream.synchronize()
                    raise
                recorded.record()

        return IssuedCopies(self._line.submit(issue), recorded)

    def close(self) -> None:
        self._line.close()
        self._stage.close()
        self._stream.synchronize()

    def _issue(self, copies: Sequence[Copy]) -> None:
        for route, group in groupby(copies, key=_route):
            if route == "upload":
                self._stage.upload(group)
            elif route == "download":
                self._stage.download(group)
            else:
                pace = Pace()
                for copy in group:
                    for source, target in direct_parts(copy):
                        pace.wait()
                        target.copy_(source, non_blocking=True)
                        pace.add(source.nbytes)


class Pace:
    """Lets the submitting thread wait while `DIRECT_AHEAD` parts of a direct transfer are in the device's queue."""

    def __init__(self) -> None:
        self._ahead: deque[torch.cuda.Event] = deque()
        self._bytes = 0

    def wait(self) -> None:
        """Before a copy is submitted."""
        if len(self._ahead) == DIRECT_AHEAD:
            self._ahead.popleft().synchronize()

    def add(self, size_bytes: int) -> None:
        """A copy was submitted to the current stream. Small ones make up a part together."""
        self._bytes += size_bytes
        if self._bytes >= DIRECT_BYTES:
            self._bytes = 0
            passed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            passed.record()
            self._ahead.append(passed)


class Stage:
    """Two pinned halves, used alternately. The host touches one only after the device has passed its event."""

    def __init__(self, half_bytes: int, movers: Movers) -> None:
        assert half_bytes >= 1, half_bytes
        self._half_bytes = half_bytes
        self._movers = movers
        self._halves = cycle([_pinned_half(half_bytes), _pinned_half(half_bytes)])

    def upload(self, copies: Iterable[Copy]) -> None:
        """Issue copies from host memory to the device on the current stream; sources have been read on return."""
        for load, (half, passed) in zip(self._loads(copies), self._halves, strict=False):
            passed.synchronize()
            staged = _split(half, load)
            self._movers.move(Copy(piece.source, place) for piece, place in zip(load, staged, strict=True))
            for piece, place in zip(load, staged, strict=True):
                piece.target.copy_(place, non_blocking=True)
            passed.record()

    def download(self, copies: Iterable[Copy]) -> None:
        """Copy from the device to host memory, after the work on the current stream; complete when this returns."""
        behind: tuple[list[Copy], torch.cuda.Event] | None = None
        for load, (half, passed) in zip(self._loads(copies), self._halves, strict=False):
            passed.synchronize()
            staged = _split(half, load)
            for piece, place in zip(load, staged, strict=True):
                place.copy_(piece.source, non_blocking=True)
            passed.record()
            self._empty(behind)
            behind = [Copy(place, piece.target) for piece, place in zip(load, staged, strict=True)], passed
        self._empty(behind)

    def close(self) -> None:
        self._movers.close()

    def _empty(self, filled: tuple[list[Copy], torch.cuda.Event] | None) -> None:
        if filled is not None:
            copies, passed = filled
            passed.synchronize()
            self._movers.move(copies)

    def _loads(self, copies: Iterable[Copy]) -> Iterator[list[Copy]]:
        """The copies in pieces, as many at a time as a half holds."""
        load: list[Copy] = []
        free_bytes = self._half_bytes
        for piece in cut(copies, min(CHUNK_BYTES, self._half_bytes)):
            if piece.source.nbytes > free_bytes:
                yield load
                load, free_bytes = [], self._half_bytes
            load.append(piece)
            free_bytes -= piece.source.nbytes
        if load:
            yield load


def _pinned_half(half_bytes: int) -> tuple[torch.Tensor, torch.cuda.Event]:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    return torch.empty(half_bytes, dtype=torch.uint8, pin_memory=True), event


def _split(half: torch.Tensor, load: Iterable[Copy]) -> list[torch.Tensor]:
    """A slice of the half for each piece, one after the other."""
    sizes = [piece.source.nbytes for piece in load]
    return list(torch.split(half[: sum(sizes)], sizes))


def _route(copy: Copy) -> str:
    if all(tensor.is_cuda or tensor.is_pinned() for tensor in (copy.source, copy.target)):
        return "direct"
    return "upload" if copy.target.is_cuda else "download"


def direct_parts(copy: Copy) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A copy without a staging buffer, as sources and targets of at most `DIRECT_BYTES`, in parts of which the host's
    side was pinned by one call each: the driver refuses a copy that reaches from one pinned range to the next one.
    """
    source, target = flat_bytes(copy.source), flat_bytes(copy.target)
    host = target if source.is_cuda else source
    if host.is_cuda:
        return [(source, target)]
    return [(source[a:b], target[a:b]) for a, b in _cuts(host, min(DIRECT_BYTES, PIN_BYTES))]


def pin_pieces(host: torch.Tensor) -> list[torch.Tensor]:
    """Memory in pieces of at most `PIN_BYTES`. No two share a page: the driver pins pages, and each only once."""
    flat = flat_bytes(host)
    return [flat[a:b] for a, b in _cuts(flat, PIN_BYTES)]


def _cuts(host: torch.Tensor, size_bytes: int) -> list[tuple[int, int]]:
    """Begin and end of the parts of flat uint8 memory, cut at addresses that are multiples of `size_bytes`."""
    first = size_bytes - host.data_ptr() % size_bytes
    return list(pairwise([0, *range(first, host.nbytes, size_bytes), host.nbytes]))


def pin(host: torch.Tensor) -> None:
    """Pin host memory, such as a piece of a mapped model, so that it is copied directly.

    It takes about 0.1 s/GB and driver-wide locks: pin little at a time. Undone by `unpin`, before the memory is freed.

    Raises:
        TransferError: the driver refuses, for instance beyond `ulimit -l`.
    """
    _check("cudaHostRegister", host, _cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0))


def unpin(host: torch.Tensor) -> None:
    """Undo `pin`. No copy may be under way.

    Raises:
        TransferError: it was not pinned.
    """
    _check("cudaHostUnregister", host, _cudart().cudaHostUnregister(host.data_ptr()))


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(call: str, host: torch.Tensor, result: Any) -> None:
    if int(result) == 0:
        return
    with suppress(RuntimeError):  # the runtime reports the error at this thread's next launch, which is this one
        torch.zeros(1, device="cuda")
    message = _cudart().cudaGetErrorString(_cudart().cudaError(int(result)))
    raise TransferError(f"{call} of {host.nbytes} bytes: {message} (CUDA error {int(result)})")
