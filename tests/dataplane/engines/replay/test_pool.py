"""What a replayed slot does with many models and little memory: switches, prefetches, swaps, hand-overs."""

from dataclasses import replace

import pytest
from msgspec import structs

from dataplane.engines.core.kv import KvEvents, KvLocation
from dataplane.engines.core.kv_allocator import choose_victim
from dataplane.engines.interface import EngineOutput, PoolStats
from dataplane.engines.replay.engine import ReplayEngine
from dataplane.engines.replay.kv import ReplayKvMemory, SequenceKv
from dataplane.engines.replay.weights import Weights, WeightsMemory
from dataplane.protocol.errors import ContextLengthError
from dataplane.protocol.tiers import Tier
from tests.dataplane.engines.replay.replayed import (
    SETTINGS,
    FakeTime,
    drain,
    engine_with,
    request,
    run_one,
    spec,
    tokens,
)

THREE = {name: spec(name) for name in "abc"}


def pool_of(engine: ReplayEngine) -> PoolStats:
    pool = engine.stats().pool
    assert pool is not None
    return pool


def weights(model: str, size_bytes: int = 500) -> Weights:
    return Weights(model=model, size_bytes=size_bytes, switch_s=1.0)


def test_weights_come_one_after_another_and_the_longest_unused_leave() -> None:
    memory = WeightsMemory(1000)
    assert memory.load(weights("a"), 0.0) == 1.0
    assert memory.load(weights("b"), 0.5) == 2.0, "the link is busy until 1.0"
    assert memory.missing_s(weights("c"), 0.5) == 2.5
    assert (memory.resident_models(1.5), memory.arriving_models(1.5)) == (("a",), ("b",))
    assert memory.load(weights("a"), 3.0) == 1.0
    assert memory.load(weights("c"), 3.0) == 4.0
    assert memory.resident_models(9.0) == ("a", "c")
    assert memory.load(weights("d", 600), 9.0, keep="a") is None
    assert memory.load(weights("d", 500), 9.0, keep="a") == 10.0
    assert memory.resident_models(99.0) == ("a", "d")


def test_kv_takes_memory_on_both_sides_during_a_swap() -> None:
    time = FakeTime()
    memory = ReplayKvMemory(1000, 300, time.clock, WeightsMemory(1000))
    one, other = (SequenceKv(bytes_per_token=10, bytes_per_s=100.0) for _ in range(2))
    assert memory.grow(one, 30)
    assert not memory.grow(other, 71)
    assert memory.grow(other, 70)
    assert not memory.swap_out(other, 70), "host memory is too small"
    assert memory.swap_out(one, 30)
    time.sleep(2.9)
    memory.settle()
    assert (one.location, memory.free_bytes, memory.host_used_bytes) == (KvLocation.SWAPPING_OUT, 0, 300)
    time.sleep(0.125)
    memory.settle()
    assert (one.location, memory.free_bytes, memory.host_used_bytes) == (KvLocation.HOST, 300, 300)
    assert [memory.fits(one, spare=spare) for spare in (0, 1)] == [True, False]
    assert memory.swap_in(one)
    memory.drop(one)
    memory.drop(other)
    assert (memory.used_bytes, memory.host_used_bytes, memory.next_move_s) == (0, 0, None)


class Ranked:
    def __init__(self, model: str, key: int, rank: int = 0) -> None:
        self.model = model
        self.key = (rank, key)


def test_other_models_are_preempted_first_and_no_sequence_for_a_later_one() -> None:
    first, asks, last, foreign, late = (
        Ranked("a", 1), Ranked("a", 2), Ranked("a", 3), Ranked("b", 0), Ranked("b", 9),
    )  # fmt: skip
    everybody = [first, asks, last, foreign, late]
    assert choose_victim(everybody, asks) is late
    assert choose_victim(everybody, asks, keep=[late, foreign]) is last
    assert choose_victim([first, asks], asks) is None


def test_of_other_models_the_lowest_tier_goes_first_and_then_the_model_whose_turn_is_the_furthest() -> None:
    asks, next_one, last_one, batch = Ranked("a", 1), Ranked("b", 9), Ranked("c", 2), Ranked("b", 5, rank=2)
    turns_s = {"b": 0.5, "c": 1.5}
    assert choose_victim([next_one, last_one, batch], asks, idle_s=turns_s.__getitem__) is batch
    assert choose_victim([next_one, last_one], asks, idle_s=turns_s.__getitem__) is last_one
    assert choose_victim([next_one, last_one], asks) is next_one, "the later of the two"


