"""Past forecasts and actual peaks, kept between forecasts as a JSON object.

Tables have one column per origin, oldest first. A peak that is not known yet, or that a forecaster declined to give, is
NaN here and null in JSON.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from forecasts.series import DemandSeries, FloatArray

STATE_VERSION = 1
SCALE_HALF_LIFE = 24.0
"""Origins after which an actual peak has half its weight in the scale of the hours after it."""
LOSS_MAX = 5.0
"""A loss counts as at most this many times the scale, so that one hour is not all that is remembered."""
RECENT_HALF_LIFE = 6.0
RECENT_SHARE = 0.2
"""Part of an error that the short memory has: a forecaster that fails now loses its weight within two hours."""
SHIFT_LOG = 1.1
"""A peak is beyond a forecast if it is three times as large, or a third of it."""
FLOOR_ORIGINS = 24
FLOOR_SHARE = 1e-3
"""Of the largest peak of the last day: what is below it is as good as zero."""
FLOOR_MIN = 1e-9


@dataclass(frozen=True, kw_only=True, eq=False)
class PastPeaks:
    """Origins in Unix time, shape (origins,); the actual peak; by forecaster its raw, median and upper peak."""

    origins_s: FloatArray = field(default_factory=lambda: np.empty(0))
    actual: FloatArray = field(default_factory=lambda: np.empty(0))
    raw: Mapping[str, FloatArray] = field(default_factory=dict)
    median: Mapping[str, FloatArray] = field(default_factory=dict)
    upper: Mapping[str, FloatArray] = field(default_factory=dict)

    def scored(self, series: DemandSeries, horizon_s: float, bucket_s: float) -> Self:
        """With the peaks that are known at the end of the series; hours without data are dropped."""
        actual = self.actual.copy()
        over = self.origins_s + horizon_s <= series.end_s + 1e-6
        for index in np.flatnonzero(np.isnan(actual) & over):
            hour = series.before(self.origins_s[index] + horizon_s).last(horizon_s)
            actual[index] = _six_digits(hour.rebin(bucket_s).maximum())
        return replace(self, actual=actual).kept(~(np.isnan(actual) & over))

    def with_origin(
        self,
        origin_s: float,
        *,
        raw: Mapping[str, float],
        median: Mapping[str, float],
        upper: Mapping[str, float],
        memory: int,
    ) -> Self:
        """With one more origin, not scored yet, which replaces the forecast of the same origin."""
        before = self.kept(self.origins_s < origin_s - 1e-6)
        longer = replace(
            before,
            origins_s=np.append(before.origins_s, origin_s),
            actual=np.append(before.actual, np.nan),
            raw=_extended(before.raw, raw, len(before.actual)),
            median=_extended(before.median, median, len(before.actual)),
            upper=_extended(before.upper, upper, len(before.actual)),
        )
        return longer.kept(np.arange(len(longer.actual)) >= len(longer.actual) - memory)

    def known(self) -> Self:
        """Only origins with a known peak."""
        return self.kept(~np.isnan(self.actual))

    def log_ratios(self, forecasts: Mapping[str, FloatArray], name: str) -> FloatArray:
        """log(actual / forecast) at each origin, shape (origins,); NaN where either is not above zero or not known."""
        peaks = forecasts.get(name, np.full(len(self.actual), np.nan))
        usable = (peaks > 0) & (self.actual > 0)
        return np.log(np.where(usable, self.actual, np.nan) / np.where(usable, peaks, 1.0))

    def weights(self, half_life: float) -> FloatArray:
        """The weight of each origin: 1 for the newest, and half as much `half_life` origins before."""
        return np.asarray(0.5 ** (np.arange(len(self.actual))[::-1] / half_life))

    @cached_property
    def scales(self) -> FloatArray:
        """The scale of each hour: the mean of its own actual peak and those before it, which weigh less with age."""
        ages = np.subtract.outer(np.arange(len(self.actual)), np.arange(len(self.actual)))
        weights = np.where(ages >= 0, 0.5 ** (np.maximum(ages, 0) / SCALE_HALF_LIFE), 0.0)
        return np.asarray(weights @ self.actual / np.maximum(weights.sum(axis=1), 1e-300))

    @cached_property
    def floors(self) -> FloatArray:
        """A thousandth of the largest actual peak of the day up to each hour, so that zero has a logarithm."""
        padded = np.concatenate([np.zeros(FLOOR_ORIGINS), self.actual])
        days = np.lib.stride_tricks.sliding_window_view(padded, FLOOR_ORIGINS)[1:]
        return np.asarray(np.maximum(FLOOR_SHARE * days.max(axis=1), FLOOR_MIN))

    @property
    def floor(self) -> float:
        """The floor of the coming hour."""
        return float(self.floors[-1]) if len(self.actual) else FLOOR_MIN

    def floored_log_ratios(self, name: str) -> FloatArray:
        """log((actual + floor) / (median + floor)) at each origin; NaN where the forecaster declined."""
        median = self.median.get(name, np.full(len(self.actual), np.nan))
        return np.log((self.actual + self.floors) / (median + self.floors))

    @property
    def is_shifted(self) -> bool:
        """Whether the newest peak, and no other one that is remembered, was beyond what every forecaster gave.

        None of them knows then what the demand is now. Where it happens again it is how that demand is.
        """
        return bool(len(self.actual) and self._beyond[-1] and not self._beyond[:-1].any())

    @cached_property
    def _beyond(self) -> npt.NDArray[np.bool_]:
        """Whether the actual peak was above, or below, all forecasts by more than `SHIFT_LOG`; shape (origins,)."""
        ratios = np.array([self.floored_log_ratios(name) for name in self.median]).reshape(-1, len(self.actual))
        known = ~np.isnan(ratios)
        above, below = (((sign * ratios > SHIFT_LOG) | ~known).all(axis=0) for sign in (1, -1))
        return np.asarray(known.any(axis=0) & (above | below))

    def error(self, name: str, fallback: str, half_life: float) -> float | None:
        """The mean of |actual - median| over the scale of its own hour; None without any.

        An hour counts the same before and after a change of scale, and within a day by its size. It is the mean of
        two memories: `half_life`, and a short one with `RECENT_SHARE`. Where the forecaster declined, the forecast of
        `fallback` counts, which would have been used.
        """
        median = self.median.get(name)
        if median is None or np.isnan(median).all() or not len(self.actual):
            return None
        filled = np.where(np.isnan(median), self.median.get(fallback, median), median)
        usable = ~np.isnan(filled)
        missed = np.abs(self.actual - filled)[usable]
        losses = np.minimum(missed / np.maximum(self.scales[usable], FLOOR_MIN), LOSS_MAX)
        long, short = (self.weights(life)[usable] for life in (half_life, RECENT_HALF_LIFE))
        return float((1 - RECENT_SHARE) * (long @ losses) / long.sum() + RECENT_SHARE * (short @ losses) / short.sum())

    def kept(self, chosen: npt.NDArray[np.bool_]) -> Self:
        """Only the chosen origins; `chosen` has shape (origins,)."""
        return replace(
            self,
            origins_s=self.origins_s[chosen],
            actual=self.actual[chosen],
            raw={name: column[chosen] for name, column in self.raw.items()},
            median={name: column[chosen] for name, column in self.median.items()},
            upper={name: column[chosen] for name, column in self.upper.items()},
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """A forecaster's parameters, or why it has none; when its orders were chosen, and from what length of history."""

    params: Mapping[str, Any] | None
    failure: str | None
    fitted_s: float
    selected_s: float
    selected_from_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class SeriesState:
    """The state of a series between two forecasts.

    Attributes:
        origin_s: of the last forecast; None before the first.
        champion: the forecaster chosen last.
        past: forecasts and actual peaks.
        fitted: parameters by forecaster.
        level: by forecaster, the quantile of past ratios that gives its upper quantile.
    """

    origin_s: float | None = None
    champion: str | None = None
    past: PastPeaks = field(default_factory=PastPeaks)
    fitted: Mapping[str, Fitted] = field(default_factory=dict)
    level: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "version": STATE_VERSION,
            "origin_s": self.origin_s,
            "champion": self.champion,
            "origins_s": self.past.origins_s.tolist(),
            "came": _to_list(self.past.actual),
            "raw": {name: _to_list(column) for name, column in self.past.raw.items()},
            "said": {name: _to_list(column) for name, column in self.past.median.items()},
            "upper": {name: _to_list(column) for name, column in self.past.upper.items()},
            "fitted": {name: vars(each).copy() for name, each in self.fitted.items()},
            "level": dict(self.level),
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """What `to_json` gave.

        Raises:
            ValueError: another version's, or a field is missing or of another type.
        """
        if stored.get("version") != STATE_VERSION:
            raise ValueError(f"version must be {STATE_VERSION}, got {stored.get('version')}")
        try:
            past = PastPeaks(
                origins_s=_to_array(stored["origins_s"]),
                actual=_to_array(stored["came"]),
                raw={name: _to_array(column) for name, column in stored["raw"].items()},
                median={name: _to_array(column) for name, column in stored["said"].items()},
                upper={name: _to_array(column) for name, column in stored["upper"].items()},
            )
            fitted = {name: Fitted(**each) for name, each in stored["fitted"].items()}
            return cls(
                origin_s=stored["origin_s"],
                champion=stored["champion"],
                past=past,
                fitted=fitted,
                level=stored["level"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a stored forecast state lacks or mistypes a field: {error}") from error


def weighted_quantile(values: FloatArray, weights: FloatArray, quantile: float) -> float:
    """The smallest value such that values up to it have the share `quantile` of the weight.

    Raises:
        ValueError: no values.
    """
    return float(weighted_quantiles(values, weights, np.array([quantile]))[0])


def weighted_quantiles(values: FloatArray, weights: FloatArray, quantiles: FloatArray) -> FloatArray:
    """`weighted_quantile` for each of `quantiles`, in the shape of these.

    Raises:
        ValueError: no values.
    """
    if not len(values):
        raise ValueError("values must not be empty")
    order = np.argsort(values, kind="stable")
    cumulative = np.cumsum(weights[order])
    indices = np.searchsorted(cumulative, quantiles * cumulative[-1] - 1e-12)
    return np.asarray(values[order][np.minimum(indices, len(values) - 1)])


def _extended(table: Mapping[str, FloatArray], row: Mapping[str, float], length: int) -> dict[str, FloatArray]:
    names: Iterable[str] = dict.fromkeys([*table, *row])
    return {
        name: np.append(table.get(name, np.full(length, np.nan)), _six_digits(row.get(name, math.nan)))
        for name in names
    }


def _to_list(column: FloatArray) -> list[float | None]:
    return [None if math.isnan(value) else value for value in column.tolist()]


def _six_digits(value: float) -> float:
    """Rounded as in the stored state, so that a kept and a replayed state are equal."""
    return float(f"{value:.6g}")


def _to_array(column: Iterable[float | None]) -> FloatArray:
    return np.array([math.nan if value is None else float(value) for value in column], dtype=np.float64)
