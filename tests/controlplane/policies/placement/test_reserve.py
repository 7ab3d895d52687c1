"""The shared reserve: own instances and slots, sized together."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policies.facts import Endpoint, RegionGpu
from controlplane.policies.placement.reserve import choose_reserve
from controlplane.policies.placement.reserve_facts import Reserve, ReserveEndpoint, ReserveSettings
from tests.controlplane.policies.placement.reserves import THETA, endpoint, key, reserve_facts

EAST = RegionGpu(region="east", gpu_type="H800")
SETTINGS = ReserveSettings(enabled=True, correlation=0.0, fill=1.0, epsilon=1.0)


def counts(reserve: Reserve) -> dict[tuple[str, str], int]:
    return {(one.key.model, one.key.region): one.instances for one in reserve.endpoints}


def total_gpus(reserve: Reserve) -> int:
    return sum(one.instances * one.gpus for one in reserve.endpoints) + sum(reserve.gpus.values())


def alone_gpus(*endpoints: ReserveEndpoint) -> int:
    return sum(one.alone * one.gpus for one in endpoints)


def test_four_models_share_what_each_would_keep() -> None:
    """By hand: at 2,000 median and 2,384 upper (s = 300) each takes 3 instances alone, 12 together. With 2 each the
    sum of what is beyond is, as worked in `shortfall`, 0.928 of a GPU: one slot, 9 in all.
    """
    some = [endpoint(name, 2000.0, 2000.0 + 1.2816 * 300.0) for name in "abcd"]
    reserve = choose_reserve(reserve_facts(*some), 0.0, SETTINGS)
    assert counts(reserve) == {(name, "east"): 2 for name in "abcd"}
    [size] = reserve.sizes
    assert (size.place, size.gpus, size.missing_gpus) == (EAST, 1, 0)
    assert reserve.held == {key(name) for name in "abcd"}
    assert "4 models need 0.93 GPUs beyond their own instances in 90 % of hours (1.54 if each" in size.reason
    assert reserve.endpoints[0].reason == (
        "median peak 2000 tokens/s, at most 2384 in 90 % of hours: 2 of its own, what these cannot begin in time goes"
        " to the reserve's 1 slots"
    )


def test_errors_that_come_together_are_not_shared() -> None:
    some = [endpoint(name, 2000.0, 2000.0 + 1.2816 * 300.0) for name in "abcd"]
    apart = choose_reserve(reserve_facts(*some), 0.0, SETTINGS)
    together = choose_reserve(
        reserve_facts(*some), 0.0, ReserveSettings(enabled=True, correlation=1.0, fill=1.0, epsilon=1.0)
    )
    assert total_gpus(apart) == 9
    assert total_gpus(together) == 10


def test_errors_that_came_together_are_not_shared() -> None:
    """The correlation is that of past errors of the region's models, and plans say so."""
    some = [endpoint(name, 2000.0, 2000.0 + 1.2816 * 300.0) for name in "abcd"]
    hours = {hour: 1.0 if hour % 2 else -1.0 for hour in range(1000)}
    past = {Endpoint(model=name, region="east"): hours for name in "abcd"}
    reserve = choose_reserve(replace(reserve_facts(*some), errors=past), 0.0, SETTINGS)
    assert total_gpus(reserve) == 10
    elsewhere = {Endpoint(model=name, region="west"): hours for name in "abcd"}
    apart = choose_reserve(replace(reserve_facts(*some), errors=elsewhere), 0.0, SETTINGS)
    assert total_gpus(apart) == 9
    assert "errors of forecasts: correlation 0.00 as set" in apart.sizes[0].reason


