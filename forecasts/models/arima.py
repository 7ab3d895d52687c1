"""ARIMA with orders by AIC and bounded fit time.

Fitting every order by maximum likelihood takes about ten seconds a series. The order grid is therefore ranked first by
Hannan and Rissanen's two regressions (a long autoregression gives residuals; a second one uses them as the
moving-average terms), which cost milliseconds, and only the best few are fitted exactly; AIC chooses among those.
"""

import itertools
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from forecasts.models.forecaster import Forecaster, ForecastError, Params
from forecasts.series import DemandSeries, FloatArray
from forecasts.settings import ArimaSettings, ForecastSettings

LONG_AUTOREGRESSION = 12
RUN_MIN = 144
"""Values after the newest gap that make what was before it unimportant."""


@dataclass(frozen=True, kw_only=True, order=True)
class ArimaOrder:
    """Autoregressive terms, differences, moving-average terms."""

    p: int
    d: int
    q: int

    def __str__(self) -> str:
        return f"ARIMA({self.p},{self.d},{self.q})"


@dataclass(frozen=True, kw_only=True, eq=False)
class ArimaFit:
    """An order and its parameters, fitted to values divided by `scale`: reusable on later values."""

    order: ArimaOrder
    params: FloatArray
    aic: float
    scale: float

    def path(self, values: FloatArray, windows: int) -> FloatArray:
        """Filter the values with these parameters, without a refit, and forecast from their end.

        Returns:
            Shape (windows,), in the values' unit; may be negative or very large, the caller clips.

        Raises:
            ForecastError: the filter cannot run on these values.
        """
        scaled = values / self.scale
        gaps = np.flatnonzero(np.isnan(scaled))
        run = scaled[gaps[-1] + 1 :] if gaps.size else scaled
        if len(run) < min(RUN_MIN, len(scaled)):
            return _filtered_ahead(scaled, self, windows) * self.scale
        return _ahead(run, self, windows) * self.scale


def fit_arima(values: FloatArray, settings: ArimaSettings) -> ArimaFit:
    """Choose the order by AIC and estimate its parameters.

    Args:
        values: shape (buckets,), any sign, NaN = gap.
        settings: bounds of the search.

    Raises:
        ForecastError: the series is too short, all gaps or constant, or no order could be fitted.
    """
    scale = _scale(values)
    fits, failures = [], []
    for order in _shortlist(values / scale, settings):
        try:
            fits.append(_fit_one(values / scale, scale, order, settings.iterations_max))
        except ForecastError as error:
            failures.append(str(error))
    if not fits:
        raise ForecastError("; ".join(failures) or "too few known points for any order")
    return min(fits, key=lambda fit: (fit.aic, fit.order))


def fit_order(
    order: ArimaOrder, values: FloatArray, settings: ArimaSettings, start: FloatArray | None = None
) -> ArimaFit:
    """The parameters of a given order; a `start` from an earlier fit makes it fast.

    Raises:
        ForecastError: the fit fails on these values.
    """
    scale = _scale(values)
    return _fit_one(values / scale, scale, order, settings.iterations_max, start=start)


def _scale(values: FloatArray) -> float:
    known = values[~np.isnan(values)]
    if known.size == 0:
        raise ForecastError("every bucket is a gap")
    if np.ptp(known) == 0:
        raise ForecastError("the series is constant")
    return float(np.abs(known).mean())


def _differenced(values: FloatArray, d: int) -> FloatArray:
    """Drop or difference away the first point, so that AIC compares the same observations whatever d is."""
    return np.diff(values) if d else values[1:]


