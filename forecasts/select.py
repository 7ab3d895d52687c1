"""The peak of the coming hour: forecasters side by side, the best on the recent past answers, and says why.

Input is one endpoint's demand up to the origin (the end of the series); nothing after it is ever seen. The upper
quantile comes from what past peaks were to past forecasts, not from the forecaster's own Gaussian band: too narrow.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from forecasts.arima import ArimaError, ArimaSettings, fit_arima, refit_arima
from forecasts.backtest import BacktestScore, Forecaster, backtest, origins_of, upper_ratio
from forecasts.baselines import LAST_HOUR_MAX, last_hour_max_path, last_known_hour
from forecasts.series import DemandSeries, FloatArray

NO_FORECASTER = "none"


@dataclass(frozen=True, kw_only=True)
class ForecastSettings:
    """How to forecast.

    Attributes:
        quantile: of the coming hour's peak, for `peak_upper`.
        bucket_s: windows of this length are forecast.
        horizon_s: how far ahead.
        history_min_s: below this the baseline answers.
        origins_max: past moments the backtest tries.
        ratios_min: past errors needed to calibrate; with fewer, `headroom` is the upper ratio.
        clip_ratio: no forecast above this times the maximum of the last `clip_history_s`.
    """

    quantile: float = 0.9
    bucket_s: float = 300.0
    horizon_s: float = 3600.0
    history_min_s: float = 4 * 3600.0
    origins_max: int = 24
    ratios_min: int = 5
    headroom: float = 1.5
    clip_ratio: float = 3.0
    clip_history_s: float = 86_400.0
    arima: ArimaSettings = field(default_factory=ArimaSettings)

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            ValueError: a field is out of range.
        """
        if not 0.5 < self.quantile < 1:
            raise ValueError(f"quantile must be above 0.5 and below 1, got {self.quantile}")
        if self.horizon_s < self.bucket_s:
            raise ValueError(f"horizon_s {self.horizon_s} must be at least bucket_s {self.bucket_s}")
        if self.history_min_s < 2 * self.horizon_s:
            raise ValueError(f"history_min_s {self.history_min_s} must be at least twice horizon_s {self.horizon_s}")
        if self.origins_max < 1:
            raise ValueError(f"origins_max must be at least 1, got {self.origins_max}")
        if self.headroom < 1 or self.clip_ratio < 1:
            raise ValueError(f"headroom {self.headroom} and clip_ratio {self.clip_ratio} must be at least 1")

    @property
    def windows(self) -> int:
        """Windows in the coming hour."""
        return round(self.horizon_s / self.bucket_s)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One forecaster's answer, used or not. Peaks in tokens per second, `error` and `coverage` as shares of 1."""

    forecaster: str
    peak_q50: float
    peak_upper: float
    error: float | None
    coverage: float | None
    origins: int


@dataclass(frozen=True, kw_only=True)
class PeakForecast:
    """The coming hour, tokens per second.

    Attributes:
        forecaster: which one answered; "none" where nothing is known and the zeros mean nothing.
        origin_s: Unix time at which the first window begins.
        peak_q50: the median peak. peak_upper: its upper quantile.
        windows: the path behind `peak_q50`, one value per window; its maximum is `peak_q50`.
        windows_upper: the same path raised to `peak_upper`; what a plan uses.
        candidates: all that were tried, the chosen one first.
        reason: in plain words, why this one.
    """

    forecaster: str
    origin_s: float
    peak_q50: float
    peak_upper: float
    windows: tuple[float, ...]
    windows_upper: tuple[float, ...]
    candidates: tuple[Candidate, ...]
    reason: str

    @property
    def known(self) -> bool:
        """Whether anything was known to forecast from."""
        return self.forecaster != NO_FORECASTER


@dataclass(frozen=True, kw_only=True)
class _Answer:
    candidate: Candidate
    path: FloatArray


def forecast_peak(series: DemandSeries, settings: ForecastSettings) -> PeakForecast:
    """Forecast the peak of the hour that begins where the series ends.

    Args:
        series: demand per minute (or any bucket that divides `settings.bucket_s`), gaps as NaN.
        settings: see ForecastSettings.

    Raises:
        ValueError: the series' buckets do not divide `settings.bucket_s`.
    """
    history = series.rebin(settings.bucket_s)
    if math.isnan(history.maximum()):
        return _nothing_known(history, settings)
    origins = _origins(history, settings)
    baseline = _answer(
        history,
        LAST_HOUR_MAX,
        replayed=last_hour_max_path,
        fresh=last_hour_max_path,
        origins=origins,
        settings=settings,
    )
    refusal = _why_no_arima(history, settings)
    if refusal is None:
        try:
            fitted = _arima_answer(history, origins, settings)
        except ArimaError as error:
            refusal = f"ARIMA fit failed: {error}"
        else:
            return _better(history, baseline, fitted, settings)
    return _forecast(history, (baseline,), _with_silence(history, refusal), settings)


def _origins(history: DemandSeries, settings: ForecastSettings) -> tuple[float, ...]:
    train = history.buckets_in(settings.history_min_s / 2)
    return origins_of(history, windows=settings.windows, train=train, count_max=settings.origins_max)


def _why_no_arima(history: DemandSeries, settings: ForecastSettings) -> str | None:
    known = history.values[~np.isnan(history.values)]
    covered_s = known.size * history.bucket_s
    if covered_s < settings.history_min_s:
        return f"too little history: {covered_s / 60:.0f} minutes, need {settings.history_min_s / 60:.0f}"
    if np.ptp(known) == 0:
        return f"constant series at {known[0]:,.0f} tokens/s"
    return None


