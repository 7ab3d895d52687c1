"""The figures of the forecast, on a series whose figures are known by arithmetic."""

from dataclasses import replace

import numpy as np
import pytest

from forecasts.importers.series_file import EndpointSeries
from forecasts.models.baselines import LAST_HOUR_MAX
from forecasts.series import DemandSeries
from forecasts.settings import ForecastSettings
from ops.bench.planner.forecasts import Accuracy, measure_accuracy, measure_speed, missed_targets

BARE = ForecastSettings(forecasters=("same hour yesterday",), origins_max=2)


def test_a_day_that_repeats_itself_is_yesterdays() -> None:
    """Hours take turns at 100 and 300: yesterday misses none, the last hour misses all by 200."""
    series = DemandSeries(start_s=0, bucket_s=300, values=np.repeat([100.0, 300.0] * 36, 12))
    found = measure_accuracy(EndpointSeries(region="r", model="m", series=series), BARE)
    assert found.hours == 36
    assert found.alone["same hour yesterday"] == 0
    assert found.alone[LAST_HOUR_MAX] == pytest.approx(1.0)
    assert (found.error, found.coverage, found.over_provision) == (0, 1, pytest.approx(0))
    # the last hour's maximum covers all only at three times itself: then 900 stand above 100, and 300 above 300
    assert found.last_hour_over_provision == pytest.approx(800 / 400)


def test_what_is_missed_is_named() -> None:
    good = Accuracy(
        series="s",
        hours=9,
        error=0.1,
        alone={LAST_HOUR_MAX: 0.2},
        to_table_best=1.0,
        to_best=1.0,
        coverage=0.9,
        over_provision=0.3,
        last_hour_over_provision=0.4,
        seconds=1.0,
    )
    assert missed_targets(good) == ""
    bad = replace(good, error=0.3, to_table_best=1.01, coverage=0.86, over_provision=0.31)
    assert missed_targets(bad) == "error, last hour, coverage, over-provision"


@pytest.mark.slow
def test_speed_is_of_all_series_and_of_the_grid() -> None:
    week = DemandSeries(start_s=0, bucket_s=300, values=100 + np.random.default_rng(0).normal(size=100))
    found = measure_speed([week], BARE, 3)
    assert found.series == 3
    assert found.grid_s == pytest.approx(found.grid_few_s)  # all three were fitted
    assert found.faster == pytest.approx(found.grid_s / found.forecast_s)