def test_errors_of_a_models_regions_are_not_those_of_a_regions_models() -> None:
    """A model in three regions, at home in each with 0.75 of its demand: what its regions lack together needs more
    where their errors go together, though no region has a second model.
    """
    some = [endpoint("a", 1300.0, 2300.0, region) for region in ("east", "north", "west")]
    settings = ReserveSettings(enabled=True, correlation=0.0, fill=1.0, epsilon=0.3)
    hours = {hour: 1.0 if hour % 2 else -1.0 for hour in range(1000)}
    past = {Endpoint(model="a", region=region): hours for region in ("east", "north", "west")}
    apart = choose_reserve(reserve_facts(*some), 0.0, settings)
    together = choose_reserve(replace(reserve_facts(*some), errors=past), 0.0, settings)
    assert total_gpus(apart) < total_gpus(together)


def test_a_valley_moves_into_the_reserve() -> None:
    """Four models of a tenth of an instance and a minimum of two: eight GPUs alone, two shared slots together, since
    each has an instance on both.
    """
    some = [endpoint(name, 100.0, 130.0, fewest=2) for name in "abcd"]
    reserve = choose_reserve(reserve_facts(*some), 0.0, SETTINGS)
    assert alone_gpus(*some) == 8
    assert counts(reserve) == {(name, "east"): 0 for name in "abcd"}
    assert [size.slots for size in reserve.sizes] == [2]
    assert reserve.endpoints[0].reason.endswith("served from the reserve's 2 slots")


def test_its_morning_brings_its_instances_back() -> None:
    some = [endpoint("a", 5600.0, 5900.0, fewest=2), *(endpoint(name, 100.0, 130.0, fewest=2) for name in "bcd")]
    reserve = choose_reserve(reserve_facts(*some), 0.0, SETTINGS)
    assert counts(reserve)["a", "east"] in (5, 6)
    assert counts(reserve)["b", "east"] == 0
    assert total_gpus(reserve) <= 8


def test_one_model_alone_needs_no_reserve() -> None:
    """A slot for one model is an instance that serves worse."""
    reserve = choose_reserve(reserve_facts(endpoint("a", 2300.0, 2700.0, fewest=2)), 0.0, SETTINGS)
    assert counts(reserve) == {("a", "east"): 3}
    assert reserve.sizes == ()
    assert reserve.endpoints[0].reason.endswith("the region needs no reserve")


def test_slots_are_taken_whole_and_not_filled() -> None:
    some = [endpoint(name, 2000.0, 2000.0 + 1.2816 * 300.0, gpus=1) for name in "abcd"]
    settings = ReserveSettings(enabled=True, correlation=0.0, fill=0.5, epsilon=1.0)
    [size] = choose_reserve(reserve_facts(*some, slot_gpus=2), 0.0, settings).sizes
    assert size.gpus == 2
    assert size.slots == 1


@pytest.mark.parametrize("slots", [0, 1, 2])
def test_of_plans_with_as_many_gpus_the_one_that_keeps_the_reserves_slots(slots: int) -> None:
    """Two models that fill an instance each: on their own, or from as many slots."""
    facts = reserve_facts(*(endpoint(name, 1000.0, 1000.0) for name in "ab"))
    room = replace(facts.places[EAST], present_gpus=slots)
    reserve = choose_reserve(replace(facts, places={EAST: room}), 0.0, SETTINGS)
    assert sum(reserve.gpus.values()) == slots
    assert sum(counts(reserve).values()) == 2 - slots


def test_own_instances_go_first_where_capacity_is_short() -> None:
    some = [endpoint(name, 2000.0, 2000.0 + 1.2816 * 300.0) for name in "abcd"]
    reserve = choose_reserve(reserve_facts(*some, free=8), 0.0, SETTINGS)
    assert counts(reserve) == {(name, "east"): 2 for name in "abcd"}
    [size] = reserve.sizes
    assert (size.gpus, size.missing_gpus) == (0, 1)
    assert size.reason.endswith("1 GPUs are missing: east has no more")
    assert reserve.gpus == {}


