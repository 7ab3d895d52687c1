"""Completion events that another process can wait for: words of a table in a file in shared memory (Aegaeon 5.3).

A slot announces KV while it transfers it, and names the table's word that says how far the transfer is:

    released -> submitted -> recorded -> passed -> released
                    |            a device event is behind the copies: before, a wait for it would end at once
                    +-------------------------------> released: given up, or nobody needs it

A word is used again and again: it holds the number of its use, so that a process that waits for a former use learns
that this is over. Only the table's owner writes. It holds a lock on the file as long as it lives, by which others learn
of its end. It releases a use when the transfer has ended and nobody will read the KV any more.
"""

import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from dataplane.memory.events import Event, MoveList, TransferError

POLL_S = 0.0002
_WORD_BYTES = 8
_STATES = 4


class TransferState(IntEnum):
    """How far a transfer is."""

    RELEASED = 0
    SUBMITTED = 1
    RECORDED = 2
    PASSED = 3


@dataclass(frozen=True, kw_only=True)
class SharedTransfer:
    """The `number`th use of a `slot` of a table, for one transfer."""

    slot: int
    number: int


def event_file(kv_file: Path) -> Path:
    """The file of the events of transfers to a KV file."""
    return kv_file.with_name(f"{kv_file.name}.events")


class EventTable:
    """A table of this process. `note` may be called on any thread, all else on one."""

    def __init__(self, file: Path, slots: int) -> None:
        """Make the file.

        Raises:
            OSError: it exists already, or the file system is full.
        """
        self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        os.posix_fallocate(self._file, 0, slots * _WORD_BYTES)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._words = memoryview(mmap.mmap(self._file, 0)).cast("Q")
        self._lock = threading.Lock()
        self._free = list(range(slots))
        self._leaving: MoveList[SharedTransfer] = MoveList()

    def take(self) -> SharedTransfer | None:
        """A use of a slot for a transfer that is submitted now; None if all slots are in use."""
        if not self._free:
            return None
        slot = self._free.pop()
        taken = SharedTransfer(slot=slot, number=self._words[slot] // _STATES + 1)
        with self._lock:
            self._write(taken, TransferState.SUBMITTED)
        return taken

    def note(self, transfer: SharedTransfer, state: TransferState) -> None:
        """Say how far a transfer is. It may have been released meanwhile."""
        with self._lock:
            number, present = divmod(self._words[transfer.slot], _STATES)
            if number == transfer.number and present != TransferState.RELEASED:
                self._write(transfer, state)

    def release(self, transfer: SharedTransfer, after: Event) -> None:
        """Nobody will wait for a transfer any more; its slot is free when that is done."""
        self._leaving.add(transfer, after)
        self.settle()

    def settle(self) -> None:
        """Free the slots of released transfers that are done."""
        for transfer in self._leaving.take_done():
            with self._lock:
                self._write(transfer, TransferState.RELEASED)
            self._free.append(transfer.slot)

    def check(self, held: Iterable[SharedTransfer]) -> None:
        """Assert that each slot is free, of a transfer in `held`, or of a released one that is not done."""
        used = [transfer.slot for transfer in (*held, *self._leaving)]
        assert sorted([*self._free, *used]) == list(range(len(self._words))), "lost or doubled events"

    def close(self) -> None:
        """Unlock the file: who still waits for a transfer learns that it does not pass."""
        os.close(self._file)

    def _write(self, transfer: SharedTransfer, state: TransferState) -> None:
        self._words[transfer.slot] = transfer.number * _STATES + state


class WatchedTable:
    """A table of another process. Its words may be read on any thread."""

    def __init__(self, file: Path) -> None:
        """Open the file.

        Raises:
            OSError: it cannot be read.
            ValueError: it is empty.
        """
        self._file = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            self._words = memoryview(mmap.mmap(self._file, 0, access=mmap.ACCESS_READ)).cast("Q")
        except BaseException:
            os.close(self._file)
            raise

    def __del__(self) -> None:
        if hasattr(self, "_words"):
            os.close(self._file)

    def has(self, transfer: SharedTransfer) -> bool:
        """Whether there is such a slot."""
        return 0 <= transfer.slot < len(self._words)

    def state(self, transfer: SharedTransfer) -> TransferState:
        """How far a transfer is; RELEASED also if its slot was used again."""
        number, state = divmod(self._words[transfer.slot], _STATES)
        return TransferState(state) if number == transfer.number else TransferState.RELEASED

    @property
    def owner_is_gone(self) -> bool:
        """Whether its process has ended, or closed it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return True


class SharedEvent:
    """The end of a transfer of another process. Meets `dataplane.memory.events.Event`.

    It fails when the transfer is released before it has passed, its owner ends, or it has not passed at `fails_s` by
    `time.monotonic`. `wait_on_device`: make the caller's next operation wait for the event that the owner has recorded
    behind the transfer; False if it cannot, so that the calling thread has to wait until the transfer has passed.
    """

    def __init__(
        self,
        table: WatchedTable,
        transfer: SharedTransfer,
        *,
        fails_s: float,
        wait_on_device: Callable[[], bool] = lambda: False,
    ) -> None:
        self._table = table
        self._transfer = transfer
        self._fails_s = fails_s
        self._wait_on_device = wait_on_device
        self._passed = False
        self.error: BaseException | None = None

    def done(self) -> bool:
        if not self._passed and self.error is None:
            self._look()
        return self._passed or self.error is not None

    def wait(self) -> None:
        """Block until it has passed, or until the caller's next operation waits for it on the device.

        Raises:
            TransferError: it failed.
        """
        while not self.done():
            if self._state is TransferState.RECORDED and self._wait_on_device():
                return
            time.sleep(POLL_S)
        if self.error is not None:
            raise TransferError(f"KV of another slot does not arrive: {self.error}") from self.error

    @property
    def _state(self) -> TransferState:
        return self._table.state(self._transfer)

    def _look(self) -> None:
        is_gone = self._table.owner_is_gone  # before its last word is read
        state = self._state
        if state is TransferState.PASSED:
            self._passed = True
        elif state is TransferState.RELEASED:
            self.error = TransferError("its transfer was given up")
        elif is_gone:
            self.error = TransferError("the worker that transfers it has ended")
        elif time.monotonic() >= self._fails_s:
            self.error = TransferError("its transfer takes too long")