def _arima_answer(history: DemandSeries, origins: tuple[float, ...], settings: ForecastSettings) -> _Answer:
    """ARIMA with order and backtested parameters from before the first origin; the answer's are refitted on all."""
    bounds = settings.arima
    past = fit_arima(history.before(origins[0]), bounds)
    latest = refit_arima(past, history, bounds)

    def replayed(known: DemandSeries, windows: int) -> FloatArray:
        return past.path(known, windows, bounds)

    def fresh(known: DemandSeries, windows: int) -> FloatArray:
        return latest.path(known, windows, bounds)

    return _answer(history, str(past.order), replayed=replayed, fresh=fresh, origins=origins, settings=settings)


def _answer(
    history: DemandSeries,
    name: str,
    *,
    replayed: Forecaster,
    fresh: Forecaster,
    origins: tuple[float, ...],
    settings: ForecastSettings,
) -> _Answer:
    """Backtest the one, ask the other about the coming hour, and calibrate its answer on the backtest's errors."""
    score = backtest(
        history,
        name,
        _clipped(replayed, settings),
        origins=origins,
        windows=settings.windows,
        quantile=settings.quantile,
    )
    path = _clipped(fresh, settings)(history, settings.windows)
    if not np.isfinite(path).all():
        raise ArimaError(f"{name}: the forecast is not finite")
    middle, upper = _calibration(score, settings)
    ceiling = _ceiling(history, settings)
    candidate = Candidate(
        forecaster=name,
        peak_q50=min(float(path.max()) * middle, ceiling),
        peak_upper=min(float(path.max()) * upper, ceiling),
        error=score.weighted_error,
        coverage=score.calibrated_coverage,
        origins=len(score.outcomes),
    )
    return _Answer(candidate=candidate, path=path)


def _calibration(score: BacktestScore, settings: ForecastSettings) -> tuple[float, float]:
    """What to multiply a forecast with for the median and for the upper quantile of the peak."""
    ratios = score.ratios()
    if len(ratios) < settings.ratios_min:
        return 1.0, settings.headroom
    middle = float(np.median(ratios))
    return middle, max(middle, upper_ratio(ratios, settings.quantile))


def _clipped(forecaster: Forecaster, settings: ForecastSettings) -> Callable[[DemandSeries, int], FloatArray]:
    def bounded(known: DemandSeries, windows: int) -> FloatArray:
        return np.clip(forecaster(known, windows), 0.0, _ceiling(known, settings))

    return bounded


def _ceiling(known: DemandSeries, settings: ForecastSettings) -> float:
    recent = known.last(settings.clip_history_s).maximum()
    return settings.clip_ratio * (last_known_hour(known).maximum() if math.isnan(recent) else recent)


def _better(history: DemandSeries, baseline: _Answer, fitted: _Answer, settings: ForecastSettings) -> PeakForecast:
    base, arima = baseline.candidate, fitted.candidate
    if base.error is None or arima.error is None:
        reason = f"no past hour to compare on; {base.forecaster} needs no fit"
        return _forecast(history, (baseline, fitted), _with_silence(history, reason), settings)
    ranked = (fitted, baseline) if arima.error < base.error else (baseline, fitted)
    best, other = ranked[0].candidate, ranked[1].candidate
    reason = (
        f"{best.forecaster} missed the last {best.origins} peaks by {_percent(best.error)}, "
        f"{other.forecaster} by {_percent(other.error)}"
    )
    return _forecast(history, ranked, _with_silence(history, reason), settings)


def _percent(share: float | None) -> str:
    return "?" if share is None or math.isinf(share) else f"{100 * share:.1f} %"


def _with_silence(history: DemandSeries, reason: str) -> str:
    if not math.isnan(history.last_hour_max()):
        return reason
    newest = np.flatnonzero(~np.isnan(history.values))[-1]
    silent_s = history.end_s - (history.start_s + (newest + 1) * history.bucket_s)
    return f"{reason}; no data for the last {silent_s / 60:.0f} minutes"


def _forecast(
    history: DemandSeries, ranked: tuple[_Answer, ...], reason: str, settings: ForecastSettings
) -> PeakForecast:
    chosen, path = ranked[0].candidate, ranked[0].path
    if chosen.origins < settings.ratios_min:
        reason += f"; {chosen.origins} past peaks are too few to calibrate on: upper = peak x {settings.headroom:g}"
    shape = path / path.max() if path.max() > 0 else np.zeros_like(path)
    return PeakForecast(
        forecaster=chosen.forecaster,
        origin_s=history.end_s,
        peak_q50=chosen.peak_q50,
        peak_upper=chosen.peak_upper,
        windows=tuple((shape * chosen.peak_q50).tolist()),
        windows_upper=tuple((shape * chosen.peak_upper).tolist()),
        candidates=tuple(answer.candidate for answer in ranked),
        reason=reason,
    )


def _nothing_known(history: DemandSeries, settings: ForecastSettings) -> PeakForecast:
    zeros = (0.0,) * settings.windows
    return PeakForecast(
        forecaster=NO_FORECASTER,
        origin_s=history.end_s,
        peak_q50=0.0,
        peak_upper=0.0,
        windows=zeros,
        windows_upper=zeros,
        candidates=(),
        reason="no data: every bucket is a gap",
    )
