"""Each forecaster on demand whose coming hour is known by arithmetic."""

import json

import numpy as np
import pytest

from forecasts.models.forecaster import ForecastError
from forecasts.models.forecasters import FORECASTERS
from forecasts.selection.combination import combination_weights, combined_path
from forecasts.series import DemandSeries, FloatArray
from forecasts.settings import DEFAULT_FORECASTERS, ForecastSettings
from tests.forecasts.demand import hourly, minutes, noisy_days

HOW = ForecastSettings()
DAY = np.array([100.0 + 10 * hour for hour in range(24)])  # its last hour has 330, its first 100


def path(name: str, history: DemandSeries) -> FloatArray:
    forecaster = FORECASTERS[name]
    params = json.loads(json.dumps(forecaster.fit(history, HOW, None)))
    return forecaster.path(history, params, HOW)


@pytest.mark.parametrize(
    ("name", "hours", "peak"),
    [
        ("last hour's maximum", [*DAY, *2 * DAY], 660),
        ("same hour yesterday", [*DAY, *2 * DAY[:5]], 150),
        ("yesterday's shape", [*DAY, *2 * DAY[:5]], 280 * 150 / 140),
        # after 140: 150 a day ago, 70 two days ago, so their geometric mean
        ("typical day's shape", [*DAY[:5], 70, *DAY[6:], *DAY, *2 * DAY[:5]], 280 * np.sqrt(150 * 70) / 140),
        ("Theta", [*DAY, *DAY, *DAY, *DAY[:5]], 150),
        ("seasonal ARIMA", [*DAY, *1.01 * DAY, *1.03 * DAY, *1.04 * DAY[:5]], 156),
    ],
)
def test_the_peak_of_a_regular_day(name: str, hours: list[float], peak: float) -> None:
    found = path(name, hourly(*hours))
    assert found.shape == (12,)
    assert found.max() == pytest.approx(peak, rel=0.05 if "ARIMA" in name or name == "Theta" else 1e-9)


@pytest.mark.parametrize("name", ["regression on past days", "regression on recent hours", "ARIMA", "Fourier + ARIMA"])
def test_fitted_ones_miss_by_less_than_half_of_what_the_last_hour_does(name: str) -> None:
    """Five days of a daily wave, at its steepest rise."""
    time = np.arange(5.75 * 288) / 288
    values = 1000 * np.exp(1.5 * np.sin(2 * np.pi * time) + np.random.default_rng(0).normal(0, 0.02, len(time)))
    history = DemandSeries(start_s=0, bucket_s=300, values=values[: 5 * 288])
    actual = values[5 * 288 : 5 * 288 + 12].max()
    assert abs(path(name, history).max() - actual) < abs(path("last hour's maximum", history).max() - actual) / 2


@pytest.mark.parametrize("name", DEFAULT_FORECASTERS)
def test_nothing_but_the_history_matters_and_its_size_only_scales(name: str) -> None:
    history = minutes(noisy_days(60)).rebin(300.0)
    larger = DemandSeries(start_s=0, bucket_s=300, values=1000 * history.values)
    assert path(name, larger) == pytest.approx(1000 * path(name, history), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "hours", "reason"),
    [
        ("same hour yesterday", [1.0] * 20, "does not reach back 1 day"),
        ("same hour yesterday", [*DAY[:3], np.nan, *DAY[4:], *DAY[:3]], "a gap on the day before"),
        ("yesterday's shape", [*DAY, *DAY[:4], np.nan], "no data in the last hour"),
        ("yesterday's shape", [0.0, 5.0, *DAY[2:], 7.0], "no demand at this time 1 day ago"),
        ("typical day's shape", [*DAY[:3], np.nan, *DAY[4:], *DAY[:3]], "no past day has this hour"),
        ("regression on recent hours", [*DAY, 0.0], "no demand in the last half hour"),
        ("regression on recent hours", [*DAY, *[np.nan] * 4], "no demand in the last half hour|gaps in the last hours"),
        ("regression on recent hours", [5.0] * 3, "past hours to learn from, need 30"),
        ("Theta", [*DAY[:3], 0.0, *DAY[4:], *DAY[:3], 0.0, *DAY[4:]], "a time of day without demand"),
        ("seasonal ARIMA", [*DAY, *DAY], "constant"),
    ],
)
def test_what_a_forecaster_cannot_do_it_says(name: str, hours: list[float], reason: str) -> None:
    with pytest.raises(ForecastError, match=reason):
        path(name, hourly(*hours))


def test_the_defaults_all_exist() -> None:
    assert set(DEFAULT_FORECASTERS) <= set(FORECASTERS)


def test_small_errors_weigh_most_and_large_ones_nothing() -> None:
    weights = combination_weights({"a": 0.10, "b": 0.11, "c": 0.12})
    assert weights["a"] / weights["b"] == pytest.approx(1.1**4)
    assert set(weights) == {"a", "b"}  # 0.12 is more than 1.15 times the best
    assert sum(weights.values()) == pytest.approx(1)
    assert combination_weights({"a": 0.0, "b": 0.1}) == {"a": 1.0}


def test_peaks_combine_by_their_geometric_mean() -> None:
    paths = {"a": np.array([2.0, 4.0]), "b": np.array([9.0, 4.5]), "c": np.array([1e9, 1e9])}
    combined = combined_path(paths, {"a": 0.5, "b": 0.5})
    assert combined.max() == pytest.approx(6)
    assert combined.tolist() == pytest.approx([6, 6])  # shapes 0.5 1 and 1 0.5
    assert combined_path({"a": np.zeros(2), "b": np.ones(2)}, {"a": 0.5, "b": 0.5}).tolist() == [0, 0]
