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

Action = Callable[[], None]
_RECORD = struct.Struct("<dqqq")


class Kind(IntEnum):
    """What an event is; the smaller goes first at one moment."""

    END = 0
    ARRIVAL = 1
    TICK = 2


class Events:
    """The events to come, and the present moment: that of the event that runs."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.count = 0
        self._heap: list[tuple[float, Kind, int, Action]] = []
        self._asked = 0

    def at(self, at_s: float, kind: Kind, action: Action) -> None:
        """Ask for `action` at a moment, which is not over yet."""
        assert at_s >= self.now_s, f"{at_s} lies before {self.now_s}"
        self._asked += 1
        heappush(self._heap, (at_s, kind, self._asked, action))

    def run_next(self) -> bool:
        """Move to the next event and run it. False: there is none."""
        if not self._heap:
            return False
        self.now_s, _, _, action = heappop(self._heap)
        self.count += 1
        action()
        return True


class EventLog:
    """Everything that happened to requests, as one hash. `noted`: how many records went in."""

    def __init__(self) -> None:
        self.noted = 0
        self._hash = blake2b(digest_size=16)

    def note(self, at_s: float, what: int, request: int, value: int = 0) -> None:
        """Something happened to a request. `what` is the teller's code, `value` what else counts."""
        self.noted += 1
        self._hash.update(_RECORD.pack(at_s, what, request, value))

    @property
    def digest(self) -> str:
        """32 hexadecimal digits: equal for equal records in equal order."""
        return self._hash.hexdigest()
