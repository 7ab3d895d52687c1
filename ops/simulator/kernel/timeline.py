"""The decode steps of an instance, numbered, and how late they were for whoever was in the batch from a step on.

All sequences of a batch get their tokens at the same moments. That of step g was out at t(g); to a request with a TBT
of d it is late by t(g) - g d, plus what hangs on the request alone. The largest t(g) - g d from a step on answers for
all of them. Who joins does so where a fast-forward begins, and within a fast-forward lateness is convex: the larger one
of its first and last step is all that is kept of it. Where steps take no longer than d, or all of them do, the smaller
one is the least: then all of a fast-forward or nothing is in time for most requests, and its steps need not be counted.
"""

import math
from bisect import bisect_left

from ops.simulator.kernel.fast_forwards import FastForward


class _Lateness:
    """The largest t(g) - g d of each fast-forward, and the least; minus infinity where a step in its middle has it."""

    def __init__(self, count: int) -> None:
        self.most_s = [math.nan] * count
        self.least_s = [-math.inf] * count


class Timeline:
    """Steps from 1; `step` is the last one, and was over at `over_s`."""

    def __init__(self) -> None:
        self.step = 0
        self.over_s = math.nan
        self.fast_forwards: list[FastForward] = []
        """Those that are remembered."""
        self._firsts: list[int] = []
        """The first step of each."""
        self._lateness: dict[float, _Lateness] = {}
        """By d."""

    def expect(self, tbt_s: float) -> None:
        """Keep the lateness for this TBT from now on."""
        if tbt_s not in self._lateness:
            self._lateness[tbt_s] = _Lateness(len(self.fast_forwards))

    def add(self, fast_forward: FastForward, over_s: float) -> None:
        """Append steps, the last of which ends at `over_s`."""
        first = self.step + 1
        self.step = last = self.step + fast_forward.steps
        self.over_s = over_s
        first_s = fast_forward.first_s
        first_over_s = fast_forward.started_s + first_s
        last_s = first_s + (fast_forward.steps - 1) * fast_forward.growth_s
        self._firsts.append(first)
        self.fast_forwards.append(fast_forward)
        for tbt_s, lateness in self._lateness.items():
            first_late_s, late_s = first_over_s - first * tbt_s, over_s - last * tbt_s
            most_s, least_s = (first_late_s, late_s) if first_late_s > late_s else (late_s, first_late_s)
            lateness.most_s.append(most_s)
            lateness.least_s.append(-math.inf if first_s < tbt_s < last_s else least_s)

    def late_s(self, first: int, due_s: float, tbt_s: float) -> float:
        """The most that a step from `first` on, with which a fast-forward begins, was late: that one is due at `due_s`,
        each later one a TBT after.
        """
        return max(self._lateness[tbt_s].most_s[bisect_left(self._firsts, first) :]) - due_s + first * tbt_s

    def in_time(self, first: int, due_s: float, tbt_s: float) -> int:
        """The number of steps from `first` on that were not late."""
        place, lateness, slack_s = bisect_left(self._firsts, first), self._lateness[tbt_s], due_s - first * tbt_s
        count = 0
        for at, (most_s, least_s) in enumerate(
            zip(lateness.most_s[place:], lateness.least_s[place:], strict=True), start=place
        ):
            if most_s <= slack_s:
                count += self.fast_forwards[at].steps
            elif least_s <= slack_s:
                began = self._firsts[at]
                count += self.fast_forwards[at].in_time(due_s + (began - first) * tbt_s, tbt_s)
        return count

    def forget(self, first: int) -> None:
        """Drop the steps before `first`, with which a fast-forward begins."""
        place = bisect_left(self._firsts, first)
        del self._firsts[:place], self.fast_forwards[:place]
        for lateness in self._lateness.values():
            del lateness.most_s[:place], lateness.least_s[:place]
