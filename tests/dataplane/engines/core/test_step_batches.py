"""Which KV is swapped in for a decode step, on replayed memory of 100 tokens."""

import math

import pytest

from dataplane.engines.core import step_batches
from dataplane.engines.core.kv import DEVICE, HOST, NONE, SWAPPING_IN, SWAPPING_OUT, KvLocation
from dataplane.engines.core.step_batches import StepBatches
from dataplane.engines.replay.kv import SequenceKv
from dataplane.engines.replay.models import ReplaySequence
from dataplane.protocol.tiers import Tier
from dataplane.scheduling.mixed_batches import MixedStepFacts
from dataplane.scheduling.schedule import Turn
from tests.dataplane.engines.core.test_kv_allocator import Slot


def batches(slot: Slot, left_s: float) -> StepBatches[SequenceKv]:
    return StepBatches(slot.allocator, slot.kv, batch_max=8, prefill_tokens_max=64, left_s=lambda: left_s)


def mixed(step: StepBatches[SequenceKv], slot: Slot, *group: ReplaySequence) -> list[ReplaySequence]:
    """What a mixed step of model a runs, beside one decoding sequence or more."""
    turn = Turn(kind="decode", model="a", budget_s=math.inf, started_s=0.0, next_model=None)
    return [chunk.sequence for chunk in step.form(turn, slot.models["a"], group)]


def in_host_memory(slot: Slot, request_id: str, tier: Tier) -> ReplaySequence:
    """A sequence of model a, whose swap takes 0.8 s each way."""
    sequence = slot.decoding(request_id, "a", tier)
    assert slot.kv.swap_out(sequence.kv, sequence.cached)
    slot.clock.sleep(0.8)
    slot.kv.settle()
    return sequence


def settled(slot: Slot) -> None:
    slot.clock.sleep(0.9)
    slot.kv.settle()


@pytest.mark.parametrize(
    ("left_s", "tier", "other", "expected"),
    [
        (1.7, "IW-N", "IW-N", SWAPPING_OUT),
        (math.inf, "IW-N", "NIW", SWAPPING_OUT),
        (1.5, "IW-N", "IW-N", DEVICE),
        (-math.inf, "IW-N", "IW-N", DEVICE),
        (1.7, "NIW", "IW-N", DEVICE),
    ],
    ids=["in time", "of a lower tier", "after the slice", "never", "of a higher tier"],
)
def test_kv_of_a_model_that_waits_makes_room_for_the_rest_of_a_batch(
    left_s: float, tier: Tier, other: Tier, expected: KvLocation
) -> None:
    slot = Slot()
    second = in_host_memory(slot, "second", tier)
    first, waiting = slot.decoding("first", "a", "IW-F"), slot.decoding("waiting", "b", other)
    step = batches(slot, left_s)
    assert [chunk.sequence for chunk in step.decode(slot.models["a"])] == [first]
    assert waiting.kv.location is expected
    settled(slot)
    step.decode(slot.models["a"])
    assert second.kv.location is (SWAPPING_IN if expected is SWAPPING_OUT else HOST)
    settled(slot)
    assert first in [chunk.sequence for chunk in step.decode(slot.models["a"])]


def test_the_rest_of_a_batch_takes_nothing_from_its_own_model() -> None:
    slot = Slot()
    third = in_host_memory(slot, "third", "IW-N")
    first, last = slot.decoding("first", "a", "IW-F"), slot.decoding("last", "a", "NIW")
    step = batches(slot, math.inf)
    assert [chunk.sequence for chunk in step.decode(slot.models["a"])] == [first, last]
    assert (third.kv.location, last.kv.location) == (HOST, DEVICE)


@pytest.mark.parametrize("model", ["a", "b"])
def test_no_prefill_starts_over_for_the_rest_of_a_batch(model: str) -> None:
    slot = Slot()
    second = in_host_memory(slot, "second", "IW-N")
    first, half = slot.decoding("first", "a", "IW-F"), slot.half_prefilled("half", model, "NIW")
    step = batches(slot, math.inf)
    assert [chunk.sequence for chunk in step.decode(slot.models["a"])] == [first]
    assert (second.kv.location, half.kv.location) == (HOST, DEVICE)


