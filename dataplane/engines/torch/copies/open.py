"""What a device needs for copies: its streams, its marks, and the host memory pinned for it."""

import resource
import threading
from contextlib import suppress

import structlog
import torch

from dataplane.engines.torch.copies.base import STAGING_BYTES, CopyStream
from dataplane.engines.torch.copies.cpu import ThreadStream
from dataplane.engines.torch.copies.cuda import CudaMark, CudaStream, pin, unpin
from dataplane.memory.events import PASSED, Event, TransferError

log = structlog.get_logger()


def make_stream(device: torch.device, name: str, *, threads: int = 1, staging_bytes: int = STAGING_BYTES) -> CopyStream:
    """A stream between host memory and `device`. `threads` copy on the host; only CUDA takes pinned `staging_bytes`."""
    if device.type == "cuda":
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
        try:
            pin(host)
        except TransferError as error:
            self._note_refusal(host, str(error))
        else:
            with self._lock:
                self._sizes[host.data_ptr()] = host.nbytes

    def unpin(self, host: torch.Tensor) -> None:
        """Undo `pin`; nothing happens where that was refused."""
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
        return CudaMark(torch.cuda.current_stream(device).record_event())
    return PASSED
