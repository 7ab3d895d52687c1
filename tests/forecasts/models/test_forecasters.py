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
ON_BY_DAY = np.where((np.arange(24) >= 9) & (np.arange(24) < 17), 500.0, 0.0)
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
        # after 140: 150 a day ago, 70 two days ago, so their geometric mean
        ("typical day's shape", [*DAY[:5], 70, *DAY[6:], *DAY, *2 * DAY[:5]], 280 * np.sqrt(150 * 70) / 140),
        ("Theta", [*DAY, *DAY, *DAY, *DAY[:5]], 150),
        # on from hour 9 to 16: on in the coming hour after hour 8, off after hour 17 and in the night
        ("two parts", [*ON_BY_DAY, *ON_BY_DAY, *ON_BY_DAY, *ON_BY_DAY[:9]], 500),
        ("two parts", [*ON_BY_DAY, *ON_BY_DAY, *ON_BY_DAY, *ON_BY_DAY[:18]], 0),
        ("two parts", [*ON_BY_DAY, *ON_BY_DAY, *ON_BY_DAY, *ON_BY_DAY[:3]], 0),
        ("two parts", [*ON_BY_DAY, *ON_BY_DAY, *ON_BY_DAY, *ON_BY_DAY[:12]], 500),
    ],
)
def test_the_peak_of_a_regular_day(name: str, hours: list[float], peak: float) -> None:
    found = path(name, hourly(*hours))
    assert found.shape == (12,)
    assert found.max() == pytest.approx(peak, rel=0.05 if name == "Theta" else 1e-9, abs=1e-6)


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
    spells = np.arange(3600) // 240 % 2 if name == "two parts" else 1
    history = minutes(noisy_days(60) * spells).rebin(300.0)
    larger = DemandSeries(start_s=0, bucket_s=300, values=1000 * history.values)
    assert path(name, larger) == pytest.approx(1000 * path(name, history), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "hours", "reason"),
    [
        ("same hour yesterday", [1.0] * 20, "does not reach back 1 day"),
        ("same hour yesterday", [*DAY[:3], np.nan, *DAY[4:], *DAY[:3]], "a gap on the day before"),
        ("typical day's shape", [*DAY, *DAY[:4], np.nan], "no data in the last hour"),
        ("typical day's shape", [0.0, 5.0, *DAY[2:], 7.0], "no past day has this hour"),
        ("typical day's shape", [*DAY[:3], np.nan, *DAY[4:], *DAY[:3]], "no past day has this hour"),
        ("regression on recent hours", [*DAY, 0.0], "no demand in the last half hour"),
        ("regression on recent hours", [*DAY, *[np.nan] * 4], "no demand in the last half hour|gaps in the last hours"),
        ("regression on recent hours", [5.0] * 3, "past hours to learn from, need 30"),
        ("Theta", [*DAY[:3], 0.0, *DAY[4:], *DAY[:3], 0.0, *DAY[4:]], "a time of day without demand"),
        ("ARIMA", [5.0] * 12, "constant"),
        ("two parts", [0.0] * 30, "no demand in the last week"),
        ("two parts", [*DAY, *DAY], "demand is not on and off"),
        ("two parts", [*ON_BY_DAY, *ON_BY_DAY, np.nan], "no data in the last quarter of an hour"),
        ("two parts", [5.0, 0.0, 5.0], "too little history"),
    ],
)
def test_what_a_forecaster_cannot_do_it_says(name: str, hours: list[float], reason: str) -> None:
    with pytest.raises(ForecastError, match=reason):
        path(name, hourly(*hours))


def test_the_defaults_all_exist() -> None:
    assert set(DEFAULT_FORECASTERS) <= set(FORECASTERS)


def test_small_errors_weigh_most_and_large_ones_nothing() -> None:
    weights = combination_weights({"a": 0.10, "b": 0.11, "c": 0.21})
    assert weights["a"] / weights["b"] == pytest.approx(1.1**8)
    assert set(weights) == {"a", "b"}  # 0.21 is more than twice the best
    assert sum(weights.values()) == pytest.approx(1)
    assert combination_weights({"a": 0.0, "b": 0.1}) == {"a": 1.0}


def test_peaks_combine_by_their_geometric_mean() -> None:
    paths = {"a": np.array([2.0, 4.0]), "b": np.array([9.0, 4.5]), "c": np.array([1e9, 1e9])}
    paths["b"] *= 5 / 9
    combined = combined_path(paths, {"a": 0.5, "b": 0.5}, 1e-9)
    assert combined.max() == pytest.approx(np.sqrt(4 * 5))
    assert combined.tolist() == pytest.approx([np.sqrt(20)] * 2)  # shapes 0.5 1 and 1 0.5


@pytest.mark.parametrize("strange", [0.0, 1e-3, 1e6])
def test_a_member_that_collapses_or_explodes_cannot_drag_the_others(strange: float) -> None:
    paths = {"a": np.full(2, 100.0), "b": np.full(2, 100.0), "c": np.full(2, strange)}
    combined = combined_path(paths, {"a": 0.4, "b": 0.4, "c": 0.2}, 0.1)
    assert combined.max() == pytest.approx(100 * np.exp(np.sign(strange - 100) * 0.4 * 0.2), rel=1e-3)


def test_between_on_and_off_the_combination_takes_the_side_of_more_weight() -> None:
    paths = {"on": np.full(2, 1e5), "off": np.full(2, 100.0)}
    assert combined_path(paths, {"on": 0.4, "off": 0.6}, 1.0).max() < 150
    assert combined_path(paths, {"on": 0.6, "off": 0.4}, 1.0).max() > 8e4
