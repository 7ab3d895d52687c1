"""Run every forecaster for the coming hour: refit those due, clip, correct by past ratios, combine, calibrate."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from forecasts.models.baselines import LAST_HOUR_MAX, last_known_hour
from forecasts.models.elsewhere import ELSEWHERE, NEW_S, borrowed_headroom, elsewhere_path
from forecasts.models.forecaster import Forecaster, ForecastError
from forecasts.models.forecasters import FORECASTERS
from forecasts.selection.calibration import SPREAD, log_ratio_quantiles
from forecasts.selection.combination import COMBINATION, combination_weights, combined_path
from forecasts.selection.past import FLOOR_MIN, Fitted, PastPeaks, SeriesState, weighted_quantile
from forecasts.series import DemandSeries, FloatArray
from forecasts.settings import ForecastSettings


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """One forecaster's forecast of the coming hour, tokens per second.

    Attributes:
        name: of the forecaster.
        path: shape (windows,), clipped and corrected.
        raw: the clipped peak of the forecaster, without correction.
        upper: upper quantile of the peak.
        spread: quantiles of the peak at the levels `SPREAD`; empty while there are too few past errors.
        error: mean error over past origins, each relative to its scale; None before the first.
        coverage: share of past peaks under their forecast upper quantile.
        origins: number of its past forecasts with a known actual peak.
    """

    name: str
    path: FloatArray
    raw: float
    upper: float
    spread: tuple[float, ...]
    error: float | None
    coverage: float | None
    origins: int

    @property
    def peak(self) -> float:
        """The median peak."""
        return float(self.path.max())


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The answers by forecaster; why the others declined; whose fit or forecast failed; why no model was run."""

    by_name: Mapping[str, Answer]
    declined: Mapping[str, str]
    failed: frozenset[str]
    refusal: str | None
    fitted: Mapping[str, Fitted]


def ask_all(
    history: DemandSeries, state: SeriesState, settings: ForecastSettings, like: DemandSeries | None = None
) -> Answers:
    """The answers of all forecasters; the last hour's maximum always gives one.

    Args:
        history: in buckets of `settings.bucket_s`, with at least one known value.
        state: with all known peaks scored.
        settings: see ForecastSettings.
        like: demand for the same model elsewhere, in the same buckets up to the same moment; used while the series is
            new.
    """
    past, covered_s = state.past.known(), _known_s(history)
    refusal = _why_no_model(history, covered_s, settings)
    fitted, declined, failed = dict(state.fitted), {}, set()
    answers: dict[str, Answer] = {}
    for forecaster in _asked(settings):
        if forecaster.name != LAST_HOUR_MAX and refusal is not None:
            declined[forecaster.name] = refusal
            continue
        if covered_s < forecaster.history_min_s:
            need_h = forecaster.history_min_s / 3600
            declined[forecaster.name] = f"{covered_s / 3600:.0f} hours of data, need {need_h:.0f}"
            continue
        kept = _fit_due(forecaster, history, state.fitted.get(forecaster.name), settings)
        fitted[forecaster.name] = kept
        try:
            raw = _raw_path(forecaster, history, kept, settings)
        except ForecastError as error:
            declined[forecaster.name] = str(error)
            failed |= {forecaster.name} if kept.failure else set()
            continue
        path = _corrected(forecaster, raw, past, history, settings)
        answers[forecaster.name] = _answer(forecaster.name, path, float(raw.max()), past, state, history, settings)
    if like is not None and covered_s < NEW_S:
        settings = replace(settings, headroom=borrowed_headroom(like, settings) or settings.headroom)
        try:
            path = np.clip(elsewhere_path(history, like, settings), 0.0, _ceiling(history, settings))
            answers[ELSEWHERE] = _answer(ELSEWHERE, path, float(path.max()), past, state, history, settings)
        except ForecastError as error:
            declined[ELSEWHERE] = str(error)
    combined = _combined(answers, past, state, history, settings)
    return Answers(
        by_name=answers if combined is None else {COMBINATION: combined, **answers},
        declined=declined,
        failed=frozenset(failed),
        refusal=refusal,
        fitted=fitted,
    )


def _asked(settings: ForecastSettings) -> Sequence[Forecaster]:
    unknown = [name for name in settings.forecasters if name not in FORECASTERS]
    if unknown:
        raise ValueError(f"forecasters: {unknown[0]!r} is none of {', '.join(FORECASTERS)}")
    return [FORECASTERS[name] for name in dict.fromkeys((LAST_HOUR_MAX, *settings.forecasters))]


def _known_s(history: DemandSeries) -> float:
    return float(np.count_nonzero(~np.isnan(history.values)) * history.bucket_s)


def _why_no_model(history: DemandSeries, covered_s: float, settings: ForecastSettings) -> str | None:
    known = history.values[~np.isnan(history.values)]
    if covered_s < settings.history_min_s:
        return f"too little history: {covered_s / 60:.0f} minutes, need {settings.history_min_s / 60:.0f}"
    if np.ptp(known) == 0:
        return f"constant series at {known[0]:,.0f} tokens/s"
    return None


