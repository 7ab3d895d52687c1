"""The load of a slot by what it did."""

import pytest

from dataplane.scheduling.decode import BatchFacts, DecodeSettings, plan_round
from dataplane.scheduling.load import MEMORY_S, DecodeShare


def batch(model: str) -> BatchFacts:
    return BatchFacts(model=model, sequences=1, step_s=0.025, tbt_s=0.1, switch_s=1.0)


def test_a_slot_that_does_what_was_planned_has_the_load_of_the_plan() -> None:
    """The paper's example: 3 s of decoding after each switch of 1 s; alpha is 1 by equation 3 and by observation."""
    batches = [batch(model) for model in "abc"]
    share = DecodeShare()
    loads = []
    for step in range(400):
        share = share.observe(0.25, decoded=step % 16 >= 4)
        loads.append(share.load(batches))
    assert sum(loads[-160:]) / 160 == pytest.approx(
        plan_round(batches, DecodeSettings(quota_max_s=3.0)).alpha, rel=0.02
    )


def test_time_spent_otherwise_raises_the_load_and_is_forgotten() -> None:
    share = DecodeShare().observe(MEMORY_S, decoded=False)
    assert share.load([batch("a")]) == pytest.approx(0.25 * 2.71828, rel=1e-4)
    assert share.observe(20 * MEMORY_S, decoded=True).load([batch("a")]) == pytest.approx(0.25)
    assert DecodeShare().observe(1e6, decoded=False).load([batch("a")]) == 25.0
    assert share.load([]) == 0.0


def test_how_time_is_cut_into_steps_does_not_matter() -> None:
    whole = DecodeShare().observe(3.0, decoded=False)
    cut = DecodeShare()
    for _ in range(30):
        cut = cut.observe(0.1, decoded=False)
    assert cut.share == pytest.approx(whole.share)
