"""The figures of the forecast, on a series whose figures are known by arithmetic."""

from dataclasses import replace

import numpy as np
import pytest

from forecasts.importers.series_file import EndpointSeries
from forecasts.models.baselines import LAST_HOUR_MAX
from forecasts.series import DemandSeries
from forecasts.settings import ForecastSettings
from ops.bench.planner.forecasts import Accuracy, measure_accuracy, measure_speed, missed_targets

BARE = ForecastSettings(forecasters=(), origins_max=2)


def test_a_level_that_stays_is_the_last_hours() -> None:
    """A day at 100 and then a day at 300: the last hour misses the change only, and so do all."""
    series = DemandSeries(start_s=0, bucket_s=300, values=np.repeat([100.0] * 30 + [300.0] * 18, 12))
    found = measure_accuracy(EndpointSeries(region="r", model="m", series=series), BARE)
    assert found.hours == 24
    missed = 200 / (6 * 100 + 18 * 300)
    assert found.alone[LAST_HOUR_MAX] == pytest.approx(missed)
    assert (found.error, found.to_best, found.coverage) == (pytest.approx(missed), 1, pytest.approx(23 / 24))
    # the last hour's maximum covers as many hours without a factor
    assert found.last_hour_over_provision == pytest.approx(0)


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
