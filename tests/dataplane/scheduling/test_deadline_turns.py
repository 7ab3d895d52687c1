"""Turns of slices by deadlines: the prompts and the batch of one model, what is prefetched, and that all are served."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from dataplane.protocol.tiers import Tier
from dataplane.scheduling.prefill import PrefillQueue
from dataplane.scheduling.schedule import SlotFacts, SlotState, Turn, TurnSettings, choose_turn
from tests.dataplane.scheduling.slots import SETTINGS, batch, prefills, slot
from tests.dataplane.scheduling.test_schedule_runs import Slot

BY_DEADLINES = replace(SETTINGS, time_slices="deadlines")


def turn_of(
    facts: SlotFacts, state: SlotState, now_s: float, settings: TurnSettings = BY_DEADLINES
) -> tuple[Turn, SlotState]:
    turn, after = choose_turn(facts, state, now_s, settings)
    assert turn is not None
    return turn, after


def test_prompts_go_before_the_batch_of_their_model() -> None:
    facts = slot(prefills(("a", 0.0, "IW-N")), [batch("a"), batch("b", 9.0)], "a")
    turn, _ = turn_of(facts, SlotState(), 0.0)
    assert (turn.kind, turn.model, turn.group, turn.next_model) == ("prefill", "a", ("a0",), "b")


def test_a_batch_that_is_owed_time_goes_before_its_prompts() -> None:
    facts = slot(prefills(("a", 0.0, "IW-N")), [batch("a")], "a")
    _, state = turn_of(facts, SlotState(), 0.0)
    turn, _ = turn_of(facts, state.spent("prefill", 5.0), 5.0)
    assert turn.kind == "decode"


def test_with_mixed_batches_they_go_beside_it() -> None:
    facts = slot(prefills(("a", 0.0, "IW-N")), [batch("a")], "a")
    turn, _ = turn_of(facts, SlotState(), 0.0, replace(BY_DEADLINES, mixed_batches=True))
    assert (turn.is_mixed, turn.group, turn.counts) == (True, ("a0",), False)


def test_the_prompts_of_a_loaded_model_do_not_end_the_slice() -> None:
    batches = [batch("a", 5.0), batch("b", 9.0)]
    _, state = turn_of(slot(PrefillQueue(), batches, "a"), SlotState(), 0.0)
    both = structs.replace(slot(prefills(("b", 0.1, "IW-F")), batches, "a"), switch_s={"a": 0.0, "b": 0.0})
    turn, after = turn_of(both, state, 0.1)
    assert (turn.kind, turn.model, turn.next_model) == ("prefill", "b", "a")
    assert after.slice.model == "a"
    turn, _ = turn_of(slot(PrefillQueue(), batches, "a"), after, 0.3)
    assert (turn.kind, turn.model) == ("decode", "a")


def test_another_next_model_is_prefetched_too() -> None:
    batches = [batch("a", 5.0), batch("b", 9.0)]
    first, state = turn_of(slot(PrefillQueue(), batches, "a"), SlotState(), 0.0)
    same, state = turn_of(slot(PrefillQueue(), batches, "a"), state, 0.1)
    other, _ = turn_of(slot(prefills(("c", 0.1, "IW-F")), batches, "a"), state, 0.2)
    assert [(turn.next_model, turn.started_s) for turn in (first, same, other)] == [("b", 0.0), ("b", 0.0), ("c", 0.2)]


def test_slices_are_longer_where_loads_are_waited_for() -> None:
    """Batches that need 0.8 of the time have slices of four loads, unless these are hidden by a prefetch."""
    batches = [structs.replace(batch(model, 5.0), step_s=0.04) for model in ("a", "b")]
    hidden = [structs.replace(one, prefetched=True) for one in batches]
    _, alone = turn_of(slot(PrefillQueue(), batches, "a"), SlotState(), 0.0)
    _, together = turn_of(slot(PrefillQueue(), hidden, "a"), SlotState(), 0.0)
    load_s = batches[0].switch_s
    assert alone.round.quotas[0].quota_s == pytest.approx(min(4 * load_s, BY_DEADLINES.decode.quota_max_s))
    assert together.round.quotas[0].quota_s == load_s


def test_models_without_weights_in_host_memory_have_no_slice() -> None:
    facts = slot(prefills(("b", 0.0, "IW-F")), [batch("a", 5.0), batch("c", ready=False)], "a", unready=["b", "c"])
    turn, _ = turn_of(facts, SlotState(), 0.0)
    assert (turn.model, turn.next_model) == ("a", None)
    assert choose_turn(slot(PrefillQueue(), [batch("c", ready=False)], "a"), SlotState(), 0.0, BY_DEADLINES)[0] is None


@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from("abcdef"), st.sampled_from(["IW-F", "IW-N", "NIW"]), st.integers(0, 40)),
        min_size=1,
        max_size=60,
    ),
)
@settings(max_examples=40)
def test_all_are_served_to_their_end(arrivals: list[tuple[str, Tier, int]]) -> None:
    node = Slot(settings=BY_DEADLINES)
    node.serve(arrivals)


def test_a_prompt_without_memory_lets_other_models_try() -> None:
    facts = slot(prefills(("c", 0.0, "IW-F"), ("a", 5.0, "IW-N")), [], "c")
    first, state = turn_of(facts, SlotState(), 10.0)
    again, _ = turn_of(facts, state, 10.0)
    second, state = turn_of(facts, state.cut_short(10.0), 10.0)
    third, _ = turn_of(facts, state.cut_short(10.0), 10.0)
    assert [turn.model for turn in (first, again, second)] == ["c", "c", "a"]
    assert third.model in ("a", "c"), "all were tried"
