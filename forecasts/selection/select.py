"""The peak of the coming hour, by a combination of forecasters with little recent error, with the reason for it.

Inputs are one endpoint's demand up to the origin (the end of the series) and the state of the last forecast. One step
runs for each hour since then, or without a state for each since there has been enough history, but for at most
`origins_max` past hours, so that a live forecast and a replayed one are the same computation:

    score past forecasts   ->   refit those due   ->   run all   ->   correct, combine, calibrate
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forecasts.models.baselines import LAST_HOUR_MAX, scaled_to_peak
from forecasts.models.elsewhere import ELSEWHERE
from forecasts.selection.ask import Answer, Answers, ask_all
from forecasts.selection.calibration import adapted_level
from forecasts.selection.combination import COMBINATION
from forecasts.selection.past import SeriesState
from forecasts.series import DemandSeries
from forecasts.settings import ForecastSettings

__all__ = ["NO_FORECASTER", "Candidate", "PeakForecast", "forecast_peak"]

NO_FORECASTER = "none"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One forecaster's forecast, chosen or not. Peaks in tokens per second, `error` and `coverage` as shares of 1.

    `coverage`: the share of the `origins` past peaks under their forecast upper quantile.
    """

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
        forecaster: the chosen one; "none" without any data, when the zeros mean nothing.
        origin_s: Unix time of the start of the first window.
        peak_q50: the median peak. peak_upper: its upper quantile.
        windows: the forecast path, one value per window; its maximum is `peak_q50`.
        windows_upper: the same path scaled to `peak_upper`, which plans use.
        spread: quantiles of the peak at the levels `calibration.SPREAD`; empty while there are too few past errors.
        candidates: all forecasts, the chosen one first, then by error.
        declined: by forecaster, why it gave none.
        reason: why this one was chosen.
        state: a JSON object to pass to the next forecast of this series.
    """

    forecaster: str
    origin_s: float
    peak_q50: float
    peak_upper: float
    windows: tuple[float, ...]
    windows_upper: tuple[float, ...]
    spread: tuple[float, ...]
    candidates: tuple[Candidate, ...]
    declined: Mapping[str, str]
    reason: str
    state: Mapping[str, Any]

    @property
    def known(self) -> bool:
        return self.forecaster != NO_FORECASTER


def forecast_peak(
    series: DemandSeries,
    settings: ForecastSettings,
    state: Mapping[str, Any] | None = None,
    like: DemandSeries | None = None,
) -> PeakForecast:
    """Forecast the peak of the hour after the end of the series.

    Args:
        series: demand per minute (or any bucket that divides `settings.bucket_s`), gaps as NaN.
        settings: see ForecastSettings.
        state: of the last forecast of the series. Without one, or if it has a later origin or cannot be read, all is
            chosen again; the reason then has the error.
        like: demand for the same model elsewhere, in the same buckets and to the same end, from which a series borrows
            while it has less than a day of data.

    Raises:
        ValueError: the series' buckets do not divide `settings.bucket_s`, or a forecaster's name is not known.
    """
    kept, complaint = SeriesState(), ""
    try:
        kept = kept if state is None else SeriesState.from_json(state)
    except ValueError as error:
        complaint = f"; what was kept cannot be read: {error}"
    if kept.origin_s is not None and kept.origin_s > series.end_s:
        kept = SeriesState()
    for origin_s in _origins_since(kept.origin_s, series, settings):
        forecast, kept = _step(series.before(origin_s), kept, settings, like)
    return replace(forecast, reason=forecast.reason + complaint)


def _origins_since(last_s: float | None, series: DemandSeries, settings: ForecastSettings) -> list[float]:
    """The hours since the last forecast, or since the first with enough history, and the end of the series."""
    known = np.flatnonzero(~np.isnan(series.values))
    first_known_s = series.start_s + (int(known[0]) if known.size else len(series.values)) * series.bucket_s
    earliest_s = max(first_known_s + settings.history_min_s / 2, -math.inf if last_s is None else last_s + 1.0)
    hours = math.floor((series.end_s - earliest_s) / settings.horizon_s)
    count = min(max(0, hours), settings.origins_max)
    return [series.end_s - back * settings.horizon_s for back in reversed(range(count + 1))]


def _step(
    known: DemandSeries, before: SeriesState, settings: ForecastSettings, like: DemandSeries | None
) -> tuple[PeakForecast, SeriesState]:
    history = known.rebin(settings.bucket_s)
    if like is not None:
        like = like.before(known.end_s).rebin(settings.bucket_s)
    state = replace(_scored(known, before, settings), origin_s=history.end_s)
    if math.isnan(history.maximum()):
        return _nothing_known(history, state, settings), state
    answers = ask_all(history, state, settings, like)
    champion, reason = _choose(answers.by_name, state)
    state = _remembered(state, answers, champion, settings)
    return _forecast(history, answers, champion, reason, state, settings), state


def _scored(known: DemandSeries, state: SeriesState, settings: ForecastSettings) -> SeriesState:
    """With the peaks known since, and the calibration levels adapted to which of them were covered."""
    unscored = set(state.past.origins_s[np.isnan(state.past.actual)].tolist())
    past = state.past.scored(known, settings.horizon_s, settings.bucket_s)
    level = dict(state.level)
    for index, (origin_s, actual) in enumerate(zip(past.origins_s.tolist(), past.actual.tolist(), strict=True)):
        if origin_s not in unscored or math.isnan(actual):
            continue
        for name, upper in past.upper.items():
            if not math.isnan(upper[index]):
                before = level.get(name, settings.quantile)
                level[name] = adapted_level(before, settings.quantile, covered=bool(actual <= upper[index]))
    return replace(state, past=past, level=level)


def _remembered(state: SeriesState, answers: Answers, champion: str, settings: ForecastSettings) -> SeriesState:
    """With the forecasts of now, to be scored when the hour is over."""
    assert state.origin_s is not None
    past = state.past.with_origin(
        state.origin_s,
        raw={name: answer.raw for name, answer in answers.by_name.items()},
        median={name: answer.peak for name, answer in answers.by_name.items()},
        upper={name: answer.upper for name, answer in answers.by_name.items()},
        memory=settings.memory,
    )
    return replace(state, past=past, champion=champion, fitted=answers.fitted)


def _choose(answers: Mapping[str, Answer], state: SeriesState) -> tuple[str, str]:
    """The chosen forecaster and the reason: the combination, or the baseline while there are too few past errors and
    in the hour after a shift.

    A single forecaster with the least past error is not chosen in its stead: on hard series that loses more often than
    it wins, and its weight in the combination is large anyway.
    """
    if COMBINATION not in answers and ELSEWHERE in answers:
        return ELSEWHERE, f"too few past hours to combine on; the {ELSEWHERE} has the shape of this hour"
    if COMBINATION not in answers:
        return LAST_HOUR_MAX, f"too few past hours to combine on; {LAST_HOUR_MAX} needs no fit"
    if state.past.known().is_shifted:
        return LAST_HOUR_MAX, f"the last peak was beyond every forecast, so {LAST_HOUR_MAX} is what is known"
    errors = {name: each.error for name, each in answers.items() if name != COMBINATION and each.error is not None}
    best = min(errors, key=lambda name: (errors[name], name))
    reason = (
        f"{COMBINATION}, near {best}, which missed the last {answers[best].origins} peaks by {_percent(errors[best])}"
    )
    own = answers[COMBINATION].error
    if own is not None:
        reason += f"; it missed its own by {_percent(own)}"
    before = state.champion
    return COMBINATION, reason + (f"; before, it was {before}" if before not in {None, COMBINATION} else "")


def _percent(share: float) -> str:
    return "?" if math.isinf(share) else f"{100 * share:.1f} %"


def _forecast(
    history: DemandSeries, answers: Answers, champion: str, reason: str, state: SeriesState, settings: ForecastSettings
) -> PeakForecast:
    chosen = answers.by_name[champion]
    others = [answer for name, answer in answers.by_name.items() if name != champion]
    others.sort(key=lambda answer: (answer.error is None, answer.error, answer.name))
    return PeakForecast(
        forecaster=champion,
        origin_s=history.end_s,
        peak_q50=chosen.peak,
        peak_upper=chosen.upper,
        windows=tuple(chosen.path.tolist()),
        windows_upper=tuple(scaled_to_peak(chosen.path, chosen.upper).tolist()),
        spread=chosen.spread,
        candidates=tuple(_candidate(answer) for answer in (chosen, *others)),
        declined=answers.declined,
        reason=_full_reason(history, answers, chosen, reason, settings),
        state=state.to_json(),
    )


def _candidate(answer: Answer) -> Candidate:
    return Candidate(
        forecaster=answer.name,
        peak_q50=answer.peak,
        peak_upper=answer.upper,
        error=answer.error,
        coverage=answer.coverage,
        origins=answer.origins,
    )


def _full_reason(
    history: DemandSeries, answers: Answers, chosen: Answer, reason: str, settings: ForecastSettings
) -> str:
    parts = [reason if chosen.name == ELSEWHERE or answers.refusal is None else answers.refusal]
    if math.isnan(history.last_hour_max()):
        newest = np.flatnonzero(~np.isnan(history.values))[-1]
        silent_s = history.end_s - (history.start_s + (newest + 1) * history.bucket_s)
        parts.append(f"no data for the last {silent_s / 60:.0f} minutes")
    if chosen.origins < settings.ratios_min:
        few = f"{chosen.origins} past peaks are too few to calibrate on"
        factor = chosen.upper / chosen.peak if chosen.peak > 0 else settings.headroom
        parts.append(f"{few}: upper = peak x {factor:.3g}")
    parts += [f"{name}: {why}" for name, why in answers.declined.items() if name in answers.failed]
    return "; ".join(parts)


def _nothing_known(history: DemandSeries, state: SeriesState, settings: ForecastSettings) -> PeakForecast:
    zeros = (0.0,) * settings.windows
    return PeakForecast(
        forecaster=NO_FORECASTER,
        origin_s=history.end_s,
        peak_q50=0.0,
        peak_upper=0.0,
        windows=zeros,
        windows_upper=zeros,
        spread=(),
        candidates=(),
        declined={},
        reason="no data: every bucket is a gap",
        state=state.to_json(),
    )
