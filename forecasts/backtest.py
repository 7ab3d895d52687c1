"""Rolling-origin backtests: what a forecaster would have said at past moments, told only what was known then.

The series is cut at each origin before the forecaster sees it, so a forecaster cannot look ahead.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from forecasts.series import DemandSeries, FloatArray

Forecaster = Callable[[DemandSeries, int], FloatArray]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One origin: the forecast peak of the windows after it and the one that came, tokens per second."""

    origin_s: float
    forecast: float
    actual: float


@dataclass(frozen=True, kw_only=True)
class BacktestScore:
    """A forecaster over all origins with a known outcome.

    Attributes:
        weighted_error: sum |actual - forecast| / sum actual, as a share of 1; None without outcomes.
        coverage: share of origins whose peak stayed under the forecast as it stands, uncalibrated.
        calibrated_coverage: the same for the forecast times the upper ratio found on the *other* origins.
    """

    forecaster: str
    outcomes: tuple[Outcome, ...]
    weighted_error: float | None
    coverage: float | None
    calibrated_coverage: float | None

    def ratios(self) -> FloatArray:
        """Actual over forecast peak at each origin with a forecast above zero, shape (outcomes,)."""
        return np.array([outcome.actual / outcome.forecast for outcome in self.outcomes if outcome.forecast > 0])


def upper_ratio(ratios: FloatArray, quantile: float) -> float:
    """The conformal quantile of past ratios: the ceil((n + 1) * quantile)-th smallest, at most the largest."""
    rank = math.ceil((len(ratios) + 1) * quantile)
    return float(np.sort(ratios)[min(rank, len(ratios)) - 1])


def origins_of(series: DemandSeries, *, windows: int, train: int, count_max: int) -> tuple[float, ...]:
    """Origins over the newest part of a series, oldest first, the last with its windows just complete.

    They lie `windows` apart, or closer where the history is too short for `count_max` of them.

    Args:
        series: the history.
        windows: buckets forecast at each origin.
        train: buckets that must lie before the first origin.
        count_max: most origins.
    """
    room = len(series.values) - windows - train
    if room < 0 or count_max < 1:
        return ()
    stride = min(windows, max(1, room // max(1, count_max - 1)))
    count = min(count_max, room // stride + 1)
    newest = len(series.values) - windows
    return tuple(series.start_s + (newest - back * stride) * series.bucket_s for back in reversed(range(count)))


def backtest(
    series: DemandSeries, name: str, forecaster: Forecaster, *, origins: Sequence[float], windows: int, quantile: float
) -> BacktestScore:
    """Forecast the peak of the next `windows` buckets at each origin and compare with what came."""
    found = (_outcome(series, forecaster, origin_s, windows) for origin_s in origins)
    outcomes = tuple(outcome for outcome in found if outcome is not None)
    return BacktestScore(
        forecaster=name,
        outcomes=outcomes,
        weighted_error=_weighted_error(outcomes),
        coverage=_share([outcome.actual <= outcome.forecast for outcome in outcomes]),
        calibrated_coverage=_calibrated_coverage(outcomes, quantile),
    )


def _outcome(series: DemandSeries, forecaster: Forecaster, origin_s: float, windows: int) -> Outcome | None:
    past, future = series.split(origin_s)
    actual = future.before(origin_s + windows * series.bucket_s).maximum()
    forecast = float(np.max(forecaster(past, windows)))
    if math.isnan(actual) or not math.isfinite(forecast):
        return None
    return Outcome(origin_s=origin_s, forecast=forecast, actual=actual)


def _weighted_error(outcomes: Sequence[Outcome]) -> float | None:
    missed = sum(abs(outcome.actual - outcome.forecast) for outcome in outcomes)
    total = sum(outcome.actual for outcome in outcomes)
    if not outcomes:
        return None
    if total == 0:
        return 0.0 if missed == 0 else math.inf
    return missed / total


def _calibrated_coverage(outcomes: Sequence[Outcome], quantile: float) -> float | None:
    usable = [outcome for outcome in outcomes if outcome.forecast > 0]
    if len(usable) < 2:
        return None
    ratios = np.array([outcome.actual / outcome.forecast for outcome in usable])
    return _share(
        [bool(ratio <= upper_ratio(np.delete(ratios, place), quantile)) for place, ratio in enumerate(ratios)]
    )


def _share(hits: Sequence[bool]) -> float | None:
    return sum(hits) / len(hits) if hits else None
