"""Requests that a generator makes: a stream in the order of arrival, the same for the same seed.

Arrivals are a renewal process (gamma intervals; Poisson where cv is 1) in operational time, that is, in expected
arrivals: it runs faster while the rate is higher. The rate hangs on the hour by a cosine and is multiplied in bursts.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ops.simulator.kernel.requests import Request
from ops.simulator.traffic.traffic_parts import GeneratedPart

DAY_S = 86_400.0
_STEP_S = 60.0
"""The rate counts as constant for so long."""
_CHUNK = 4096

NameT = TypeVar("NameT")
FloatArray = npt.NDArray[np.float64]


def zipf(names: Sequence[str], exponent: float) -> dict[str, float]:
    """Shares of names by rank: the k-th, from 1, has k ** -exponent, in proportion."""
    weights = [(rank + 1) ** -exponent for rank in range(len(names))]
    return {name: weight / sum(weights) for name, weight in zip(names, weights, strict=True)}


def generate(traffic: GeneratedPart, models: Sequence[str], seed: int) -> Iterator[Request]:
    """The requests of synthetic traffic, in order of arrival."""
    rng = np.random.default_rng(seed)
    clock, shares = _Clock(traffic), zipf(models, traffic.zipf)
    due, shape = 0.0, 1 / traffic.cv**2
    for first in itertools.count(0, _CHUNK):
        dues = np.cumsum(np.append(due, rng.gamma(shape, 1 / shape, _CHUNK)))[1:]
        due = float(dues[-1])
        times_s = clock.times_s(dues).tolist()
        yield from map(
            Request,
            range(first, first + len(times_s)),
            times_s,
            draw_names(shares, rng, _CHUNK).tolist(),
            draw_names(traffic.origins, rng, _CHUNK).tolist(),
            draw_names(traffic.tiers, rng, _CHUNK).tolist(),
            traffic.prompt_tokens.draw(rng, _CHUNK).tolist(),
            traffic.output_tokens.draw(rng, _CHUNK).tolist(),
        )
        if len(times_s) < _CHUNK:
            return


def rate_at(traffic: GeneratedPart, at_s: float) -> float:
    """Arrivals per second at a moment; 0 s is midnight."""
    angle = 2 * math.pi * (at_s / DAY_S - traffic.peak_hour / 24)
    rate_per_s = traffic.rate_per_s * (1 + traffic.day_swing * math.cos(angle))
    for burst in traffic.bursts:
        if burst.start_s <= at_s < burst.start_s + burst.duration_s:
            rate_per_s *= burst.factor
    return rate_per_s


class _Clock:
    """The times of numbers of expected arrivals. The rate counts as constant between two edges."""

    def __init__(self, traffic: GeneratedPart) -> None:
        edges_s = {step * _STEP_S for step in range(math.ceil(traffic.duration_s / _STEP_S))} | {traffic.duration_s}
        for burst in traffic.bursts:
            edges_s |= {burst.start_s, burst.start_s + burst.duration_s}
        edges = np.array(sorted(edge_s for edge_s in edges_s if 0 <= edge_s <= traffic.duration_s))
        self._begins_s = edges[:-1]
        self._rates_per_s = np.array([rate_at(traffic, begin_s) for begin_s in self._begins_s.tolist()])
        self._passed = np.cumsum(np.append(0.0, np.diff(edges) * self._rates_per_s))

    def times_s(self, expected: FloatArray) -> FloatArray:
        """The times of ascending numbers of arrivals, up to the end."""
        expected = expected[expected <= self._passed[-1]]
        steps = np.searchsorted(self._passed[1:], expected)
        times_s: FloatArray = self._begins_s[steps] + (expected - self._passed[steps]) / self._rates_per_s[steps]
        return times_s


def draw_names(shares: Mapping[NameT, float], rng: np.random.Generator, count: int) -> npt.NDArray[np.object_]:
    """So many of the names, by their shares."""
    names, weights = np.array(list(shares), dtype=object), np.array(list(shares.values()))
    return names[rng.choice(len(names), count, p=weights / weights.sum())]
