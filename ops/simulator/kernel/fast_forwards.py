"""Many decode steps at once. Contexts grow by a token a step, so a step takes a fixed time longer than the one before;
the time of k steps is a quadratic in k, and how many steps fit into a time is its root.
"""

import math
from collections.abc import Callable

from msgspec import Struct


class FastForward(Struct, gc=False):
    """Steps of one unchanged batch, from `started_s` on: the first takes `first_s`, each one after it `growth_s`
    longer. `steps`: how many they are, unless they are cut short.
    """

    started_s: float
    first_s: float
    growth_s: float
    steps: int

    def seconds(self, steps: int) -> float:
        """The time of the first steps, so many of them."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    def ended_s(self, step: int) -> float:
        """The end of a step, from 1."""
        return self.started_s + (step * self.first_s + self.growth_s * (step * (step - 1) / 2))

    def cut(self, at_s: float) -> bool:
        """End with the step that runs at a moment. Returns whether that is earlier."""
        if self.steps == 1:
            return False
        steps = self.steps_to(at_s - self.started_s)
        if steps >= self.steps:
            return False
        self.steps = steps
        return True

    def steps_to(self, seconds: float) -> int:
        """The fewest steps, at least one, that take `seconds` or longer."""
        first_s, growth_s = self.first_s, self.growth_s
        if seconds <= first_s:
            return 1
        half = first_s - growth_s / 2
        steps = 1 + int(2 * seconds / (half + math.sqrt(half * half + 2 * growth_s * seconds)))
        while steps * first_s + growth_s * (steps * (steps - 1) / 2) < seconds:
            steps += 1
        while (steps - 1) * first_s + growth_s * ((steps - 1) * (steps - 2) / 2) >= seconds:
            steps -= 1
        return steps

    def in_time(self, due_s: float, tbt_s: float) -> int:
        """How many steps ended in time, the first being due at `due_s` and each later one `tbt_s` after it.

        Lateness is convex in the step, since steps only get longer: those in time are neighbours.
        """
        first, last = 1, self.steps
        if self._late_s(first, due_s, tbt_s) <= 0 and self._late_s(last, due_s, tbt_s) <= 0:
            return last
        middle = self._least_late(tbt_s)
        if self._late_s(middle, due_s, tbt_s) > 0:
            return 0
        begins = _first_true(first, middle, lambda step: self._late_s(step, due_s, tbt_s) <= 0)
        ends = _first_true(middle, last + 1, lambda step: step > last or self._late_s(step, due_s, tbt_s) > 0)
        return ends - begins

    def late_s(self, due_s: float, tbt_s: float) -> float:
        """The largest lateness of a step; negative if all were early."""
        return max(self._late_s(1, due_s, tbt_s), self._late_s(self.steps, due_s, tbt_s))

    def _late_s(self, step: int, due_s: float, tbt_s: float) -> float:
        return self.ended_s(step) - due_s - (step - 1) * tbt_s

    def _least_late(self, tbt_s: float) -> int:
        """The step with the least lateness: the last that takes no longer than `tbt_s`."""
        if self.first_s >= tbt_s:
            return 1
        if self.growth_s <= 0:
            return self.steps
        return min(self.steps, 1 + int((tbt_s - self.first_s) / self.growth_s))


def _first_true(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The first of `low` to `high` for which a monotone condition holds; it does for `high`."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
