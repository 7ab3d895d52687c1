import threading

import pytest

from dataplane.memory.events import PASSED, AllOf, Event, FlagEvent, MoveList, Settled, TransferError


def finished(error: BaseException | None = None) -> FlagEvent:
    event = FlagEvent()
    event.finish(error)
    return event


@pytest.mark.parametrize("event", [PASSED, finished()])
def test_a_transfer_that_went_well(event: Event) -> None:
    assert event.done()
    assert event.error is None
    event.wait()


def test_a_failed_transfer_is_done_and_says_why() -> None:
    error = OSError("the device is gone")
    event = finished(error)
    assert event.done()
    assert event.error is error
    for _ in range(2):
        with pytest.raises(TransferError, match="the device is gone") as caught:
            event.wait()
        assert caught.value.__cause__ is error


def test_a_waiting_thread_continues_when_another_one_finishes() -> None:
    event, waiting, gone_on = FlagEvent(), threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        event.wait()
        gone_on.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(60)
    assert not event.done()
    assert not gone_on.wait(0.05)
    event.finish()
    assert gone_on.wait(60)
    thread.join()


def test_an_event_is_finished_once() -> None:
    event = finished()
    with pytest.raises(AssertionError, match="once"):
        event.finish(OSError("late"))
    assert event.error is None


def test_a_move_list_returns_items_whose_events_are_done_in_any_order() -> None:
    first, second, third = FlagEvent(), FlagEvent(), FlagEvent()
    moves: MoveList[str] = MoveList()
    for item, event in (("a", first), ("b", second), ("c", third), ("d", second)):
        moves.add(item, event)
    assert moves.take_done() == []
    second.finish(OSError("failed is done too"))
    assert moves.take_done() == ["b", "d"]
    third.finish()
    first.finish()
    assert list(moves) == ["a", "c"]
    assert moves.take_done() == ["a", "c"]
    assert moves.take_done() == []


def test_all_of_is_done_with_the_last_and_fails_with_the_first_that_failed() -> None:
    events = [FlagEvent(), FlagEvent()]
    all_of = AllOf(events)
    error = OSError("lost")
    events[1].finish(error)
    assert not all_of.done()
    events[0].finish()
    assert all_of.done()
    assert all_of.error is error
    with pytest.raises(TransferError, match="lost"):
        all_of.wait()
    assert AllOf([]).done()


def test_settled_ignores_the_error() -> None:
    event = FlagEvent()
    settled = Settled(event)
    assert not settled.done()
    event.finish(OSError("lost"))
    settled.wait()
    assert settled.done()
    assert settled.error is None
