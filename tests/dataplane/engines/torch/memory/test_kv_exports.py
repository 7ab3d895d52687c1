"""Announced KV whose transfer cannot be followed is given up at once, and said to be."""

import time
from pathlib import Path

import pytest

from dataplane.engines.torch.memory.kv_exports import KvExports
from dataplane.memory.events import PASSED, Event
from dataplane.memory.shared_events import TransferState, WatchedTable, event_file


class Broken:
    """A device without events."""

    def handle(self, slot: int) -> bytes:
        return b""

    def record(self, slot: int, transfer: Event) -> None:
        raise RuntimeError("the device has no event left")

    def synchronize(self, slot: int) -> None:
        raise AssertionError("nothing was recorded")

    def wait_for(self, handle: bytes, source: object) -> bool:
        return False

    def has_passed(self, handle: bytes) -> bool:
        return True


def test_an_unexpected_error_gives_the_announced_kv_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    exports = KvExports(tmp_path / "kv", Broken())
    transfer = exports.begin()
    assert transfer is not None
    watched = WatchedTable(event_file(tmp_path / "kv"))
    assert watched.state(transfer) is TransferState.SUBMITTED
    exports.follow(transfer, PASSED)
    until_s = time.monotonic() + 30
    while watched.state(transfer) is not TransferState.RELEASED and time.monotonic() < until_s:
        time.sleep(0.001)
    assert watched.state(transfer) is TransferState.RELEASED
    exports.release(transfer, PASSED)
    exports.check([])
    exports.close()
    said = capfd.readouterr()
    assert "cannot be followed" in said.out + said.err
