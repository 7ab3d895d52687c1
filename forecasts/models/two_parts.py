"""The forecast of demand that is on and off, in two parts: is it on in the coming hour, and how high is it then.

On and off are told apart by the widest gap between the logarithms of past hourly peaks, if it is wide enough. Past
moments count in the same state (on or off in the last quarter of an hour), and the more the nearer they are in time of
day and in how long that state had lasted. Their weight says how likely the coming hour is to be on; the median peak of
those on that side says how high.
"""

import numpy as np
import numpy.typing as npt

from forecasts.models.baselines import DAY_S
from forecasts.models.forecaster import Forecaster, ForecastError, Params
from forecasts.series import DemandSeries, FloatArray
from forecasts.settings import ForecastSettings
from forecasts.windows import next_max, trailing_max

HISTORY_S = 7 * DAY_S
STATE_S = 900.0
FLOOR_SHARE = 1e-3
GAP_RATIO_MIN = 2.0
FEW_MOMENTS = 4
"""As many of the largest and smallest peaks do not make a side: an hour's worth of moments."""
MOMENTS_MIN = 24
HALF_LIFE_DAYS = 3.0
NEAR_HOURS = 0.5
NEAR_LOG_AGE = 0.5
AGE_FLOOR_H = 0.25
PRIOR_DAYS = 0.3
"""Days of evidence at this time of day for which moments at all times of day count."""


def _two_parts_path(history: DemandSeries, params: Params, settings: ForecastSettings) -> FloatArray:
    recent = history.last(HISTORY_S)
    values, per_hour = recent.values, recent.buckets_in(3600.0)
    top = recent.maximum()
    if not top > 0:
        raise ForecastError("no demand in the last week")
    quarter, floor = max(1, recent.buckets_in(STATE_S)), FLOOR_SHARE * top
    state = np.log(trailing_max(values, quarter) + floor)
    ahead = np.log(next_max(values, settings.windows) + floor)
    moments = np.arange(len(values) - settings.windows, quarter - 1, -quarter)
    moments = moments[~np.isnan(ahead[moments]) & ~np.isnan(state[moments])]
    if np.isnan(state[-1]) or len(moments) < MOMENTS_MIN:
        raise ForecastError("no data in the last quarter of an hour" if np.isnan(state[-1]) else "too little history")
    threshold = _threshold(ahead[moments])
    weights = _likeness(state > threshold, moments, per_hour, quarter)
    if not weights.sum() > 0:
        raise ForecastError("was never in this state before")
    on_next = ahead[moments] > threshold
    same = on_next == (float(weights @ on_next) > weights.sum() / 2)
    peak = float(np.exp(_median(ahead[moments][same], weights[same]))) - floor
    return np.full(settings.windows, max(0.0, peak))


def _threshold(logs: FloatArray) -> float:
    """The middle of the widest gap between sorted logarithms.

    Raises:
        ForecastError: there is no gap of a factor of `GAP_RATIO_MIN`.
    """
    sides = np.sort(logs)[FEW_MOMENTS - 1 : len(logs) - FEW_MOMENTS + 1]
    widest = int(np.argmax(np.diff(sides)))
    if sides[widest + 1] - sides[widest] < np.log(GAP_RATIO_MIN):
        raise ForecastError("demand is not on and off")
    return float(sides[widest] + sides[widest + 1]) / 2


def _likeness(is_on: npt.NDArray[np.bool_], moments: npt.NDArray[np.int64], per_hour: int, spacing: int) -> FloatArray:
    """How much each past moment is like the newest; in days of evidence."""
    now, per_day = len(is_on) - 1, 24 * per_hour
    changed = np.append(0, np.flatnonzero(np.diff(is_on.astype(np.int64))) + 1)
    since = changed[np.searchsorted(changed, np.arange(now + 1), side="right") - 1]
    log_age = np.log(AGE_FLOOR_H + (np.arange(now + 1) - since) / per_hour)
    fresh = 0.5 ** ((now - moments) / per_day / HALF_LIFE_DAYS) * (is_on[moments] == is_on[now])
    at_any_time = fresh * np.exp(-0.5 * ((log_age[moments] - log_age[now]) / NEAR_LOG_AGE) ** 2)
    hours = ((moments - now + per_day / 2) % per_day - per_day / 2) / per_hour
    near = np.exp(-0.5 * (hours / NEAR_HOURS) ** 2)
    a_day = np.sqrt(2 * np.pi) * NEAR_HOURS * per_hour / spacing
    total = float(at_any_time.sum())
    return np.asarray(fresh * near / a_day + (PRIOR_DAYS * at_any_time / total if total > 0 else 0.0))


def _median(values: FloatArray, weights: FloatArray) -> float:
    order = np.argsort(values)
    cumulative = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(cumulative, cumulative[-1] / 2)])


TWO_PARTS = Forecaster(name="two parts", path=_two_parts_path, history_min_s=6 * 3600.0)
