"""Forecasters without parameters. The maximum of the last hour is the baseline."""

import math

import numpy as np

from forecasts.models.forecaster import Forecaster, ForecastError, Params
from forecasts.series import DemandSeries, FloatArray
from forecasts.settings import ForecastSettings

LAST_HOUR_MAX = "last hour's maximum"
DAY_S = 86_400.0
LEVEL_S = 1800.0
DAYS_MAX = 7
RATIO_MAX = 3.0


def last_known_hour(history: DemandSeries) -> DemandSeries:
    """The hour up to the newest known bucket; an empty series without any."""
    known = np.flatnonzero(~np.isnan(history.values))
    newest_end_s = history.start_s + (known[-1] + 1) * history.bucket_s if known.size else history.start_s
    return history.before(newest_end_s).last(3600.0)


def level(history: DemandSeries) -> float:
    """Mean of the known values of the last half hour, or else of the last hour, tokens per second.

    Raises:
        ForecastError: the last hour has none.
    """
    for span_s in (LEVEL_S, 2 * LEVEL_S):
        recent = history.last(span_s).values
        known = recent[~np.isnan(recent)]
        if known.size:
            return float(known.mean())
    raise ForecastError("no data in the last hour")


def _last_hour_max(history: DemandSeries, params: Params, settings: ForecastSettings) -> FloatArray:
    return np.full(settings.windows, last_known_hour(history).maximum())


def _same_hour_yesterday(history: DemandSeries, params: Params, settings: ForecastSettings) -> FloatArray:
    return filled(_hour_after(history, 1, settings))


def _typical_shape(history: DemandSeries, params: Params, settings: ForecastSettings) -> FloatArray:
    return level(history) * typical_hour(history, settings)


def typical_hour(history: DemandSeries, settings: ForecastSettings) -> FloatArray:
    """What usually follows, over the level of the last half hour; shape (windows,).

    It is the geometric mean over the past days of "next hour's peak over the level before it". A mean of paths would
    flatten peaks that are some minutes earlier or later each day; so peaks are averaged, and the mean path gives the
    shape only.

    Raises:
        ForecastError: this hour is unknown on all days before.
    """
    peaks, shapes = [], []
    for day in range(1, DAYS_MAX + 1):
        try:
            relative = filled(relative_hour(history, day, settings))
        except ForecastError:
            continue
        peak = float(relative.max())
        peaks.append(math.log(min(max(peak, 1 / RATIO_MAX), RATIO_MAX)))
        shapes.append(relative / peak if peak > 0 else np.ones_like(relative))
    if not peaks:
        raise ForecastError("no past day has this hour")
    return scaled_to_peak(np.mean(shapes, axis=0), math.exp(sum(peaks) / len(peaks)))


def scaled_to_peak(path: FloatArray, peak: float) -> FloatArray:
    """The path scaled to a maximum of `peak`; flat if it has no value above zero."""
    highest = float(path.max())
    return path * (peak / highest) if highest > 0 else np.full_like(path, peak)


def _hour_after(history: DemandSeries, days: int, settings: ForecastSettings) -> FloatArray:
    """The windows that followed this time of day some days ago, NaN where unknown; shape (windows,)."""
    first = len(history.values) - days * history.buckets_in(DAY_S)
    if first < 0:
        raise ForecastError(f"history does not reach back {days} day" + "s" * (days > 1))
    return history.values[first : first + settings.windows]


def relative_hour(history: DemandSeries, days: int, settings: ForecastSettings) -> FloatArray:
    """`_hour_after` over the level before it; shape (windows,).

    Raises:
        ForecastError: either is unknown, or that level was zero.
    """
    actual = _hour_after(history, days, settings)
    before = level(history.before(history.end_s - days * DAY_S))
    if before <= 0:
        raise ForecastError(f"no demand at this time {days} day" + "s" * (days > 1) + " ago")
    return actual / before


def filled(hour: FloatArray) -> FloatArray:
    """The hour with its mean in its gaps.

    Raises:
        ForecastError: it has nothing but gaps.
    """
    known = ~np.isnan(hour)
    if not known.any():
        raise ForecastError("this hour is a gap on the day before")
    return np.where(known, hour, hour[known].mean())


LAST_HOUR = Forecaster(name=LAST_HOUR_MAX, path=_last_hour_max)
YESTERDAY = Forecaster(name="same hour yesterday", path=_same_hour_yesterday)
TYPICAL_SHAPE = Forecaster(name="typical day's shape", path=_typical_shape)
