"""Latency models and switches, with the arithmetic in the rows."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.scheduling.costs import FACTOR_MAX, CostEstimate, LatencyModel, StepWork, switch_s

QWEN_7B_H800 = LatencyModel(
    prefill_base_s=5.6791e-03,
    prefill_per_token_s=2.2746e-05,
    prefill_per_token2_s=2.0510e-10,
    decode_base_s=8.4524e-03,
    decode_per_context_token_s=4.4307e-08,
    decode_per_sequence_s=1.0703e-04,
)


def test_prefill_of_one_prompt_of_1024() -> None:
    # 5.6791 ms + 1024 x 22.746 us + 1024^2 x 0.2051 ns = 5.6791 + 23.2919 + 0.2151 ms
    assert QWEN_7B_H800.prefill_s(1024, 1024**2) == pytest.approx(29.1861e-3, rel=1e-5)


def test_decode_of_eight_with_1024_each() -> None:
    # 8.4524 ms + 8192 x 44.307 ns + 8 x 107.03 us = 8.4524 + 0.36296 + 0.85624 ms
    assert QWEN_7B_H800.decode_s(8192, 8) == pytest.approx(9.67160e-3, rel=1e-5)


def test_a_mixed_step_pays_one_constant_and_all_else() -> None:
    # 29.1861 + 9.6716 ms, less the smaller constant, 5.6791 ms
    assert QWEN_7B_H800.mixed_s(1024, 1024**2, 8192, 8) == pytest.approx(33.1786e-3, rel=1e-5)
    assert QWEN_7B_H800.mixed_s(0, 0, 8192, 8) == pytest.approx(QWEN_7B_H800.decode_s(8192, 8))


def test_a_step_takes_as_long_as_the_work_that_it_does() -> None:
    prefill = StepWork(tokens=1024, squared_tokens=1024**2)
    decode = StepWork(context_tokens=8192, batch=8)
    both = StepWork(tokens=1024, squared_tokens=1024**2, context_tokens=8192, batch=8)
    assert QWEN_7B_H800.step_s(prefill) == QWEN_7B_H800.prefill_s(1024, 1024**2)
    assert QWEN_7B_H800.step_s(decode) == QWEN_7B_H800.decode_s(8192, 8)
    assert QWEN_7B_H800.step_s(both) == QWEN_7B_H800.mixed_s(1024, 1024**2, 8192, 8)
    apart_s = QWEN_7B_H800.step_s(prefill) + QWEN_7B_H800.step_s(decode)
    assert max(QWEN_7B_H800.step_s(prefill), QWEN_7B_H800.step_s(decode)) < QWEN_7B_H800.step_s(both) < apart_s


def test_switch_is_slower_than_the_link_rate() -> None:
    # 29.5 GB over 55.6 GB/s takes 0.531 s at best; at an efficiency of 0.625, 0.849 s
    assert switch_s(29_500_000_000, 55.6e9, 1.0) == pytest.approx(0.5306, abs=1e-4)
    assert switch_s(29_500_000_000, 55.6e9, 0.625) == pytest.approx(0.8489, abs=1e-4)


@pytest.mark.parametrize("name", list(LatencyModel.__dataclass_fields__))
@pytest.mark.parametrize("value", [-1e-9, float("nan")])
def test_negative_coefficients_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        replace(QWEN_7B_H800, **{name: value})


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 512), st.integers(0, 512))
def test_more_work_never_takes_less_time(tokens: int, more: int, batch: int, more_batch: int) -> None:
    model = QWEN_7B_H800
    assert model.prefill_s(tokens + more, (tokens + more) ** 2) >= model.prefill_s(tokens, tokens**2)
    assert model.decode_s(tokens + more, batch + more_batch) >= model.decode_s(tokens, batch)


def observed(factor: float, times: int, estimate: CostEstimate) -> CostEstimate:
    """After steps that took `factor` times as long as by the fit."""
    for _ in range(times):
        estimate = estimate.observe_prefill(factor * QWEN_7B_H800.prefill_s(512, 512**2), 512, 512**2)
        estimate = estimate.observe_decode(factor * QWEN_7B_H800.decode_s(4096, 8), 4096, 8)
    return estimate


@pytest.mark.parametrize("factor", [0.2, 0.9, 1.0, 1.5, 6.0])
def test_estimate_converges_to_what_is_observed(factor: float) -> None:
    estimate = observed(factor, 100, CostEstimate(latency=QWEN_7B_H800))
    assert estimate.prefill_s(2048, 2048**2) == pytest.approx(factor * QWEN_7B_H800.prefill_s(2048, 2048**2), rel=1e-2)
    assert estimate.decode_s(100, 1) == pytest.approx(factor * QWEN_7B_H800.decode_s(100, 1), rel=1e-2)


def test_kinds_of_step_are_corrected_apart() -> None:
    estimate = CostEstimate(latency=QWEN_7B_H800).observe_decode(1.0, 4096, 8)
    assert estimate.decode_factor > 1.0
    assert estimate.prefill_factor == 1.0


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_mixed_steps_correct_themselves_alone(factor: float) -> None:
    """They begin from the corrected times of their parts, and are right whatever comes on top."""
    estimate = observed(1.5, 100, CostEstimate(latency=QWEN_7B_H800))
    work = StepWork(tokens=512, squared_tokens=512**2, context_tokens=4096, batch=8)
    assert estimate.mixed_s(512, 512**2, 4096, 8) == pytest.approx(1.5 * QWEN_7B_H800.step_s(work), rel=1e-2)
    taught = estimate
    for _ in range(100):
        taught = taught.observe_mixed(factor * QWEN_7B_H800.step_s(work), work)
    assert taught.mixed_s(512, 512**2, 4096, 8) == pytest.approx(factor * QWEN_7B_H800.step_s(work), rel=1e-2)
    assert (taught.prefill_factor, taught.decode_factor) == (estimate.prefill_factor, estimate.decode_factor)
    token_s, _ = taught.mixed_token_s
    longer_s = taught.mixed_s(513, 512**2, 4096, 8) - taught.mixed_s(512, 512**2, 4096, 8)
    assert token_s == pytest.approx(longer_s, rel=1e-6)


@pytest.mark.parametrize("observed_s", [0.0, 1e-9, 60.0, float("inf")])
def test_one_outlier_moves_little(observed_s: float) -> None:
    estimate = CostEstimate(latency=QWEN_7B_H800).observe_decode(observed_s, 4096, 8)
    assert estimate.decode_factor == pytest.approx(1.0, abs=0.08)


@given(st.lists(st.floats(0.0, 1e6), max_size=300))
@settings(max_examples=30)
def test_factors_are_bounded(observations: list[float]) -> None:
    estimate = CostEstimate(latency=QWEN_7B_H800)
    for observed_s in observations:
        estimate = estimate.observe_prefill(observed_s, 512, 512**2)
        assert 1 / FACTOR_MAX <= estimate.prefill_factor <= FACTOR_MAX


def test_a_model_without_cost_is_not_corrected() -> None:
    free = LatencyModel(**dict.fromkeys(LatencyModel.__dataclass_fields__, 0.0))
    assert CostEstimate(latency=free).observe_decode(1.0, 10, 1).decode_factor == 1.0


def test_reference_steps_are_told_once_steps_were_observed() -> None:
    estimate = CostEstimate(latency=QWEN_7B_H800)
    assert (estimate.reference_prefill_s, estimate.reference_decode_s) == (None, None)
    prefill_s, decode_s = QWEN_7B_H800.prefill_s(1024, 1024**2), QWEN_7B_H800.decode_s(8192, 8)
    slower = estimate.observe_prefill(1.5 * QWEN_7B_H800.prefill_s(100, 100**2), 100, 100**2)
    assert slower.reference_prefill_s == pytest.approx(slower.prefill_factor * prefill_s)
    assert slower.reference_decode_s is None
    faster = slower.observe_decode(0.5 * QWEN_7B_H800.decode_s(100, 1), 100, 1)
    assert faster.reference_decode_s == pytest.approx(faster.decode_factor * decode_s)
