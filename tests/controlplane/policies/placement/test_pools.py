"""Occupancy of pooled GPUs against worked numbers, and against a simulation of arrivals."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policies.placement.pools import PoolLoad, active_probability, occupancy_of

# baichuan2_13b_chat on H800, fitted to the profiles of Aegaeon
LOAD = PoolLoad(
    prefill_base_s=8.9694e-03,
    prefill_per_token_s=4.2952e-05,
    prefill_per_token2_s=8.5064e-10,
    decode_base_s=1.2802e-02,
    decode_per_context_token_s=2.2846e-07,
    decode_per_sequence_s=1.6004e-04,
    requests_per_s=0.1,
    input_tokens=300.0,
    output_tokens=200.0,
    switch_s=0.8,
)


def test_theorem_3_1_with_the_printed_inputs() -> None:
    """The paper prints 46.55, from unrounded inputs."""
    assert 100 * active_probability(0.037, 16.79) == pytest.approx(46.3, abs=0.05)


def test_three_batches_fill_a_gpu_exactly() -> None:
    """Aegaeon 4.3: targets of 0.1 s, steps of 0.025 s, switches of 3 s a round: a round of 12 s is exactly on time."""
    load = PoolLoad(
        prefill_base_s=0.0,
        prefill_per_token_s=0.0,
        decode_base_s=0.025,
        decode_per_context_token_s=0.0,
        requests_per_s=1.0,
        input_tokens=100.0,
        output_tokens=1000.0,  # 100 s each: always active
        switch_s=1.0,
        gather_s=1e12,
    )
    occupancy = occupancy_of(load)
    assert occupancy.decode == pytest.approx(0.25)
    assert 3 * (occupancy.decode + occupancy.switching - load.switch_s / 8) == pytest.approx(1.0)


def test_each_share_by_hand() -> None:
    """0.1 requests/s x 20 s of decoding: 2 at a time, active 1 - exp(-2) = 0.8647 of the time; contexts of 400."""
    occupancy = occupancy_of(LOAD)
    assert occupancy.prefill == pytest.approx(0.1 * (8.9694e-3 + 300 * 4.2952e-5 + 90_000 * 8.5064e-10))
    assert occupancy.decode == pytest.approx((0.8647 * 1.2802e-2 + 2 * (400 * 2.2846e-7 + 1.6004e-4)) / 0.1, rel=1e-4)
    assert occupancy.switching == pytest.approx(0.8 * (0.8647 / 12 + 0.1 / 1.1), rel=1e-4)
    assert occupancy.total == pytest.approx(occupancy.prefill + occupancy.decode + occupancy.switching)
    assert occupancy_of(replace(LOAD, gpus=2)).total == pytest.approx(2 * occupancy.total)


def test_the_decode_share_is_what_a_simulation_finds() -> None:
    """Poisson arrivals that decode for 20 s each; while any do, a step per 0.1 s that lasts c0 + (a context + b) n."""
    random.seed(3)
    ends: list[float] = []
    now, busy, until = 0.0, 0.0, 200_000.0
    arrival = random.expovariate(0.1)
    while now < until:
        ends = [end for end in ends if end > now]
        event = min([arrival, *ends])
        if ends:
            step_s = 1.2802e-2 + len(ends) * (400 * 2.2846e-7 + 1.6004e-4)
            busy += (event - now) / 0.1 * step_s
        now = event
        if now == arrival:
            ends.append(now + 20.0)
            arrival = now + random.expovariate(0.1)
    assert occupancy_of(LOAD).decode == pytest.approx(busy / now, rel=0.02)


def test_no_requests_take_nothing() -> None:
    assert occupancy_of(replace(LOAD, requests_per_s=0.0)).total == 0.0


@settings(max_examples=60)
@given(
    rate=st.floats(0, 50),
    factor=st.floats(1, 4),
    name=st.sampled_from(["requests_per_s", "input_tokens", "output_tokens", "switch_s", "decode_base_s"]),
)
def test_more_load_takes_more(rate: float, factor: float, name: str) -> None:
    less = replace(LOAD, requests_per_s=rate)
    more = replace(less, **{name: getattr(less, name) * factor})
    before, after = occupancy_of(less), occupancy_of(more)
    assert after.prefill >= before.prefill * (1 - 1e-12)
    assert after.decode >= before.decode * (1 - 1e-12)
    assert after.switching >= before.switching * (1 - 1e-12)


@pytest.mark.parametrize(
    "change",
    [
        {"requests_per_s": -1.0},
        {"switch_s": math.inf},
        {"tbt_s": 0.0},
        {"round_s": 0.0},
        {"gpus": 0},
        {"input_tokens2": 1.0},
    ],
)
def test_bad_loads_are_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(LOAD, **change)
