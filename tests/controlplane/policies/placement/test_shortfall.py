"""What own instances do not serve, in closed forms, and its sum over endpoints."""

import math
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policies.placement.shortfall import ReserveLoad, ReserveSum, quantile_z, shortfall_of, slots_for

loads = st.builds(
    ReserveLoad,
    mean=st.floats(0, 50),
    deviation=st.floats(0, 20),
    alone=st.floats(0, 100),
)


def test_the_worked_example() -> None:
    one = shortfall_of(1500.0, 300.0, 1500.0)
    assert one.probability == pytest.approx(0.5)
    assert one.mean == pytest.approx(119.68, abs=0.01)
    assert one.deviation == pytest.approx(175.14, abs=0.01)
    z, total = quantile_z(0.9), ReserveSum(quantile_z(0.9), 0.0)
    for _ in range(4):
        total.add(ReserveLoad(one.mean, one.deviation, z * 300.0))
    assert total.gpus == pytest.approx(927.6, abs=0.1)
    assert total.alone == pytest.approx(1537.9, abs=0.1)


@pytest.mark.parametrize(
    ("median", "deviation", "capacity", "probability", "mean"),
    [
        (1500.0, 0.0, 1000.0, 1.0, 500.0),  # nothing is uncertain
        (900.0, 0.0, 1000.0, 0.0, 0.0),
        (0.0, 100.0, 1000.0, 0.0, 0.0),  # ten deviations away
        (5000.0, 100.0, 0.0, 1.0, 5000.0),  # no instance: all of it
    ],
)
def test_ends_of_the_scale(median: float, deviation: float, capacity: float, probability: float, mean: float) -> None:
    one = shortfall_of(median, deviation, capacity)
    assert (one.probability, one.mean) == (pytest.approx(probability), pytest.approx(mean))


@given(median=st.floats(0, 1e4), deviation=st.floats(1, 1e4), capacity=st.floats(0, 2e4))
def test_the_closed_forms_are_the_integrals(median: float, deviation: float, capacity: float) -> None:
    one = shortfall_of(median, deviation, capacity)
    normal, steps = NormalDist(median, deviation), 4000
    low, high = median - 8 * deviation, median + 8 * deviation
    width = (high - low) / steps
    points = [low + (number + 0.5) * width for number in range(steps)]
    mean = sum(max(0.0, y - capacity) * normal.pdf(y) * width for y in points)
    square = sum(max(0.0, y - capacity) ** 2 * normal.pdf(y) * width for y in points)
    assert one.mean == pytest.approx(mean, abs=2e-3 * deviation)
    assert one.deviation == pytest.approx(math.sqrt(max(0.0, square - mean**2)), abs=5e-3 * deviation)


@given(st.lists(loads, max_size=6), st.floats(0, 1))
def test_a_sum_is_never_above_the_sum_of_own_quantiles(some: list[ReserveLoad], correlation: float) -> None:
    total = ReserveSum(quantile_z(0.9), correlation)
    for load in some:
        total.add(load)
    assert 0 <= total.gpus <= math.fsum(load.alone for load in some) + 1e-9


@given(st.lists(loads, min_size=1, max_size=6), st.floats(0, 1), st.floats(0, 1))
def test_more_correlation_never_needs_less(some: list[ReserveLoad], one: float, other: float) -> None:
    sums = [ReserveSum(quantile_z(0.9), correlation) for correlation in sorted((one, other))]
    for total in sums:
        for load in some:
            total.add(load)
    assert sums[0].gpus <= sums[1].gpus + 1e-9


@given(st.lists(loads, min_size=1, max_size=6))
def test_what_is_taken_away_is_gone(some: list[ReserveLoad]) -> None:
    total, fewer = ReserveSum(1.28, 0.3), ReserveSum(1.28, 0.3)
    for load in some:
        total.add(load)
    for load in some[1:]:
        fewer.add(load)
    total.add(some[0], -1)
    assert total.gpus == pytest.approx(fewer.gpus, abs=1e-6)


def test_slots_are_whole() -> None:
    assert [slots_for(gpus, 2, 0.8) for gpus in (0.0, 0.1, 1.6, 1.7, 3.2)] == [0, 1, 1, 2, 2]
