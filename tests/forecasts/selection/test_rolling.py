from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forecasts.selection.rolling import rolling_origins
from forecasts.series import DemandSeries
from forecasts.settings import ArimaSettings, ForecastSettings
from tests.forecasts.demand import hourly, minutes, noisy_days

ALL = ForecastSettings(origins_max=6, arima=ArimaSettings(p_max=1, q_max=1, exact_fits_max=1, iterations_max=5))
BASE = minutes(noisy_days(56)).rebin(300.0)


def test_each_origin_has_its_actual_peak() -> None:
    series = hourly(*[5.0] * 8, np.nan, 7.0)
    rolled = list(rolling_origins(series, replace(ALL, forecasters=()), [3600.0 * hour for hour in (7, 8, 9, 10)]))
    assert [each.actual for each in rolled] == [5, None, 7, None]  # a gap, and an hour that is not over
    assert [each.forecast.origin_s for each in rolled] == [3600.0 * hour for hour in (7, 8, 9, 10)]


@settings(max_examples=6)
@given(
    hour=st.integers(50, 54),
    bucket=st.integers(0, 11),
    what=st.sampled_from(["huge", "zero", "gap"]),
)
@pytest.mark.slow
def test_no_prediction_changes_when_what_came_after_it_does(hour: int, bucket: int, what: str) -> None:
    """Medians, quantiles, choice, errors, calibration and state of every origin up to the change stay as they are."""
    origins = [3600.0 * each for each in range(48, 56)]
    values = BASE.values.copy()
    values[12 * hour + bucket :] = {"huge": 1e6, "zero": 0.0, "gap": np.nan}[what]
    altered = DemandSeries(start_s=0, bucket_s=300, values=values)
    after = [each.forecast for each in rolling_origins(altered, ALL, [o for o in origins if o <= 3600 * hour])]
    before = [each.forecast for each in _usual() if each.forecast.origin_s <= 3600 * hour]
    assert after == before


def test_a_change_is_seen_by_origins_after_it() -> None:
    """So that the test above can fail."""
    values = BASE.values.copy()
    values[12 * 50 :] *= 3
    altered = DemandSeries(start_s=0, bucket_s=300, values=values)
    later = next(rolling_origins(altered, ALL, [3600.0 * 52])).forecast
    assert later.peak_q50 > 1.5 * next(e.forecast.peak_q50 for e in _usual() if e.forecast.origin_s == 3600 * 52)


_rolled: list[object] = []


def _usual() -> list:  # type: ignore[type-arg]
    if not _rolled:
        _rolled.extend(rolling_origins(BASE, ALL, [3600.0 * each for each in range(48, 56)]))
    return _rolled