def test_regions_help_one_another_with_what_epsilon_lets_them() -> None:
    """Three regions of 1,300 tokens/s: at home each must serve 0.8 of it, 1,040, and all together 3,900: four instances
    instead of six.
    """
    some = [endpoint("a", 1300.0, 1300.0, region) for region in ("east", "north", "west")]
    settings = ReserveSettings(enabled=True, correlation=0.0, fill=1.0, epsilon=0.75)
    reserve = choose_reserve(reserve_facts(*some), 0.0, settings)
    assert alone_gpus(*some) == 6
    assert total_gpus(reserve) == 4


endpoints = st.builds(
    lambda number, region, median, more, fewest: endpoint(f"m{number}", median, median + more, region, fewest=fewest),
    number=st.integers(0, 5),
    region=st.sampled_from(["east", "west"]),
    median=st.floats(0, 6 * THETA),
    more=st.floats(0, 3 * THETA),
    fewest=st.integers(0, 3),
)
fleets = st.lists(endpoints, max_size=10, unique_by=lambda one: one.key)
settings = st.builds(
    ReserveSettings,
    enabled=st.just(True),
    correlation=st.floats(0, 1),
    fill=st.floats(0.3, 1),
    epsilon=st.floats(0, 1),
)


@given(fleets, settings)
def test_no_fleet_takes_more_gpus_than_own_quantiles(some: list[ReserveEndpoint], chosen: ReserveSettings) -> None:
    reserve = choose_reserve(reserve_facts(*some, free=1000), 0.0, chosen)
    assert total_gpus(reserve) <= alone_gpus(*some)


@given(fleets, settings, st.integers(0, 30))
def test_capacity_holds_and_minimums_are_met(some: list[ReserveEndpoint], chosen: ReserveSettings, free: int) -> None:
    reserve = choose_reserve(reserve_facts(*some, free=free), 0.0, chosen)
    slots = {size.place: size.slots for size in reserve.sizes}
    for place in {one.key.place for one in some}:
        own = sum(one.instances for one in reserve.endpoints if one.key.place == place)
        if own + slots.get(place, 0) > free:
            assert slots.get(place, 0) == 0, "own instances come first; the placement says what does not fit"
    asked = {one.key: one for one in some}
    missing = {size.place for size in reserve.sizes if size.missing_gpus}
    for one in reserve.endpoints:
        if one.key.place not in missing:
            assert one.instances + slots.get(one.key.place, 0) >= asked[one.key].fewest
        assert one.instances <= asked[one.key].most


@given(fleets, st.randoms())
def test_the_order_of_the_facts_changes_nothing(some: list[ReserveEndpoint], random: object) -> None:
    shuffled = sorted(some, key=lambda one: hash((one.key, str(random))))
    assert choose_reserve(reserve_facts(*some), 0.0, SETTINGS) == choose_reserve(
        reserve_facts(*shuffled), 0.0, SETTINGS
    )


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"quantile": 0.4}, "reserve.quantile must be at least 0.5 and below 1, got 0.4"),
        ({"upper_quantile": 0.5}, "reserve.upper_quantile must lie between 0.5 and 1, got 0.5"),
        ({"fill": 0.0}, "reserve.fill must be above 0"),
        ({"correlation": 1.1}, "reserve.correlation must be between 0 and 1, got 1.1"),
        ({"epsilon": -0.1}, "reserve.epsilon must be between 0 and 1, got -0.1"),
    ],
)
def test_settings_out_of_range(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ReserveSettings(enabled=True, **changes)


def test_facts_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"reserve.endpoints\[a in east on H800\]: need 0 <= median <= upper"):
        endpoint("a", 2.0, 1.0)
    with pytest.raises(ValueError, match="need tokens_per_s > 0"):
        endpoint("a", 1.0, 2.0, tokens_per_s=0.0)
    with pytest.raises(ValueError, match="need 0 <= fewest <= most"):
        endpoint("a", 1.0, 2.0, fewest=3, most=2)
