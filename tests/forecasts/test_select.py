import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forecasts.arima import ArimaError, ArimaSettings, fit_arima
from forecasts.baselines import LAST_HOUR_MAX
from forecasts.select import ForecastSettings, PeakForecast, forecast_peak
from forecasts.series import DemandSeries, FloatArray

USUAL = ForecastSettings()
QUICK = ForecastSettings(
    origins_max=8, arima=ArimaSettings(history_s=86_400, p_max=2, q_max=1, exact_fits_max=1, iterations_max=10)
)


def minutes(values: FloatArray | list[float]) -> DemandSeries:
    return DemandSeries(start_s=0, bucket_s=60, values=np.asarray(values, dtype=np.float64))


def noisy_days(hours: float, seed: int = 1) -> FloatArray:
    rng = np.random.default_rng(seed)
    time = np.arange(round(hours * 60)) / 1440
    return np.asarray(1000 * (1.2 + np.sin(2 * np.pi * time)) * np.exp(rng.normal(0, 0.2, len(time))))


def require_sound(forecast: PeakForecast, how: ForecastSettings) -> None:
    values = np.array([forecast.windows, forecast.windows_upper])
    assert values.shape == (2, how.windows)
    assert np.isfinite(values).all()
    assert (values >= 0).all()
    assert max(forecast.windows) == pytest.approx(forecast.peak_q50)
    assert max(forecast.windows_upper) == pytest.approx(forecast.peak_upper)
    assert forecast.peak_upper >= forecast.peak_q50
    assert forecast.reason


def test_both_forecasters_answer_and_the_smaller_past_error_wins() -> None:
    forecast = forecast_peak(minutes(noisy_days(72)), QUICK)
    require_sound(forecast, QUICK)
    errors = {candidate.forecaster: candidate.error for candidate in forecast.candidates}
    assert len(errors) == 2
    assert forecast.forecaster == min(errors, key=lambda name: errors[name] or 0.0)
    assert "missed the last 8 peaks by" in forecast.reason
    assert forecast.origin_s == 72 * 3600


def test_a_steep_regular_rise_is_arimas_case() -> None:
    """Demand grows by 1,000 an hour: the last hour's maximum is always an hour behind, a difference is not."""
    rising = minutes(np.arange(36 * 60) / 60 * 1000 + 5000 + np.random.default_rng(3).normal(0, 30, 36 * 60))
    forecast = forecast_peak(rising, USUAL)
    assert forecast.forecaster.startswith("ARIMA(")
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
def test_what_cannot_be_fitted_is_answered_with_the_reason(
    values: FloatArray, forecaster: str, peak: float | None, reason: str
) -> None:
    forecast = forecast_peak(minutes(values), USUAL)
    require_sound(forecast, USUAL)
    assert forecast.forecaster == forecaster
    assert forecast.known is (forecaster != "none")
    assert reason in forecast.reason
    if peak is not None:
        assert forecast.peak_q50 == pytest.approx(peak)


def test_a_failed_fit_leaves_the_baseline_and_says_so() -> None:
    """Constant up to the first origin of the backtest, then alive: there is nothing to fit from."""
    late = minutes(np.r_[np.full(60 * 30, 50.0), noisy_days(2)])
    forecast = forecast_peak(late, QUICK)
    assert forecast.forecaster == LAST_HOUR_MAX
    assert "ARIMA fit failed: the series is constant" in forecast.reason


def test_few_past_peaks_are_not_calibrated_on() -> None:
    forecast = forecast_peak(minutes(np.full(60, 100.0)), USUAL)
    assert forecast.peak_upper == pytest.approx(150)
    assert "too few to calibrate on: upper = peak x 1.5" in forecast.reason


def test_the_upper_quantile_is_what_past_peaks_were_to_past_forecasts() -> None:
    """Hours take turns at 100 and 200: ratios are 2 and 1/2, so above a 200 stands 400."""
    turns = minutes(np.repeat([100.0, 200.0] * 36, 60))
    forecast = forecast_peak(turns, ForecastSettings(history_min_s=80 * 3600))
    assert forecast.forecaster == LAST_HOUR_MAX
    assert forecast.peak_upper == pytest.approx(400)


def test_no_forecast_exceeds_the_clip() -> None:
    exploding = minutes(np.exp(np.arange(600) / 60.0))
    forecast = forecast_peak(exploding, ForecastSettings(clip_ratio=1.1))
    assert forecast.peak_upper <= 1.1 * exploding.rebin(300).maximum() * (1 + 1e-9)


def test_nothing_after_the_origin_changes_a_forecast() -> None:
    values = noisy_days(40)
    altered = values.copy()
    altered[30 * 60 :] = 1e6
    told = [forecast_peak(minutes(each).before(30 * 3600), QUICK) for each in (values, altered, values[: 30 * 60])]
    assert told[0] == told[1] == told[2]


@settings(max_examples=12, deadline=None)
@given(
    hours=st.integers(1, 30),
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
    require_sound(forecast_peak(minutes(values), QUICK), QUICK)


@pytest.mark.parametrize(
    "change", [{"quantile": 0.5}, {"quantile": 1.0}, {"horizon_s": 60.0}, {"headroom": 0.9}, {"clip_ratio": 0.5}]
)
def test_bad_settings_are_refused_by_name(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        ForecastSettings(**change)  # type: ignore[arg-type]


def test_the_shortlist_misses_little_of_what_the_whole_grid_would_find() -> None:
    rng = np.random.default_rng(5)
    values = np.full(150, 100.0)
    for place in range(2, 150):
        values[place] = 100 + 0.9 * (values[place - 1] - 100) - 0.5 * (values[place - 2] - 100) + rng.normal(0, 5)
    history = DemandSeries(start_s=0, bucket_s=300, values=values)
    short = fit_arima(history, ArimaSettings(p_max=2))
    whole = fit_arima(history, ArimaSettings(p_max=2, exact_fits_max=99))
    assert short.aic - whole.aic < 2
    assert (short.order.p >= 2, short.order.d) == (True, 0)


@pytest.mark.parametrize(
    ("values", "reason"),
    [([np.nan] * 50, "every bucket is a gap"), ([3.0] * 50, "constant"), ([1.0, 2.0, 1.0], "too few known points")],
)
def test_what_has_no_arima_says_why(values: list[float], reason: str) -> None:
    with pytest.raises(ArimaError, match=reason):
        fit_arima(DemandSeries(start_s=0, bucket_s=300, values=np.array(values)), ArimaSettings())
