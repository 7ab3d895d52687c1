"""Backtests of every series of a file: the forecasts at past hours, each from the demand known then.

Origins are at whole hours of UTC. The forecasters update hour by hour from the series' beginning (in long files, from
a week before the first requested hour), as in a live fleet, so that a forecast does not depend on the end of the
file.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from forecasts.importers.series_file import EndpointSeries
from forecasts.models.baselines import LAST_HOUR_MAX
from forecasts.models.forecaster import ForecastError
from forecasts.models.forecasters import FORECASTERS
from forecasts.selection.calibration import SPREAD
from forecasts.selection.rolling import rolling_origins
from forecasts.selection.select import PeakForecast
from forecasts.series import DemandSeries, FloatArray
from forecasts.settings import ForecastSettings

CHAMPION = "champion"
"""The forecast that a plan would have used, of whichever forecaster."""

HOUR_S = 3600.0
WINDOW_S_MIN = 300.0
ROUNDING = 1e-9
"""A peak equal to its forecast counts as covered despite rounding."""

LEARNING_HOURS_MAX = 7 * 24
"""Before the first requested hour: the hours whose errors are kept."""

Progress = Callable[[str, int, int], None]
"""Called with the series, its hours done, and its hours in total."""


class Prediction(NamedTuple):
    """One forecaster at one hour: median and upper quantile of its peak, and the actual peak, in input tokens/s.

    `chosen` names the champion of that hour; `actual` is None if the whole hour is a gap; `spread`: the champion's
    quantiles at the levels `calibration.SPREAD`, empty for others and while there are too few past errors.
    """

    origin_s: float
    forecaster: str
    chosen: str
    peak_q50: float
    peak_upper: float
    actual: float | None
    spread: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ForecasterScore:
    """How well a forecaster did over the hours with a prediction and an outcome.

    Attributes:
        forecaster: its name, "champion" for the one chosen hour by hour.
        hours: the number of those hours.
        error: sum |peak - median| / sum of peaks, a share of 1; None without hours or without demand.
        coverage: share of hours whose peak was at most the upper quantile.
        pinball: mean pinball loss of the upper quantile over the mean peak, a share of 1: the lower, the better is the
            quantile, sharp and covering at once.
        over_provision: sum of (upper quantile - peak) where positive / sum of peaks.
        equal_cover: the same with all upper quantiles scaled by the factor, computed in hindsight, at which exactly the
            requested share of hours is covered; it compares forecasters of different coverage.
        fit_s: time to choose its orders and fit it at the newest hour; None for several series.
        forecast_s: time of one forecast with fitted parameters; for the champion, the mean time of an hour with all
            forecasters, their refits and the choice.
    """

    forecaster: str
    hours: int
    error: float | None
    coverage: float | None
    pinball: float | None
    over_provision: float | None
    equal_cover: float | None
    fit_s: float | None
    forecast_s: float | None


class Cost(NamedTuple):
    """Seconds of a fit and of a forecast, see `ForecasterScore`."""

    fit_s: float | None
    forecast_s: float


@dataclass(frozen=True, kw_only=True)
class SeriesBacktest:
    """The backtest of one series.

    Attributes:
        endpoint: the series.
        predictions: of the requested hours, in order. Where a forecaster declined, what it gives is the last hour's
            maximum, which would have been used; one that always declined has none.
        costs: by forecaster.
        seconds: total time, including the hours before the requested ones.
        chosen: by forecaster, in how many hours it was the champion.
        reason: why there are no predictions, or fewer than requested; None = there are all.
    """

    endpoint: EndpointSeries
    predictions: tuple[Prediction, ...]
    costs: Mapping[str, Cost]
    seconds: float
    chosen: Mapping[str, int]
    reason: str | None


def run_backtests(
    found: Sequence[EndpointSeries], settings: ForecastSettings, *, hours_max: int | None, progress: Progress
) -> tuple[list[SeriesBacktest], bool]:
    """Backtest series after series.

    Args:
        found: the series.
        settings: how to forecast; `bucket_s` is set to each series' own windows.
        hours_max: number of newest hours of each; None = those of its second half.
        progress: called after each hour.

    Returns:
        The finished backtests, and whether Ctrl-C interrupted them.
    """
    done: list[SeriesBacktest] = []
    for endpoint in found:
        one, interrupted = _backtest(endpoint, elsewhere(found, endpoint), settings, hours_max, progress)
        done.append(one)
        if interrupted:
            return done, True
    return done, False


def _backtest(
    endpoint: EndpointSeries,
    like: DemandSeries | None,
    settings: ForecastSettings,
    hours_max: int | None,
    progress: Progress,
) -> tuple[SeriesBacktest, bool]:
    predictions: list[Prediction] = []
    costs: dict[str, Cost] = {}
    reason, interrupted, began_s = None, False, time.perf_counter()
    try:
        hours, wanted_from_s, settings = _hours(endpoint.series, settings, hours_max)
        predictions.extend(_predicted(endpoint, like, settings, hours, wanted_from_s, progress))  # kept after Ctrl-C
        costs[CHAMPION] = Cost(None, (time.perf_counter() - began_s) / len(hours))
        answered = {one.forecaster for one in predictions if one.origin_s == hours[-1]}
        costs |= _costs(endpoint.series.before(hours[-1]).rebin(settings.bucket_s), settings, answered)
    except ValueError as error:
        reason = str(error)
        progress(endpoint.name, 1, 1)
    except KeyboardInterrupt:
        reason, interrupted = "interrupted", True
    backtest = SeriesBacktest(
        endpoint=endpoint,
        predictions=tuple(_with_fallback(predictions)),
        costs=costs,
        seconds=time.perf_counter() - began_s,
        chosen=Counter(one.chosen for one in predictions if one.forecaster == CHAMPION),
        reason=reason,
    )
    return backtest, interrupted


def elsewhere(found: Sequence[EndpointSeries], endpoint: EndpointSeries) -> DemandSeries | None:
    """The summed demand for its model in other regions, in the buckets of its series; None without any."""
    series, total = endpoint.series, np.full(len(endpoint.series.values), np.nan)
    for other in found:
        shift = (other.series.start_s - series.start_s) / series.bucket_s
        if other.model != endpoint.model or other.region == endpoint.region:
            continue
        if other.series.bucket_s != series.bucket_s or abs(shift - round(shift)) > 1e-6:
            continue
        first = round(shift)
        values = other.series.values[max(0, -first) : len(total) - first]
        place = slice(max(0, first), max(0, first) + len(values))
        total[place] = np.where(np.isnan(values), total[place], np.nan_to_num(total[place]) + values)
    return None if np.isnan(total).all() else replace(series, values=total)


def scores_of(predictions: Sequence[Prediction], quantile: float, costs: Mapping[str, Cost]) -> list[ForecasterScore]:
    """The score of each forecaster, the champion's first, then by error.

    Args:
        predictions: of one or several series.
        quantile: the one that `peak_upper` estimates.
        costs: by forecaster, as far as known.
    """
    by_forecaster: dict[str, list[Prediction]] = {}
    for one in predictions:
        by_forecaster.setdefault(one.forecaster, []).append(one)
    scores = [_score(name, rows, quantile, costs.get(name)) for name, rows in by_forecaster.items()]
    return sorted(scores, key=lambda s: (s.forecaster != CHAMPION, math.inf if s.error is None else s.error))


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """How often peaks stayed at or under the champion's quantiles.

    Attributes:
        hours: the number of hours with a distribution and an outcome.
        levels: the quantiles, ascending.
        covered: the share of hours at or under each; equal to `levels` if the distribution is right.
    """

    hours: int
    levels: tuple[float, ...]
    covered: tuple[float, ...]


def reliability_of(predictions: Sequence[Prediction]) -> Reliability | None:
    """The champion's reliability over one or several series; None without an hour that has a distribution."""
    known = [(one.actual, one.spread) for one in predictions if one.spread and one.actual is not None]
    if not known:
        return None
    actual, spread = np.array([peak for peak, _ in known]), np.array([quantiles for _, quantiles in known])
    covered = (actual[:, None] <= spread * (1 + ROUNDING)).mean(axis=0)
    return Reliability(hours=len(known), levels=SPREAD, covered=tuple(covered.tolist()))