def test_a_prefetched_model_arrives_while_the_present_one_decodes() -> None:
    waits = {}
    for prefetch in (True, False):
        engine, time = engine_with(replace(SETTINGS, prefetch=prefetch), **THREE)
        for name in "abc":
            engine.add(request(name, name, max_tokens=80))
        drain(engine)
        waits[prefetch] = time.now_s
        assert engine.stats().switches_total >= 3
        assert len(engine.stats().resident_models) == 2, "1000 bytes hold two models of 500"
    assert waits[True] < waits[False] - 1.0


def test_two_models_that_fit_are_each_loaded_once() -> None:
    engine, time = engine_with(a=spec("a"), b=spec("b"))
    for name in "ab":
        engine.add(request(name, name, max_tokens=40))
    drain(engine)
    engine.step()  # which ends the last turn
    pool = pool_of(engine)
    assert engine.stats().switches_total > 2
    busy_s = sum(turn.ended_s - turn.started_s for turn in pool.time_slices)
    assert time.now_s - 100 == pytest.approx(busy_s)
    assert busy_s < 2.0 + 2 * (0.02 + 40 * 0.03), "two transfers of a second, and the steps"


@pytest.mark.parametrize(("host_kv_bytes", "recomputed"), [(10_000, False), (0, True)])
def test_short_kv_is_swapped_and_recomputed_only_when_the_host_is_full(host_kv_bytes: int, recomputed: bool) -> None:
    engine, _ = engine_with(replace(SETTINGS, host_kv_bytes=host_kv_bytes))
    asked = [request(f"r{n}", prompt=20, max_tokens=40) for n in range(3)]
    for one in asked:
        engine.add(one)
    outputs = drain(engine)
    for one in asked:
        assert tokens(outputs[one.request_id]) == tokens(run_one(one))
    extra = engine.stats().extra
    assert extra["preemptions"] > 0
    assert (extra["recomputed"] > 0) == recomputed
    assert (extra["swapped_in"] > 0) != recomputed


def test_models_that_need_each_others_kv_both_come_to_their_end() -> None:
    """A prefill that preempts KV waits for its memory; otherwise that KV would be swapped in before it, for ever."""
    engine, _ = engine_with(replace(SETTINGS, host_kv_bytes=300), i=spec("a"), j=spec("b"))
    shapes = [("i", 2, 19), ("i", 1, 33), ("i", 16, 18), ("j", 24, 36), ("j", 35, 5), ("j", 53, 32)]
    for n, (where, prompt, count) in enumerate(shapes):
        engine.add(request(f"r{n}", where, prompt=prompt, max_tokens=count))
    assert len(drain(engine)) == 6


def test_memory_freed_for_the_first_is_not_taken_by_a_smaller_one_behind_it() -> None:
    engine, _ = engine_with(replace(SETTINGS, host_kv_bytes=10_000), i=spec("a"), j=spec("b"))
    shapes = [("i", 14, 11), ("i", 11, 6), ("i", 52, 19), ("i", 29, 30), ("i", 2, 34), ("i", 32, 29), ("j", 32, 6)]
    for n, (where, prompt, count) in enumerate(shapes):
        engine.add(request(f"r{n}", where, prompt=prompt, max_tokens=count))
    assert len(drain(engine)) == 7


