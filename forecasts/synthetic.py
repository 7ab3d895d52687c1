"""Synthetic demand with daily and weekly patterns, time zones, bursts, and a Zipf distribution over models.

The same arguments give the same rows, and an endpoint's rows do not depend on the other regions.
"""

from collections.abc import Mapping, Sequence
from zlib import crc32

import numpy as np

from forecasts.series import DemandRow, FloatArray

MINUTES_PER_DAY = 1440
BUSIEST_HOUR = 15.0
NIGHT_SHARE = 0.25
WEEKEND_SHARE = 0.6
ZIPF_EXPONENT = 1.1
NOISE_SIGMA = 0.15
NOISE_MEMORY = 0.9
BURSTS_PER_DAY = 2.0


def generate_demand(
    regions: Sequence[str],
    models: Sequence[str],
    days: float,
    seed: int,
    *,
    start_s: float = 0.0,
    peak_tokens_per_s: float = 20_000.0,
    utc_offsets_h: Mapping[str, float] | None = None,
) -> list[DemandRow]:
    """Demand per minute of every model in every region, ordered by region, model and time.

    Args:
        regions: names; without `utc_offsets_h` their time zones are spread evenly.
        models: names, the most popular first; popularity is rank ** -1.1.
        days: length; the day of `start_s` counts as a Monday in UTC.
        seed: of the noise and the bursts.
        start_s: Unix time of the first minute.
        peak_tokens_per_s: approximate sum over the models of a region in the busiest hour of a week day.
        utc_offsets_h: offset of each region from UTC.

    Raises:
        ValueError: no regions or models, a repeated name, or days not positive.
    """
    for field, names in (("regions", regions), ("models", models)):
        if not names or len(set(names)) != len(names):
            raise ValueError(f"{field} must be one or more different names, got {list(names)}")
    if not days > 0:
        raise ValueError(f"days must be positive, got {days}")
    if utc_offsets_h is None:
        utc_offsets_h = {region: 24.0 * index / len(regions) for index, region in enumerate(regions)}
    popularity = np.arange(1, len(models) + 1) ** -ZIPF_EXPONENT
    popularity /= popularity.sum()
    minutes = np.arange(round(days * MINUTES_PER_DAY))
    rows: list[DemandRow] = []
    for region in regions:
        rhythm = _rhythm(minutes / 60.0 + utc_offsets_h[region])
        for model, share in zip(models, popularity, strict=True):
            rng = np.random.default_rng([seed, crc32(region.encode()), crc32(model.encode())])
            demand = peak_tokens_per_s * share * rhythm * _noise(len(minutes), rng) * _bursts(len(minutes), rng)
            rows += [
                DemandRow(start_s=start_s + 60.0 * minute, region=region, model=model, tokens_per_s=round(value, 3))
                for minute, value in enumerate(demand.tolist())
            ]
    return rows


def _rhythm(local_hours: FloatArray) -> FloatArray:
    """The daily and weekly pattern, 1 in the busiest hour of a week day."""
    day = 0.5 + 0.5 * np.cos(2 * np.pi * (local_hours - BUSIEST_HOUR) / 24.0)
    weekend = (local_hours // 24) % 7 >= 5
    return np.asarray((NIGHT_SHARE + (1 - NIGHT_SHARE) * day**1.5) * np.where(weekend, WEEKEND_SHARE, 1.0))


def _noise(minutes: int, rng: np.random.Generator) -> FloatArray:
    """A factor around 1: an autoregressive process over minutes, and independent noise."""
    steps = rng.normal(0.0, NOISE_SIGMA * np.sqrt(1 - NOISE_MEMORY**2), minutes)
    level = np.empty(minutes)
    last = rng.normal(0.0, NOISE_SIGMA)
    for minute, step in enumerate(steps):
        last = NOISE_MEMORY * last + step
        level[minute] = last
    return np.exp(level + rng.normal(0.0, NOISE_SIGMA / 2, minutes))


def _bursts(minutes: int, rng: np.random.Generator) -> FloatArray:
    """A factor of 1, and of 1.5 to 3 for five to twenty minutes a few times a day."""
    factor = np.ones(minutes)
    for _ in range(rng.poisson(BURSTS_PER_DAY * minutes / MINUTES_PER_DAY)):
        first, length = int(rng.integers(minutes)), int(rng.integers(5, 21))
        factor[first : first + length] *= rng.uniform(1.5, 3.0)
    return factor
