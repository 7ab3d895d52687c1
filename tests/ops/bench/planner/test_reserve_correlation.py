"""The benchmark of reserves by the correlation that is set, and by what past errors say."""

import numpy as np

from controlplane.policies.facts import Endpoint
from controlplane.policies.placement.error_correlation import NO_ERRORS, PeakErrors
from controlplane.policies.placement.reserve_facts import ReserveSettings
from forecasts.selection.combination import COMBINATION
from forecasts.selection.past import PastPeaks
from ops.bench.planner.reserve_correlation import (
    LEARNT_HOURS,
    Hour,
    Hours,
    correlations,
    forecast_hours,
    hours_of,
    known_at,
    sized,
)
from ops.bench.planner.strategies_cases import SCENARIO
from ops.simulator.scenario.scenario import load_scenario

FIRST = 400_000
THETA = dict.fromkeys("abcd", 1000.0)
SETTINGS = ReserveSettings(enabled=True, correlation=0.0, fill=1.0, epsilon=1.0)


def alike(hours: int) -> tuple[Hours, PeakErrors]:
    """Four models whose peaks are all a standard deviation above their median, then all below."""
    endpoints = [Endpoint(model=name, region="east") for name in "abcd"]
    came = {
        at: Hour(median=2000.0, upper=2384.5, actual=2300.0 if at % 2 else 1700.0) for at in range(FIRST, FIRST + hours)
    }
    errors = {at: 1.0 if at % 2 else -1.0 for at in came}
    return dict.fromkeys(endpoints, came), dict.fromkeys(endpoints, errors)


def test_only_hours_that_are_over_are_known() -> None:
    _, errors = alike(10)
    assert {tuple(each) for each in known_at(errors, FIRST + 4).values()} == {tuple(range(FIRST, FIRST + 4))}


def test_errors_that_go_together_take_more_and_are_met_more_often() -> None:
    hours, errors = alike(LEARNT_HOURS + 100)
    apart, known = (sized(hours, each, THETA, SETTINGS) for each in (NO_ERRORS, errors))
    assert apart["hours"] == known["hours"] == 100
    assert known["gpus"] > apart["gpus"]
    assert apart["short"] == apart["short_home"] == 0.5
    assert known["short"] < 0.5
    assert correlations(errors, 0.2)["east"] == "correlation 0.80 from 148 hours"


def test_hours_without_a_forecast_or_a_peak_are_left_out() -> None:
    past = PastPeaks(
        origins_s=np.array([0.0, 3600.0, 7200.0]),
        actual=np.array([1.0, 2.0, np.nan]),
        median={COMBINATION: np.array([np.nan, 3.0, 4.0])},
        upper={COMBINATION: np.array([np.nan, 5.0, 6.0])},
    )
    assert hours_of(past) == {1: Hour(median=3.0, upper=5.0, actual=2.0)}


def test_forecasts_are_the_simulators() -> None:
    scenario = load_scenario(SCENARIO, settings=("traffic.duration_s=86400", "traffic.rate_per_s=0.5"))
    hours, errors = forecast_hours(scenario, 1)
    assert {at.region for at in hours} == set(scenario.regions)
    assert all(
        len(each) >= 10 and all(hour.upper >= hour.median > 0 for hour in each.values()) for each in hours.values()
    )
    assert all(set(each) < set(errors[at]) for at, each in hours.items()), "the first had a baseline's forecast only"
