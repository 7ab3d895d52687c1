"""Completion events of transfers, and lists of memory that a transfer still uses (Aegaeon 5.3).

Bookkeeping knows transfers only by their events. To free memory that a copy still reads or writes, the caller passes
the copy's event; the memory stays in a `MoveList` until that event is done. A failed copy is done too: it accesses its
memory no more.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar, runtime_checkable

Item = TypeVar("Item")


class TransferError(Exception):
    """A transfer failed: its target was not written."""


class Event(Protocol):
    """The completion of a transfer."""

    def done(self) -> bool:
        """Whether the transfer has completed or failed. Never blocks; once true it stays true."""
        ...

    def wait(self) -> None:
        """Make the caller's next operation wait for the transfer.

        Raises:
            TransferError: it failed.
        """
        ...

    @property
    def error(self) -> BaseException | None:
        """Why the transfer failed; defined when done."""
        ...


@runtime_checkable
class TimedEvent(Event, Protocol):
    """An event with the time of its completion by `time.monotonic`; None until the completion was observed."""

    ended_s: float | None


class Passed:
    """An event that is done without an error."""

    error: BaseException | None = None

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Return at once."""


PASSED = Passed()


class FlagEvent:
    """A `TimedEvent` that a thread finishes. `error`: what it was finished with."""

    def __init__(self) -> None:
        self._flag = threading.Event()
        self.error: BaseException | None = None
        self.ended_s: float | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Complete the event; with an error, the transfer failed. May be called once."""
        assert not self._flag.is_set(), "an event is finished once"
        self.error = error
        self.ended_s = time.monotonic()
        self._flag.set()

    def done(self) -> bool:
        return self._flag.is_set()

    def wait(self) -> None:
        """Block until it is finished.

        Raises:
            TransferError: it was finished with an error, which is the cause.
        """
        self._flag.wait()
        if self.error is not None:
            raise TransferError(f"a transfer failed: {self.error!r}") from self.error


class AllOf:
    """An event that is done when all its events are. `error`: the first one."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = tuple(events)

    def done(self) -> bool:
        return all(event.done() for event in self.events)

    def wait(self) -> None:
        for event in self.events:
            event.wait()

    @property
    def error(self) -> BaseException | None:
        return next((event.error for event in self.events if event.error is not None), None)


class Settled:
    """An event without its error, for callers that need only that the transfer accesses its memory no more."""

    error: BaseException | None = None

    def __init__(self, event: Event) -> None:
        self.event = event

    def done(self) -> bool:
        return self.event.done()

    def wait(self) -> None:
        with suppress(TransferError):
            self.event.wait()


class MoveList(Generic[Item]):
    """Items that transfers still read or write, each with the event after which it is free."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Item, Event]] = []

    def __iter__(self) -> Iterator[Item]:
        """Items whose event was not done when last asked."""
        return (item for item, _ in self._waiting)

    def add(self, item: Item, after: Event) -> None:
        self._waiting.append((item, after))

    def take_done(self) -> list[Item]:
        """Remove and return the items whose events are done. Each event is asked once."""
        waiting, self._waiting = self._waiting, []
        done: list[Item] = []
        for item, after in waiting:
            if after.done():
                done.append(item)
            else:
                self._waiting.append((item, after))
        return done
