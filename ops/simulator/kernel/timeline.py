"""The decode steps of an instance, numbered, and how late they were for whoever was in the batch from a step on.

All sequences of a batch get their tokens at the same moments. That of step g was out at t(g); to a request with a TBT
of d it is late by t(g) - g d, plus what hangs on the request alone. The largest t(g) - g d from a step on answers for
all of them. Who joins does so where a fast-forward begins, and within a fast-forward lateness is convex: the larger one
of its first and last step is all that is kept of it.
"""

import math
from bisect import bisect_left

from ops.simulator.kernel.fast_forwards import FastForward


class Timeline:
    """Steps from 1; `step` is the last one, and was over at `over_s`."""

    def __init__(self) -> None:
        self.step = 0
        self.over_s = math.nan
        self.fast_forwards: list[FastForward] = []
        """Those that are remembered."""
        self._firsts: list[int] = []
        """The first step of each."""
        self._lates_s: dict[float, list[float]] = {}
        """The largest t(g) - g d of each, by d."""

    def expect(self, tbt_s: float) -> None:
        """Keep the lateness for this TBT from now on."""
        if tbt_s not in self._lates_s:
            self._lates_s[tbt_s] = [math.nan] * len(self.fast_forwards)

    def add(self, fast_forward: FastForward, over_s: float) -> None:
        """Append steps, the last of which ends at `over_s`."""
        first = self.step + 1
        self.step = last = self.step + fast_forward.steps
        self.over_s = over_s
        first_over_s = fast_forward.started_s + fast_forward.first_s
        self._firsts.append(first)
        self.fast_forwards.append(fast_forward)
        for tbt_s, lates_s in self._lates_s.items():
            first_late_s, late_s = first_over_s - first * tbt_s, over_s - last * tbt_s
            lates_s.append(first_late_s if first_late_s > late_s else late_s)

    def late_s(self, first: int, due_s: float, tbt_s: float) -> float:
        """The most that a step from `first` on, with which a fast-forward begins, was late: that one is due at `due_s`,
        each later one a TBT after.
        """
        return max(self._lates_s[tbt_s][bisect_left(self._firsts, first) :]) - due_s + first * tbt_s

    def in_time(self, first: int, due_s: float, tbt_s: float) -> int:
        """The number of steps from `first` on that were not late."""
        place = bisect_left(self._firsts, first)
        return sum(
            fast_forward.in_time(due_s + (began - first) * tbt_s, tbt_s)
            for began, fast_forward in zip(self._firsts[place:], self.fast_forwards[place:], strict=True)
        )

    def forget(self, first: int) -> None:
        """Drop the steps before `first`, with which a fast-forward begins."""
        place = bisect_left(self._firsts, first)
        del self._firsts[:place], self.fast_forwards[:place]
        for lates_s in self._lates_s.values():
            del lates_s[:place]
