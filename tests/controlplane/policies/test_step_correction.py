"""Step times follow what nodes observe: by steps, within bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policies.placement.pools import LATENCY_FIELDS
from controlplane.policies.profile_correction import CorrectionSettings
from controlplane.policies.step_correction import StepFacts, choose_step_correction, corrected_latency

SETTINGS = CorrectionSettings()
NOW_S = 1_000_000.0
LATENCY = {
    "prefill_base_s": 0.01,
    "prefill_per_token_s": 1e-4,
    "prefill_per_token2_s": 1e-8,
    "decode_base_s": 0.02,
    "decode_per_context_token_s": 1e-6,
    "decode_per_sequence_s": 1e-3,
    "switch_s": 1.0,
}
PREFILL_S = 0.01 + 1024e-4 + 1024**2 * 1e-8
DECODE_S = 0.02 + 8192e-6 + 8e-3


def test_each_kind_of_step_goes_towards_the_median_of_what_is_observed() -> None:
    facts = StepFacts(latency=LATENCY, prefill_s=[1.1 * PREFILL_S, 1.12 * PREFILL_S, 9.0], decode_s=[0.5 * DECODE_S])
    found = choose_step_correction(facts, NOW_S, SETTINGS)
    assert (found.prefill_factor, found.decode_factor) == (pytest.approx(1.12), pytest.approx(0.85))
    assert found.moved_s == NOW_S
    assert found.reason == ("prefills take 1.12 and decode steps 0.85 times what is stated, by 3 and 1 instances")
    again = StepFacts(latency=LATENCY, decode_s=[0.5 * DECODE_S], decode_factor=0.85, moved_s=NOW_S)
    assert choose_step_correction(again, NOW_S + 60, SETTINGS).decode_factor == 0.85, "once an hour"
    assert choose_step_correction(again, NOW_S + 3600, SETTINGS).decode_factor == pytest.approx(0.85**2)


@pytest.mark.parametrize(
    "facts",
    [
        StepFacts(latency=None, prefill_s=[1.0], decode_s=[1.0]),
        StepFacts(latency=LATENCY),
        StepFacts(latency=LATENCY, prefill_s=[1.04 * PREFILL_S], decode_s=[0.96 * DECODE_S]),
        StepFacts(latency=dict.fromkeys(LATENCY_FIELDS, 0.0), prefill_s=[1.0], decode_s=[1.0]),
    ],
    ids=["nothing stated", "nothing observed", "within the band", "stated as nothing"],
)
def test_otherwise_nothing_moves(facts: StepFacts) -> None:
    found = choose_step_correction(facts, NOW_S, SETTINGS)
    assert (found.prefill_factor, found.decode_factor, found.moved_s) == (1.0, 1.0, None)


@given(st.lists(st.floats(1e-9, 1e9), max_size=5), st.floats(0.5, 2))
def test_whatever_is_observed_a_factor_moves_by_a_step_within_the_bounds(seconds: list[float], factor: float) -> None:
    facts = StepFacts(latency=LATENCY, prefill_s=seconds, decode_s=seconds, prefill_factor=factor, decode_factor=factor)
    found = choose_step_correction(facts, NOW_S, SETTINGS)
    for after in (found.prefill_factor, found.decode_factor):
        assert 0.5 <= after <= 2
        assert factor * 0.85 * (1 - 1e-9) <= after <= factor * 1.15 * (1 + 1e-9)


def test_a_corrected_latency_keeps_what_is_no_step() -> None:
    stated = {**LATENCY, "switch_s": 3.0}
    found = corrected_latency(stated, prefill=2.0, decode=0.5)
    assert found == {
        "prefill_base_s": 0.02,
        "prefill_per_token_s": 2e-4,
        "prefill_per_token2_s": 2e-8,
        "decode_base_s": 0.01,
        "decode_per_context_token_s": 5e-7,
        "decode_per_sequence_s": 5e-4,
        "switch_s": 3.0,
    }
