"""Requests that a generator makes: a stream in the order of arrival, the same for the same seed.

Arrivals are a renewal process (gamma intervals; Poisson where cv is 1) in operational time, that is, in expected
arrivals: it runs faster while the rate is higher. The rate hangs on the hour by a cosine and is multiplied in bursts.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dataplane.protocol.tiers import Tier
from ops.simulator.kernel.requests import Request

DAY_S = 86_400.0
_STEP_S = 60.0
"""The rate counts as constant for so long."""
_CHUNK = 4096

NameT = TypeVar("NameT")
IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lognormal token counts around a median, cut to 1 .. `most`. `spread`: the standard deviation of the logarithm."""

    median: float
    spread: float
    most: int

    @property
    def mean(self) -> float:
        """Their mean after the cut, but for the rounding to whole tokens."""
        log_median = math.log(self.median)
        below, above = math.log(self.most) - log_median, -log_median
        if not self.spread:
            return min(max(self.median, 1.0), self.most)
        between = _normal(below / self.spread - self.spread) - _normal(above / self.spread - self.spread)
        uncut = self.median * math.exp(self.spread**2 / 2) * between
        return uncut + self.most * _normal(-below / self.spread) + _normal(above / self.spread)

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        drawn = rng.lognormal(math.log(self.median), self.spread, count)
        return np.clip(np.rint(drawn), 1, self.most).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Burst:
    """From `start_s` on, for `duration_s`, the rate is `factor` times as high."""

    start_s: float
    duration_s: float
    factor: float


@dataclass(frozen=True, kw_only=True)
class Generated:
    """`rate_per_s`: of all models together, on average over a day. `cv`: the intervals' coefficient of variation.
    `day_swing`: the highest rate is 1 + this times the average, at `peak_hour`. `models`, `origins`, `tiers`: shares.
    """

    rate_per_s: float
    duration_s: float
    models: Mapping[str, float]
    origins: Mapping[str, float]
    tiers: Mapping[Tier, float]
    prompt: Lengths
    output: Lengths
    cv: float = 1.0
    day_swing: float = 0.0
    peak_hour: float = 14.0
    bursts: tuple[Burst, ...] = ()

    def rate_at(self, at_s: float) -> float:
        """Arrivals per second at a moment; 0 s is midnight."""
        angle = 2 * math.pi * (at_s / DAY_S - self.peak_hour / 24)
        rate_per_s = self.rate_per_s * (1 + self.day_swing * math.cos(angle))
        for burst in self.bursts:
            if burst.start_s <= at_s < burst.start_s + burst.duration_s:
                rate_per_s *= burst.factor
        return rate_per_s


def zipf(names: list[str], exponent: float) -> dict[str, float]:
    """Shares of names by rank: the k-th, from 1, has k ** -exponent, in proportion."""
    weights = [(rank + 1) ** -exponent for rank in range(len(names))]
    return {name: weight / sum(weights) for name, weight in zip(names, weights, strict=True)}


def generate(traffic: Generated, seed: int) -> Iterator[Request]:
    """All requests."""
    rng = np.random.default_rng(seed)
    clock = _Clock(traffic)
    due, shape = 0.0, 1 / traffic.cv**2
    for first in itertools.count(0, _CHUNK):
        dues = np.cumsum(np.append(due, rng.gamma(shape, 1 / shape, _CHUNK)))[1:]
        due = float(dues[-1])
        times_s = clock.times_s(dues).tolist()
        yield from map(
            Request,
            range(first, first + len(times_s)),
            times_s,
            draw_names(traffic.models, rng, _CHUNK).tolist(),
            draw_names(traffic.origins, rng, _CHUNK).tolist(),
            draw_names(traffic.tiers, rng, _CHUNK).tolist(),
            traffic.prompt.draw(rng, _CHUNK).tolist(),
            traffic.output.draw(rng, _CHUNK).tolist(),
        )
        if len(times_s) < _CHUNK:
            return


class _Clock:
    """When so many arrivals are expected to have come: the rate counts as constant between two edges."""

    def __init__(self, traffic: Generated) -> None:
        edges_s = {step * _STEP_S for step in range(math.ceil(traffic.duration_s / _STEP_S))} | {traffic.duration_s}
        for burst in traffic.bursts:
            edges_s |= {burst.start_s, burst.start_s + burst.duration_s}
        edges = np.array(sorted(edge_s for edge_s in edges_s if 0 <= edge_s <= traffic.duration_s))
        self._begins_s = edges[:-1]
        self._rates_per_s = np.array([traffic.rate_at(begin_s) for begin_s in self._begins_s.tolist()])
        self._passed = np.cumsum(np.append(0.0, np.diff(edges) * self._rates_per_s))

    def times_s(self, expected: FloatArray) -> FloatArray:
        """The moments of rising numbers of arrivals, as far as there are so many."""
        expected = expected[expected <= self._passed[-1]]
        steps = np.searchsorted(self._passed[1:], expected)
        times_s: FloatArray = self._begins_s[steps] + (expected - self._passed[steps]) / self._rates_per_s[steps]
        return times_s


def draw_names(shares: Mapping[NameT, float], rng: np.random.Generator, count: int) -> npt.NDArray[np.object_]:
    """So many of the names, by their shares."""
    names, weights = np.array(list(shares), dtype=object), np.array(list(shares.values()))
    return names[rng.choice(len(names), count, p=weights / weights.sum())]


def _normal(deviations: float) -> float:
    """The share of a normal distribution that lies below."""
    return math.erfc(-deviations / math.sqrt(2)) / 2
