"""When a transfer is over: events, and the lists of what may not be touched before (Aegaeon 5.3).

Bookkeeping knows transfers only by their events. Whoever gives memory back while a copy still reads or writes it names
the copy's event; the memory waits in a `MoveList` until that event is done. A failed copy is over too: nobody touches
its memory any more.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar, runtime_checkable

Item = TypeVar("Item")


class TransferError(Exception):
    """A transfer failed: what it should have written is not there."""


class Event(Protocol):
    """The end of a transfer."""

    def done(self) -> bool:
        """Whether the transfer is over, well or badly. Never blocks; once true it stays true."""
        ...

    def wait(self) -> None:
        """Let what runs next wait for the transfer.

        Raises:
            TransferError: it failed.
        """
        ...

    @property
    def error(self) -> BaseException | None:
        """Why the transfer failed. Means something only when done."""
        ...


@runtime_checkable
class TimedEvent(Event, Protocol):
    """An event that knows when it was over, by `time.monotonic`: None as long as nobody knows that it is."""

    ended_s: float | None


class Passed:
    """An event that is done, and well: there is nothing to wait for."""

    def done(self) -> bool:
        """True."""
        return True

    def wait(self) -> None:
        """Return at once."""

    @property
    def error(self) -> BaseException | None:
        """None."""
        return None


PASSED = Passed()


class FlagEvent:
    """An event that a thread finishes, and so a `TimedEvent`."""

    def __init__(self) -> None:
        self._flag = threading.Event()
        self._error: BaseException | None = None
        self.ended_s: float | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Say that the transfer is over; with an error, that it failed. Said once."""
        assert not self._flag.is_set(), "an event is finished once"
        self._error = error
        self.ended_s = time.monotonic()
        self._flag.set()

    def done(self) -> bool:
        """Whether it is finished."""
        return self._flag.is_set()

    def wait(self) -> None:
        """Block until it is finished.

        Raises:
            TransferError: it was finished with an error, which is the cause.
        """
        self._flag.wait()
        if self._error is not None:
            raise TransferError(f"a transfer failed: {self._error!r}") from self._error

    @property
    def error(self) -> BaseException | None:
        """The error that it was finished with."""
        return self._error


class Together:
    """Events that are over when the last of them is."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = tuple(events)

    def done(self) -> bool:
        """Whether all are."""
        return all(event.done() for event in self._events)

    def wait(self) -> None:
        """Wait for each.

        Raises:
            TransferError: one failed.
        """
        for event in self._events:
            event.wait()

    @property
    def error(self) -> BaseException | None:
        """The first error."""
        return next((event.error for event in self._events if event.error is not None), None)


class Over:
    """The end of a transfer, well or badly: for who only needs that it touches nothing any more."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def done(self) -> bool:
        """Whether it is over."""
        return self._event.done()

    def wait(self) -> None:
        """Wait for it."""
        with suppress(TransferError):
            self._event.wait()

    @property
    def error(self) -> BaseException | None:
        """None."""
        return None


class MoveList(Generic[Item]):
    """Things that transfers still read or write, each with the event after which it is free."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Item, Event]] = []

    def __iter__(self) -> Iterator[Item]:
        """All that still wait, as far as was asked."""
        return (item for item, _ in self._waiting)

    def add(self, item: Item, after: Event) -> None:
        """Keep the item until `after` is done."""
        self._waiting.append((item, after))

    def take_done(self) -> list[Item]:
        """Remove and return what no transfer touches any more. Asks each event once."""
        done: list[Item] = []
        waiting: list[tuple[Item, Event]] = []
        for item, after in self._waiting:
            if after.done():
                done.append(item)
            else:
                waiting.append((item, after))
        self._waiting = waiting
        return done
