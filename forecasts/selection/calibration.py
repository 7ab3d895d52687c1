"""From a forecast peak to its upper quantile, by what past peaks were to past forecasts.

No band of a model is used: they are too narrow (`algorithms.md`, section 1). The upper ratio is a weighted quantile of
past ratios "peak that came / peak said". Ratios scatter more where there is little demand, so forecasts of a size near
today's count most, and recent ones more than old. Which quantile is read is adapted online so that the share covered
comes out as asked (adaptive conformal inference, Gibbs and Candes 2021): up after a miss, down a little after a hit.
"""

import numpy as np

from forecasts.selection.past import weighted_quantile
from forecasts.series import FloatArray

STEP = 0.02
LEVEL_MIN = 0.5
MISS_SHARE_MIN = 0.3
"""Misses at the highest level, over the misses asked for: beyond it a level is the one largest ratio seen."""
HALF_LIFE = 100.0
SIMILAR_LOG_SIZE = 0.7


def upper_log_ratio(log_ratios: FloatArray, log_said: FloatArray, log_now: float, level: float) -> float:
    """The weighted quantile `level` of past log ratios, counted as if the coming one were the largest.

    Args:
        log_ratios: shape (origins,), oldest first: log(peak that came / peak said).
        log_said: shape (origins,): logarithms of those forecasts.
        log_now: logarithm of the forecast to put an upper quantile on.
        level: which quantile, below 1.

    Raises:
        ValueError: no past ratios.
    """
    ages = np.arange(len(log_ratios))[::-1]
    distance = (log_said - log_now) / SIMILAR_LOG_SIZE
    nearest = float(np.min(np.abs(distance), initial=np.inf))
    weights = 0.5 ** (ages / HALF_LIFE) * np.exp(-0.5 * (distance**2 - nearest**2))
    count = float(weights.sum() / weights.max(initial=1e-300))
    return weighted_quantile(log_ratios, weights, min(1.0, level * (count + 1.0) / max(count, 1.0)))


def adapted_level(level: float, quantile: float, *, covered: bool) -> float:
    """The level for the next origin, after one was covered or missed."""
    moved = level + STEP * ((quantile - 1.0) if covered else quantile)
    return float(np.clip(moved, LEVEL_MIN, 1.0 - MISS_SHARE_MIN * (1.0 - quantile)))
