"""Events that another process waits for: how far a transfer is, whose use of a word it was, and the owner's end."""

import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from dataplane.memory.events import PASSED, FlagEvent, TransferError
from dataplane.memory.shared_events import (
    EventTable,
    SharedEvent,
    SharedTransfer,
    TransferState,
    WatchedTable,
    event_file,
)

FAR_S = time.monotonic() + 1e6


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return event_file(tmp_path / "kv")


def taken(table: EventTable) -> SharedTransfer:
    transfer = table.take()
    assert transfer is not None
    return transfer


def test_a_transfer_is_waited_for_until_it_has_passed(file: Path) -> None:
    table, watched = EventTable(file, 4), WatchedTable(file)
    transfer = taken(table)
    event = SharedEvent(watched, transfer, fails_s=FAR_S)
    assert not event.done()
    waiting = threading.Thread(target=event.wait)
    waiting.start()
    table.note(transfer, TransferState.RECORDED)
    assert not event.done()
    assert waiting.is_alive()
    table.note(transfer, TransferState.PASSED)
    waiting.join()
    assert (event.done(), event.error) == (True, None)
    table.release(transfer, PASSED)
    assert event.done(), "once true it stays true"


def test_a_device_waits_only_for_an_event_that_was_recorded(file: Path) -> None:
    table, asked = EventTable(file, 4), []
    transfer = taken(table)

    def wait_on_device() -> bool:
        asked.append(WatchedTable(file).state(transfer))
        return len(asked) > 1

    event = SharedEvent(WatchedTable(file), transfer, fails_s=FAR_S, wait_on_device=wait_on_device)
    waiting = threading.Thread(target=event.wait)
    waiting.start()
    time.sleep(0.01)
    assert not asked
    table.note(transfer, TransferState.RECORDED)
    waiting.join()
    assert asked == [TransferState.RECORDED] * 2
    assert not event.done(), "the device waits, and nobody knows yet that it has passed"
    table.note(transfer, TransferState.PASSED)
    assert event.done()


@pytest.mark.parametrize("is_used_again", [False, True])
def test_a_transfer_that_is_given_up_fails(file: Path, is_used_again: bool) -> None:
    table = EventTable(file, 1)
    transfer = taken(table)
    event = SharedEvent(WatchedTable(file), transfer, fails_s=FAR_S)
    table.release(transfer, PASSED)
    if is_used_again:
        table.note(taken(table), TransferState.PASSED)
    with pytest.raises(TransferError, match="given up"):
        event.wait()


def test_a_transfer_is_waited_for_no_longer_than_it_may_take(file: Path) -> None:
    transfer = taken(EventTable(file, 1))
    with pytest.raises(TransferError, match="too long"):
        SharedEvent(WatchedTable(file), transfer, fails_s=time.monotonic() + 0.01).wait()


def test_a_released_event_is_free_once_its_transfer_is_done(file: Path) -> None:
    table, copies = EventTable(file, 1), FlagEvent()
    transfer = taken(table)
    assert table.take() is None
    table.release(transfer, copies)
    table.check([])
    assert WatchedTable(file).state(transfer) is TransferState.SUBMITTED
    assert table.take() is None
    copies.finish()
    table.settle()
    assert taken(table) == SharedTransfer(slot=0, number=transfer.number + 1)


def test_what_is_noted_late_changes_no_later_use(file: Path) -> None:
    table, watched = EventTable(file, 1), WatchedTable(file)
    first = taken(table)
    table.release(first, PASSED)
    table.note(first, TransferState.PASSED)
    assert watched.state(first) is TransferState.RELEASED
    second = taken(table)
    table.note(first, TransferState.PASSED)
    assert watched.state(second) is TransferState.SUBMITTED


def test_a_table_is_made_once_and_is_the_owners(file: Path) -> None:
    table = EventTable(file, 1)
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        EventTable(file, 1)
    table.close()
    with pytest.raises(FileNotFoundError):
        WatchedTable(file.with_name("other"))


