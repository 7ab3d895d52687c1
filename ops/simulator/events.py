"""What happens next: a heap of events, and the log by whose hash two runs are compared.

Events of one moment run in this order, whatever the order in which they were asked for:

1. END: a step, a leap of steps or a transfer is over. What it frees is free for all that follows.
2. ARRIVAL: a request comes, at the gateway or at an instance. It sees what ended at its moment.
3. TICK: views are taken, deferred requests are released. They see all of their moment.

Within a kind the one asked for first runs first. An event may ask for another of its own moment, but of no earlier one.
"""

import struct
from collections.abc import Callable
from enum import IntEnum
from hashlib import blake2b
from heapq import heappop, heappush
from typing import Any, TypeVarTuple

Told = TypeVarTuple("Told")

_RECORD = "dqqq"
_BLOCK = 1024
"""So many records are hashed at once."""


class Kind(IntEnum):
    """What an event is; the smaller goes first at one moment."""

    END = 0
    ARRIVAL = 1
    TICK = 2


END, ARRIVAL, TICK = Kind
"""They are asked for often, and a member is found faster by a name of its own."""


class Events:
    """The events to come, and the present moment: that of the event that runs."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.count = 0
        self.stopped = False
        """Whether `run` is to end with the event that runs."""
        self._heap: list[tuple[float, Kind, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, at_s: float, kind: Kind, action: Callable[[*Told], None], *told: *Told) -> None:
        """Ask for `action` at a moment, which is not over yet; it is told the rest."""
        assert at_s >= self.now_s, f"{at_s} lies before {self.now_s}"
        self._asked += 1
        heappush(self._heap, (at_s, kind, self._asked, action, told))

    def run_next(self) -> bool:
        """Move to the next event and run it. False: there is none."""
        if not self._heap:
            return False
        self._run(1)
        return True

    def run(self, most: int) -> bool:
        """Run so many events, unless one of them stops it or there are no more. False: one of these is so."""
        self._run(most)
        return not self.stopped and bool(self._heap)

    def _run(self, most: int) -> None:
        heap, last = self._heap, self.count + most
        while heap and self.count < last and not self.stopped:
            self.now_s, _, _, action, told = heappop(heap)
            self.count += 1
            action(*told)


class EventLog:
    """Everything that happened to requests, as one hash."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)
        self._hashed = 0
        self._fresh: list[float] = []

    def note(self, at_s: float, what: int, request: int, value: int = 0) -> None:
        """Something happened to a request. `what` is the teller's code, `value` what else counts."""
        self._fresh += (at_s, what, request, value)
        if len(self._fresh) == _BLOCK * len(_RECORD):
            self._take_in()

    @property
    def noted(self) -> int:
        """How many records went in."""
        return self._hashed + len(self._fresh) // len(_RECORD)

    @property
    def digest(self) -> str:
        """32 hexadecimal digits: equal for equal records in equal order."""
        self._take_in()
        return self._hash.hexdigest()

    def _take_in(self) -> None:
        count = len(self._fresh) // len(_RECORD)
        self._hash.update(struct.pack("<" + count * _RECORD, *self._fresh))
        self._hashed += count
        self._fresh.clear()
