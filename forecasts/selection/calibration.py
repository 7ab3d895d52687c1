"""From a forecast peak to its upper quantile, by the ratios of past peaks to past forecasts.

The confidence bands of models are not used: they are too narrow. The upper ratio is a weighted quantile of past ratios
"actual peak / forecast peak", both with a floor added, since demand may be zero. Ratios scatter more at low demand, and
behind a forecast of silence stands demand that may begin; so forecasts of a similar size have the most weight, and
recent ones more than old. The level of the quantile is adapted online so that the covered share becomes the requested
one (adaptive conformal inference, Gibbs and Candes 2021): up after a miss, down a little after a hit. The step is
large, because three days of hours are to show the requested share.
"""

from collections.abc import Sequence

import numpy as np

from forecasts.selection.past import weighted_quantiles
from forecasts.series import FloatArray

STEP = 0.1
LEVEL_MIN = 0.5
MISS_SHARE_MIN = 0.05
"""Least share of misses, over the requested share: above that level the quantile is the largest ratio only."""
HALF_LIFE = 100.0
SIMILAR_LOG_SIZE = 0.7
SPREAD = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
"""Levels at which a forecast gives its distribution, as past ratios have it, without the adapted level."""


def log_ratio_quantiles(
    log_ratios: FloatArray, log_forecasts: FloatArray, log_now: float, levels: Sequence[float]
) -> FloatArray:
    """The weighted quantiles of past log ratios at `levels`; shape (levels,).

    Args:
        log_ratios: shape (origins,), oldest first: log(actual peak / forecast peak).
        log_forecasts: shape (origins,): logarithms of those forecasts.
        log_now: logarithm of the forecast whose quantiles are needed.
        levels: the quantiles, below 1.

    Raises:
        ValueError: no past ratios.
    """
    ages = np.arange(len(log_ratios))[::-1]
    distance = (log_forecasts - log_now) / SIMILAR_LOG_SIZE
    nearest = float(np.min(np.abs(distance), initial=np.inf))
    weights = 0.5 ** (ages / HALF_LIFE) * np.exp(-0.5 * (distance**2 - nearest**2))
    return weighted_quantiles(log_ratios, weights, np.array(levels))


def adapted_level(level: float, quantile: float, *, covered: bool) -> float:
    """The level for the next origin, after a peak was covered or missed."""
    moved = level + STEP * ((quantile - 1.0) if covered else quantile)
    return float(np.clip(moved, LEVEL_MIN, 1.0 - MISS_SHARE_MIN * (1.0 - quantile)))
