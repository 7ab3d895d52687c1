"""Streams and events of a device, and the host memory pinned for it."""

import resource
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import structlog
import torch

from dataplane.engines.torch.copies.base import STAGING_BYTES, CopyStream
from dataplane.engines.torch.copies.cpu import ThreadStream
from dataplane.engines.torch.copies.cuda import CudaStream, RecordedEvent, pin, pin_pieces, unpin
from dataplane.memory.events import PASSED, Event, TransferError

log = structlog.get_logger()


def make_stream(device: torch.device, name: str, *, threads: int = 1, staging_bytes: int = STAGING_BYTES) -> CopyStream:
    """A stream between host memory and `device`. `threads` copy on the host; only CUDA uses pinned `staging_bytes`."""
    if device.type == "cuda":
        return CudaStream(device, name, threads=threads, staging_bytes=staging_bytes)
    return ThreadStream(name, threads=threads)


class Pins:
    """The host memory that this process has pinned for CUDA. `refused`: why some is not, and how much: copies of it go
    through the staging buffer, at a fraction of the rate. Thread-safe.

    A thread of its own calls the driver for `PIN_BYTES` at a time, so that the engine's steps run in between.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pins")
        self._addresses: set[int] = set()
        self._refused_bytes = 0
        self._reason: str | None = None

    @property
    def refused(self) -> str | None:
        """The last refusal as a message; None if there was none."""
        if self._reason is None:
            return None
        return f"{self._refused_bytes} bytes of host memory are not pinned: {self._reason}"

    def pin(self, host: torch.Tensor) -> None:
        """Pin all of it and wait for that, or none and record the refusal. The first one is logged."""
        self._thread.submit(self._pin, host).result()

    def unpin(self, host: torch.Tensor, then: Callable[[], None]) -> None:
        """Undo `pin`, unless that was refused, and call `then`: on the thread that unpins, or at once if nothing is
        pinned.
        """
        with self._lock:
            is_pinned = host.data_ptr() in self._addresses
            self._addresses.discard(host.data_ptr())
        if is_pinned:
            self._thread.submit(self._unpin, host, then)
        else:
            then()

    def _pin(self, host: torch.Tensor) -> None:
        done: list[torch.Tensor] = []
        for piece in pin_pieces(host):
            try:
                pin(piece)
            except TransferError as error:
                _unpin_all(done)
                self._note_refusal(host, str(error))
                return
            done.append(piece)
        with self._lock:
            self._addresses.add(host.data_ptr())

    @staticmethod
    def _unpin(host: torch.Tensor, then: Callable[[], None]) -> None:
        _unpin_all(pin_pieces(host))
        then()

    def _note_refusal(self, host: torch.Tensor, error: str) -> None:
        limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if limit_bytes == resource.RLIM_INFINITY else f"{limit_bytes} bytes"
        with self._lock:
            first = self._reason is None
            self._refused_bytes += host.nbytes
            self._reason = f"{error}; ulimit -l is {limit}"
        if first:
            log.warning("host memory is not pinned", size_bytes=host.nbytes, reason=self._reason)


def _unpin_all(pieces: list[torch.Tensor]) -> None:
    for piece in pieces:
        with suppress(TransferError):  # the driver has released it itself
            unpin(piece)


PINS = Pins()


def pinned(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Host memory pinned for CUDA, if it may be; on other devices, and refused (see `PINS`), as it is."""
    if device.type == "cuda" and host.nbytes:
        PINS.pin(host)
    return host


def unpinned(host: torch.Tensor, device: torch.device, then: Callable[[], None] = lambda: None) -> None:
    """Undo `pinned`, before the memory is freed, and call `then`; on another thread if it is pinned. No copy may be
    under way.
    """
    if device.type == "cuda" and host.nbytes:
        PINS.unpin(host, then)
    else:
        then()


def record_event(device: torch.device) -> Event:
    """An event after the kernels that the calling thread has submitted to `device` so far, for later copies to wait
    for.
    """
    if device.type == "cuda":
        return RecordedEvent(torch.cuda.current_stream(device).record_event())
    return PASSED
