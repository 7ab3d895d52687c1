"""Files of other slots: mapped once, pinned as long as a copy may read them, and refused where nobody could wait."""

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

import pytest
import torch
from msgspec import structs

from dataplane.engines.interface import KvEvent, KvHandle
from dataplane.engines.torch.copies.interprocess import DeviceEvents
from dataplane.engines.torch.memory import kv_imports
from dataplane.engines.torch.memory.kv_file import host_memory
from dataplane.engines.torch.memory.kv_imports import KvImports
from dataplane.memory.events import PASSED, FlagEvent
from dataplane.memory.shared_events import EventTable, TransferState, event_file
from tests.event_loop import PATIENCE_S

CPU = torch.device("cpu")


def handle(file: Path, event: KvEvent | None = None) -> KvHandle:
    if not file.exists():
        host_memory(4096, file)
    return KvHandle(file=str(file), slab_bytes=1024, shape=(1, 1, 1, 1, 1), blocks=(0,), tokens=1, event=event)


def test_a_file_is_mapped_once_and_one_that_is_gone_is_not_there(tmp_path: Path) -> None:
    imports = KvImports(CPU, None)
    first, second = (imports.open(handle(tmp_path / "kv")) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first[0] is second[0]
    assert (first[1], imports.waited_for) == (PASSED, {"nothing": 2, "device": 0, "host": 0})
    assert imports.open(structs.replace(handle(tmp_path / "kv"), file="/nowhere/kv")) is None
    imports.close()


def test_the_file_of_a_slot_that_ended_is_unpinned_when_no_sequence_and_no_copy_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV that waits for memory may have no copy yet."""
    unpinned: list[int] = []
    ended = threading.Event()

    def unpin(host: torch.Tensor, device: torch.device, then: Callable[[], None] = lambda: None) -> None:
        unpinned.append(host.data_ptr())
        ended.set()

    monkeypatch.setattr(kv_imports, "unpinned", unpin)
    imports, copy = KvImports(CPU, None), FlagEvent()
    opened = imports.open(handle(tmp_path / "one"))
    assert opened is not None
    opened[0].readers = 1
    (tmp_path / "one").unlink()
    assert imports.open(handle(tmp_path / "two")) is not None
    imports.check()
    assert not ended.wait(0.05), "KV is in it"
    imports.note_copy(opened[0], copy)
    opened[0].readers = 0
    imports.check()
    assert not ended.wait(0.05), "a copy reads it"
    copy.finish()
    imports.check()
    assert ended.wait(30)
    assert unpinned == [opened[0].bytes.data_ptr()]
    imports.close()
    assert len(unpinned) == 2


def test_the_file_of_a_slot_that_ended_is_closed_although_no_other_is_opened(tmp_path: Path) -> None:
    """The next process of that slot may find no memory for its own file before."""
    imports = KvImports(CPU, None)
    assert imports.open(handle(tmp_path / "kv")) is not None
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    (tmp_path / "kv").unlink()
    until_s = time.monotonic() + PATIENCE_S
    while str(tmp_path) in Path("/proc/self/maps").read_text():
        assert time.monotonic() < until_s, "it is still mapped"
        imports.check()
        time.sleep(0.01)
    imports.close()


def test_the_device_waits_for_no_file_of_which_a_part_is_not_pinned_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host would read that part at once."""
    may_pin = threading.Event()

    def pin(host: torch.Tensor, device: torch.device) -> torch.Tensor:
        may_pin.wait()
        return host

    class Device:
        waits = 0

        def wait_for(self, handle: bytes, source: torch.Tensor) -> bool:
            self.waits += 1
            return True

    monkeypatch.setattr(kv_imports, "pinned", pin)
    device = Device()
    imports = KvImports(CPU, cast("DeviceEvents", device))
    table = EventTable(event_file(tmp_path / "kv"), 1)
    transfer = table.take()
    assert transfer is not None
    table.note(transfer, TransferState.RECORDED)
    event = KvEvent(slot=transfer.slot, number=transfer.number, device=b"handle")
    opened = imports.open(handle(tmp_path / "kv", event))
    assert opened is not None
    waiting = threading.Thread(target=opened[1].wait)
    waiting.start()
    waiting.join(0.05)
    assert (waiting.is_alive(), device.waits) == (True, 0), "the host waits"
    may_pin.set()
    waiting.join()
    assert device.waits == 1
    imports.close()


def test_the_events_of_a_slot_that_ended_are_closed_when_the_device_has_passed_them(tmp_path: Path) -> None:
    class Device:
        passed = False
        forgotten: tuple[bytes, ...] = ()

        def wait_for(self, handle: bytes, source: torch.Tensor) -> bool:
            return True

        def has_passed(self, handle: bytes) -> bool:
            return self.passed

        def forget(self, handles: Iterable[bytes]) -> None:
            self.forgotten += tuple(handles)

    device, table = Device(), EventTable(event_file(tmp_path / "one"), 1)
    imports = KvImports(CPU, cast("DeviceEvents", device))
    transfer = table.take()
    assert transfer is not None
    table.note(transfer, TransferState.RECORDED)
    event = KvEvent(slot=transfer.slot, number=transfer.number, device=b"handle")
    opened = imports.open(handle(tmp_path / "one", event))
    assert opened is not None
    opened[0].pinning.wait()
    opened[1].wait()
    (tmp_path / "one").unlink()
    assert imports.open(handle(tmp_path / "two")) is not None
    imports.check()
    assert device.forgotten == (), "the device waits for it"
    device.passed = True
    imports.check()
    imports.check()
    assert device.forgotten == (b"handle",)
    imports.close()


@pytest.mark.parametrize("state", [TransferState.SUBMITTED, TransferState.PASSED])
def test_what_has_passed_is_not_counted_as_waited_for(tmp_path: Path, state: TransferState) -> None:
    table = EventTable(event_file(tmp_path / "kv"), 1)
    transfer = table.take()
    assert transfer is not None
    table.note(transfer, state)
    imports = KvImports(CPU, None)
    opened = imports.open(handle(tmp_path / "kv", KvEvent(slot=transfer.slot, number=transfer.number)))
    assert opened is not None
    has_passed = state is TransferState.PASSED
    assert opened[1].done() is has_passed
    assert imports.waited_for == {"nothing": int(has_passed), "device": 0, "host": int(not has_passed)}


def test_an_event_of_which_the_other_ranks_know_nothing_is_refused(tmp_path: Path) -> None:
    table = EventTable(event_file(tmp_path / "kv"), 1)
    transfer = table.take()
    assert transfer is not None
    event = KvEvent(slot=transfer.slot, number=transfer.number)
    assert KvImports(CPU, None, ranks=2).open(handle(tmp_path / "kv", event)) is None
    assert KvImports(CPU, None, ranks=2).open(handle(tmp_path / "kv")) is not None


def test_an_announcement_fails_after_some_time(tmp_path: Path) -> None:
    table = EventTable(event_file(tmp_path / "kv"), 1)
    transfer = table.take()
    assert transfer is not None
    opened = KvImports(CPU, None, wait_max_s=0.01).open(
        handle(tmp_path / "kv", KvEvent(slot=transfer.slot, number=transfer.number))
    )
    assert opened is not None
    while not opened[1].done():
        time.sleep(0.001)
    assert opened[1].error is not None