def window_s(bucket_s: float) -> float:
    """The window of a series' forecast: the least multiple of its bucket that divides an hour, at least 5 minutes.

    Raises:
        ValueError: no multiple of the bucket is an hour.
    """
    count = round(HOUR_S / bucket_s)
    if count < 1 or abs(count * bucket_s - HOUR_S) > 1e-3:
        raise ValueError(f"buckets of {bucket_s:g} s do not divide an hour, so its peak is unknown")
    return bucket_s * next(k for k in range(1, count + 1) if count % k == 0 and k * bucket_s >= WINDOW_S_MIN)


def hours_of(series: DemandSeries, settings: ForecastSettings) -> list[float]:
    """The whole hours of UTC (or the next bucket start) with enough history before them and a complete hour after.

    Args:
        series: its buckets divide an hour.
        settings: half of `history_min_s` is before the first.
    """
    phase_s = series.start_s % series.bucket_s
    first = math.ceil((series.start_s + settings.history_min_s / 2 - phase_s) / HOUR_S - 1e-9)
    last = math.floor((series.end_s - phase_s) / HOUR_S + 1e-9) - 1
    return [hour * HOUR_S + phase_s for hour in range(first, last + 1)]


def _hours(
    series: DemandSeries, settings: ForecastSettings, hours_max: int | None
) -> tuple[list[float], float, ForecastSettings]:
    """The origins to run, the first requested one, and the settings with this series' windows.

    Raises:
        ValueError: the series has no hour to forecast.
    """
    settings = replace(settings, bucket_s=window_s(series.bucket_s))
    hours, middle_s = hours_of(series, settings), series.start_s + series.duration_s / 2
    wanted = [hour for hour in hours if hour >= middle_s] if hours_max is None else hours[-hours_max:]
    if not wanted:
        known_h, needed_h = series.duration_s / HOUR_S, (settings.history_min_s / 2 + settings.horizon_s) / HOUR_S
        raise ValueError(f"{known_h:.3g} hours are too few: {needed_h:g} are needed, the last whole by the clock")
    return hours[-(len(wanted) + LEARNING_HOURS_MAX) :], wanted[0], settings


