"""KV in the host memory of other slots: their files, and the events of transfers that are still under way."""

import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from dataplane.engines.interface import KvEvent, KvHandle
from dataplane.engines.torch.copies.base import Line
from dataplane.engines.torch.copies.interprocess import DeviceEvents
from dataplane.engines.torch.copies.open import pinned, unpinned
from dataplane.engines.torch.memory.kv_file import KvFile, host_memory
from dataplane.memory.events import PASSED, Event
from dataplane.memory.shared_events import SharedEvent, SharedTransfer, WatchedTable, event_file
from dataplane.protocol.errors import DeviceLostError

WAIT_MAX_S = 30.0
"""How long after its announcement KV of another slot must have been transferred, with all that goes before it."""
DEVICE_WAIT_MAX_S = 10.0
"""How long a device may wait for an event that was recorded: before it are two parts of a copy, a millisecond."""
LOOK_EVERY_S = 1.0
"""How often `check` looks for files that are gone. Their memory is not free while they are mapped."""


class FileMirror(Protocol):
    """Tells the other ranks of a slot which files this one reads."""

    def note_file(self, file: str, memory: torch.Tensor) -> None:
        """A file was mapped; `memory`: this rank's part."""

    def drop_file(self, file: str) -> None:
        """A file is not read any more."""


@dataclass(eq=False, kw_only=True)
class ImportedFile(KvFile):
    """A file of another slot, at `path`. `pinning`: done when all of it is pinned, or none; `table`: its events, None
    until one is waited for; `awaited`: handles of those that the device was told to wait for; `readers`: how many
    sequences have KV in it; `copies`: that read it.
    """

    path: str
    pinning: Event
    table: WatchedTable | None = None
    awaited: set[bytes] = field(default_factory=set)
    readers: int = 0
    copies: list[Event] = field(default_factory=list)

    @property
    def is_read(self) -> bool:
        """Whether a copy reads it, or one will."""
        return self.readers > 0 or not all(copy.done() for copy in self.copies)


class KvImports:
    """The files of other slots, as one slot reads them. Called by one thread.

    On a slot of several `ranks` a file has a part for each, of which this reads the first one's; `mirror` tells the
    others.
    """

    def __init__(
        self,
        device: torch.device,
        events: DeviceEvents | None,
        *,
        ranks: int = 1,
        mirror: FileMirror | None = None,
        wait_max_s: float = WAIT_MAX_S,
    ) -> None:
        self._device = device
        self._events = events
        self._ranks, self._mirror = ranks, mirror
        self._wait_max_s = wait_max_s
        self._looked_s = time.monotonic()
        self._files: dict[str, ImportedFile] = {}
        self._leaving: list[ImportedFile] = []
        """Files of slots that have ended, still pinned."""
        self._pins = Line("kv_pins")
        self._lock = threading.Lock()
        self._waits: list[tuple[bytes, float]] = []
        """Events that the device was told to wait for, and until when they must have passed."""
        self._announced = self._ready = self._on_device = 0

    @property
    def waited_for(self) -> dict[str, int]:
        """How much KV was taken over, by what its copy had to wait for: `nothing`, the other slot's `device`, or the
        `host`, a thread that sees in shared memory how far that is.
        """
        return {"nothing": self._ready, "device": self._on_device, "host": self._announced - self._on_device}

    def open(self, handle: KvHandle) -> tuple[ImportedFile, Event] | None:
        """The file of some KV, and what has to pass before it is read. None if it is gone, or cannot be read."""
        file = self._open(handle)
        if file is None or (handle.event is not None and self._ranks > 1):  # the other ranks would not wait
            return None
        event = PASSED if handle.event is None else self._event(Path(handle.file), file, handle.event)
        if event is None:
            return None
        if event.done():
            self._ready += 1
        else:
            self._announced += 1
        return file, event

    def note_copy(self, file: ImportedFile, copy: Event) -> None:
        """A copy from a file was submitted."""
        file.copies = [one for one in file.copies if not one.done()] + [copy]

    def check(self) -> None:
        """Look after the events that the device was told to wait for, and give up files and events of slots that have
        ended, once nobody reads or awaits them any more.

        Raises:
            DeviceLostError: one does not pass, as when the worker that recorded it has died: no other copy will.
        """
        with self._lock:
            waits, self._waits = self._waits, []
        for handle, until_s in waits:
            assert self._events is not None
            if self._events.has_passed(handle):
                continue
            if time.monotonic() >= until_s:
                raise DeviceLostError(f"the event of another worker has not passed for {DEVICE_WAIT_MAX_S:g} s")
            with self._lock:
                self._waits.append((handle, until_s))
        if self._files and time.monotonic() >= self._looked_s + LOOK_EVERY_S:
            self._give_up_gone_files()
        awaited = {handle for handle, _ in self._waits}
        for gone in [file for file in self._leaving if not file.is_read and awaited.isdisjoint(file.awaited)]:
            self._leaving.remove(gone)
            if self._mirror is not None:
                self._mirror.drop_file(gone.path)
            self._pins.submit(partial(unpinned, gone.bytes, self._device))
            if self._events is not None:
                self._events.forget(gone.awaited)

    def close(self) -> None:
        """Unpin the files. No copy is under way."""
        self._pins.close()
        for file in (*self._files.values(), *self._leaving):
            unpinned(file.bytes, self._device)

    def _event(self, kv_file: Path, file: ImportedFile, event: KvEvent) -> Event | None:
        transfer = SharedTransfer(slot=event.slot, number=event.number)
        try:
            file.table = file.table or WatchedTable(event_file(kv_file))
        except (OSError, ValueError):
            return None
        if not file.table.has(transfer):
            return None
        return SharedEvent(
            file.table,
            transfer,
            fails_s=time.monotonic() + self._wait_max_s,
            wait_on_device=lambda: self._wait_on_device(file, event.device),
        )

    def _wait_on_device(self, file: ImportedFile, handle: bytes) -> bool:
        """Called on a stream's thread. The host would read at once what is not pinned yet: so the device waits only if
        all of the file is pinned.
        """
        if self._events is None or not file.pinning.done() or not self._events.wait_for(handle, file.bytes):
            return False
        with self._lock:
            file.awaited.add(handle)
            self._waits.append((handle, time.monotonic() + DEVICE_WAIT_MAX_S))
            self._on_device += 1
        return True

    def _open(self, handle: KvHandle) -> ImportedFile | None:
        if handle.file not in self._files:
            try:
                whole = host_memory(0, Path(handle.file))
            except (OSError, ValueError):
                return None
            self._give_up_gone_files()
            memory = whole[: whole.numel() // self._ranks]
            if self._mirror is not None:
                self._mirror.note_file(handle.file, memory)
            pinning = self._pins.submit(lambda: _ignore(pinned(memory, self._device)))
            self._files[handle.file] = ImportedFile(
                path=handle.file, bytes=memory, slab_bytes=handle.slab_bytes, pinning=pinning
            )
        return self._files[handle.file]

    def _give_up_gone_files(self) -> None:
        """Give up the files of slots that ended; `check` closes them once nobody reads them."""
        self._looked_s = time.monotonic()
        for gone in [file for file in self._files if not Path(file).exists()]:
            self._leaving.append(self._files.pop(gone))


def _ignore(_: object) -> None:
    """A task without a result."""
