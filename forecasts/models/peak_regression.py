"""The next hour's peak by a regression on the last hours and on the same hours of past days.

The target at every past origin is the logarithm of "next hour's peak over the level of the last half hour"; the terms
are statistics of the hours before it. A weighted ridge regression for the *median* (least absolute deviations, by
iteratively reweighted least squares: the weighted error is an absolute one) is fitted to all origins whose hour is
over; recent ones and those with high demand have more weight. No parameters are kept: each fit takes milliseconds.
"""

from dataclasses import dataclass

import numpy as np

from forecasts.models.baselines import DAY_S, DAYS_MAX, scaled_to_peak
from forecasts.models.forecaster import Forecaster, ForecastError, Params
from forecasts.series import DemandSeries, FloatArray
from forecasts.settings import ForecastSettings
from forecasts.windows import days_before, forward_filled, known_mean, next_max, trailing_max, trailing_mean

RIDGE = 0.001
HALF_LIFE_S = 2 * DAY_S
ITERATIONS = 8
SPACING_S = 900.0
ROWS_MIN = 30
SMALL_DEVIATION = 0.02
LOG_RATIO_MAX = 2.0
FLOOR_SHARE = 0.005


@dataclass(frozen=True, kw_only=True, eq=False)
class _Table:
    """One row for each origin: terms, shape (origins, terms); offset and target, logarithms; level, tokens/s."""

    terms: FloatArray
    offset: FloatArray
    target: FloatArray
    level: FloatArray


def _recent_path(history: DemandSeries, params: Params, settings: ForecastSettings) -> FloatArray:
    return np.full(settings.windows, _peak(history, settings, days=0))


def _daily_path(history: DemandSeries, params: Params, settings: ForecastSettings) -> FloatArray:
    return _shaped(history, _peak(history, settings, days=DAYS_MAX), settings)


def _peak(history: DemandSeries, settings: ForecastSettings, *, days: int) -> float:
    floor = FLOOR_SHARE * float(np.nanmean(history.values))
    table = _table(history, settings, days=days, floor=floor)
    if not table.level[-1] > floor:
        raise ForecastError("no demand in the last half hour to start from")
    if np.isnan(table.terms[-1]).any():
        raise ForecastError("gaps in the last hours")
    spacing = max(1, history.buckets_in(SPACING_S))
    rows = np.arange(len(history.values) - settings.windows, -1, -spacing)
    usable = ~np.isnan(table.terms[rows]).any(axis=1) & ~np.isnan(table.target[rows]) & (table.level[rows] > floor)
    rows = rows[usable]
    if len(rows) < ROWS_MIN:
        raise ForecastError(f"{len(rows)} past hours to learn from, need {ROWS_MIN}")
    age_s = (len(history.values) - rows) * history.bucket_s
    weights = table.level[rows] * 0.5 ** (age_s / HALF_LIFE_S)
    learned = _median_ridge(table.terms[rows], (table.target - table.offset)[rows], weights / weights.sum())
    log_ratio = float(table.terms[-1] @ learned + table.offset[-1])
    return float(table.level[-1] * np.exp(np.clip(log_ratio, -LOG_RATIO_MAX, LOG_RATIO_MAX)))


def _table(history: DemandSeries, settings: ForecastSettings, *, days: int, floor: float) -> _Table:
    """Terms of the last hours; with `days`, also the same terms and targets of those days.

    The target is then the difference from the past days' mean, shrunk towards zero while there are few of them.
    """
    hour = history.buckets_in(3600.0)
    values = forward_filled(history.values, 3 * hour)
    half_hour = trailing_mean(values, max(1, hour // 2))

    def relative(statistic: FloatArray) -> FloatArray:
        ratio = np.log(np.maximum(statistic, floor)) - np.log(np.maximum(half_hour, floor))
        return np.asarray(np.clip(ratio, -LOG_RATIO_MAX, LOG_RATIO_MAX))

    target = relative(next_max(history.values, settings.windows))
    recent = [
        relative(trailing_max(values, hour)),
        relative(trailing_mean(values, max(1, hour // 4))),
        relative(trailing_mean(values, 1)),
        relative(trailing_mean(values, hour)),
        relative(trailing_mean(values, 3 * hour)),
    ]
    terms, offset = [np.ones(len(target)), *recent], np.zeros(len(target))
    if days:
        per_day = history.buckets_in(DAY_S)
        past = days_before(target, per_day, days)
        count = (~np.isnan(past)).sum(axis=0)
        trust = count / (count + 1.0)
        mean = np.nan_to_num(known_mean(past))
        height = np.log(np.maximum(half_hour, floor))
        offset = trust * mean
        terms += [offset]
        terms += [trust * np.nan_to_num(known_mean(days_before(each, per_day, days))) for each in recent]
        anomaly = height - known_mean(days_before(height, per_day, days))
        terms += [np.clip(np.nan_to_num(anomaly), -LOG_RATIO_MAX, LOG_RATIO_MAX)]
        terms += [trust * np.nan_to_num(past[0] - mean)]
    return _Table(terms=np.column_stack(terms), offset=offset, target=target, level=half_hour)


def _median_ridge(terms: FloatArray, target: FloatArray, weights: FloatArray) -> FloatArray:
    """Coefficients, shape (terms,), with a small weighted sum of absolute deviations; the first is not shrunk."""
    penalty = np.full(terms.shape[1], RIDGE)
    penalty[0] = 1e-9
    effective = weights
    for _ in range(ITERATIONS):
        weighted = terms * effective[:, None]
        learned = np.linalg.solve(weighted.T @ terms + np.diag(penalty * effective.sum()), weighted.T @ target)
        effective = weights / np.maximum(np.abs(target - terms @ learned), SMALL_DEVIATION)
    return np.asarray(learned)


def _shaped(history: DemandSeries, peak: float, settings: ForecastSettings) -> FloatArray:
    """The peak with the mean shape of the coming hour on past days; flat if none is known."""
    per_day, values = history.buckets_in(DAY_S), history.values
    firsts = range(len(values) - per_day, max(-1, len(values) - (DAYS_MAX + 1) * per_day), -per_day)
    hours = [values[first : first + settings.windows] for first in firsts]
    shape = known_mean(np.array(hours)) if hours else np.full(settings.windows, np.nan)
    if np.isnan(shape).all():
        return np.full(settings.windows, peak)
    return scaled_to_peak(np.nan_to_num(shape, nan=float(np.nanmean(shape))), peak)


RECENT_PEAKS = Forecaster(name="regression on recent hours", path=_recent_path, history_min_s=6 * 3600.0)
DAILY_PEAKS = Forecaster(name="regression on past days", path=_daily_path, history_min_s=DAY_S + 6 * 3600.0)
