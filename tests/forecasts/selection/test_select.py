import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from forecasts.models.baselines import LAST_HOUR_MAX
from forecasts.selection.combination import COMBINATION
from forecasts.selection.select import PeakForecast, forecast_peak
from forecasts.series import FloatArray
from forecasts.settings import ArimaSettings, ForecastSettings
from tests.forecasts.demand import hourly, minutes, noisy_days

USUAL = ForecastSettings()
QUICK = ForecastSettings(
    origins_max=8, arima=ArimaSettings(history_s=86_400, p_max=2, q_max=1, exact_fits_max=1, iterations_max=10)
)
CHEAP = replace(QUICK, forecasters=("typical day's shape", "regression on recent hours", "Theta"))


def require_sound(forecast: PeakForecast, how: ForecastSettings) -> None:
    values = np.array([forecast.windows, forecast.windows_upper])
    assert values.shape == (2, how.windows)
    assert np.isfinite(values).all()
    assert (values >= 0).all()
    assert max(forecast.windows) == pytest.approx(forecast.peak_q50)
    assert max(forecast.windows_upper) == pytest.approx(forecast.peak_upper)
    assert forecast.peak_upper >= forecast.peak_q50
    assert forecast.reason
    assert json.loads(json.dumps(forecast.state)) == forecast.state


def test_all_answer_and_the_smallest_past_error_wins() -> None:
    forecast = forecast_peak(minutes(noisy_days(52)), QUICK)
    require_sound(forecast, QUICK)
    assert {each.forecaster for each in forecast.candidates} == {*USUAL.forecasters, COMBINATION}
    assert forecast.candidates[0].forecaster == forecast.forecaster
    errors = {each.forecaster: each.error or 0.0 for each in forecast.candidates}
    assert errors[forecast.forecaster] * (1 - QUICK.margin) <= min(errors.values())
    assert f"{forecast.forecaster} missed the last" in forecast.reason
    assert forecast.origin_s == 52 * 3600


def test_a_steep_regular_rise_is_not_the_last_hours_case() -> None:
    """Demand grows by 1,000 an hour: the last hour's maximum is always an hour behind."""
    rising = minutes(np.arange(36 * 60) / 60 * 1000 + 5000 + np.random.default_rng(3).normal(0, 30, 36 * 60))
    forecast = forecast_peak(rising, QUICK)
    assert forecast.forecaster != LAST_HOUR_MAX
    assert forecast.peak_q50 == pytest.approx(42_000, rel=0.02)


def test_a_level_with_noise_is_near_its_own_maximum() -> None:
    level = minutes(1000 + np.random.default_rng(4).normal(0, 50, 30 * 60))
    forecast = forecast_peak(level, QUICK)
    assert 1000 < forecast.peak_q50 < 1100


@pytest.mark.parametrize(
    ("values", "forecaster", "peak", "reason"),
    [
        (np.full(600, np.nan), "none", 0.0, "no data: every bucket is a gap"),
        ([], "none", 0.0, "no data"),
        (noisy_days(35 / 60), LAST_HOUR_MAX, None, "too little history: 35 minutes, need 240"),
        (np.full(600, 40.0), LAST_HOUR_MAX, 40.0, "constant series at 40 tokens/s"),
        (np.zeros(600), LAST_HOUR_MAX, 0.0, "constant series at 0 tokens/s"),
        (np.r_[np.full(200, 70.0), np.full(90, np.nan)], LAST_HOUR_MAX, 70.0, "no data for the last 90 minutes"),
        (np.r_[np.full(500, np.nan), np.full(60, 70.0)], LAST_HOUR_MAX, 70.0, "too little history: 60 minutes"),
    ],
)
def test_what_cannot_be_modelled_is_answered_with_the_reason(
    values: FloatArray, forecaster: str, peak: float | None, reason: str
) -> None:
    forecast = forecast_peak(minutes(values), USUAL)
    require_sound(forecast, USUAL)
    assert forecast.forecaster == forecaster
    assert forecast.known is (forecaster != "none")
    assert reason in forecast.reason
    if peak is not None:
        assert forecast.peak_q50 == pytest.approx(peak)


def test_a_failed_fit_is_told() -> None:
    """Two values in turn, an hour each, do not differ from one day to the next: there is nothing to fit."""
    turns = minutes(np.repeat([100.0, 200.0] * 24, 60))
    forecast = forecast_peak(turns, replace(QUICK, forecasters=("seasonal ARIMA",)))
    assert "seasonal ARIMA: fit failed: the series is constant" in forecast.reason
    assert forecast.declined["seasonal ARIMA"] == "fit failed: the series is constant"
    assert forecast.forecaster == LAST_HOUR_MAX


def test_without_a_day_of_history_the_daily_forecasters_decline() -> None:
    forecast = forecast_peak(minutes(noisy_days(10)), QUICK)
    require_sound(forecast, QUICK)
    assert forecast.declined["same hour yesterday"] == "history does not reach back 1 day"
    assert forecast.declined["regression on past days"] == "10 hours of data, need 30"
    assert "regression on recent hours" in {each.forecaster for each in forecast.candidates}


