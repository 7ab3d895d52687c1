"""Greedy tokens equal transformers' own `generate`, whatever the company, the chunking and the shortage of memory."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.model.skeleton import MODEL_TYPES
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.scheduling.schedule import TurnSettings
from ops.local.tiny_models import RECIPES, build_tiny_models
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.slots import slot_for_one
from tests.dataplane.engines.torch.tiny import ARCHITECTURES, VOCABULARY, greedy_tokens, save_tiny, spec_of

MAX_TOKENS = 16
Checkpoint = Callable[[str], Path]


def prompts(vocabulary: int, lengths: tuple[int, ...] = (1, 33, 6, 18)) -> dict[str, list[int]]:
    chance = random.Random(7)
    return {f"r{n}": [chance.randrange(3, vocabulary) for _ in range(n)] for n in lengths}


def engine_of(folder: Path, **changes: Any) -> TorchEngine:
    """One instance "a"; prefills 7 tokens a step, so that prompts come in chunks."""
    given: dict[str, Any] = {
        "weights_bytes": 2**24,
        "kv_bytes": 2**21,
        "slab_bytes": 2**15,
        "block_tokens": 4,
        "prefill_tokens_per_step_max": 7,
        **changes,
    }
    engine = TorchEngine(TorchEngineSettings(**given), lambda: 0.0)
    engine.load("a", spec_of("model", folder))
    return engine


def test_every_supported_architecture_is_compared_here() -> None:
    assert set(ARCHITECTURES) == MODEL_TYPES


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_alone_and_in_ragged_batches(architecture: str, checkpoint: Checkpoint) -> None:
    folder = checkpoint(architecture)
    given = prompts(VOCABULARY)
    expected = {name: greedy_tokens(folder, prompt, MAX_TOKENS) for name, prompt in given.items()}
    requests = [request(name, prompt, max_tokens=MAX_TOKENS) for name, prompt in given.items()]

    engine = engine_of(folder)
    engine.add(requests[1])
    assert drain(engine).tokens == {"r33": expected["r33"]}

    joined = drain(engine, later={0: requests[:2], 3: requests[2:3], 9: requests[3:]})
    assert joined.tokens == expected
    ends = {name: "length" if len(tokens) == MAX_TOKENS else "stop" for name, tokens in expected.items()}
    assert joined.finished == ends
    assert engine.stats().instances[0].kv_used_bytes == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prefilled_beside_a_batch(architecture: str, checkpoint: Checkpoint) -> None:
    """Prompts in pieces of 7 tokens, each in one pass with a token of those that decode."""
    folder = checkpoint(architecture)
    given = prompts(VOCABULARY)
    expected = {name: greedy_tokens(folder, prompt, MAX_TOKENS) for name, prompt in given.items()}
    requests = [request(name, prompt, max_tokens=MAX_TOKENS) for name, prompt in given.items()]
    engine = engine_of(folder, turns=TurnSettings(mixed_batches=True))
    assert drain(engine, later={0: requests[:1], 2: requests[1:3], 9: requests[3:]}).tokens == expected
    pool = engine.stats().pool
    assert pool is not None
    assert sum(one.prompts for one in pool.time_slices if one.kind == "mixed") >= 2


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2"])
def test_after_preemption_by_lack_of_kv(architecture: str, checkpoint: Checkpoint, *, mixed: bool) -> None:
    folder = checkpoint(architecture)
    given = prompts(VOCABULARY, (12, 33, 20, 18))
    expected = {name: greedy_tokens(folder, prompt, MAX_TOKENS) for name, prompt in given.items()}
    turns = TurnSettings(mixed_batches=mixed)
    # 64 tokens; the largest needs 49
    engine = engine_of(folder, slab_bytes=4608, kv_bytes=8 * 4608, block_tokens=8, turns=turns)
    for name, prompt in given.items():
        engine.add(request(name, prompt, max_tokens=MAX_TOKENS))
    assert drain(engine).tokens == expected
    assert engine.stats().extra["preemptions"] >= 1


@pytest.mark.parametrize(
    ("architecture", "peculiarity"),
    [
        ("mistral", {"sliding_window": 256}),
        ("qwen2", {"use_sliding_window": False}),
        ("phi3", {"sliding_window": 256}),
        ("gemma2", {"sliding_window": 256}),
        ("gemma2", {"attn_logit_softcapping": 1000.0}),
        ("gemma3_text", {"sliding_window": 256}),
    ],
)
def test_the_checkpoints_are_such_that_a_forgotten_peculiarity_would_show(
    architecture: str, peculiarity: dict[str, Any], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    without = save_tiny(architecture, tmp_path / "without", **peculiarity)
    prompt = prompts(VOCABULARY)["r33"]
    assert greedy_tokens(without, prompt, MAX_TOKENS) != greedy_tokens(checkpoint(architecture), prompt, MAX_TOKENS)


@pytest.mark.parametrize("name", RECIPES)
def test_demo_models(name: str, tmp_path: Path) -> None:
    model = build_tiny_models(tmp_path, [name])[0]
    given = prompts(512, (5, 40, 150))
    expected = {name: greedy_tokens(model.path, prompt, 16) for name, prompt in given.items()}
    engine = engine_of(model.path, prefill_tokens_per_step_max=64, block_tokens=16, slab_bytes=2**17)
    for prompt_name, prompt in given.items():
        engine.add(request(prompt_name, prompt, max_tokens=16))
    assert drain(engine).tokens == expected


def test_two_models_take_turns_in_an_arena_that_holds_one(checkpoint: Checkpoint) -> None:
    folders = {"a": checkpoint("llama"), "b": checkpoint("qwen3")}
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.1
        return now_s

    engine = TorchEngine(slot_for_one(folders.values(), kv_bytes=2**17), clock)
    given = prompts(VOCABULARY)
    for name, folder in folders.items():
        engine.load(name, spec_of(name, folder))
    for name in folders:
        for prompt_name, prompt in given.items():
            engine.add(request(name + prompt_name, prompt, instance_id=name, max_tokens=MAX_TOKENS))
    seen = set()
    outputs = []
    while engine.has_work():
        outputs.append(engine.step())
        seen.add(engine.stats().resident_models)
    assert seen - {()} == {("a",), ("b",)}
    assert engine.stats().switches_total >= 2
    for name, folder in folders.items():
        for prompt_name, prompt in given.items():
            made = [t for step in outputs for o in step if o.request_id == name + prompt_name for t in o.token_ids]
            assert tuple(made) == greedy_tokens(folder, prompt, MAX_TOKENS)


def test_what_was_prepared_for_a_second_instance_leaves_with_the_first(checkpoint: Checkpoint) -> None:
    engine, spec = engine_of(checkpoint("llama")), spec_of("model", checkpoint("llama"))
    engine.prepare(spec)
    assert engine.is_prepared(spec)
    engine.unload("a")
    assert not engine.is_prepared(spec)
    engine.prepare(spec)
    assert engine.is_prepared(spec)
    assert not engine.is_prepared(spec_of("model", checkpoint("qwen3")))


def test_two_instances_of_a_model_share_weights_and_not_caches(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama")
    engine = engine_of(folder)
    engine.load("second", spec_of("model", folder))
    given = prompts(VOCABULARY)
    for instance_id in ("a", "second"):
        for name, prompt in given.items():
            engine.add(request(instance_id + name, prompt, instance_id=instance_id, max_tokens=MAX_TOKENS))
    tokens = drain(engine).tokens
    for name, prompt in given.items():
        assert tokens["a" + name] == tokens["second" + name] == greedy_tokens(folder, prompt, MAX_TOKENS)
    engine.unload("a")
    engine.add(request("after", given["r6"], instance_id="second", max_tokens=MAX_TOKENS))
    assert drain(engine).tokens["after"] == greedy_tokens(folder, given["r6"], MAX_TOKENS)
    engine.unload("second")
    assert engine.stats().resident_models == ()
