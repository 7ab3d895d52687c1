"""Announcing KV that is still being transferred: the events of transfers to the file that other slots read."""

from collections.abc import Iterable
from pathlib import Path

import structlog

from dataplane.engines.interface import KvEvent
from dataplane.engines.torch.copies.base import Line
from dataplane.engines.torch.copies.interprocess import DeviceEvents
from dataplane.memory.events import Event, TransferError
from dataplane.memory.shared_events import EventTable, SharedTransfer, TransferState, event_file

log = structlog.get_logger()

SLOTS = 1024
"""Transfers of a slot at a time that are under way, or announced and not read yet."""


class KvExports:
    """Says in shared memory how far each transfer is. A thread follows them, one after the other, as they are executed;
    all methods are called on another one. `device`: that of the copies, None if they are over when they were issued.
    """

    def __init__(self, kv_file: Path, device: DeviceEvents | None) -> None:
        """Make the event table.

        Raises:
            OSError: it exists already, or the file system is full.
        """
        self._table = EventTable(event_file(kv_file), SLOTS)
        self._device = device
        self._line = Line("kv_exports")

    def begin(self) -> SharedTransfer | None:
        """An event for a transfer; None if all are in use: its KV can be announced when it was transferred."""
        return self._table.take()

    def follow(self, transfer: SharedTransfer, copies: Event) -> None:
        """The copies of a transfer were submitted. If they fail, they may be submitted again."""
        self._line.submit(lambda: self._follow(transfer, copies))

    def announced(self, transfer: SharedTransfer) -> KvEvent:
        """What another slot waits for."""
        handle = b"" if self._device is None else self._device.handle(transfer.slot)
        return KvEvent(slot=transfer.slot, number=transfer.number, device=handle)

    def release(self, transfer: SharedTransfer, after: Event) -> None:
        """No other slot needs the KV any more. `after`: the copies."""
        self._table.release(transfer, after)

    def settle(self) -> None:
        """Free the events of released transfers that are done."""
        self._table.settle()

    def check(self, held: Iterable[SharedTransfer]) -> None:
        """Assert that the events in use are those of `held`, and of released transfers that are not done."""
        self._table.check(held)

    def close(self) -> None:
        """No transfer is under way."""
        self._line.close()
        self._table.close()

    def _follow(self, transfer: SharedTransfer, copies: Event) -> None:
        try:
            self._follow_to_its_end(transfer, copies)
        except TransferError:
            pass  # it is submitted again, or given up, which the engine says then
        except Exception:
            log.exception("KV that was announced cannot be followed: it is computed again where it is needed")
            self._table.note(transfer, TransferState.RELEASED)

    def _follow_to_its_end(self, transfer: SharedTransfer, copies: Event) -> None:
        if self._device is None:
            copies.wait()
        else:
            self._device.record(transfer.slot, copies)
            self._table.note(transfer, TransferState.RECORDED)
            self._device.synchronize(transfer.slot)
        self._table.note(transfer, TransferState.PASSED)
