"""The replay engine on a fake clock: tokens, time, batching, KV."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from dataplane.engines.interface import EngineOutput
from dataplane.protocol.errors import BadRequestError, ContextLengthError, ModelLoadError, UnknownInstanceError
from dataplane.protocol.messages import ModelSpec, Task
from dataplane.protocol.tiers import Tier
from dataplane.scheduling.schedule import TurnSettings
from tests.dataplane.engines.replay.replayed import SETTINGS, drain, engine_with, request, run_one, spec, tokens


def test_tokens_hang_on_model_prompt_and_seed_alone() -> None:
    first = tokens(run_one(request()))
    assert len(first) == 5
    assert first == tokens(run_one(structs.replace(request(), request_id="other")))
    assert first == tokens(run_one(structs.replace(request(), seed=7))), "greedy answers do not hang on the seed"
    sampled = structs.replace(request(), temperature=1.0)
    assert tokens(run_one(structs.replace(sampled, seed=1))) != tokens(run_one(structs.replace(sampled, seed=2)))
    assert first != tokens(run_one(request(prompt=11)))
    assert all(0 <= token_id < SETTINGS.vocabulary_size for token_id in first)


@given(made=st.integers(0, 20), seed=st.integers(0, 2**31), temperature=st.sampled_from([0.0, 1.0]))
@settings(max_examples=30)
def test_a_continued_request_gives_the_same_tokens(made: int, seed: int, temperature: float) -> None:
    asked = structs.replace(request(max_tokens=20), seed=seed, temperature=temperature)
    whole = tokens(run_one(asked))
    rest = run_one(structs.replace(asked, generated=tuple(whole[:made])))
    assert whole[:made] + tokens(rest) == whole
    assert rest[-1].finish_reason == "length"


def test_time_is_that_of_the_latency_model() -> None:
    engine, time = engine_with()
    engine.add(request(prompt=10, max_tokens=2))
    assert engine.step() == []
    assert time.now_s == pytest.approx(101), "a switch of 500 / (1000 x 0.5) s"
    engine.step()
    assert time.now_s == pytest.approx(101.02), "a prefill of 0.01 + 10 x 0.001 s"
    engine.step()
    assert time.now_s == pytest.approx(101.02 + 0.022), "a decode step of 0.02 + 10 x 0.0001 + 0.001 s"
    assert not engine.has_work()
    fast, fast_time = engine_with(replace(SETTINGS, speed=10.0))
    fast.add(request(prompt=10, max_tokens=1))
    drain(fast)
    assert fast_time.now_s == pytest.approx(100.102)


def test_a_newcomer_joins_the_running_batch() -> None:
    engine, _ = engine_with()
    engine.add(request("old", max_tokens=10))
    for _ in range(3):
        engine.step()
    engine.add(request("new", max_tokens=10))
    assert {output.request_id for output in engine.step()} == {"new"}, "a prefill that costs no switch comes first"
    assert {output.request_id for output in engine.step()} == {"old", "new"}


def test_short_prompts_share_a_prefill_step_and_long_ones_take_several() -> None:
    engine, time = engine_with(replace(SETTINGS, prefill_tokens_per_step_max=25))
    for name in "xyz":
        engine.add(request(name, prompt=10, max_tokens=1))
    engine.step()
    assert [output.request_id for output in engine.step()] == ["x", "y"]
    assert time.now_s == pytest.approx(101 + 0.01 + 0.025), "and half of z"
    assert [output.request_id for output in engine.step()] == ["z"]
    assert time.now_s == pytest.approx(101.035 + 0.01 + 0.005)


def test_an_urgent_prompt_waits_for_no_queue_of_others_of_its_model() -> None:
    """Fifteen wait, in two groups, the first of which was begun."""
    engine, _ = engine_with(replace(SETTINGS, prefill_tokens_per_step_max=8))
    for number in range(15):
        engine.add(request(f"n{number}", prompt=4, max_tokens=1, tier="IW-N"))
    engine.step()
    assert [output.request_id for output in engine.step()] == ["n0", "n1"]
    engine.add(request("urgent", prompt=4, max_tokens=1))
    assert [output.request_id for output in engine.step()] == ["urgent", "n2"]
    assert list(drain(engine)) == [f"n{number}" for number in range(3, 15)]


def test_batch_max_makes_the_rest_wait() -> None:
    engine, _ = engine_with(replace(SETTINGS, batch_max=2))
    for name in "xyz":
        engine.add(request(name))
    engine.step()
    assert {output.request_id for output in engine.step()} == set("xyz")
    assert {output.request_id for output in engine.step()} == {"x", "y"}
    assert {name: len(tokens(outputs)) for name, outputs in drain(engine).items()} == {"x": 3, "y": 3, "z": 4}


def test_kv_is_counted_and_freed() -> None:
    engine, _ = engine_with()
    engine.add(request(prompt=10, max_tokens=5))
    (before,) = engine.stats().instances
    assert (before.kv_used_bytes, before.remaining_tokens, before.waiting) == (0, 15, 1)
    engine.step()
    engine.step()
    (after,) = engine.stats().instances
    assert (after.kv_used_bytes, after.remaining_tokens, after.running) == (110, 4, 1)
    assert after.kv_capacity_bytes == 1000
    drain(engine)
    (idle,) = engine.stats().instances
    assert (idle.kv_used_bytes, idle.remaining_tokens, idle.running, idle.waiting) == (0, 0, 0, 0)


TIERS = st.sampled_from(["IW-F", "IW-N", "NIW"])


@given(
    shapes=st.lists(
        st.tuples(st.sampled_from("ij"), TIERS, st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=8
    ),
    host_kv_bytes=st.sampled_from([0, 300, 10_000]),
    prefill_tokens_per_step_max=st.sampled_from([16, 2048]),
    mixed=st.booleans(),
)
@settings(max_examples=60)
def test_preemption_changes_no_token_and_kv_never_overflows(
    shapes: list[tuple[str, Tier, int, int]], host_kv_bytes: int, prefill_tokens_per_step_max: int, *, mixed: bool
) -> None:
    turns = TurnSettings(mixed_batches=mixed)
    short = replace(SETTINGS, host_kv_bytes=host_kv_bytes, turns=turns)
    short = replace(short, prefill_tokens_per_step_max=prefill_tokens_per_step_max)
    engine, _ = engine_with(short, i=spec("a"), j=spec("b"))
    asked = [
        request(f"r{n}", instance_id, prompt=prompt, max_tokens=count, tier=tier)
        for n, (instance_id, tier, prompt, count) in enumerate(shapes)
    ]
    for one in asked:
        engine.add(one)
    outputs: dict[str, list[EngineOutput]] = {}
    for _ in range(5000):
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        pool = engine.stats().pool
        assert pool is not None
        assert sum(shape.used_bytes for shape in pool.kv) <= SETTINGS.kv_bytes
        assert sum(shape.used_bytes for shape in pool.host_kv) <= host_kv_bytes
        if not engine.has_work():
            break
    for one in asked:
        assert tokens(outputs[one.request_id]) == tokens(run_one(one, SETTINGS, i=spec("a"), j=spec("b")))
    assert all(stats.kv_used_bytes == 0 for stats in engine.stats().instances)


def test_cancel_frees_at_once_and_nothing_follows() -> None:
    engine, _ = engine_with()
    engine.add(request("gone", max_tokens=50))
    engine.step()
    engine.step()
    engine.cancel("gone")
    engine.cancel("never was")
    assert not engine.has_work()
    assert engine.step() == []
    (stats,) = engine.stats().instances
    assert stats.kv_used_bytes == 0


def test_unload_ends_its_requests_with_an_error() -> None:
    engine, _ = engine_with(i=spec("a"), j=spec("b"))
    engine.add(request("left", "i"))
    engine.add(request("stays", "j"))
    engine.unload("i")
    outputs = drain(engine)
    assert outputs["left"][-1].error is not None
    assert outputs["stays"][-1].finish_reason == "length"
    with pytest.raises(UnknownInstanceError):
        engine.add(request("late", "i"))


@pytest.mark.parametrize(
    ("model", "prompt", "max_tokens", "limit"),
    [
        (spec(context_tokens=50), 46, 5, "context of 50"),
        (spec(context_tokens=5000), 60, 41, "KV cache of 100"),  # 1000 bytes of KV hold 100 tokens
    ],
)
def test_what_cannot_fit_is_refused(model: ModelSpec, prompt: int, max_tokens: int, limit: str) -> None:
    engine, _ = engine_with(i=model)
    with pytest.raises(ContextLengthError, match=limit):
        engine.add(request(prompt=prompt, max_tokens=max_tokens))
    engine.add(request(prompt=prompt, max_tokens=max_tokens - 1))
    assert drain(engine)["r"][-1].finish_reason == "length"


def test_bad_requests_and_loads() -> None:
    engine, _ = engine_with()
    engine.add(request())
    with pytest.raises(BadRequestError, match="in use"):
        engine.add(request())
    with pytest.raises(BadRequestError, match="at least one token"):
        engine.add(request("empty", prompt=0))
    with pytest.raises(ModelLoadError, match="weights_bytes of big is 1001"):
        engine.load("big", spec("big", weights_bytes=1001))
    with pytest.raises(ModelLoadError, match="weights_bytes of big is 1001"):
        engine.prepare(spec("big", weights_bytes=1001))
    with pytest.raises(ModelLoadError, match="loaded already"):
        engine.load("i", spec())
    assert [stats.instance_id for stats in engine.stats().instances] == ["i"]


def test_answers_may_end_by_themselves() -> None:
    ending = replace(SETTINGS, mean_tokens=5)
    asked = request(max_tokens=90)
    outputs = run_one(asked, ending)
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].token_ids == ()
    assert len(tokens(outputs)) < 90
    assert len(tokens(run_one(structs.replace(asked, ignore_eos=True), ending))) == 90


def test_a_request_that_has_all_its_tokens_ends() -> None:
    outputs = run_one(structs.replace(request(max_tokens=3), generated=(1, 2, 3)))
    assert outputs == [EngineOutput(request_id="r", finish_reason="length")]


def test_embeddings_are_unit_vectors_and_scores_shares_of_the_prompt_alone() -> None:
    def pooled(task: Task) -> dict[str, tuple[float, ...]]:
        engine, _ = engine_with(i=structs.replace(spec(), task=task))
        for prompt in (10, 20):
            engine.add(structs.replace(request(f"r{prompt}", prompt=prompt), pooling=True))
        outputs = drain(engine)
        assert engine.stats().instances[0].kv_used_bytes == 0
        with pytest.raises(BadRequestError):
            engine.add(request("tokens"))
        return {name: last.values for name, [*_, last] in outputs.items()}

    embeddings, scores = pooled("embed"), pooled("score")
    assert (embeddings, scores) == (pooled("embed"), pooled("score"))
    assert all(math.hypot(*values) == pytest.approx(1) for values in embeddings.values())
    assert embeddings["r10"] != embeddings["r20"]
    assert all(0 <= score < 1 for (score,) in scores.values())


def test_what_an_answer_may_take_is_not_what_it_is_expected_to_take() -> None:
    engine, _ = engine_with(replace(SETTINGS, mean_tokens=5))
    for number in range(200):
        engine.add(request(f"r{number}", prompt=1, max_tokens=80))
        drain(engine)
    engine.add(request("long", prompt=10, max_tokens=80))
    (stats,) = engine.stats().instances
    assert 10 < stats.remaining_tokens < 25
