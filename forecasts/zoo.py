"""A zoo of hard series: generated demand on which forecasts fail, by kind and seed.

Every series is a daily rhythm with noise of a size, scale and phase of its own, to which its kind does something once
or again and again. What happens once happens between 45 and 85 % of the way through, so that the second half of a
series, which a backtest judges, holds the change and the time after it. The same arguments give the same series.
"""

from collections.abc import Callable, Mapping
from zlib import crc32

import numpy as np

from forecasts.series import DemandSeries, FloatArray

BUCKET_S = 300.0
PER_HOUR = 12
PER_DAY = 24 * PER_HOUR
DAYS = 10
MONDAY_S = 1_731_283_200.0

Rng = np.random.Generator
Kind = Callable[[FloatArray, Rng], FloatArray]
"""Takes usual demand, shape (buckets,), and gives what this kind makes of it."""


def hard_series(kind: str, seed: int, *, days: int = DAYS) -> DemandSeries:
    """One series of five-minute buckets that begins on a Monday.

    Args:
        kind: a name in `KINDS` or `HELD_OUT_KINDS`.
        seed: of everything random in it.
        days: its length.

    Raises:
        ValueError: the kind is not known, or fewer than four days are asked for.
    """
    makers = {**KINDS, **HELD_OUT_KINDS}
    if kind not in makers:
        raise ValueError(f"kind: {kind!r} is none of {', '.join(makers)}")
    if days < 4:
        raise ValueError(f"days must be at least 4, got {days}")
    rng = np.random.default_rng([seed, crc32(kind.encode())])
    values = makers[kind](usual_demand(days * PER_DAY, rng), rng)
    return DemandSeries(start_s=MONDAY_S, bucket_s=BUCKET_S, values=values)


def usual_demand(buckets: int, rng: Rng) -> FloatArray:
    """A daily rhythm with slow and fast noise, shape (buckets,); its size is from 100 to 100,000 tokens/s."""
    hours = np.arange(buckets) / PER_HOUR
    depth, phase = rng.uniform(0.1, 0.7), rng.uniform(0, 24)
    rhythm = 1 + depth * np.cos(2 * np.pi * (hours - phase) / 24)
    return np.asarray(10 ** rng.uniform(2, 5) * rhythm * _noise(buckets, rng))


def _noise(buckets: int, rng: Rng) -> FloatArray:
    slow = _autoregression(buckets, memory=0.97, sigma=rng.uniform(0.02, 0.2), rng=rng)
    return np.exp(slow + rng.normal(0, rng.uniform(0.02, 0.2), buckets))


def _autoregression(buckets: int, *, memory: float, sigma: float, rng: Rng) -> FloatArray:
    steps = rng.normal(0, sigma * np.sqrt(1 - memory**2), buckets)
    level = np.empty(buckets)
    last = rng.normal(0, sigma)
    for bucket, step in enumerate(steps):
        last = memory * last + step
        level[bucket] = last
    return level


def _moment(buckets: int, rng: Rng) -> int:
    return int(rng.uniform(0.45, 0.85) * buckets)


def _spells(buckets: int, rng: Rng, *, on_hours: float, off_hours: float) -> FloatArray:
    """1 and 0 in turn, for exponentially distributed times of these means."""
    state, filled, turns = bool(rng.integers(2)), 0, []
    while filled < buckets:
        length = 1 + int(rng.exponential(PER_HOUR * (on_hours if state else off_hours)))
        turns.append(np.full(length, float(state)))
        filled, state = filled + length, not state
    return np.concatenate(turns)[:buckets]


def _steady(usual: FloatArray, rng: Rng) -> FloatArray:
    """Nothing happens."""
    return usual


def _shift(usual: FloatArray, rng: Rng) -> FloatArray:
    """The scale changes by a factor of 0.001 to 1000, and stays."""
    factor = float(rng.choice([0.001, 0.01, 0.1, 0.3, 3, 10, 100, 1000]))
    return np.where(np.arange(len(usual)) < _moment(len(usual), rng), usual, usual * factor)


def _ramp(usual: FloatArray, rng: Rng) -> FloatArray:
    """Growth of 10 to 1000 times within half a day to three days."""
    length = rng.uniform(0.5, 3) * PER_DAY
    share = np.clip((np.arange(len(usual)) - _moment(len(usual), rng)) / length, 0, 1)
    return np.asarray(usual * 10 ** (rng.uniform(1, 3) * share))


def _fade(usual: FloatArray, rng: Rng) -> FloatArray:
    """Demand dies down 1,000-fold over the last week."""
    share = np.clip((np.arange(len(usual)) - (len(usual) - 7 * PER_DAY)) / (7 * PER_DAY), 0, 1)
    return np.asarray(usual * 10 ** (-3 * share))


def _switching(usual: FloatArray, rng: Rng) -> FloatArray:
    """Switches between 100 and 100,000 tokens/s, each for 2 to 8 hours in the mean."""
    on = _spells(len(usual), rng, on_hours=rng.uniform(2, 8), off_hours=rng.uniform(2, 8))
    return np.where(on > 0, 100_000.0, 100.0) * _noise(len(usual), rng)


def _on_off(usual: FloatArray, rng: Rng) -> FloatArray:
    """On for some hours, then without any demand for some hours, at no fixed time."""
    return usual * _spells(len(usual), rng, on_hours=rng.uniform(1, 6), off_hours=rng.uniform(2, 12))


