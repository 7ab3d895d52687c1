"""A profile's theta follows what instances do: by evidence, by steps, within bounds."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from controlplane.policies.assignment.facts import Donation, PlacedInstance
from controlplane.policies.facts import Endpoint, EndpointGpu, InstanceFacts
from controlplane.policies.profile_correction import (
    Correction,
    CorrectionSettings,
    LoadSums,
    LoadWindow,
    ProfileFacts,
    choose_correction,
    load_sums,
    theta_of,
)

SETTINGS = CorrectionSettings()
HOUR_S, DAY_S, WINDOW_S = 3600.0, 86_400.0, 300.0
NOW_S = 10 * DAY_S
THETA = 1500.0
"""The true one of the windows below: u / r = 1e-4 + b u, and b is such that u is 0.7 at this rate."""
SLOPE = (0.7 / THETA - 1e-4) / 0.7
ENDPOINT = Endpoint(model="llama", region="east")
AT = EndpointGpu(model="llama", region="east", gpu_type="A100")


def utilization(rate: float, theta: float = THETA) -> float:
    """Little's law with steps that take longer the more is resident; full beyond."""
    rate = rate * THETA / theta
    left = 1 - SLOPE * rate
    return min(1.0, 1e-4 * rate / left) if left > 0 else 1.0


def window(rate: float, at_s: float = NOW_S - HOUR_S, late: float = 0.0) -> LoadWindow:
    return LoadWindow(start_s=at_s, tokens_per_s=rate, utilization=utilization(rate), late=late)


def spread(low: float, high: float, count: int = 72, until_s: float = NOW_S) -> list[LoadWindow]:
    """Windows one after another whose rates go up and down between two."""
    swing = ((1 + math.sin(number / 3)) / 2 for number in range(count))
    return [window(low + (high - low) * at, until_s - WINDOW_S * number) for number, at in enumerate(swing, 1)]


def facts(windows: Sequence[LoadWindow], tokens_per_s: float = THETA, factor: float = 1.0) -> ProfileFacts:
    return ProfileFacts(tokens_per_s=tokens_per_s, windows=windows, factor=factor)


@pytest.mark.parametrize(("low", "high"), [(500, 900), (700, 1100), (300, 1500), (1100, 1550)])
def test_theta_is_read_from_any_part_of_the_line(low: float, high: float) -> None:
    assert theta_of(spread(low, high), 0.7) == pytest.approx(THETA, rel=0.01)


def test_an_estimate_reaches_twice_what_was_seen() -> None:
    assert theta_of(spread(100, 200), 0.7) == pytest.approx(400, rel=0.1)


def test_rates_that_hardly_differ_make_no_line() -> None:
    """With noise in utilization alone a line would say that the present rate is theta."""
    chance = random.Random(1)
    noisy = [replace(each, utilization=each.utilization * chance.uniform(0.8, 1.2)) for each in spread(700, 760)]
    assert theta_of(noisy, 0.7) is None
    assert choose_correction(facts(noisy), NOW_S, SETTINGS).factor == 1.0


def test_a_right_profile_stays() -> None:
    found = choose_correction(facts(spread(500, 1400)), NOW_S, SETTINGS)
    assert found == Correction(
        factor=1.0,
        reason="observed 1,500 tokens/s are within 5%",
        estimate=pytest.approx(THETA, rel=0.01),
        windows=72,
        moved_s=None,
    )


def test_a_profile_that_says_too_much_is_lowered_by_a_step_and_says_why() -> None:
    found = choose_correction(facts(spread(500, 1400), tokens_per_s=2250), NOW_S, SETTINGS)
    assert found.factor == pytest.approx(0.85)
    assert found.moved_s == NOW_S
    assert found.reason == (
        "2,250 -> 1,912 tokens/s, a step towards 1,500: 72 windows in 6 hours reach 70% of KV memory there"
    )


def test_the_last_step_ends_at_what_was_observed() -> None:
    found = choose_correction(facts(spread(500, 1400), tokens_per_s=1000, factor=1.4), NOW_S, SETTINGS)
    assert found.factor == pytest.approx(1.5, rel=0.01)
    assert "a step towards" not in found.reason


def test_an_hour_has_one_step() -> None:
    once = choose_correction(facts(spread(500, 1400), tokens_per_s=2250), NOW_S, SETTINGS)
    again = replace(facts(spread(500, 1400), tokens_per_s=2250, factor=once.factor), moved_s=once.moved_s)
    assert choose_correction(again, NOW_S + 60, SETTINGS).factor == once.factor
    assert choose_correction(again, NOW_S + HOUR_S, SETTINGS).factor < once.factor


@pytest.mark.parametrize(
    "windows",
    [
        [],
        spread(500, 1400, count=35),
        [window(rate, NOW_S - HOUR_S) for rate in range(500, 1400, 10)],
        spread(500, 1400, until_s=NOW_S - DAY_S),
        [replace(each, utilization=0.01) for each in spread(500, 1400)],
    ],
    ids=["none", "few", "of one hour", "forgotten", "idle"],
)
def test_without_evidence_nothing_moves(windows: Sequence[LoadWindow]) -> None:
    found = choose_correction(facts(windows, tokens_per_s=2500, factor=1.2), NOW_S, SETTINGS)
    assert (found.factor, found.moved_s) == (1.2, None)
    assert "too few to tell" in found.reason