def _predicted(
    endpoint: EndpointSeries,
    like: DemandSeries | None,
    settings: ForecastSettings,
    hours: Sequence[float],
    wanted_from_s: float,
    progress: Progress,
) -> Iterator[Prediction]:
    progress(endpoint.name, 0, len(hours))
    rolled = rolling_origins(endpoint.series, settings, hours, like)
    for done, (forecast, actual) in enumerate(rolled, start=1):
        progress(endpoint.name, done, len(hours))
        if forecast.known and forecast.origin_s >= wanted_from_s:
            yield from _predictions(forecast, actual)


def _with_fallback(predictions: Sequence[Prediction]) -> Iterator[Prediction]:
    """With the last hour's maximum for forecasters that declined, so that all are judged on the same hours."""
    answered = {(one.origin_s, one.forecaster) for one in predictions}
    names = dict.fromkeys(one.forecaster for one in predictions)
    for one in predictions:
        yield one
        if one.forecaster == LAST_HOUR_MAX:
            missing = (name for name in names if (one.origin_s, name) not in answered)
            yield from (one._replace(forecaster=name) for name in missing)


def _costs(history: DemandSeries, settings: ForecastSettings, answered: Collection[str]) -> dict[str, Cost]:
    """The time of a first fit and of a forecast, for each forecaster that gave one."""
    costs = {}
    for name in FORECASTERS.keys() & answered:
        forecaster, began_s = FORECASTERS[name], time.perf_counter()
        with suppress(ForecastError):
            params = forecaster.fit(history, settings, None)
            fitted_s = time.perf_counter()
            forecaster.path(history, params, settings)
            costs[name] = Cost(fitted_s - began_s, time.perf_counter() - fitted_s)
    return costs


def _predictions(forecast: PeakForecast, actual: float | None) -> Iterator[Prediction]:
    answers = [(each.forecaster, each.peak_q50, each.peak_upper) for each in forecast.candidates]
    origin_s, chosen = forecast.origin_s, forecast.forecaster
    yield Prediction(origin_s, CHAMPION, chosen, forecast.peak_q50, forecast.peak_upper, actual, forecast.spread)
    for name, median, upper in answers:
        yield Prediction(origin_s, name, chosen, median, upper, actual)


def _score(name: str, rows: Sequence[Prediction], quantile: float, cost: Cost | None) -> ForecasterScore:
    known = [(row.peak_q50, row.peak_upper, row.actual) for row in rows if row.actual is not None]
    median, upper, actual = np.array(known, dtype=np.float64).reshape(-1, 3).T
    total = float(actual.sum())
    return ForecasterScore(
        forecaster=name,
        hours=len(known),
        error=float(np.abs(actual - median).sum()) / total if total else None,
        coverage=float((actual <= upper * (1 + ROUNDING)).mean()) if known else None,
        pinball=_pinball(upper, actual, quantile) / total if total else None,
        over_provision=_above(upper, actual) / total if total else None,
        equal_cover=_above(upper * _factor(upper, actual, quantile), actual) / total if total else None,
        fit_s=None if cost is None else cost.fit_s,
        forecast_s=None if cost is None else cost.forecast_s,
    )


def _pinball(upper: FloatArray, actual: FloatArray, quantile: float) -> float:
    missed = actual - upper
    return float(np.maximum(quantile * missed, (quantile - 1) * missed).sum())


def _above(upper: FloatArray, actual: FloatArray) -> float:
    return float(np.maximum(0.0, upper - actual).sum())


def _factor(upper: FloatArray, actual: FloatArray, quantile: float) -> float:
    """The least factor on upper quantiles that covers the share `quantile`; 1 if all of them are zero."""
    ratios = np.sort(actual[upper > 0] / upper[upper > 0])
    return float(ratios[math.ceil(quantile * len(ratios)) - 1]) if len(ratios) else 1.0
