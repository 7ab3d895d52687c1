"""The event loop: a heap of events, followers with clocks of their own, and the log by whose hash runs are compared.

Events of one moment run in this order, whatever the order in which they were scheduled:

1. END: a step, a fast-forward of steps or a transfer ends. What it frees is free for all that follows.
2. ARRIVAL: a request arrives at the gateway or at an instance. It sees what ended at its moment.
3. TICK: views are renewed, deferred requests are released. They see all of their moment.

Within a kind the one scheduled first runs first. An event may schedule another of its own moment, but no earlier one.

What changes nothing for others needs no event: a `Follower` is advanced lazily, when it is read.
"""

from collections.abc import Callable
from enum import IntEnum
from hashlib import blake2b
from heapq import heappop, heappush
from math import inf
from struct import Struct
from typing import Any, Protocol, TypeVarTuple

import numpy as np

Arguments = TypeVarTuple("Arguments")

_RECORD = np.dtype([("at_s", "<f8"), ("what", "<i8"), ("request", "<i8"), ("value", "<i8")])
_record = Struct("<dqqq").pack
_RECORDS_MAX = 4096
"""Records that are hashed at once."""


class Kind(IntEnum):
    """What an event is; the smaller goes first at one moment."""

    END = 0
    ARRIVAL = 1
    TICK = 2


END, ARRIVAL, TICK = Kind
"""Names of their own, which are faster than attributes of the enumeration."""


class Clocked(Protocol):
    """A part of the simulation with a clock of its own."""

    @property
    def next_s(self) -> float:
        """The moment at which something ends next; infinite: nothing runs."""

    def advance(self, now_s: float) -> None:
        """Simulate up to a moment."""


class Follower(Clocked, Protocol):
    """One that is advanced lazily."""

    def keep_up(self) -> None:
        """Advance now, and by events from now on."""


class Events:
    """The scheduled events, and the present moment: that of the running event."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.count = 0
        self.stopped = False
        """Whether `run` ends with the running event."""
        self._heap: list[tuple[float, Kind, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0
        self._followers: dict[Follower, None] = {}
        self._keeps_up = False

    def at(self, at_s: float, kind: Kind, action: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        """Schedule `action` with its arguments at a moment that has not passed."""
        assert at_s >= self.now_s, f"{at_s} lies before {self.now_s}"
        self._asked += 1
        heappush(self._heap, (at_s, kind, self._asked, action, arguments))

    def run_before(self, at_s: float, kind: Kind) -> None:
        """Run all events before a moment and kind, and move there. The caller runs that event; it is counted here."""
        heap, first = self._heap, (at_s, kind + 1)
        while heap and heap[0] < first:
            self.run(1)
        self.now_s = at_s
        self.count += 1

    def follow(self, follower: Follower) -> None:
        """Advance it lazily until `keep_up` is called."""
        self._followers[follower] = None
        if self._keeps_up:
            follower.keep_up()

    def unfollow(self, follower: Follower) -> None:
        self._followers.pop(follower, None)

    def catch_up(self) -> None:
        """Advance all followers to the present."""
        for follower in list(self._followers):
            follower.advance(self.now_s)

    def keep_up(self) -> None:
        """From now on followers are advanced by events instead of lazily."""
        self._keeps_up = True
        for follower in list(self._followers):
            follower.keep_up()

    def run(self, most: int) -> bool:
        """Run so many events, unless one of them stops the loop or no more are left. Returns whether it may go on."""
        heap, last = self._heap, self.count + most
        while heap and self.count < last and not self.stopped:
            self.now_s, _, _, action, arguments = heappop(heap)
            self.count += 1
            action(*arguments)
        return bool(heap) and not self.stopped


class Alarm:
    """Advances something with a clock of its own by events, one wherever something ends there."""

    def __init__(self, clocked: Clocked, events: Events) -> None:
        self._clocked = clocked
        self._events = events
        self._set_s = inf

    def set(self) -> None:
        """Schedule the next event; call it whenever that may have become earlier."""
        next_s = self._clocked.next_s
        if next_s < self._set_s:
            self._set_s = next_s
            self._events.at(next_s, END, self._ring, next_s)

    def stop(self) -> None:
        """Forget the event that is scheduled, if one is."""
        self._set_s = inf

    def _ring(self, at_s: float) -> None:
        if at_s == self._set_s:
            self._set_s = inf
            self._clocked.advance(at_s)
            self.set()


class EventLog:
    """Everything that happened to requests, as one hash. Records are ordered by their moments, and within a moment as
    they were added.
    """

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)
        self._hashed = 0
        self._fresh: list[bytes] = []

    def note(self, at_s: float, what: int, request: int, value: int = 0) -> None:
        """Record something that happened to a request. `what` is the caller's code, `value` any other number."""
        self._fresh.append(_record(at_s, what, request, value))

    @property
    def noted(self) -> int:
        """The number of records."""
        return self._hashed + len(self._fresh)

    @property
    def digest(self) -> str:
        """32 hexadecimal digits: equal for equal records in equal order."""
        self._close()
        return self._hash.hexdigest()

    def close(self) -> None:
        """Hash the records so far, if they are many. No later record is of an earlier moment."""
        if len(self._fresh) >= _RECORDS_MAX:
            self._close()

    def _close(self) -> None:
        records = np.frombuffer(b"".join(self._fresh), dtype=_RECORD)
        self._hash.update(records[np.argsort(records["at_s"], kind="stable")].tobytes())
        self._hashed += len(records)
        self._fresh.clear()
