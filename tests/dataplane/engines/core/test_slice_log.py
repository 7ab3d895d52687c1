"""The time slices of a slot, and the prefill rate measured from them."""

import random

import pytest

from dataplane.engines.core.slice_log import SLICES_KEPT, SliceLog
from dataplane.scheduling.pace import PrefillPace, SeenPrefills
from dataplane.scheduling.schedule import Kind, Turn


def turn(kind: Kind, model: str, started_s: float, *, beside: tuple[str, ...] = ()) -> Turn:
    return Turn(kind=kind, model=model, started_s=started_s, next_model=None, group=beside, budget_s=0.1)


def test_a_decode_turn_is_cut_where_its_steps_begin_and_cease_to_prefill() -> None:
    """The pace is that of whole mixed steps: two prompts of 300 tokens in 0.9 s."""
    log = SliceLog()
    for now_s, beside, prompts in ((0.0, (), ()), (1.0, ("r",), ()), (1.5, ("r",), (300, 300)), (1.9, (), ())):
        log.turn(turn("decode", "a", 0.0, beside=beside), now_s)
        log.step(1 + len(prompts), prompts=prompts)
    log.turn(None, 3.0)
    seen = [(one.kind, one.started_s, one.ended_s, one.tokens, one.prompts, one.prompt_tokens) for one in log.slices]
    assert seen == [
        ("decode", 0.0, 1.0, 1, 0, 0),
        ("mixed", 1.0, 1.9, 4, 2, 600),
        ("decode", 1.9, 3.0, 1, 0, 0),
    ]
    assert log.prefill_pace.base_s + 300 * log.prefill_pace.token_s == pytest.approx(0.45)


def test_time_without_memory_for_prompts_beside_is_no_time_of_prefills() -> None:
    log = SliceLog()
    for now_s, blocked in ((0.0, False), (0.1, True), (9.0, False)):
        log.turn(turn("decode", "a", 0.0, beside=("r",)), now_s, blocked=blocked)
        log.step(1, prompts=() if blocked else (100,))
    log.turn(None, 9.1)
    assert [(one.kind, one.prompts) for one in log.slices] == [("mixed", 1), ("decode", 0), ("mixed", 1)]
    assert log.prefill_pace.base_s + 100 * log.prefill_pace.token_s == pytest.approx(0.1)


def test_the_pace_is_that_of_the_prefills_among_the_turns_kept() -> None:
    log, chance, now_s = SliceLog(), random.Random(1), 0.0
    assert log.prefill_pace == PrefillPace()
    for number in range(3 * SLICES_KEPT):
        kind: Kind = "decode" if number % 3 else "prefill"
        log.turn(turn(kind, f"m{number % 4}", now_s), now_s)
        prompts = [chance.randint(1, 4000) for _ in range(chance.randint(0, 3))] if kind == "prefill" else ()
        log.step(len(prompts), prompts=prompts)
        now_s += chance.uniform(0.01, 1.0) * (1 if number > SLICES_KEPT else 1000)
    log.turn(None, now_s)
    seen = SeenPrefills()
    kept = [one for one in log.slices if one.kind == "prefill" and one.tokens]
    assert 0 < len(kept) < len(log.slices) == SLICES_KEPT
    for one in kept:
        seen.take(one.tokens, one.prompt_tokens, one.ended_s - one.started_s, switched=one.switched)
    pace, expected = log.prefill_pace, seen.pace
    assert (pace.base_s, pace.token_s) == pytest.approx((expected.base_s, expected.token_s))
    assert pace.switch_s == pytest.approx(expected.switch_s)


def test_a_prompt_that_is_prefilled_in_pieces_beside_others_took_all_of_their_time() -> None:
    log = SliceLog()
    mixed = {model: Turn(kind="decode", model=model, group=("r",), started_s=0.0, next_model=None) for model in "ab"}
    for step, model in enumerate("abababab"):
        log.turn(mixed[model], 0.1 * step)
        log.step(1, prompts=[400] if step == 6 else [])
    log.turn(None, 0.8)
    assert log.prefill_pace.base_s + 400 * log.prefill_pace.token_s == pytest.approx(0.4), "four steps of a"


def test_a_slice_that_switched_says_how_long_its_weights_take_to_load() -> None:
    log = SliceLog()
    log.turn(turn("prefill", "a", 0.0), 0.0, missing_s=0.5)
    log.turn(turn("prefill", "a", 0.0), 1.0, missing_s=0.25)
    log.turn(turn("decode", "a", 2.0), 2.0, missing_s=0.125)
    log.turn(turn("decode", "b", 3.0), 3.0, missing_s=2.0)
    log.turn(None, 4.0)
    assert [(each.switched, each.switch_s) for each in log.slices] == [(True, 0.5), (False, 0.0), (True, 2.0)]