OWNER = """
import sys, time
from pathlib import Path
from dataplane.memory.shared_events import EventTable, TransferState
table = EventTable(Path(sys.argv[1]), 8)
passed, recorded, submitted = table.take(), table.take(), table.take()
table.note(passed, TransferState.PASSED)
table.note(recorded, TransferState.RECORDED)
print(passed.slot, recorded.slot, submitted.slot, flush=True)
time.sleep(3600)
"""


def test_who_waits_learns_that_the_owner_was_killed(file: Path) -> None:
    """What has passed stays so; what was recorded may never pass."""
    with subprocess.Popen([sys.executable, "-c", OWNER, file], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        slots = [int(word) for word in owner.stdout.readline().split()]
        watched = WatchedTable(file)
        events = [SharedEvent(watched, SharedTransfer(slot=slot, number=1), fails_s=FAR_S) for slot in slots]
        assert [event.done() for event in events] == [True, False, False]
        assert not watched.owner_is_gone
        others = [SharedEvent(watched, SharedTransfer(slot=slot, number=1), fails_s=FAR_S) for slot in slots]
        owner.kill()
        owner.wait()
        others[0].wait()
        for event in (*events[1:], *others[1:]):
            with pytest.raises(TransferError, match="has ended"):
                event.wait()


class Tables(RuleBasedStateMachine):
    """An owner, and processes that wait for any of its transfers, at any time, also for those that are over."""

    transfers: Bundle[SharedTransfer] = Bundle("transfers")

    def __init__(self) -> None:
        super().__init__()
        self._folder = TemporaryDirectory()
        file = Path(self._folder.name) / "events"
        self._table, self._watched = EventTable(file, 3), WatchedTable(file)
        self._states: dict[SharedTransfer, TransferState] = {}
        self._leaving: dict[SharedTransfer, FlagEvent] = {}
        self._events: list[tuple[SharedTransfer, SharedEvent]] = []

    def teardown(self) -> None:
        self._table.close()
        self._folder.cleanup()

    @precondition(lambda self: self._in_use() < 3)
    @rule(target=transfers)
    def take(self) -> SharedTransfer:
        transfer = taken(self._table)
        assert transfer not in self._states
        self._states[transfer] = TransferState.SUBMITTED
        return transfer

    @rule(transfer=transfers, state=st.sampled_from([TransferState.RECORDED, TransferState.PASSED]))
    def note(self, transfer: SharedTransfer, state: TransferState) -> None:
        self._table.note(transfer, state)
        if self._states[transfer] is not TransferState.RELEASED:
            self._states[transfer] = state

    @rule(transfer=consumes(transfers))
    def release(self, transfer: SharedTransfer) -> None:
        self._leaving[transfer] = FlagEvent()
        self._table.release(transfer, self._leaving[transfer])

    @precondition(lambda self: self._leaving)
    @rule(data=st.data())
    def end_copies(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from(sorted(self._leaving, key=repr)))
        self._leaving.pop(transfer).finish()
        self._table.settle()
        self._states[transfer] = TransferState.RELEASED

    @precondition(lambda self: self._states)
    @rule(data=st.data())
    def watch(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from(sorted(self._states, key=repr)))
        self._events.append((transfer, SharedEvent(self._watched, transfer, fails_s=FAR_S)))

    @invariant()
    def words_say_how_far_transfers_are(self) -> None:
        assert {transfer: self._watched.state(transfer) for transfer in self._states} == self._states
        held = [one for one, state in self._states.items() if state is not TransferState.RELEASED]
        self._table.check([one for one in held if one not in self._leaving])

    @invariant()
    def events_end_once(self) -> None:
        """A watcher that looks after each change sees whether it passed before it was released."""
        for transfer, event in self._events:
            had_passed, had_failed = event._passed, event.error is not None
            done, state = event.done(), self._states[transfer]
            if had_passed or had_failed:
                assert (event._passed, event.error is not None) == (had_passed, had_failed)
            else:
                assert event._passed is (state is TransferState.PASSED)
                assert (event.error is not None) is (state is TransferState.RELEASED)
            assert done is (event._passed or event.error is not None)

    def _in_use(self) -> int:
        return sum(state is not TransferState.RELEASED for state in self._states.values())


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=100, stateful_step_count=40)