def _ahead(run: FloatArray, fit: ArimaFit, windows: int) -> FloatArray:
    """The forecast means after values without a gap.

    One linear recursion gives the innovations, which costs a hundredth of a state-space filter; the first ones, whose
    predecessors are not known, are zero, and what that changes decays with the moving-average terms.
    """
    from scipy.signal import lfilter  # noqa: PLC0415 - a gateway imports this module and needs no filter

    p, d, q = fit.order.p, fit.order.d, fit.order.q
    constant = 0.0 if d else float(fit.params[0])
    ar, ma = fit.params[len(fit.params) - p - q :][:p], fit.params[len(fit.params) - q :]
    steps = np.diff(run) if d else run
    unexplained = steps[p:] - constant
    for lag in range(1, p + 1):
        unexplained = unexplained - ar[lag - 1] * steps[p - lag : len(steps) - lag]
    innovations = np.append(np.zeros(q), lfilter([1.0], np.append(1.0, ma), unexplained))
    known, path = list(steps[len(steps) - p :]), np.empty(windows)
    shocks = list(innovations[len(innovations) - q :]) if q else []
    for window in range(windows):
        step = constant + float(ar @ known[::-1][:p]) + float(ma @ shocks[::-1][:q])
        path[window] = step
        known.append(step)
        shocks.append(0.0)
    return run[-1] + np.cumsum(path) if d else path


