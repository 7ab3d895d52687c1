"""How long instances of the same model take to come back from spot."""

from dataclasses import dataclass
from math import exp
from zlib import crc32

import numpy as np

from controlplane.policies.assignment.facts import SlotRef


@dataclass(frozen=True, kw_only=True)
class SpotStartTimes:
    """A lognormal time, cut: its median, the deviation of its logarithm, and the most that it may be."""

    median_s: float
    spread: float = 0.0
    most_s: float = float("inf")


class SpotStarts:
    """Start times that are drawn by slot: the n-th start on a slot takes the same under every strategy of one seed."""

    def __init__(self, times: SpotStartTimes, seed: int) -> None:
        self._times = times
        self._seed = seed
        self._drawn: dict[SlotRef, np.random.Generator] = {}

    def draw_s(self, ref: SlotRef) -> float:
        """The time of the next start on a slot."""
        if ref not in self._drawn:
            node, slot = ref
            self._drawn[ref] = np.random.default_rng([self._seed, crc32(node.encode()), slot])
        times = self._times
        return min(times.most_s, times.median_s * exp(times.spread * self._drawn[ref].standard_normal()))