def test_the_first_of_a_batch_takes_what_it_needs_whatever_is_left_of_the_slice() -> None:
    slot = Slot()
    first = in_host_memory(slot, "first", "NIW")
    others = [slot.decoding(f"other{number}", "b", "IW-F") for number in range(2)]
    step = batches(slot, -math.inf)
    assert step.decode(slot.models["a"]) == []
    assert [other.kv.location for other in others].count(SWAPPING_OUT) == 1
    settled(slot)
    step.decode(slot.models["a"])
    assert first.kv.location is SWAPPING_IN


def test_a_model_whose_batch_gives_its_memory_back_is_stuck_until_it_decodes() -> None:
    """An earlier request, half prefilled, holds what the only decoding one needs for its next tokens."""
    slot = Slot()
    half, decoding = slot.half_prefilled("half", "b", "IW-F"), slot.decoding("decoding", "a", "IW-N")
    assert slot.allocator.grow(half, 50)
    step = batches(slot, math.inf)
    while step.decode(slot.models["a"]):
        assert step.stuck == set()
        decoding.cached += 1
        slot.requests.take(decoding, 7)
    assert (decoding.kv.location, half.kv.location, step.stuck) == (SWAPPING_OUT, DEVICE, {"a"})
    settled(slot)
    settled(slot)
    step.decode(slot.models["a"])
    assert (decoding.kv.location, step.stuck) == (SWAPPING_IN, {"a"})
    slot.requests.end_all([half], "cancelled")
    settled(slot)
    settled(slot)
    assert step.decode(slot.models["a"])
    assert step.stuck == set()


def test_a_batch_in_host_memory_that_waits_for_a_prompt_is_stuck() -> None:
    """An earlier request, half prefilled, holds what the batch needs: only its prefill goes on."""
    slot = Slot()
    half = slot.half_prefilled("half", "b", "IW-N")
    swapped = in_host_memory(slot, "swapped", "IW-N")
    assert slot.allocator.grow(half, 80)
    step = batches(slot, math.inf)
    assert step.decode(slot.models["a"]) == []
    assert (swapped.kv.location, step.stuck) == (HOST, {"a"})
    slot.requests.end_all([half], "cancelled")
    step.decode(slot.models["a"])
    settled(slot)
    assert step.decode(slot.models["a"])
    assert step.stuck == set()


def test_a_prompt_whose_prefix_another_computes_gives_its_place_to_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt in between has to wait: 64 tokens are 24 and 40."""
    slot = Slot()
    half = slot.half_prefilled("half", "a", "NIW")
    urgent, between = slot.waiting("urgent", "a", "IW-F"), slot.waiting("between", "a", "IW-N")
    monkeypatch.setattr(slot.kv, "awaited", lambda kv: half.kv if kv is urgent.kv else None)
    chunks = batches(slot, math.inf).prefill([urgent, between, half], slot.models["a"])
    assert [(chunk.sequence, chunk.count) for chunk in chunks] == [(half, 24), (between, 40)]


def test_a_mixed_step_takes_tokens_by_the_prompts_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt with tokens behind it takes longer than the one that waits for its prefix, and is computed once."""
    slot = Slot()
    slot.decoding("decoding", "a", "IW-N")
    half = slot.half_prefilled("half", "a", "NIW")
    urgent = slot.waiting("urgent", "a", "IW-F")
    monkeypatch.setattr(slot.kv, "awaited", lambda kv: half.kv if kv is urgent.kv else None)
    asked: list[MixedStepFacts] = []
    monkeypatch.setattr(step_batches, "choose_prefill_tokens", lambda facts: asked.append(facts) or 8)
    mixed(batches(slot, math.inf), slot, urgent, half)
    assert [(prompt.cached, prompt.pending) for prompt in asked[0].prompts] == [(half.cached, half.pending)]
    assert half.cached > 0


def test_only_prompts_that_found_no_memory_are_blocked() -> None:
    slot = Slot()
    decoding, waiting = slot.decoding("decoding", "a", "IW-N"), slot.waiting("waiting", "a", "IW-N")
    step = batches(slot, math.inf)
    waiting.kv.location = SWAPPING_IN
    assert mixed(step, slot, waiting) == [decoding]
    assert step.blocked == set(), "its cached prefix is being transferred"
    waiting.kv.location = NONE
    slot.decoding("other", "b", "IW-F")
    assert mixed(step, slot, waiting) == [decoding]
    assert step.blocked == {"a"}
    slot.requests.forget("other")
    assert mixed(step, slot, waiting) == [decoding, waiting]
    assert step.blocked == set()
