"""Greedy tokens are those of transformers and of the torch engine; sampled ones those of the torch engine."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.protocol.errors import DeviceLostError
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.test_greedy import prompts
from tests.dataplane.engines.torch.test_sampling import LOGPROBS, MAX_TOKENS, VARIANTS, check_scores
from tests.dataplane.engines.torch.tiny import VOCABULARY, adjusted_answer, greedy_tokens, spec_of
from tests.vllm.conftest import HEAD_DIM, SHAPES

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

KV_BYTES_PER_TOKEN = 2 * 3 * 2 * HEAD_DIM * 4
Checkpoint = Callable[[str], Path]


@pytest.mark.parametrize("architecture", SHAPES)
def test_the_same_tokens_as_transformers_and_the_torch_engine(
    architecture: str, checkpoint: Checkpoint, make_engine: Callable[..., Any]
) -> None:
    folder = checkpoint(architecture)
    given = prompts(VOCABULARY)
    greedy = [request(name, prompt, max_tokens=MAX_TOKENS) for name, prompt in given.items()]
    sampled = [
        request(f"s{name}", prompt, max_tokens=MAX_TOKENS, temperature=0.9, top_p=0.95, seed=seed, ignore_eos=True)
        for seed, (name, prompt) in enumerate(given.items())
    ]
    cut = {"frequency_penalty": 0.5, "repetition_penalty": 1.1, "top_k": 30, "min_p": 0.01, "top_p": 0.9}
    sampled += [replace(one, request_id=f"c{one.request_id}", **cut) for one in sampled[:2]]
    ours = TorchEngine(TorchEngineSettings(weights_bytes=2**24, kv_bytes=2**22), time.monotonic)
    ours.load("a", spec_of("model", folder))
    later = {0: greedy[:2], 3: greedy[2:], 6: sampled}
    expected = drain(ours, later=later)
    ours.close()

    engine = make_engine(prefill_tokens_per_step_max=7)
    engine.load("a", spec_of("model", folder))
    made = drain(engine, later=later)
    assert made.errors == {}
    assert made.tokens == expected.tokens
    assert made.finished == expected.finished
    for name, prompt in given.items():
        assert made.tokens[name] == greedy_tokens(folder, prompt, MAX_TOKENS)
    assert len(set(made.tokens.values())) > len(given)
    stats = engine.stats()
    assert stats.instances[0].kv_used_bytes == 0
    assert stats.pool is not None
    prefills = [turn for turn in stats.pool.time_slices if turn.kind == "prefill" and turn.tokens]
    assert 0 < sum(turn.tokens for turn in prefills) <= len(greedy) + len(sampled), (
        "prompts, not what decoded concurrently"
    )
    longest = max(map(len, given.values()))
    assert all(turn.prompt_tokens <= turn.tokens * longest for turn in prefills)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mixtral"])
def test_adjusted_answers_and_scores_are_those_of_transformers(
    architecture: str, checkpoint: Checkpoint, make_engine: Callable[..., Any]
) -> None:
    folder = checkpoint(architecture)
    given = prompts(VOCABULARY, (33, 6))
    asked = [
        request(f"{name}-{variant}", prompt, max_tokens=MAX_TOKENS, logprobs=LOGPROBS, **fields)
        for name, prompt in given.items()
        for variant, fields in VARIANTS.items()
    ]
    engine = make_engine(prefill_tokens_per_step_max=7)
    engine.load("a", spec_of("model", folder))
    gathered = drain(engine, later={0: asked[:3], 4: asked[3:]})
    assert gathered.errors == {}
    for one in asked:
        expected, logprobs = adjusted_answer(folder, one)
        assert gathered.tokens[one.request_id] == expected, one.request_id
        check_scores(gathered.scores[one.request_id], expected, logprobs)
        halfway = replace(one, generated=expected[: len(expected) // 2], logprobs=0)
        engine.add(halfway)
        rest = drain(engine)
        assert halfway.generated + rest.tokens[one.request_id] == expected, "penalties count what was made elsewhere"
        assert all(score.top == () for score in rest.scores[one.request_id])


def test_tokens_come_one_by_one_and_stop_when_cancelled(
    checkpoint: Checkpoint, make_engine: Callable[..., Any]
) -> None:
    engine = make_engine()
    engine.load("a", spec_of("model", checkpoint("llama")))
    given = prompts(VOCABULARY, (6, 9))
    for name, prompt in given.items():
        engine.add(request(name, prompt, max_tokens=40, ignore_eos=True))
    received: list[str] = []
    while received.count("r9") < 5:
        outputs = engine.step()
        assert all(len(output.token_ids) == 1 for output in outputs)
        received += [output.request_id for output in outputs]
    used = engine.stats().instances[0]
    held_tokens = sum(len(prompt) - 1 for prompt in given.values()) + len(received)
    assert used.kv_used_bytes == pytest.approx(held_tokens * KV_BYTES_PER_TOKEN, rel=0.1)
    assert used.kv_capacity_bytes == pytest.approx(2**21, rel=0.1), "which is more than one context's"
    engine.cancel("r9")
    rest = drain(engine)
    assert set(rest.tokens) == {"r6"}
    assert received.count("r6") + len(rest.tokens["r6"]) == 40


def test_the_end_of_sequence_stops_and_is_not_in_the_tokens(
    checkpoint: Checkpoint, make_engine: Callable[..., Any]
) -> None:
    folder = checkpoint("llama")
    starts = ([start, start + 1, start + 2] for start in range(3, 90))
    stopping = next(prompt for prompt in starts if len(greedy_tokens(folder, prompt, 24)) < 24)
    engine = make_engine()
    engine.load("a", spec_of("model", folder))
    engine.add(request("stops", stopping, max_tokens=24))
    engine.add(request("goes-on", stopping, max_tokens=24, ignore_eos=True))
    gathered = drain(engine)
    assert gathered.tokens["stops"] == greedy_tokens(folder, stopping, 24)
    assert gathered.finished == {"stops": "stop", "goes-on": "length"}
    assert 2 not in gathered.tokens["goes-on"]


def test_preempted_requests_make_the_tokens_they_make_alone(
    checkpoint: Checkpoint, make_engine: Callable[..., Any]
) -> None:
    folder = checkpoint("llama")
    given = prompts(VOCABULARY, (28, 30, 33, 60))
    engine = make_engine(kv_bytes=7 * 32 * KV_BYTES_PER_TOKEN)  # a null block, and six of 32 tokens
    engine.load("a", spec_of("model", folder))
    asked = [
        request(name, prompt, max_tokens=50, ignore_eos=True, frequency_penalty=0.5 * number)
        for number, (name, prompt) in enumerate(given.items())
    ]
    for one in asked:
        engine.add(one)
    together = drain(engine).tokens
    assert engine.stats().extra["preemptions"] >= 1
    for one in asked:
        engine.add(one)
        assert drain(engine).tokens[one.request_id] == together[one.request_id]


def test_what_fails_in_a_step_fails_alone(
    checkpoint: Checkpoint, make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataplane.engines.vllm import engine as engine_module  # noqa: PLC0415
    from dataplane.engines.vllm.runner import Step  # noqa: PLC0415

    engine = make_engine(models_max=2, awake_max=2)
    for name in ("llama", "qwen3"):
        engine.load(name, spec_of(name, checkpoint(name)))
        engine.add(request(name, [5, 6, 7], instance_id=name))

    runner = engine.models["llama"].runner
    (inside,) = runner.engine.collective_rpc(lambda worker: worker.model_runner)

    def break_down(*_: Any, **__: Any) -> None:
        raise RuntimeError("kernel exploded")

    with monkeypatch.context() as patch:
        patch.setattr(inside, "_model_forward", break_down)
        gathered = drain(engine)
    assert "kernel exploded" in gathered.errors["llama"]
    assert gathered.tokens["qwen3"] == greedy_tokens(checkpoint("qwen3"), [5, 6, 7], 8)

    def again(name: str) -> None:
        engine.add(request(name, [5, 6, 7], instance_id="llama"))
        assert drain(engine).tokens[name] == greedy_tokens(checkpoint("llama"), [5, 6, 7], 8)

    again("after a failure")
    with monkeypatch.context() as patch:
        engine.add(request("ended", [5, 6, 7], instance_id="llama"))
        ends = Step(tokens={}, ended={str(sequence.order): "error" for sequence in engine.requests})
        patch.setattr(runner, "step", lambda: ends)
        assert drain(engine).errors == {"ended": "vLLM ended it too early: error"}
    again("after it was ended")

    def lose_device(*_: Any, **__: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(inside, "_model_forward", lose_device)
        patch.setattr(engine_module, "Runner", lose_device)
        engine.unload("qwen3")
        with pytest.raises(DeviceLostError, match="illegal memory access"):
            engine.load("qwen3", spec_of("qwen3", checkpoint("qwen3")))
        engine.add(request("goes on elsewhere", [5, 6, 7], instance_id="llama"))
        with pytest.raises(torch.AcceleratorError):
            drain(engine)
