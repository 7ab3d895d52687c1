"""How old a standby's copy of the database is, as a bound that is never too low.

The age of a copy is the time since the primary's state that it holds. It is bounded in two ways, and the lower bound
counts. First, by positions in the write-ahead log: a standby that has replayed what the primary had written at some
moment is as new as that moment, so that a primary at which nothing happens does not look like a lag, and no clock of
another region is trusted. Positions are compared within one timeline only: a standby that could not follow a promotion
may be further on in the log of the former primary. Second, by the time at which the last transaction it has replayed
was committed, and by how much the clocks of the two servers may differ: a process that does not reach the primary knows
nothing better.
"""

import math
from collections import deque
from dataclasses import dataclass

_MARKS_MAX = 3600
_CLOCKS_APART_S = 10.0
"""By so much the clocks of two servers may differ: to a standby whose clock is behind an old commit looks new."""


@dataclass(frozen=True, kw_only=True)
class LogPosition:
    """Where a server is in the write-ahead log. `timeline`: the one that it writes, or a standby is known to follow;
    `replayed_ago_s`: since the last transaction that a standby has replayed was committed, None where it does not know.
    """

    bytes: int
    timeline: str
    takes_writes: bool = False
    replayed_ago_s: float | None = None


class ReplicaAge:
    """What was seen of the primary and of one standby. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self._timeline = ""
        self._marks: deque[tuple[float, int]] = deque(maxlen=_MARKS_MAX)
        self._in_step_s = -math.inf
        self._replayed_s = -math.inf

    def note_primary(self, position: LogPosition, asked_s: float) -> None:
        """The primary answered; it was asked at `asked_s`."""
        if position.timeline != self._timeline:
            self._marks.clear()
            self._timeline = position.timeline
        self._marks.append((asked_s, position.bytes))

    def note_replica(self, position: LogPosition, asked_s: float) -> None:
        """The standby answered; it was asked at `asked_s`. It is as new as a primary of its own timeline only."""
        if position.replayed_ago_s is not None:
            self._replayed_s = asked_s - max(0.0, position.replayed_ago_s + _CLOCKS_APART_S)
        if position.timeline == self._timeline:
            while self._marks and self._marks[0][1] <= position.bytes:
                self._in_step_s, _ = self._marks.popleft()

    def age_s(self, now_s: float) -> float:
        """The age at a moment; infinite where nothing is known."""
        return max(0.0, now_s - max(self._in_step_s, self._replayed_s))
