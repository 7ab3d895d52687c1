"""Three ARIMA forecasters: plain, after removal of Fourier terms of the day, and on differences from yesterday.

A state-space SARIMA with a season of 288 buckets takes minutes; the differences from yesterday of a (2,0,1)(0,1,0) are
computed here instead and leave a plain ARMA(2,1): the same likelihood in well under a second.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from forecasts.models.arima import ArimaFit, ArimaOrder, fit_arima, fit_order
from forecasts.models.baselines import DAY_S
from forecasts.models.forecaster import Forecaster, ForecastError, Params
from forecasts.series import DemandSeries, FloatArray
from forecasts.settings import ForecastSettings

FOURIER_PAIRS = 6
LOG_FLOOR_SHARE = 0.005
AFTER_THE_SEASON = ArimaOrder(p=2, d=0, q=1)


def _fit_plain(history: DemandSeries, settings: ForecastSettings, known: Params | None) -> Params:
    values = history.last(settings.arima.history_s).values
    if known is None:
        return _as_params(fit_arima(values, settings.arima))
    return _refitted(values, settings, known)


def _plain_path(history: DemandSeries, params: Params, settings: ForecastSettings) -> FloatArray:
    return _as_fit(params).path(history.last(settings.arima.history_s).values, settings.windows)


def _fit_fourier(history: DemandSeries, settings: ForecastSettings, known: Params | None) -> Params:
    rest = _without_day(history, settings)[0][-history.buckets_in(settings.arima.history_s) :]
    return _after_the_season(rest, settings, known)


def _fourier_path(history: DemandSeries, params: Params, settings: ForecastSettings) -> FloatArray:
    rest, ahead, unscale = _without_day(history, settings)
    recent = rest[-history.buckets_in(settings.arima.history_s) :]
    return unscale(ahead + _as_fit(params).path(recent, settings.windows))


def _fit_seasonal(history: DemandSeries, settings: ForecastSettings, known: Params | None) -> Params:
    return _after_the_season(_from_yesterday(history, settings)[0], settings, known)


def _seasonal_path(history: DemandSeries, params: Params, settings: ForecastSettings) -> FloatArray:
    differences, yesterday, unscale = _from_yesterday(history, settings)
    return unscale(yesterday + _as_fit(params).path(differences, settings.windows))


def _without_day(
    history: DemandSeries, settings: ForecastSettings
) -> tuple[FloatArray, FloatArray, Callable[[FloatArray], FloatArray]]:
    """Residuals of a regression on Fourier terms of the day, its values in the coming windows, and the inverse."""
    values, unscale = _logs_where_safe(history.values)
    phase = 2 * np.pi * np.arange(len(values) + settings.windows) / history.buckets_in(DAY_S)
    waves = [wave(pair * phase) for pair in range(1, FOURIER_PAIRS + 1) for wave in (np.sin, np.cos)]
    terms = np.column_stack([np.ones(len(phase)), *waves])
    known = ~np.isnan(values)
    learned = np.linalg.lstsq(terms[: len(values)][known], values[known], rcond=None)[0]
    fitted = terms @ learned
    return values - fitted[: len(values)], fitted[len(values) :], unscale


def _from_yesterday(
    history: DemandSeries, settings: ForecastSettings
) -> tuple[FloatArray, FloatArray, Callable[[FloatArray], FloatArray]]:
    """Differences from a day before, the hour that followed a day ago, and the inverse."""
    values, unscale = _logs_where_safe(history.values)
    per_day = history.buckets_in(DAY_S)
    differences = (values[per_day:] - values[:-per_day])[-history.buckets_in(settings.arima.history_s) :]
    yesterday = values[len(values) - per_day :][: settings.windows]
    if np.isnan(yesterday).all():
        raise ForecastError("this hour is a gap on the day before")
    return differences, np.where(np.isnan(yesterday), np.nanmean(yesterday), yesterday), unscale


def _logs_where_safe(values: FloatArray) -> tuple[FloatArray, Callable[[FloatArray], FloatArray]]:
    """Logarithms if all known values are well above zero, else the values; and the inverse function."""
    known = values[~np.isnan(values)]
    if known.size and known.min() > LOG_FLOOR_SHARE * known.mean():
        return np.log(values), _bounded_exp
    return values, np.asarray


def _bounded_exp(logs: FloatArray) -> FloatArray:
    return np.exp(np.clip(logs, -50.0, 50.0))


def _after_the_season(values: FloatArray, settings: ForecastSettings, known: Params | None) -> Params:
    if known is None:
        return _as_params(fit_order(AFTER_THE_SEASON, values, settings.arima))
    return _refitted(values, settings, known)


def _refitted(values: FloatArray, settings: ForecastSettings, known: Params) -> Params:
    before = _as_fit(known)
    return _as_params(fit_order(before.order, values, settings.arima, start=before.params))


def _as_params(fit: ArimaFit) -> dict[str, Any]:
    order = [fit.order.p, fit.order.d, fit.order.q]
    return {"order": order, "params": fit.params.tolist(), "scale": fit.scale, "aic": fit.aic}


def _as_fit(params: Params) -> ArimaFit:
    p, d, q = params["order"]
    return ArimaFit(
        order=ArimaOrder(p=p, d=d, q=q),
        params=np.array(params["params"], dtype=np.float64),
        scale=params["scale"],
        aic=params["aic"],
    )


ARIMA = Forecaster(name="ARIMA", path=_plain_path, fit=_fit_plain, mean_path=True, history_min_s=4 * 3600.0)
FOURIER_ARIMA = Forecaster(
    name="Fourier + ARIMA", path=_fourier_path, fit=_fit_fourier, mean_path=True, history_min_s=2 * DAY_S
)
SEASONAL_ARIMA = Forecaster(
    name="seasonal ARIMA", path=_seasonal_path, fit=_fit_seasonal, mean_path=True, history_min_s=1.5 * DAY_S
)
