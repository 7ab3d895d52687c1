import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from forecasts.models.baselines import LAST_HOUR_MAX
from forecasts.models.forecaster import Forecaster
from forecasts.models.forecasters import FORECASTERS
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


def test_all_answer_and_the_combination_is_near_the_smallest_past_error() -> None:
    forecast = forecast_peak(minutes(noisy_days(52)), QUICK)
    require_sound(forecast, QUICK)
    assert {each.forecaster for each in forecast.candidates} == {*USUAL.forecasters, COMBINATION} - {"two parts"}
    assert forecast.declined == {"two parts": "demand is not on and off"}
    assert forecast.candidates[0].forecaster == forecast.forecaster == COMBINATION
    best = forecast.candidates[1]
    assert f"{COMBINATION}, near {best.forecaster}, which missed the last {best.origins} peaks" in forecast.reason
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
    """A series that was constant for as long as ARIMA looks back: there is nothing to fit."""
    still = minutes(np.r_[np.full(60, 100.0), np.full(25 * 60, 200.0)])
    forecast = forecast_peak(still, replace(QUICK, forecasters=("ARIMA",), origins_max=0))
    assert "ARIMA: fit failed: the series is constant" in forecast.reason
    assert forecast.declined["ARIMA"] == "fit failed: the series is constant"
    assert forecast.forecaster == LAST_HOUR_MAX


def test_without_a_day_of_history_the_daily_forecasters_decline() -> None:
    forecast = forecast_peak(minutes(noisy_days(10)), QUICK)
    require_sound(forecast, QUICK)
    assert forecast.declined["typical day's shape"] == "no past day has this hour"
    assert forecast.declined["regression on past days"] == "10 hours of data, need 30"
    assert "regression on recent hours" in {each.forecaster for each in forecast.candidates}


def test_few_past_peaks_are_not_calibrated_on() -> None:
    forecast = forecast_peak(minutes(np.full(60, 100.0)), USUAL)
    assert forecast.peak_upper == pytest.approx(150)
    assert "too few to calibrate on: upper = peak x 1.5" in forecast.reason


def test_the_upper_quantile_is_what_past_peaks_were_to_past_forecasts() -> None:
    """Hours take turns at 100 and 200: ratios are 2 and 1/2, so above a 100 stands 200, and above a 200 at first 400;
    the level falls while all is covered, until nothing more than needed stands above a 200.
    """
    turns, how = [100.0, 200.0] * 36, ForecastSettings(forecasters=(), origins_max=60)
    forecast = forecast_peak(hourly(*turns), how)
    assert forecast.forecaster == LAST_HOUR_MAX
    assert forecast_peak(hourly(*turns[:18]), how).peak_upper == pytest.approx(400, rel=0.01)
    assert forecast.peak_upper == pytest.approx(200)
    assert forecast_peak(hourly(*turns, 100.0), how).peak_upper == pytest.approx(200)


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


@pytest.mark.parametrize("factor", [0.0, 0.001, 0.1, 10.0, 1000.0])
def test_a_change_of_scale_is_followed_within_two_hours(factor: float) -> None:
    """Whatever was near before, two hours after the change the forecast is near the new level, and covers it."""
    values = noisy_days(60)
    values[54 * 60 :] *= factor
    series, state = minutes(values), None
    for hour in range(50, 57):
        forecast = forecast_peak(series.before(hour * 3600), CHEAP, state)
        state = forecast.state
    last_hour = series.before(56 * 3600).rebin(300).last_hour_max()
    assert forecast.peak_q50 == pytest.approx(last_hour, rel=0.3)
    assert forecast.peak_upper >= last_hour * 0.9


def test_the_hour_after_a_first_shift_is_the_last_hours_and_the_next_one_is_combined() -> None:
    """Demand falls silent, which no forecaster knew, and returns after ten hours, which is how it is by then."""
    series = minutes(np.r_[noisy_days(48), np.zeros(10 * 60), noisy_days(4)])
    state, given = None, {}
    for hour in range(44, 61):
        forecast = forecast_peak(series.before(hour * 3600), QUICK, state)
        state = forecast.state
        given[hour] = forecast
    silent, back = given[49], given[59]
    assert silent.forecaster == LAST_HOUR_MAX
    assert "the last peak was beyond every forecast" in silent.reason
    assert silent.peak_q50 == 0
    assert given[50].forecaster == COMBINATION
    assert "before, it was last hour's maximum" in given[50].reason
    assert back.forecaster == COMBINATION


def test_silence_that_lasts_is_forecast_as_zero_and_not_as_less_than_a_token() -> None:
    series, state = minutes(np.r_[noisy_days(30), np.zeros(10 * 60)]), None
    for hour in range(26, 40):
        forecast = forecast_peak(series.before(hour * 3600), QUICK, state)
        state = forecast.state
        assert hour <= 32 or (forecast.peak_upper, max(forecast.windows)) == (0, 0)


def test_a_mean_that_falls_to_zero_beside_demand_is_no_forecast() -> None:
    """A straight line through a steep fall ends below zero; clipped, it would say that there is no demand."""
    falling = minutes(np.r_[np.linspace(9_000, 100, 30 * 60), np.full(5, 100.0)])
    how = replace(USUAL, forecasters=("steep",))
    steep = Forecaster(name="steep", path=lambda history, *_: np.full(12, -50.0), mean_path=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FORECASTERS, "steep", steep)
        assert forecast_peak(falling, how).declined == {"steep": "the forecast is not above zero, and demand is"}
        patch.setitem(FORECASTERS, "steep", replace(steep, mean_path=False))
        assert forecast_peak(falling, how).declined == {}


def test_demand_that_is_on_and_off_is_foreseen_by_its_hour() -> None:
    """On for eight hours a day: before the first of them the last hour's maximum is zero, and the forecast is not."""
    day = [0.0] * 9 + [500.0] * 8 + [0.0] * 7
    how = replace(QUICK, forecasters=("two parts",), origins_max=48)
    forecast = forecast_peak(hourly(*day * 5, *day[:9]), how)
    assert forecast.peak_q50 == pytest.approx(500, rel=0.05)
    assert forecast_peak(hourly(*day * 5, *day[:18]), how).peak_q50 == pytest.approx(0, abs=5)


def test_a_state_of_a_release_with_other_forecasters_is_read() -> None:
    """Columns of forecasters that are no more stand in it; they have no weight, and no harm comes of them."""
    series = minutes(noisy_days(60))
    state = json.loads(json.dumps(forecast_peak(series.before(59 * 3600), CHEAP).state))
    count = len(state["origins_s"])
    for table in ("raw", "said", "upper"):
        state[table]["seasonal ARIMA"] = [1e9] * count
    state["champion"] = "seasonal ARIMA"
    forecast = forecast_peak(series, CHEAP, state)
    assert (
        forecast.peak_q50 == forecast_peak(series, CHEAP, forecast_peak(series.before(59 * 3600), CHEAP).state).peak_q50
    )
    assert "before, it was seasonal ARIMA" in forecast.reason
