"""What a new series borrows from its model in other regions."""

from dataclasses import replace

import numpy as np
import pytest

from forecasts.models.baselines import LAST_HOUR_MAX
from forecasts.models.elsewhere import ELSEWHERE, borrowed_headroom, elsewhere_path
from forecasts.models.forecaster import ForecastError
from forecasts.selection.select import forecast_peak
from forecasts.series import DemandSeries
from forecasts.settings import ForecastSettings
from tests.forecasts.demand import hourly

HOW = ForecastSettings(forecasters=(), clip_ratio=100.0)
DAY = [100.0 + 10 * hour for hour in range(24)]


def new(*peaks: float, hours_before: int) -> DemandSeries:
    """Hours of a series that begins that many hours after 0."""
    return replace(hourly(*peaks), start_s=3600.0 * hours_before)


def test_the_path_is_half_way_from_the_last_hour_to_what_follows_elsewhere() -> None:
    """Elsewhere, after 120 came 130 on both days; here the last hour stood at 60."""
    path = elsewhere_path(new(50.0, 60.0, hours_before=49), hourly(*DAY, *DAY, *DAY[:3]), HOW)
    assert path.shape == (12,)
    assert path.max() == pytest.approx(60 * np.sqrt(130 / 120))


def test_a_series_without_its_like_says_why() -> None:
    with pytest.raises(ForecastError, match="no past day has this hour"):
        elsewhere_path(hourly(1.0, 2.0), hourly(*DAY[:3]), HOW)


def test_headroom_is_what_demand_elsewhere_needed_and_never_less_than_the_usual() -> None:
    assert borrowed_headroom(hourly(*[100.0, 300.0] * 20), HOW) == pytest.approx(3)
    assert borrowed_headroom(hourly(*[100.0] * 40), HOW) == HOW.headroom
    assert borrowed_headroom(hourly(*[100.0] * 5), HOW) is None


def test_it_answers_until_there_are_past_errors_and_ends_with_the_first_day() -> None:
    like = hourly(*[100.0, 300.0] * 60)
    early = new(5.0, 5.0, 5.0, hours_before=72)
    forecast = forecast_peak(early, HOW, None, like)
    assert forecast.forecaster == ELSEWHERE
    assert forecast.peak_upper == pytest.approx(3 * forecast.peak_q50)
    assert f"the {ELSEWHERE} has the shape of this hour" in forecast.reason
    assert forecast_peak(early, HOW).forecaster == LAST_HOUR_MAX
    later = forecast_peak(new(*[5.0, 6.0] * 10, hours_before=72), HOW, None, like)
    assert ELSEWHERE in {each.forecaster for each in later.candidates}
    old = forecast_peak(new(*[5.0, 6.0] * 13, hours_before=72), HOW, None, like)
    assert ELSEWHERE not in {each.forecaster for each in old.candidates}


def test_demand_elsewhere_after_the_origin_changes_nothing() -> None:
    series = new(*[5.0, 6.0] * 6, hours_before=72)
    like = [100.0, 300.0] * 42
    known = forecast_peak(series, HOW, None, hourly(*like))
    assert forecast_peak(series, HOW, None, hourly(*like, 1e6, 1e6)) == known