@pytest.mark.parametrize("events", ["host", "off"])
def test_a_prefill_slot_exports_kv_and_keeps_it_until_release(events: KvEvents) -> None:
    """Announced, KV is read where it lies as soon as it is there; else it is announced then."""
    prefiller, time = engine_with(replace(SETTINGS, prefill_only=True, kv_events=events))
    asked = request(prompt=20, max_tokens=6)
    prefiller.add(asked)
    first, gone = drain(prefiller)["r"]
    assert (len(first.token_ids), first.kv, gone.token_ids) == (1, None, ())
    assert gone.kv is not None
    assert gone.kv.tokens == 20
    prefilled_s, transfer_s = 100 + 1.0 + 0.03, 20 * 10 / 500
    assert time.now_s == pytest.approx(prefilled_s + (transfer_s if events == "off" else 0.0))
    assert gone.kv.passes_s == pytest.approx(prefilled_s + transfer_s)
    assert [shape.used_bytes for shape in pool_of(prefiller).host_kv] == [200]
    decoder, decoder_time = engine_with()
    decoder.add(structs.replace(asked, generated=first.token_ids, kv=gone.kv))
    rest = drain(decoder)["r"]
    assert tokens([first, *rest]) == tokens(run_one(asked))
    steps_s = sum(0.021 + 0.0001 * context for context in range(20, 25))
    assert decoder_time.now_s == pytest.approx(prefilled_s + 2 * transfer_s + steps_s)
    prefiller.release("r")
    assert pool_of(prefiller).host_kv == ()


def test_a_prefill_slot_refuses_what_its_host_memory_would_never_take() -> None:
    prefiller, _ = engine_with(replace(SETTINGS, prefill_only=True, host_kv_bytes=250))
    assert prefiller.stats().instances[0].kv_tokens_max == 25
    with pytest.raises(ContextLengthError, match="exceed the KV cache of 25 tokens"):
        prefiller.add(request(prompt=20, max_tokens=6))
    prefiller.add(request(prompt=20, max_tokens=5))
    assert drain(prefiller)["r"][-1].kv is not None
    other, _ = engine_with(replace(SETTINGS, host_kv_bytes=250))
    assert other.stats().instances[0].kv_tokens_max == 100


def test_a_lost_handle_is_prefilled_again() -> None:
    prefiller, _ = engine_with(replace(SETTINGS, prefill_only=True))
    asked = request(prompt=20, max_tokens=6)
    prefiller.add(asked)
    first, gone = drain(prefiller)["r"]
    assert gone.kv is not None
    for kv in (structs.replace(gone.kv, file="/nowhere"), structs.replace(gone.kv, tokens=19), None):
        engine, time = engine_with()
        engine.add(structs.replace(asked, generated=first.token_ids, kv=kv))
        assert tokens([first, *drain(engine)["r"]]) == tokens(run_one(asked))
        assert time.now_s > 101 + 0.01 + 21 * 0.001, "a prefill of prompt and token"


def test_the_turn_log_is_complete() -> None:
    engine, _ = engine_with(SETTINGS, **THREE)
    for name in "abc":
        engine.add(request(name, name, max_tokens=20))
    outputs: list[EngineOutput] = [output for group in drain(engine).values() for output in group]
    engine.step()
    pool = pool_of(engine)
    assert pool.running_model is None
    assert pool.load == 0
    assert sum(turn.tokens for turn in pool.time_slices) == len(tokens(outputs)) == 60
    assert sum(turn.switched for turn in pool.time_slices) == engine.stats().switches_total
    prompts = {turn.model: (turn.tokens, turn.prompt_tokens) for turn in pool.time_slices if turn.kind == "prefill"}
    assert prompts == {name: (1, len(request(name, name).prompt)) for name in "abc"}
    assert all(turn.prompt_tokens == 0 for turn in pool.time_slices if turn.kind == "decode")


def test_a_turn_that_can_do_nothing_is_cut_short() -> None:
    """KV of b that was just swapped in stays for b's turn: a, which does not fit with it, ends its own turn early."""
    shapes: list[tuple[str, Tier, int, int]] = [
        ("j", "NIW", 57, 25),
        ("i", "IW-F", 6, 12),
        ("i", "IW-F", 43, 15),
        ("i", "IW-N", 54, 38),
        ("i", "IW-N", 19, 1),
        ("i", "IW-N", 35, 24),
        ("j", "IW-F", 45, 33),
    ]
    engine, _ = engine_with(replace(SETTINGS, prefill_tokens_per_step_max=16), i=spec("a"), j=spec("b"))
    for number, (instance_id, tier, prompt, count) in enumerate(shapes):
        engine.add(request(f"r{number}", instance_id, prompt=prompt, max_tokens=count, tier=tier))
    outputs = drain(engine, steps_max=1000)  # of a millisecond each, where it waits for nothing
    assert {request_id: len(tokens(made)) for request_id, made in outputs.items()} == {
        f"r{number}": count for number, (_, _, _, count) in enumerate(shapes)
    }
