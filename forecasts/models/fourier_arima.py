"""ARIMA on what a regression on Fourier terms of the day leaves."""

from collections.abc import Callable

import numpy as np

from forecasts.models.arima import ArimaOrder, as_fit, as_params, fit_order, refitted
from forecasts.models.baselines import DAY_S
from forecasts.models.forecaster import Forecaster, Params
from forecasts.series import DemandSeries, FloatArray
from forecasts.settings import ForecastSettings

FOURIER_PAIRS = 6
LOG_FLOOR_SHARE = 0.005
AFTER_THE_DAY = ArimaOrder(p=2, d=0, q=1)


def _fit(history: DemandSeries, settings: ForecastSettings, known: Params | None) -> Params:
    rest = _without_day(history, settings)[0][-history.buckets_in(settings.arima.history_s) :]
    if known is None:
        return as_params(fit_order(AFTER_THE_DAY, rest, settings.arima))
    return refitted(rest, settings, known)


def _path(history: DemandSeries, params: Params, settings: ForecastSettings) -> FloatArray:
    rest, ahead, unscale = _without_day(history, settings)
    recent = rest[-history.buckets_in(settings.arima.history_s) :]
    return unscale(ahead + as_fit(params).path(recent, settings.windows))


def _without_day(
    history: DemandSeries, settings: ForecastSettings
) -> tuple[FloatArray, FloatArray, Callable[[FloatArray], FloatArray]]:
    """Residuals of a regression on Fourier terms of the day, its values in the coming windows, and the inverse."""
    values, unscale = _logs_where_safe(history.values)
    phase = 2 * np.pi * np.arange(len(values) + settings.windows) / history.buckets_in(DAY_S)
    waves = [wave(pair * phase) for pair in range(1, FOURIER_PAIRS + 1) for wave in (np.sin, np.cos)]
    terms = np.column_stack([np.ones(len(phase)), *waves])
    known = ~np.isnan(values)
    rows = terms[: len(values)][known]
    learned = np.linalg.solve(rows.T @ rows + 1e-9 * np.eye(rows.shape[1]), rows.T @ values[known])
    fitted = terms @ learned
    return values - fitted[: len(values)], fitted[len(values) :], unscale


def _logs_where_safe(values: FloatArray) -> tuple[FloatArray, Callable[[FloatArray], FloatArray]]:
    """Logarithms if all known values are well above zero, else the values; and the inverse function."""
    known = values[~np.isnan(values)]
    if known.size and known.min() > LOG_FLOOR_SHARE * known.mean():
        return np.log(values), _bounded_exp
    return values, np.asarray


def _bounded_exp(logs: FloatArray) -> FloatArray:
    return np.exp(np.clip(logs, -50.0, 50.0))


FOURIER_ARIMA = Forecaster(name="Fourier + ARIMA", path=_path, fit=_fit, mean_path=True, history_min_s=2 * DAY_S)