def _filtered_ahead(values: FloatArray, fit: ArimaFit, windows: int) -> FloatArray:
    """The forecast means by the state-space filter, which passes over gaps."""
    model = _statespace(values, fit.order, fit.order.d)
    with _without_warnings():
        try:
            model.update(fit.params)
            space, state = model.ssm, model.ssm.filter().predicted_state[:, -1]
        except (ValueError, np.linalg.LinAlgError) as error:
            raise ForecastError(f"{fit.order}: {error}") from error
    design, transition = np.asarray(space["design"]).ravel(), np.asarray(space["transition"])
    intercept = np.asarray(space["state_intercept"]).reshape(len(state), -1)[:, -1]
    path = np.empty(windows)
    for window in range(windows):
        path[window] = design @ state
        state = transition @ state + intercept
    return path


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress warnings of poor starting values and overflow in the search; the result is checked."""
    import statsmodels.tools.sm_exceptions  # noqa: F401, PLC0415 - sets filters of its own when first imported

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def _statespace(values: FloatArray, order: ArimaOrder, d: int) -> Any:
    from statsmodels.tsa.statespace.sarimax import SARIMAX  # noqa: PLC0415 - half of all a gateway would import

    return SARIMAX(values, order=(order.p, d, order.q), trend=None if order.d else "c", concentrate_scale=True)


def _fit_one(
    values: FloatArray, scale: float, order: ArimaOrder, iterations_max: int, start: FloatArray | None = None
) -> ArimaFit:
    with _without_warnings():
        try:
            result = _statespace(_differenced(values, order.d), order, 0).fit(
                start_params=start, maxiter=iterations_max, disp=0, cov_type="none", warn_convergence=False
            )
        except (ValueError, np.linalg.LinAlgError) as error:
            raise ForecastError(f"{order}: {error}") from error
    params, aic = np.asarray(result.params, dtype=np.float64), float(result.aic)
    if not (np.isfinite(params).all() and np.isfinite(aic)):
        raise ForecastError(f"{order}: the likelihood is not finite")
    return ArimaFit(order=order, params=params, aic=aic, scale=scale)


def _shortlist(values: FloatArray, settings: ArimaSettings) -> list[ArimaOrder]:
    """The orders most likely to win by AIC, best first; white noise about the mean, (0,0,0), is no forecaster."""
    ranked = []
    for d in range(settings.d_max + 1):
        lagged = _LaggedTerms.of(_differenced(values, d), settings)
        for p, q in itertools.product(range(settings.p_max + 1), range(settings.q_max + 1)):
            aic = None if (p, d, q) == (0, 0, 0) else lagged.aic(p, q, constant=d == 0)
            if aic is not None:
                ranked.append((aic, ArimaOrder(p=p, d=d, q=q)))
    return [order for _, order in sorted(ranked)[: settings.exact_fits_max]]


@dataclass(frozen=True, kw_only=True, eq=False)
class _LaggedTerms:
    """Rows for the regressions: target, shape (rows,); past values and past residuals, shape (rows, lags)."""

    target: FloatArray
    values: FloatArray
    residuals: FloatArray

    @classmethod
    def of(cls, series: FloatArray, settings: ArimaSettings) -> "_LaggedTerms":
        residuals = _long_residuals(series)
        rows = _lags(series, settings.p_max), _lags(residuals, settings.q_max)
        whole = ~np.isnan(np.column_stack([series, *rows])).any(axis=1)
        return cls(target=series[whole], values=rows[0][whole], residuals=rows[1][whole])

    def aic(self, p: int, q: int, *, constant: bool) -> float | None:
        terms = np.column_stack([self.values[:, :p], self.residuals[:, :q]])
        if constant:
            terms = np.column_stack([terms, np.ones(len(self.target))])
        parameters = int(terms.shape[1]) + 1
        if len(self.target) < 3 * parameters + 3:
            return None
        rows, errors = len(self.target), _regression_error(terms, self.target)
        variance = max(float(errors @ errors) / rows, 1e-300)
        return rows * math.log(variance) + 2 * parameters


def _long_residuals(series: FloatArray) -> FloatArray:
    """The residuals of a long autoregression, NaN where its lags include a gap."""
    lags = min(LONG_AUTOREGRESSION, max(1, len(series) // 6))
    terms = np.column_stack([_lags(series, lags), np.ones(len(series))])
    whole = ~np.isnan(terms).any(axis=1) & ~np.isnan(series)
    residuals = np.full(len(series), np.nan)
    if whole.sum() > lags + 1:
        residuals[whole] = _regression_error(terms[whole], series[whole])
    return residuals


def _lags(series: FloatArray, count: int) -> FloatArray:
    """Column n holds the series n + 1 steps earlier, NaN where that is before its start."""
    table = np.full((len(series), count), np.nan)
    for lag in range(1, min(count, len(series) - 1) + 1):
        table[lag:, lag - 1] = series[:-lag]
    return table


def _regression_error(terms: FloatArray, target: FloatArray) -> FloatArray:
    if terms.shape[1] == 0:
        return target
    solution = np.linalg.lstsq(terms, target, rcond=None)[0]
    return np.asarray(target - terms @ solution, dtype=np.float64)


def _fit(history: DemandSeries, settings: ForecastSettings, known: Params | None) -> Params:
    values = history.last(settings.arima.history_s).values
    if known is None:
        return as_params(fit_arima(values, settings.arima))
    return refitted(values, settings, known)


def _path(history: DemandSeries, params: Params, settings: ForecastSettings) -> FloatArray:
    return as_fit(params).path(history.last(settings.arima.history_s).values, settings.windows)


def refitted(values: FloatArray, settings: ForecastSettings, known: Params) -> Params:
    """The parameters of a known order, from its old ones.

    Raises:
        ForecastError: the fit fails on these values.
    """
    before = as_fit(known)
    return as_params(fit_order(before.order, values, settings.arima, start=before.params))


def as_params(fit: ArimaFit) -> dict[str, Any]:
    """The fit as a JSON object."""
    order = [fit.order.p, fit.order.d, fit.order.q]
    return {"order": order, "params": fit.params.tolist(), "scale": fit.scale, "aic": fit.aic}


def as_fit(params: Params) -> ArimaFit:
    """What `as_params` gave."""
    p, d, q = params["order"]
    return ArimaFit(
        order=ArimaOrder(p=p, d=d, q=q),
        params=np.array(params["params"], dtype=np.float64),
        scale=params["scale"],
        aic=params["aic"],
    )


ARIMA = Forecaster(name="ARIMA", path=_path, fit=_fit, mean_path=True, history_min_s=4 * 3600.0)
