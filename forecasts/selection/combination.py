"""One forecast from several: their geometric mean, weighted by past errors."""

import math
from collections.abc import Mapping

import numpy as np

from forecasts.models.baselines import scaled_to_peak
from forecasts.series import FloatArray

COMBINATION = "combination"
NEAR_BEST = 1.15
ERROR_POWER = 4.0


def combination_weights(errors: Mapping[str, float]) -> dict[str, float]:
    """Weights that sum to 1, as error ** -4, for those whose error is at most 1.15 times the smallest."""
    best = max(min(errors.values()), 1e-9)
    near = {name: max(error, 1e-9) for name, error in errors.items() if error <= NEAR_BEST * best}
    powers = {name: (best / error) ** ERROR_POWER for name, error in near.items()}
    total = sum(powers.values())
    return {name: power / total for name, power in powers.items()}


def combined_path(paths: Mapping[str, FloatArray], weights: Mapping[str, float]) -> FloatArray:
    """The weighted geometric mean of the peaks in the weighted mean of the shapes; shape (windows,).

    It is zero if any peak is zero, as a geometric mean.
    """
    peaks = {name: float(paths[name].max()) for name in weights}
    if min(peaks.values()) <= 0:
        return np.zeros_like(next(iter(paths.values())))
    shape = np.sum([weight * paths[name] / peaks[name] for name, weight in weights.items()], axis=0)
    return scaled_to_peak(shape, math.exp(sum(weight * math.log(peaks[name]) for name, weight in weights.items())))
