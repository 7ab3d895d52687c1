"""Steps that prefill beside the batch: their time, what it teaches, what the slice log says, and shortage of memory."""

from dataclasses import replace

import pytest
from msgspec import structs

from dataplane.engines.interface import PoolStats
from dataplane.engines.replay.engine import ReplayEngine
from dataplane.protocol.tiers import Objective, Tier
from dataplane.scheduling.mixed_batches import PIECE_TOKENS_MIN
from dataplane.scheduling.schedule import TurnSettings
from tests.dataplane.engines.replay.replayed import SETTINGS, FakeTime, drain, engine_with, request, spec, tokens

MIXED = replace(SETTINGS, kv_bytes=10_000, turns=TurnSettings(mixed_batches=True))
"""Room for 1,000 tokens."""


def pool_of(engine: ReplayEngine) -> PoolStats:
    pool = engine.stats().pool
    assert pool is not None
    return pool


def decoding(tbt_s: float, **changes: object) -> tuple[ReplayEngine, FakeTime]:
    """An engine with a request of 10 tokens that has its first token, and promises of so much time between tokens."""
    engine, time = engine_with(replace(MIXED, **changes), i=spec(context_tokens=1000))  # type: ignore[arg-type]
    engine.add(structs.replace(request("old", max_tokens=200), objective=Objective(ttft_s=1000.0, tbt_s=tbt_s)))
    engine.step()
    engine.step()
    return engine, time


def test_a_newcomer_is_prefilled_beside_the_running_batch() -> None:
    engine, time = decoding(0.1)
    engine.add(request("new", prompt=40, max_tokens=10))
    before_s = time.now_s
    assert {output.request_id for output in engine.step()} == {"old", "new"}
    assert time.now_s - before_s == pytest.approx(0.02 + 0.001 + 0.001 + 40 * 0.001), "one constant, and all else"


def test_a_long_prompt_comes_in_pieces_that_keep_the_objective() -> None:
    """A decode step takes 22 ms, a prompt's token one more: 128 of them fit into 150 ms."""
    engine, time = decoding(0.15)
    engine.add(request("new", prompt=300, max_tokens=2))
    gaps_s, steps, done = [], 0, False
    while not done:
        before_s = time.now_s
        outputs = engine.step()
        gaps_s.append(time.now_s - before_s)
        done = any(output.request_id == "new" for output in outputs)
        assert any(output.request_id == "old" for output in outputs), "the batch makes a token in each step"
        steps += 1
    assert steps == 3
    assert max(gaps_s) <= 0.15 + 1e-9
    assert min(gaps_s[:2]) > 0.148


def test_where_the_objective_is_nearly_used_up_a_small_piece_goes_beside() -> None:
    engine, time = decoding(0.0225)
    engine.add(structs.replace(request("new", prompt=300), objective=Objective(ttft_s=1000.0, tbt_s=0.0225)))
    before_s = time.now_s
    (output,) = engine.step()
    assert output.request_id == "old"
    assert time.now_s - before_s == pytest.approx(0.022 + PIECE_TOKENS_MIN * 0.001)


def test_where_it_is_used_up_prompts_go_alone() -> None:
    engine, _ = decoding(0.015)
    engine.add(structs.replace(request("new", prompt=300), objective=Objective(ttft_s=1000.0, tbt_s=0.015)))
    assert {output.request_id for output in engine.step()} == {"new"}


def test_mixed_steps_change_neither_the_estimate_of_prefills_nor_that_of_decode_steps() -> None:
    engine, time = decoding(0.1)
    model = engine.models["a"]
    before = model.estimate
    sleep = time.sleep
    engine._steps._sleep = lambda duration_s: sleep(3 * duration_s)
    engine.add(request("new", prompt=40, max_tokens=10))
    engine.step()
    after = model.estimate
    assert (after.prefill_factor, after.decode_factor) == (before.prefill_factor, before.decode_factor)
    assert after.mixed_factor > 1.0


def test_mixed_steps_are_time_slices_of_their_own_and_give_the_pace_of_prefills() -> None:
    engine, _ = decoding(0.1)
    default = pool_of(engine).prefill_pace
    engine.add(request("new", prompt=40, max_tokens=5))
    drain(engine)
    engine.step()
    slices = pool_of(engine).time_slices
    assert [one.kind for one in slices] == ["prefill", "mixed", "decode"]
    mixed = next(one for one in slices if one.kind == "mixed")
    assert (mixed.tokens, mixed.prompts, mixed.prompt_tokens) == (2, 1, 40)
    assert mixed.ended_s - mixed.started_s == pytest.approx(0.062)
    assert sum(one.tokens for one in slices) == 205
    assert pool_of(engine).prefill_pace != default


def test_the_load_is_that_of_the_batch_as_if_prompts_went_alone() -> None:
    engine, _ = decoding(0.1)
    before = pool_of(engine).load
    engine.add(request("new", prompt=40, max_tokens=5))
    engine.step()
    assert pool_of(engine).load > before


def crowded(tier: Tier) -> tuple[ReplayEngine, FakeTime]:
    """Two models with a batch each, `own` and `other`, of a tier, whose KV leaves no room for a prompt of 60 tokens."""
    settings = replace(MIXED, kv_bytes=1400)
    engine, time = engine_with(settings, i=spec("a"), j=spec("b"))
    for name, instance_id in (("own", "i"), ("other", "j")):
        asked = request(name, instance_id, prompt=40, max_tokens=60, tier=tier)
        engine.add(structs.replace(asked, objective=Objective(ttft_s=1000.0, tbt_s=0.2)))
    started: set[str] = set()
    while len(started) < 2:
        started |= {output.request_id for output in engine.step()}
    return engine, time


def ask_for(engine: ReplayEngine, ttft_s: float, seconds: float, time: FakeTime) -> set[str]:
    """Who makes tokens in so many seconds after an interactive prompt of 60 tokens came; due after `ttft_s`."""
    asked = request("new", prompt=60, max_tokens=2, tier="IW-N")
    engine.add(structs.replace(asked, objective=Objective(ttft_s=ttft_s, tbt_s=0.2)))
    before_s, made = time.now_s, set[str]()
    while time.now_s < before_s + seconds:
        made |= {output.request_id for output in engine.step()}
    return made


def test_prompts_beside_a_batch_preempt_no_sequence_of_their_tier() -> None:
    engine, time = crowded("IW-N")
    assert ask_for(engine, 1000.0, 0.3, time) == {"own", "other"}
    assert engine.stats().extra["preemptions"] == 0
    assert len(tokens(drain(engine)["new"])) == 2


@pytest.mark.parametrize(("tier", "ttft_s"), [("IW-N", 0.4), ("NIW", 1000.0)])
def test_they_preempt_when_they_are_nearly_due_and_those_of_a_lower_tier_at_once(tier: Tier, ttft_s: float) -> None:
    engine, time = crowded(tier)
    ask_for(engine, ttft_s, 0.6, time)
    assert engine.stats().extra["preemptions"] > 0
    assert len(tokens(drain(engine)["new"])) == 2