def test_few_past_peaks_are_not_calibrated_on() -> None:
    forecast = forecast_peak(minutes(np.full(60, 100.0)), USUAL)
    assert forecast.peak_upper == pytest.approx(150)
    assert "too few to calibrate on: upper = peak x 1.5" in forecast.reason


def test_the_upper_quantile_is_what_past_peaks_were_to_past_forecasts() -> None:
    """Hours take turns at 100 and 200: ratios are 2 and 1/2, so above a 200 stands 400."""
    turns = hourly(*[100.0, 200.0] * 36)
    forecast = forecast_peak(turns, ForecastSettings(forecasters=()))
    assert forecast.forecaster == LAST_HOUR_MAX
    assert forecast.peak_upper == pytest.approx(400)


def test_no_forecast_exceeds_the_clip() -> None:
    exploding = minutes(np.exp(np.arange(600) / 60.0))
    forecast = forecast_peak(exploding, replace(QUICK, clip_ratio=1.1, origins_max=4))
    assert all(each.peak_upper <= 1.1 * exploding.rebin(300).maximum() * (1 + 1e-9) for each in forecast.candidates)


@hypothesis_settings(max_examples=10)
@given(
    hours=st.integers(1, 54),
    seed=st.integers(0, 9),
    gaps=st.floats(0, 1),
    zeros=st.floats(0, 1),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
)
def test_any_series_gets_a_sound_answer(hours: int, seed: int, gaps: float, zeros: float, scale: float) -> None:
    rng = np.random.default_rng(seed)
    values = noisy_days(hours, seed) * scale
    values[rng.random(len(values)) < zeros] = 0.0
    values[(rng.random(len(values) // 30 + 1) < gaps).repeat(30)[: len(values)]] = np.nan
    few = replace(QUICK, origins_max=2)
    first = forecast_peak(minutes(values), few)
    require_sound(first, few)
    later = np.r_[values, noisy_days(1, seed) * scale]
    require_sound(forecast_peak(minutes(later), few, first.state), few)


@pytest.mark.parametrize(
    "change",
    [
        {"quantile": 0.5},
        {"quantile": 1.0},
        {"horizon_s": 60.0},
        {"headroom": 0.9},
        {"clip_ratio": 0.5},
        {"origins_max": 500},
        {"half_life": 0.0},
        {"margin": -0.1},
    ],
)
def test_bad_settings_are_refused_by_name(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        ForecastSettings(**change)  # type: ignore[arg-type]


def test_a_forecaster_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="forecasters: 'oracle' is none of last hour's maximum"):
        forecast_peak(minutes(noisy_days(5)), ForecastSettings(forecasters=("oracle",)))


def test_what_was_kept_spares_the_next_forecast_the_search() -> None:
    """An hour later only one more origin is scored, and no order is chosen again."""
    series = minutes(noisy_days(60))
    first = forecast_peak(series.before(58 * 3600), QUICK)
    second = forecast_peak(series.before(59 * 3600), QUICK, first.state)
    assert second.candidates[0].origins == first.candidates[0].origins + 1
    assert second.state["fitted"]["ARIMA"] == first.state["fitted"]["ARIMA"]
    assert len(second.state["origins_s"]) == len(first.state["origins_s"]) + 1


def test_missed_hours_are_made_up_for() -> None:
    """A worker that was down for three hours ends where one that never was does."""
    series = minutes(noisy_days(60))
    start = forecast_peak(series.before(56 * 3600), CHEAP).state
    state = start
    for hour in (57, 58, 59):
        steady = forecast_peak(series.before(hour * 3600), CHEAP, state)
        state = steady.state
    late = forecast_peak(series.before(59 * 3600), CHEAP, start)
    assert late.state == steady.state
    assert (late.peak_q50, late.peak_upper, late.forecaster) == (steady.peak_q50, steady.peak_upper, steady.forecaster)


def test_a_state_of_a_later_origin_is_left_aside() -> None:
    series = minutes(noisy_days(60))
    later = forecast_peak(series.before(59 * 3600), CHEAP).state
    assert forecast_peak(series.before(50 * 3600), CHEAP, later) == forecast_peak(series.before(50 * 3600), CHEAP)


def test_a_state_that_is_none_is_told_and_left_aside() -> None:
    series = minutes(noisy_days(30))
    forecast = forecast_peak(series, CHEAP, {"version": 0})
    assert "what was kept cannot be read: version must be 1, got 0" in forecast.reason
    assert forecast.peak_q50 == forecast_peak(series, CHEAP).peak_q50


def test_the_champion_is_replaced_when_it_decays() -> None:
    """Two days of hours that take turns are yesterday's case; on the third, each hour stays as the last was."""
    turns = [100.0, 200.0] * 24
    still = [130.0 + hour for hour in range(24)]
    how = replace(CHEAP, forecasters=("same hour yesterday",), origins_max=20, half_life=6.0)
    series = hourly(*turns, *still)
    first = forecast_peak(series.before(48 * 3600), how)
    assert first.forecaster == "same hour yesterday"
    later = forecast_peak(series.before(64 * 3600), how, first.state)
    assert later.forecaster == LAST_HOUR_MAX
