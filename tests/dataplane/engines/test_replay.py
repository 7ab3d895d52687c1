"""The replay engine on a fake clock: tokens, time, batching, KV, switching."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.engine import EngineOutput, EngineRequest
from dataplane.engines.replay import ReplayEngine, ReplaySettings
from dataplane.errors import BadRequestError, ContextLengthError, ModelLoadError, UnknownInstanceError
from dataplane.messages import ModelSpec
from dataplane.profile import GpuProfile, ModelProfile
from dataplane.turns.costs import LatencyModel

LATENCY = LatencyModel(
    prefill_base_s=0.01,
    prefill_per_token_s=0.001,
    prefill_per_token2_s=0.0,
    decode_base_s=0.02,
    decode_per_context_token_s=0.0001,
    decode_per_sequence_s=0.001,
)
PROFILE = GpuProfile(
    gpu_type="X",
    memory_bytes=10_000,
    pcie_bytes_per_s=1000.0,
    transfer_efficiency=0.5,
    cost_per_hour=1.0,
    models=(ModelProfile(name="m", source="made up", gpus=1, weights_bytes=500, latency=LATENCY),),
)
SETTINGS = ReplaySettings(profile=PROFILE, weights_bytes=1000, kv_bytes_per_gpu=1000)


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        assert duration_s >= 0
        self.now_s += duration_s


def spec(name: str = "a", *, weights_bytes: int = 500, context_tokens: int = 200) -> ModelSpec:
    return ModelSpec(
        name=name, path="-", weights_bytes=weights_bytes, kv_bytes_per_token=10, context_tokens=context_tokens
    )


def request(request_id: str = "r", instance_id: str = "i", *, prompt: int = 10, max_tokens: int = 5) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        instance_id=instance_id,
        tier="IW-F",
        prompt=tuple(range(prompt)),
        max_tokens=max_tokens,
    )


def engine_with(settings: ReplaySettings = SETTINGS, **models: ModelSpec) -> tuple[ReplayEngine, FakeTime]:
    time = FakeTime()
    engine = ReplayEngine(settings, time.clock, time.sleep)
    for instance_id, model in (models or {"i": spec()}).items():
        engine.load(instance_id, model)
    return engine, time


def drain(engine: ReplayEngine, steps_max: int = 2000) -> dict[str, list[EngineOutput]]:
    outputs: dict[str, list[EngineOutput]] = {}
    for _ in range(steps_max):
        if not engine.has_work():
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError("the engine never came to an end")


def tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def run_one(asked: EngineRequest, settings: ReplaySettings = SETTINGS) -> list[EngineOutput]:
    engine, _ = engine_with(settings)
    engine.add(asked)
    return drain(engine)[asked.request_id]


def test_tokens_hang_on_model_prompt_and_seed_alone() -> None:
    first = tokens(run_one(request()))
    assert len(first) == 5
    assert first == tokens(run_one(replace(request(), request_id="other")))
    assert first == tokens(run_one(replace(request(), seed=7))), "greedy answers do not hang on the seed"
    sampled = replace(request(), temperature=1.0)
    assert tokens(run_one(replace(sampled, seed=1))) != tokens(run_one(replace(sampled, seed=2)))
    assert first != tokens(run_one(request(prompt=11)))
    assert all(0 <= token_id < SETTINGS.vocabulary_size for token_id in first)


@given(made=st.integers(0, 20), seed=st.integers(0, 2**31), temperature=st.sampled_from([0.0, 1.0]))
@settings(max_examples=30, deadline=None)
def test_a_continued_request_gives_the_same_tokens(made: int, seed: int, temperature: float) -> None:
    asked = replace(request(max_tokens=20), seed=seed, temperature=temperature)
    whole = tokens(run_one(asked))
    rest = run_one(replace(asked, generated=tuple(whole[:made])))
    assert whole[:made] + tokens(rest) == whole
    assert rest[-1].finish_reason == "length"


def test_time_is_that_of_the_latency_model() -> None:
    engine, time = engine_with()
    engine.add(request(prompt=10, max_tokens=2))
    engine.step()
    # switch 500 / (1000 x 0.5) = 1 s, prefill 0.01 + 10 x 0.001 = 0.02 s
    assert time.now_s == pytest.approx(101.02)
    engine.step()
    # decode with 11 tokens of context: 0.02 + 11 x 0.0001 + 0.001
    assert time.now_s == pytest.approx(101.02 + 0.0221)
    assert not engine.has_work()
    fast, fast_time = engine_with(replace(SETTINGS, speed=10.0))
    fast.add(request(prompt=10, max_tokens=1))
    fast.step()
    assert fast_time.now_s == pytest.approx(100.102)


def test_a_newcomer_joins_the_running_batch() -> None:
    engine, _ = engine_with()
    engine.add(request("old", max_tokens=10))
    engine.step()
    engine.step()
    engine.add(request("new", max_tokens=10))
    assert {output.request_id for output in engine.step()} == {"new"}, "prefill comes first"
    assert {output.request_id for output in engine.step()} == {"old", "new"}


def test_batch_max_makes_the_rest_wait() -> None:
    engine, _ = engine_with(replace(SETTINGS, batch_max=2))
    for name in "xyz":
        engine.add(request(name))
    engine.step()
    (stats,) = engine.stats().instances
    assert (stats.running, stats.waiting) == (2, 1)
    assert {name: len(tokens(outputs)) for name, outputs in drain(engine).items()} == {"x": 4, "y": 4, "z": 5}


def test_kv_is_counted_and_freed() -> None:
    engine, _ = engine_with()
    engine.add(request(prompt=10, max_tokens=5))
    (before,) = engine.stats().instances
    assert (before.kv_used_bytes, before.remaining_tokens, before.waiting) == (0, 15, 1)
    engine.step()
    (after,) = engine.stats().instances
    assert (after.kv_used_bytes, after.remaining_tokens, after.running) == (110, 4, 1)
    assert after.kv_capacity_bytes == 1000
    drain(engine)
    (idle,) = engine.stats().instances
    assert (idle.kv_used_bytes, idle.remaining_tokens, idle.running, idle.waiting) == (0, 0, 0, 0)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_preemption_changes_no_token_and_kv_never_overflows(shapes: list[tuple[int, int]]) -> None:
    engine, _ = engine_with()
    asked = [request(f"r{i}", prompt=prompt, max_tokens=count) for i, (prompt, count) in enumerate(shapes)]
    for one in asked:
        engine.add(one)
    outputs: dict[str, list[EngineOutput]] = {}
    while engine.has_work():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        (stats,) = engine.stats().instances
        assert stats.kv_used_bytes <= stats.kv_capacity_bytes
    for one in asked:
        assert tokens(outputs[one.request_id]) == tokens(run_one(one))


def test_models_switch_by_turns_and_evict_what_was_unused_longest() -> None:
    models = {name: spec(name) for name in "abc"}
    engine, _ = engine_with(SETTINGS, **models)
    for name in "abc":
        engine.add(request(name, name, max_tokens=40))
    assert set(drain(engine)) == set("abc")
    stats = engine.stats()
    assert stats.switches_total >= 3
    assert len(stats.resident_models) == 2, "1000 bytes hold two models of 500"
    assert stats.tokens_total == 120


def test_cancel_frees_at_once_and_nothing_follows() -> None:
    engine, _ = engine_with()
    engine.add(request("gone", max_tokens=50))
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
        (spec(context_tokens=50), 46, 5, "at most 50"),
        (spec(context_tokens=5000), 60, 41, "at most 100"),  # 1000 bytes of KV hold 100 tokens
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
    with pytest.raises(BadRequestError, match="running already"):
        engine.add(request())
    with pytest.raises(BadRequestError, match="at least one token"):
        engine.add(request("empty", prompt=0))
    with pytest.raises(ModelLoadError, match="weights_bytes of big is 1001"):
        engine.load("big", spec("big", weights_bytes=1001))
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
    assert len(tokens(run_one(replace(asked, ignore_eos=True), ending))) == 90


def test_a_request_that_has_all_its_tokens_ends() -> None:
    outputs = run_one(replace(request(max_tokens=3), generated=(1, 2, 3)))
    assert outputs == [EngineOutput(request_id="r", finish_reason="length")]