def test_theta_is_not_raised_where_first_tokens_are_late_already() -> None:
    """As where prompts are long and answers short: memory is never full, and prefills queue."""
    late = [replace(each, late=0.2) for each in spread(500, 1000)]
    found = choose_correction(facts(late, tokens_per_s=1000), NOW_S, SETTINGS)
    assert found.factor == 1.0
    assert found.reason == "not raised to 1,500 tokens/s: 20% of first tokens are late already"
    lower = choose_correction(facts(late, tokens_per_s=2000), NOW_S, SETTINGS)
    assert lower.factor < 1.0, "lateness does not keep it from being lowered"


def test_theta_is_not_raised_where_first_tokens_are_late_far_below_it() -> None:
    """A fleet that is too large for any window near theta is no reason to raise it."""
    late = [replace(each, late=0.3 * each.tokens_per_s / 700) for each in spread(300, 700)]
    found = choose_correction(facts(late, tokens_per_s=1200), NOW_S, SETTINGS)
    assert found.factor == 1.0
    assert "of first tokens are late already" in found.reason


def test_instances_that_are_full_lower_theta_though_their_rate_says_nothing() -> None:
    full = [LoadWindow(start_s=each.start_s, tokens_per_s=4000, utilization=0.97) for each in spread(1, 2)]
    found = choose_correction(facts(full, tokens_per_s=3000), NOW_S, SETTINGS)
    assert found.factor == pytest.approx(0.85)
    assert found.reason == "3,000 -> 2,550 tokens/s: instances were full in 72 of 72 windows"


@given(
    st.lists(
        st.builds(
            LoadWindow,
            start_s=st.floats(NOW_S - 2 * DAY_S, NOW_S),
            tokens_per_s=st.floats(0, 1e7),
            utilization=st.floats(0, 1),
            late=st.floats(0, 1),
        ),
        max_size=120,
    ),
    st.floats(1, 1e6),
    st.floats(0.5, 2),
)
def test_whatever_is_observed_a_factor_moves_by_a_step_within_the_bounds(
    windows: list[LoadWindow], tokens_per_s: float, factor: float
) -> None:
    found = choose_correction(facts(windows, tokens_per_s, factor), NOW_S, SETTINGS)
    assert 0.5 <= found.factor <= 2
    assert factor * 0.85 * (1 - 1e-9) <= found.factor <= factor * 1.15 * (1 + 1e-9)
    assert (found.factor == factor) == (found.moved_s is None)


@settings(max_examples=40, deadline=None)
@given(st.floats(0.55, 1.8), st.integers(0, 2**32), st.floats(0.05, 0.3))
def test_a_wrong_profile_converges_on_noisy_windows(wrong: float, seed: int, noise: float) -> None:
    """A day of hourly plans: the fleet is as large as the corrected profile asks, and what it does is observed."""
    chance = random.Random(seed)
    factor, moved_s, windows = 1.0, None, list[LoadWindow]()
    for hour in range(36):
        demand = 12_000 * (1 + 0.5 * math.sin(hour / 24 * 2 * math.pi))
        instances = max(2, math.ceil(1.1 * demand / (THETA * wrong * factor)))
        windows += _hour(hour, demand / instances, noise, chance)
        now_s = (hour + 1) * HOUR_S
        now = ProfileFacts(tokens_per_s=THETA * wrong, windows=windows, factor=factor, moved_s=moved_s)
        found = choose_correction(now, now_s, SETTINGS)
        factor, moved_s = found.factor, found.moved_s
    assert wrong * factor == pytest.approx(1.0, abs=0.12)


def _hour(hour: int, rate: float, noise: float, chance: random.Random) -> Iterator[LoadWindow]:
    for number in range(12):
        come = rate * chance.uniform(0.7, 1.1)
        held = utilization(come) * (1 + chance.uniform(-noise, noise))
        yield LoadWindow(start_s=hour * HOUR_S + number * WINDOW_S, tokens_per_s=come, utilization=min(1.0, held))


def test_bounds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="band < step"):
        CorrectionSettings(band=0.2, step=0.1)
    with pytest.raises(ValueError, match="factor_max"):
        CorrectionSettings(factor_max=0.5)
    with pytest.raises(ValueError, match="utilization"):
        CorrectionSettings(utilization=0)


def placed(number: int, rate: float | None = 900.0, used: int = 40, wait_s: float = 0.0) -> PlacedInstance:
    report = InstanceFacts(
        instance_id=f"i-{number}",
        node_id="node",
        endpoint=ENDPOINT,
        gpu_type="A100",
        accepting=True,
        age_s=1.0,
        kv_used_bytes=used,
        kv_capacity_bytes=100,
        remaining_tokens=0,
        prefill_urgent_wait_s=wait_s,
        input_tokens_per_s=rate,
    )
    return PlacedInstance(
        instance_id=f"i-{number}", endpoint=ENDPOINT, gpu_type="A100", node_id="node", slot=number, report=report
    )


def test_only_ready_instances_with_gpus_of_their_own_that_report_are_observed() -> None:
    seen = [
        placed(1),
        placed(2, rate=1100.0, used=60, wait_s=1.5),
        structs.replace(placed(3), pooled=True),
        structs.replace(placed(4), ready=False),
        structs.replace(placed(5), draining=True),
        structs.replace(placed(6), donation=Donation(age_s=1.0, leased=False, noticed=False)),
        structs.replace(placed(7), report=None),
        placed(8, rate=None),
    ]
    sums = load_sums(seen, ttft_s={"llama": 1.0}, stale_s=5.0)
    assert sums == {AT: LoadSums(instances=2, tokens_per_s=2000.0, utilization=1.0, late=1.0)}
    assert sums[AT].window(300.0) == LoadWindow(start_s=300.0, tokens_per_s=1000.0, utilization=0.5, late=0.5)
    assert load_sums(seen, ttft_s={}, stale_s=0.5) == {}