def _office_hours(usual: FloatArray, rng: Rng) -> FloatArray:
    """On at fixed hours only, give or take a quarter of an hour a day."""
    days, first, length = len(usual) // PER_DAY, rng.integers(0, 14), rng.integers(4, 11)
    on = np.zeros(len(usual))
    for day in range(days):
        begin = day * PER_DAY + int(PER_HOUR * (first + rng.normal(0, 0.25)))
        on[max(0, begin) : max(0, begin + int(PER_HOUR * (length + rng.normal(0, 0.25))))] = 1
    return usual * on


def _launch(usual: FloatArray, rng: Rng) -> FloatArray:
    """No demand, then growth to full size within 1 to 24 hours."""
    length = rng.uniform(1, 24) * PER_HOUR
    return np.asarray(usual * np.clip((np.arange(len(usual)) - _moment(len(usual), rng)) / length, 0, 1))


def _death(usual: FloatArray, rng: Rng) -> FloatArray:
    """Demand ends, within an hour, for good."""
    left = np.clip(1 - (np.arange(len(usual)) - _moment(len(usual), rng)) / PER_HOUR, 0, 1)
    return np.asarray(usual * left)


def _holiday(usual: FloatArray, rng: Rng) -> FloatArray:
    """One or two days at 5 to 30 % of the usual, which then returns."""
    day = int(rng.integers(len(usual) // PER_DAY // 2, len(usual) // PER_DAY - 2))
    values = usual.copy()
    values[day * PER_DAY : (day + int(rng.integers(1, 3))) * PER_DAY] *= rng.uniform(0.05, 0.3)
    return values


def _missing_days(usual: FloatArray, rng: Rng) -> FloatArray:
    """A gap of one to two days, and gaps of some hours."""
    values = usual.copy()
    for hours in (rng.uniform(24, 48), *rng.uniform(0.5, 8, 3)):
        first = _moment(len(usual), rng)
        values[first : first + int(hours * PER_HOUR)] = np.nan
    return values


def _daily_burst(usual: FloatArray, rng: Rng) -> FloatArray:
    """10 to 50 times the usual for 15 to 60 minutes once a day, at the same hour give or take 20 minutes."""
    factor, hour, length = rng.uniform(10, 50), rng.uniform(1, 22), int(rng.integers(3, 13))
    values = usual.copy()
    for day in range(len(usual) // PER_DAY):
        first = day * PER_DAY + int(PER_HOUR * (hour + rng.normal(0, 1 / 3)))
        values[first : first + length] *= factor
    return values


def _silent_week(usual: FloatArray, rng: Rng) -> FloatArray:
    """Zeros for the week in the middle, except in the last part, or all of the rest if the series is shorter."""
    values, first = usual.copy(), int(1.5 * PER_DAY)
    values[first : first + 7 * PER_DAY] = 0.0
    return values


def _two_shifts(usual: FloatArray, rng: Rng) -> FloatArray:
    """Another scale for 6 to 30 hours, then back."""
    first = _moment(len(usual), rng)
    values = usual.copy()
    values[first : first + int(rng.uniform(6, 30) * PER_HOUR)] *= 10 ** (rng.choice([-1, 1]) * rng.uniform(0.7, 3))
    return values


def _wandering(usual: FloatArray, rng: Rng) -> FloatArray:
    """A level without a rhythm that wanders by about a factor of two to ten a day."""
    steps = rng.normal(0, rng.uniform(0.7, 2.3) / np.sqrt(PER_DAY), len(usual))
    return np.asarray(1000 * np.exp(np.cumsum(steps)) * _noise(len(usual), rng))


def _sparse(usual: FloatArray, rng: Rng) -> FloatArray:
    """Single requests, 0.2 to 3 an hour, of lognormal sizes."""
    counts = rng.poisson(rng.uniform(0.2, 3) / PER_HOUR, len(usual))
    return np.asarray(counts * rng.lognormal(2, 0.8, len(usual)))


def _sawtooth(usual: FloatArray, rng: Rng) -> FloatArray:
    """Rises 3 to 30 times over 5 to 17 hours, drops, and begins again: a rhythm that is not a day's."""
    period = rng.uniform(5, 17) * PER_HOUR
    share = (np.arange(len(usual)) / period) % 1
    return np.asarray(1000 * 10 ** (rng.uniform(0.5, 1.5) * share) * _noise(len(usual), rng))


def _slow_spells(usual: FloatArray, rng: Rng) -> FloatArray:
    """On for a day and off for a day or so, at 1 % of the usual."""
    on = _spells(len(usual), rng, on_hours=rng.uniform(12, 30), off_hours=rng.uniform(12, 30))
    return usual * np.where(on > 0, 1.0, 0.01)


def _heavy_tail(usual: FloatArray, rng: Rng) -> FloatArray:
    """Every five minutes another size, by a lognormal distribution with a long tail."""
    return usual * rng.lognormal(0, rng.uniform(0.5, 1.2), len(usual))


KINDS: Mapping[str, Kind] = {
    "steady": _steady,
    "shift": _shift,
    "ramp": _ramp,
    "fade": _fade,
    "switching": _switching,
    "on and off": _on_off,
    "office hours": _office_hours,
    "launch": _launch,
    "death": _death,
    "holiday": _holiday,
    "missing days": _missing_days,
    "daily burst": _daily_burst,
    "silent week": _silent_week,
}
"""The kinds that forecasts were tuned on, with other seeds than those they are judged on."""

HELD_OUT_KINDS: Mapping[str, Kind] = {
    "two shifts": _two_shifts,
    "wandering": _wandering,
    "sparse": _sparse,
    "sawtooth": _sawtooth,
    "slow spells": _slow_spells,
    "heavy tail": _heavy_tail,
}
"""The kinds that no setting was chosen on."""
