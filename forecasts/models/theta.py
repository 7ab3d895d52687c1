"""Theta on the series over its typical day: exponential smoothing with half the slope of a straight line."""

import numpy as np
import pandas as pd

from forecasts.models.baselines import DAY_S
from forecasts.models.forecaster import Forecaster, ForecastError, Params
from forecasts.series import DemandSeries, FloatArray
from forecasts.settings import ForecastSettings
from forecasts.windows import known_mean

ALPHAS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)


def _theta_fit(history: DemandSeries, settings: ForecastSettings, known: Params | None) -> Params:
    return {"alpha": _best_alpha(_without_gaps(_theta_rest(history, settings)[0]))}


def _theta_path(history: DemandSeries, params: Params, settings: ForecastSettings) -> FloatArray:
    """The mean of the regression line and the exponential smoothing: smoothing with half the slope of the line.

    Hyndman and Billah (2003), "Unmasking the Theta method".
    """
    gappy, profile = _theta_rest(history, settings)
    rest, alpha = _without_gaps(gappy), float(params["alpha"])
    slope = float(np.polyfit(np.arange(len(rest)), rest, 1)[0])
    ahead = np.arange(settings.windows) + (1 - (1 - alpha) ** len(rest)) / alpha
    return (float(_levels(rest, alpha)[-1]) + slope / 2 * ahead) * profile


def _theta_rest(history: DemandSeries, settings: ForecastSettings) -> tuple[FloatArray, FloatArray]:
    """The series over the typical day's profile, and that profile over the coming windows."""
    per_day = history.buckets_in(DAY_S)
    whole = history.values[len(history.values) % per_day :].reshape(-1, per_day)
    day_means = known_mean(whole.T)
    if not (day_means > 0).any():
        raise ForecastError("no demand in any whole day")
    profile = known_mean(whole / np.where(day_means > 0, day_means, np.nan)[:, None])
    if not (profile > 0).all():
        raise ForecastError("a time of day without demand, or unknown, on every day")
    return (whole / profile).ravel(), profile[: settings.windows]


def _without_gaps(values: FloatArray) -> FloatArray:
    known = ~np.isnan(values)
    if not known.any():
        raise ForecastError("every bucket is a gap")
    indices = np.arange(len(values))
    return np.interp(indices, indices[known], values[known])


def _best_alpha(values: FloatArray) -> float:
    return min(ALPHAS, key=lambda alpha: float(np.sum((values[1:] - _levels(values, alpha)[:-1]) ** 2)))


def _levels(values: FloatArray, alpha: float) -> FloatArray:
    """Simple exponential smoothing that starts at the first value; shape of `values`."""
    return np.asarray(pd.Series(values).ewm(alpha=alpha, adjust=False).mean(), dtype=np.float64)


THETA = Forecaster(name="Theta", path=_theta_path, fit=_theta_fit, mean_path=True, history_min_s=2 * DAY_S)
