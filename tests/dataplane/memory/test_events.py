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


def test_who_waits_goes_on_when_another_thread_finishes() -> None:
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


def test_a_move_list_gives_back_what_is_over_in_any_order() -> None:
    first, second, third = FlagEvent(), FlagEvent(), FlagEvent()
    moves: MoveList[str] = MoveList()
    for item, event in (("a", first), ("b", second), ("c", third), ("d", second)):
        moves.add(item, event)
    assert moves.take_done() == []
    second.finish(OSError("failed is over too"))
    assert moves.take_done() == ["b", "d"]
    third.finish()
    first.finish()
    assert list(moves) == ["a", "c"]
    assert moves.take_done() == ["a", "c"]
    assert moves.take_done() == []


def test_together_is_over_with_the_last_and_fails_with_the_first_that_failed() -> None:
    events = [FlagEvent(), FlagEvent()]
    together = AllOf(events)
    error = OSError("lost")
    events[1].finish(error)
    assert not together.done()
    events[0].finish()
    assert together.done()
    assert together.error is error
    with pytest.raises(TransferError, match="lost"):
        together.wait()
    assert AllOf([]).done()


def test_over_says_when_and_not_how() -> None:
    event = FlagEvent()
    over = Settled(event)
    assert not over.done()
    event.finish(OSError("lost"))
    over.wait()
    assert over.done()
    assert over.error is None
