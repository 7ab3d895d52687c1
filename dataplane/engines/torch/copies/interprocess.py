"""Events of a device that another process's device can wait for: interprocess CUDA events (Aegaeon 5.3).

A wait for a CUDA event that was not recorded yet ends at once, so other processes are told when it was
(`dataplane.memory.shared_events`). An event exists as long as its process: for those that have opened its handle, all
is undefined once it is destroyed. It is recorded again for another transfer when nobody waits for the one before.
"""

import threading
from collections.abc import Iterable
from typing import Any, Protocol

import structlog
import torch

from dataplane.memory.events import Event

log = structlog.get_logger()


class DeviceEvents(Protocol):
    """The events of a device that cross processes. Thread-safe."""

    def handle(self, slot: int) -> bytes:
        """What another process opens to wait for the event of a slot; empty: it cannot wait on its device."""

    def record(self, slot: int, transfer: Event) -> None:
        """Record the event of a slot behind a transfer, once that is issued.

        Raises:
            dataplane.memory.events.TransferError: it could not be issued.
        """

    def synchronize(self, slot: int) -> None:
        """Block until the event that was recorded last has passed."""

    def wait_for(self, handle: bytes, source: torch.Tensor) -> bool:
        """Make the calling thread's next copy from `source` wait for another process's event, which was recorded. False
        if the event cannot be opened here, or the device does not read the source itself.
        """

    def has_passed(self, handle: bytes) -> bool:
        """Whether an event that was waited for has passed."""

    def forget(self, handles: Iterable[bytes]) -> None:
        """Close the events of another process that has ended. No device waits for them."""


class CudaEvents:
    """Meets `DeviceEvents`. `interprocess`: whether other processes may wait for them on their devices."""

    def __init__(self, device: torch.device, *, interprocess: bool) -> None:
        self._device = device
        self._interprocess = interprocess
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._own: dict[int, tuple[torch.cuda.Event, bytes]] = {}
        self._opened: dict[bytes, torch.cuda.Event | None] = {}

    def handle(self, slot: int) -> bytes:
        return self._event(slot)[1]

    def record(self, slot: int, transfer: Event) -> None:
        with torch.cuda.stream(self._stream):
            transfer.wait()
            self._event(slot)[0].record()

    def synchronize(self, slot: int) -> None:
        self._event(slot)[0].synchronize()

    def wait_for(self, handle: bytes, source: torch.Tensor) -> bool:
        event = self._open(handle) if handle and source.is_pinned() else None  # else the host stages it, at once
        if event is None:
            return False
        torch.cuda.current_stream().wait_event(event)
        return True

    def has_passed(self, handle: bytes) -> bool:
        event = self._open(handle)
        return event is None or bool(event.query())  # type: ignore[no-untyped-call]

    def forget(self, handles: Iterable[bytes]) -> None:
        with self._lock:
            for handle in handles:
                self._opened.pop(handle, None)

    def _event(self, slot: int) -> tuple[torch.cuda.Event, bytes]:
        """The event of a slot and its handle, which is taken before it is first recorded."""
        with self._lock:
            if slot not in self._own:
                made = torch.cuda.Event(blocking=True, interprocess=self._interprocess)  # type: ignore[no-untyped-call]
                handle: Any = b""
                if self._interprocess:
                    with torch.cuda.device(self._device):
                        handle = made.ipc_handle()  # type: ignore[no-untyped-call]
                self._own[slot] = made, bytes(handle)
            return self._own[slot]

    def _open(self, handle: bytes) -> torch.cuda.Event | None:
        """The event of a handle; None, and a line in the log, if the driver refuses it, as where the GPU that recorded
        it is not visible to this process.
        """
        with self._lock:
            if handle not in self._opened:
                try:
                    opened = torch.cuda.Event.from_ipc_handle(self._device, handle)  # type: ignore[no-untyped-call]
                    self._opened[handle] = opened
                except RuntimeError as error:
                    log.warning("an event of another worker cannot be waited for on the device", reason=str(error))
                    self._opened[handle] = None
            return self._opened[handle]


def device_events(device: torch.device, *, interprocess: bool) -> DeviceEvents | None:
    """The events of a device; None on a CPU, whose transfers are over when they were issued."""
    return CudaEvents(device, interprocess=interprocess) if device.type == "cuda" else None
