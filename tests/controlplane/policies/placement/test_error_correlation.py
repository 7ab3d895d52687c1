"""The correlation of forecast errors, estimated from past hours and drawn to the setting."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policies.facts import Endpoint
from controlplane.policies.placement.error_correlation import (
    SETTING_HOURS,
    ErrorCorrelation,
    PeakErrors,
    estimate_correlation,
    peak_error,
)

A, B, C, D = ends = [Endpoint(model=name, region="eu") for name in "abcd"]


def series(*columns: list[float]) -> PeakErrors:
    return {endpoint: dict(enumerate(column)) for endpoint, column in zip(ends, columns, strict=False)}


def drawn(correlation: float, hours: int, count: int = 4) -> PeakErrors:
    """Normal errors with one correlation of all pairs."""
    rng = np.random.default_rng(7)
    common, own = rng.normal(size=(1, hours)), rng.normal(size=(count, hours))
    return series(*(correlation**0.5 * common + (1 - correlation) ** 0.5 * own).tolist())


def weighed(estimate: float, hours: int, setting: float) -> float:
    return (SETTING_HOURS * setting + hours * estimate) / (SETTING_HOURS + hours)


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.8])
def test_many_hours_say_what_it_is(correlation: float) -> None:
    found = estimate_correlation([ends], drawn(correlation, 4000), 0.5)
    assert found.value == pytest.approx(correlation, abs=0.04)
    assert found.hours == 4000


def test_the_worked_example() -> None:
    both = series([1, -1, 1, -1], [1, -1, -1, 1])
    assert estimate_correlation([[A, B]], both, 0.2).value == pytest.approx(weighed(0.0, 4, 0.2))
    alike = series([1, -1], [1, -1])
    assert estimate_correlation([[A, B]], alike, 0.2).value == pytest.approx(weighed(1.0, 2, 0.2))


@pytest.mark.parametrize("size", [1.0, 0.5, 0.01, 0.0])
def test_endpoints_whose_errors_are_small_do_not_count_as_independent(size: float) -> None:
    alike = drawn(1.0, 200)
    unequal = {at: {hour: (size if at in (C, D) else 1.0) * error for hour, error in alike[at].items()} for at in alike}
    found = estimate_correlation([ends], unequal, 0.0)
    assert found.value == pytest.approx(weighed(1.0, 200, 0.0))


@pytest.mark.parametrize(
    "errors",
    [
        {},
        {A: {0: 1.0, 1: -1.0}},  # one series
        {A: {0: 1.0, 1: -1.0}, B: {2: 1.0, 3: -1.0}},  # never at once
        {A: {0: 2.0}, B: {0: 3.0}},  # their means, and nothing more
    ],
)
def test_where_nothing_is_known_it_is_the_setting(errors: PeakErrors) -> None:
    assert estimate_correlation([ends], errors, 0.2) == ErrorCorrelation(0.2)


def test_only_pairs_of_a_group_count() -> None:
    errors = series([1, -1] * 50, [1, -1] * 50, [-1, 1] * 50, [-1, 1] * 50)
    apart = estimate_correlation([[A, B], [C, D]], errors, 0.0)
    assert apart.value == pytest.approx(weighed(1.0, 100, 0.0))
    assert estimate_correlation([ends], errors, 0.0).value == 0.0  # two pairs go together, four against each other


def test_what_is_always_so_is_no_correlation() -> None:
    """Forecasts that are all too low by the same are wrong, not correlated."""
    errors = {endpoint: {hour: error + 3 for hour, error in of.items()} for endpoint, of in drawn(0.0, 2000).items()}
    assert estimate_correlation([ends], errors, 0.0).value < 0.05


def test_one_hour_is_not_all_that_counts() -> None:
    errors = drawn(0.0, 500)
    wild = {endpoint: {**of, 7: 1000.0} for endpoint, of in errors.items()}
    before, after = (estimate_correlation([ends], some, 0.0).value for some in (errors, wild))
    assert after - before < 0.1


@given(
    st.lists(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3), max_size=4),
    st.floats(0, 1),
)
def test_it_is_a_correlation(columns: list[list[float]], setting: float) -> None:
    assert 0 <= estimate_correlation([ends], series(*columns), setting).value <= 1


def test_an_error_is_in_deviations_of_its_forecast() -> None:
    assert peak_error(1000.0, 1128.155, 1200.0, 0.9) == pytest.approx(2.0, abs=1e-4)
    assert peak_error(1000.0, 1000.0, 1200.0, 0.9) is None


def test_its_words() -> None:
    assert str(ErrorCorrelation(0.314, 140)) == "correlation 0.31 from 140 hours"
    assert str(ErrorCorrelation(0.2)) == "correlation 0.20 as set"
