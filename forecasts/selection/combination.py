"""One forecast from several: a mean of logarithms, weighted by past errors, in which none is far from the others."""

import math
from collections.abc import Mapping

import numpy as np

from forecasts.models.baselines import scaled_to_peak
from forecasts.selection.past import weighted_quantile
from forecasts.series import FloatArray

COMBINATION = "combination"
NEAR_BEST = 2.0
ERROR_POWER = 8.0
FAR_LOG = 0.4
"""A peak further than this from the weighted median, in logarithms, counts as if it were this far."""


def combination_weights(errors: Mapping[str, float]) -> dict[str, float]:
    """Weights that sum to 1, as error ** -8, for those whose error is at most twice the smallest."""
    best = max(min(errors.values()), 1e-9)
    near = {name: max(error, 1e-9) for name, error in errors.items() if error <= NEAR_BEST * best}
    powers = {name: (best / error) ** ERROR_POWER for name, error in near.items()}
    total = sum(powers.values())
    return {name: power / total for name, power in powers.items()}


def combined_path(paths: Mapping[str, FloatArray], weights: Mapping[str, float], floor: float) -> FloatArray:
    """The combined peak in the weighted mean of the shapes; shape (windows,).

    Peaks are combined by the mean of log(peak + floor), each confined to the neighbourhood of their weighted median: a
    member that collapses, or explodes, moves the mean by no more than its weight times `FAR_LOG`. Where members see
    demand either on or off, the mean stays with the side that has most of the weight.
    """
    names = list(weights)
    shares = np.array([weights[name] for name in names])
    peaks = np.array([float(paths[name].max()) for name in names])
    logs = np.log(peaks + floor)
    middle = weighted_quantile(logs, shares, 0.5)
    peak = max(0.0, math.exp(float(np.clip(logs, middle - FAR_LOG, middle + FAR_LOG) @ shares)) - floor)
    shapes = [
        paths[name] / peak_of if peak_of > 0 else np.ones_like(paths[name])
        for name, peak_of in zip(names, peaks, strict=True)
    ]
    return scaled_to_peak(np.asarray(shares @ np.array(shapes)), peak)
