"""vLLM's prefix cache changes no token, is shared by salt, and does not outlive the KV of a model that sleeps."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataplane.engines.interface import EngineRequest
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.tiny import VOCABULARY, greedy_tokens, spec_of

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

BLOCK_TOKENS = 32
Checkpoint = Callable[[str], Path]
PROMPT = [random.Random(1).randrange(3, VOCABULARY) for _ in range(75)]


def answer(engine: Any, asked: EngineRequest) -> tuple[tuple[int, ...], int]:
    """The tokens of a request, and how many of its prompt were cached."""
    engine.add(asked)
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert not [output.error for output in outputs if output.error]
    assert not any(output.cached_tokens for output in outputs[1:]), "only the first token's output tells"
    return tuple(token for output in outputs for token in output.token_ids), outputs[0].cached_tokens


def test_a_conversation_finds_its_prompt_and_its_answer(
    checkpoint: Checkpoint, make_engine: Callable[..., Any]
) -> None:
    folder = checkpoint("llama")
    engine = make_engine(prefill_tokens_per_step_max=16)
    engine.load("a", spec_of("model", folder))
    first = request("one", PROMPT, max_tokens=24, ignore_eos=True)
    made, cached = answer(engine, first)
    assert cached == 0
    assert answer(engine, first) == (made, 64)
    said = [*PROMPT, *made, 5, 6, 7]
    assert answer(engine, request("two", said, max_tokens=8)) == (greedy_tokens(folder, said, 8), 96)
    continued = request("on", PROMPT, max_tokens=24, ignore_eos=True, generated=made[:22])
    assert answer(engine, continued) == (made[22:], 75), "of the prompt, though 96 tokens were cached"
    stats = engine.stats()
    assert stats.prefix_query_tokens == {"model": 75 + 75 + 102 + 97}
    assert stats.prefix_hit_tokens == {"model": 0 + 64 + 96 + 96}
    assert stats.instances[0].kv_used_bytes == 0


def test_seeded_answers_are_the_same_from_the_cache(checkpoint: Checkpoint, make_engine: Callable[..., Any]) -> None:
    asked = request("one", PROMPT, max_tokens=12, ignore_eos=True, temperature=1.2, seed=4)
    made = {}
    for prefix_cache in (False, True):
        engine = make_engine(prefix_cache=prefix_cache)
        engine.load("a", spec_of("model", checkpoint("qwen3")))
        made[prefix_cache] = [answer(engine, asked) for _ in range(2)]
    (alone, _), _ = made[False]
    assert made[False] == [(alone, 0), (alone, 0)]
    assert made[True] == [(alone, 0), (alone, 64)]


def test_only_the_same_salt_shares(checkpoint: Checkpoint, make_engine: Callable[..., Any]) -> None:
    engine = make_engine()
    engine.load("a", spec_of("model", checkpoint("llama")))
    salts = ("tenant", "other", "", "tenant", "")
    seen = [answer(engine, request("r", PROMPT, max_tokens=4, cache_salt=salt))[1] for salt in salts]
    assert seen == [0, 0, 0, 64, 64]


def test_a_model_that_slept_forgot_its_prefixes(
    checkpoint: Checkpoint, make_engine: Callable[..., Any], tmp_path: Path
) -> None:
    engine = make_engine(models_max=2, cache_folder=tmp_path / "cache")
    folders = {name: checkpoint(name) for name in ("llama", "qwen3")}
    for name, folder in folders.items():
        engine.load(name, spec_of(name, folder))
    for name in ("llama", "qwen3", "llama", "qwen3"):
        asked = request("r", PROMPT, instance_id=name, max_tokens=8)
        assert answer(engine, asked) == (greedy_tokens(folders[name], PROMPT, 8), 0)
        assert answer(engine, asked) == (greedy_tokens(folders[name], PROMPT, 8), 64)


def test_those_who_share_blocks_use_them_once(checkpoint: Checkpoint, make_engine: Callable[..., Any]) -> None:
    engine = make_engine()
    engine.load("a", spec_of("model", checkpoint("llama")))
    answer(engine, request("first", PROMPT, max_tokens=2))
    for number in range(4):
        engine.add(request(f"r{number}", [*PROMPT, number + 5], max_tokens=20, ignore_eos=True))
    for _ in range(5):
        engine.step()
    stats = engine.stats().instances[0]
    assert stats.running == 4
    used_tokens = stats.kv_used_bytes / stats.kv_capacity_bytes * engine.models["model"].runner.kv_tokens
    assert 64 < used_tokens < 64 + 5 * BLOCK_TOKENS, "64 tokens are shared, and each has a block of its own"
    drain(engine)
