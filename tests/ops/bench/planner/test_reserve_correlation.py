"""The benchmark of reserves by the correlation that is set, and by what past errors say."""

import numpy as np
import pytest

from controlplane.policies.facts import Endpoint
from controlplane.policies.placement.reserve_facts import ReserveSettings
from forecasts.selection.combination import COMBINATION
from forecasts.selection.past import PastPeaks
from ops.bench.planner.reserve_correlation import (
    LEARNT_HOURS,
    Hour,
    Hours,
    correlations,
    errors_before,
    forecast_hours,
    hours_of,
    sized,
)
from ops.bench.planner.strategies_cases import SCENARIO
from ops.simulator.scenario.scenario import load_scenario

THETA = dict.fromkeys("abcd", 1000.0)
SETTINGS = ReserveSettings(enabled=True, correlation=0.0, fill=1.0, epsilon=1.0)


def alike(hours: int) -> Hours:
    """Four models whose peaks are all above their median, then all below."""
    return {
        Endpoint(model=name, region="east"): {
            3600 * at: Hour(median=2000.0, upper=2384.5, actual=2300.0 if at % 2 else 1700.0) for at in range(hours)
        }
        for name in "abcd"
    }


def test_only_hours_that_are_over_are_known() -> None:
    errors = errors_before(alike(10), 4 * 3600, 0.9)
    assert {tuple(each) for each in errors.values()} == {(0, 3600, 7200, 10800)}
    assert errors[Endpoint(model="a", region="east")][3600] == pytest.approx(1.0, abs=1e-3)


def test_errors_that_go_together_take_more_and_are_met_more_often() -> None:
    hours = alike(LEARNT_HOURS + 100)
    apart, known = (sized(hours, THETA, SETTINGS, estimated=each) for each in (False, True))
    assert apart["hours"] == known["hours"] == 100
    assert known["gpus"] > apart["gpus"]
    assert apart["short"] == apart["short_home"] == 0.5
    assert known["short"] < 0.5
    assert correlations(hours, 0.9, 0.2)["east"] == "correlation 0.80 from 148 hours"


def test_hours_without_a_forecast_or_a_peak_are_left_out() -> None:
    past = PastPeaks(
        origins_s=np.array([0.0, 3600.0, 7200.0]),
        actual=np.array([1.0, 2.0, np.nan]),
        median={COMBINATION: np.array([np.nan, 3.0, 4.0])},
        upper={COMBINATION: np.array([np.nan, 5.0, 6.0])},
    )
    assert hours_of(past) == {3600: Hour(median=3.0, upper=5.0, actual=2.0)}


def test_forecasts_are_the_simulators() -> None:
    scenario = load_scenario(SCENARIO, settings=("traffic.duration_s=86400", "traffic.rate_per_s=0.5"))
    hours = forecast_hours(scenario, 1)
    assert {at.region for at in hours} == set(scenario.regions)
    assert all(
        len(each) >= 10 and all(hour.upper >= hour.median > 0 for hour in each.values()) for each in hours.values()
    )