def _fit_due(forecaster: Forecaster, history: DemandSeries, kept: Fitted | None, settings: ForecastSettings) -> Fitted:
    """The kept parameters, or refitted ones if they are old; with new orders if those are old, or if there is four
    times the history that they were chosen from.
    """
    now_s = history.end_s
    if kept is not None and now_s - kept.fitted_s < settings.refit_s and not _orders_are_due(kept, now_s, settings):
        return kept
    old = None if kept is None or _orders_are_due(kept, now_s, settings) else kept
    selected_s, selected_from_s = (now_s, history.duration_s) if old is None else (old.selected_s, old.selected_from_s)
    try:
        params, failure = forecaster.fit(history, settings, None if old is None else old.params), None
    except ForecastError as error:
        params, failure = None, f"fit failed: {error}"
    return Fitted(
        params=params, failure=failure, fitted_s=now_s, selected_s=selected_s, selected_from_s=selected_from_s
    )


def _orders_are_due(kept: Fitted, now_s: float, settings: ForecastSettings) -> bool:
    return now_s - kept.selected_s >= min(settings.reselect_s, 3 * kept.selected_from_s)


def _raw_path(forecaster: Forecaster, history: DemandSeries, kept: Fitted, settings: ForecastSettings) -> FloatArray:
    if kept.params is None:
        raise ForecastError(kept.failure or "no parameters")
    path = forecaster.path(history, kept.params, settings)
    if not np.isfinite(path).all():
        raise ForecastError("the forecast is not finite")
    if forecaster.mean_path and path.max() <= 0 < last_known_hour(history).maximum():
        raise ForecastError("the forecast is not above zero, and demand is")
    return np.clip(path, 0.0, _ceiling(history, settings))


def _corrected(
    forecaster: Forecaster, raw: FloatArray, past: PastPeaks, history: DemandSeries, settings: ForecastSettings
) -> FloatArray:
    """For a path that follows the mean: the path times the median ratio of past peaks to the maxima of such paths."""
    if not forecaster.mean_path:
        return raw
    ratios = past.log_ratios(past.raw, forecaster.name)
    usable = ~np.isnan(ratios)
    if usable.sum() < settings.ratios_min:
        return raw
    weights = past.weights(settings.half_life) * past.actual / np.maximum(past.scales, FLOOR_MIN)
    median = weighted_quantile(ratios[usable], weights[usable], 0.5)
    return np.clip(raw * math.exp(median), 0.0, _ceiling(history, settings))


def _ceiling(history: DemandSeries, settings: ForecastSettings) -> float:
    recent = history.last(settings.clip_history_s).maximum()
    return settings.clip_ratio * (last_known_hour(history).maximum() if math.isnan(recent) else recent)


def _answer(
    name: str,
    path: FloatArray,
    raw: float,
    past: PastPeaks,
    state: SeriesState,
    history: DemandSeries,
    settings: ForecastSettings,
) -> Answer:
    """With the upper quantile. Less than a token in a window is none, or silence would seem to have been exceeded."""
    token = 1.0 / settings.bucket_s
    path = path if path.max() >= token else np.zeros_like(path)
    ratios, floor = past.floored_log_ratios(name), past.floor
    usable = ~np.isnan(ratios)
    origins, peak = int(usable.sum()), float(path.max())
    upper, spread = peak * settings.headroom, ()
    if origins >= settings.ratios_min:
        level = state.level.get(name, settings.quantile)
        forecasts = np.log(past.median[name] + past.floors)[usable]
        quantiles = log_ratio_quantiles(ratios[usable], forecasts, math.log(peak + floor), (level, *SPREAD))
        upper, *spread = np.maximum(0.0, (peak + floor) * np.exp(quantiles) - floor).tolist()
    uppers = past.upper.get(name, np.empty(0))
    judged = past.actual[~np.isnan(uppers)] <= uppers[~np.isnan(uppers)]
    return Answer(
        name=name,
        path=path,
        raw=raw,
        upper=max(peak, min(upper, _ceiling(history, settings)) if upper >= token else 0.0),
        spread=tuple(spread),
        error=past.error(name, LAST_HOUR_MAX, settings.half_life),
        coverage=float(judged.mean()) if judged.size else None,
        origins=origins,
    )


def _combined(
    answers: Mapping[str, Answer],
    past: PastPeaks,
    state: SeriesState,
    history: DemandSeries,
    settings: ForecastSettings,
) -> Answer | None:
    """None while fewer than two forecasters have enough past errors."""
    errors = {name: each.error for name, each in answers.items() if each.origins >= settings.ratios_min}
    tried = {name: error for name, error in errors.items() if error is not None and math.isfinite(error)}
    if len(tried) < 2:
        return None
    path = combined_path({name: answers[name].path for name in tried}, combination_weights(tried), past.floor)
    return _answer(COMBINATION, path, float(path.max()), past, state, history, settings)
