"""Embeddings and scores are transformers' own, however a prompt is cut, and live on a slot as generating models do."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from dataplane.engines.interface import EngineRequest
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.model.skeleton import build_skeleton
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.protocol.errors import BadRequestError, ContextLengthError, ModelLoadError
from dataplane.protocol.messages import ModelSpec
from ops.local.tiny_models import train_tokenizer
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.pooled import (
    pooled_spec,
    reference_choice,
    reference_embedding,
    reference_score,
    save_embedding,
    save_scoring,
    write_modules,
)
from tests.dataplane.engines.torch.tiny import ARCHITECTURES, CONTEXT_TOKENS, VOCABULARY, greedy_tokens, spec_of

Checkpoint = Callable[[str], Path]
LENGTHS = (1, 33, 6, 18)
CLOSE = 1e-3
HEADS = [name for name in ARCHITECTURES if name not in {"cohere2", "granite", "internlm3"}]
"""Architectures for which transformers has a classification model."""


def prompt_of(length: int) -> list[int]:
    chance = random.Random(length)
    return [chance.randrange(3, VOCABULARY) for _ in range(length)]


def asked(length: int, **changes: Any) -> EngineRequest:
    return request(f"r{length}", prompt_of(length), **{"pooling": True, "max_tokens": 1, **changes})


def engine_of(*specs: ModelSpec, **changes: Any) -> TorchEngine:
    """Instances "a", "b" and so on; prefills 7 tokens a step, so that prompts come in chunks."""
    given: dict[str, Any] = {
        "weights_bytes": 2**24,
        "kv_bytes": 2**21,
        "slab_bytes": 2**15,
        "block_tokens": 4,
        "prefill_tokens_per_step_max": 7,
        **changes,
    }
    engine = TorchEngine(TorchEngineSettings(**given), lambda: 0.0)
    for name, spec in zip("abc", specs, strict=False):
        engine.load(name, spec)
    return engine


def assert_embeds(engine: TorchEngine, folder: Path, **rules: Any) -> None:
    """All prompts at once give what each gives alone in one piece."""
    for length in LENGTHS:
        engine.add(asked(length))
    gathered = drain(engine)
    for length in LENGTHS:
        expected = reference_embedding(folder, prompt_of(length), **rules)
        assert torch.allclose(torch.tensor(gathered.values[f"r{length}"]), expected, atol=CLOSE), length
    assert gathered.finished == {f"r{length}": "stop" for length in LENGTHS}
    assert not any(gathered.tokens.values())
    assert engine.stats().instances[0].kv_used_bytes == 0
    assert engine.stats().tokens_total == 0
    engine.check()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_embeds_as_transformers_does(architecture: str, tmp_path: Path) -> None:
    folder = save_embedding(architecture, tmp_path / "model", pooled="last")
    engine = engine_of(pooled_spec("model", folder, "embed"))
    assert_embeds(engine, folder)
    engine.close()


@pytest.mark.parametrize("pooled", ["last", "mean", "cls"])
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_is_as_the_files_say(pooled: str, normalize: bool, tmp_path: Path) -> None:
    folder = save_embedding("qwen3", tmp_path / "model", pooled=pooled, normalize=normalize)
    engine = engine_of(pooled_spec("model", folder, "embed"))
    assert_embeds(engine, folder, pooled=pooled, normalize=normalize)
    engine.close()


def test_a_causal_checkpoint_embeds_without_its_head(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    copytree(checkpoint("gemma3_text"), folder)  # its head is not tied
    write_modules(folder, pooled="mean", flags=False)
    engine = engine_of(pooled_spec("model", folder, "embed"))
    assert_embeds(engine, folder, pooled="mean")
    whole, headless = (
        build_skeleton(folder, torch.float32, torch.device("cpu"), task).size_bytes for task in ("generate", "embed")
    )
    assert whole - headless == VOCABULARY * 48 * 4 + 64 - VOCABULARY * 48 * 4 % 64
    engine.close()


@pytest.mark.parametrize("architecture", HEADS)
def test_every_head_scores_as_transformers_does(architecture: str, tmp_path: Path) -> None:
    folder = save_scoring(architecture, tmp_path / "model")
    engine = engine_of(pooled_spec("model", folder, "score"))
    for length in LENGTHS:
        engine.add(asked(length))
    gathered = drain(engine)
    scores = {length: gathered.values[f"r{length}"] for length in LENGTHS}
    for length, values in scores.items():
        assert values == pytest.approx((reference_score(folder, prompt_of(length)),), abs=CLOSE)
    assert len(set(scores.values())) == len(LENGTHS)
    assert engine.stats().instances[0].kv_used_bytes == 0
    engine.close()


def test_a_causal_model_scores_by_two_of_its_tokens(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    copytree(checkpoint("qwen3"), folder)
    tokenizer = train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"classifier_from_token": ["0", "1"]}))
    engine = engine_of(pooled_spec("model", folder, "score"))
    for length in LENGTHS:
        engine.add(asked(length))
    gathered = drain(engine)
    no, yes = tokenizer.token_to_id("0"), tokenizer.token_to_id("1")
    for length in LENGTHS:
        expected = reference_choice(folder, prompt_of(length), no, yes)
        assert gathered.values[f"r{length}"] == pytest.approx((expected,), abs=CLOSE)
    engine.close()


def test_pooled_and_generating_models_take_turns_on_a_slot_for_one(checkpoint: Checkpoint, tmp_path: Path) -> None:
    embedding = save_embedding("qwen3", tmp_path / "embedding", pooled="mean")
    scoring = save_scoring("llama", tmp_path / "scoring")
    generating = checkpoint("mistral")
    slabs = max(
        build_skeleton(folder, torch.float32, torch.device("cpu"), task).slabs(2**14)
        for folder, task in ((embedding, "embed"), (scoring, "score"), (generating, "generate"))
    )
    engine = engine_of(
        spec_of("generating", generating),
        pooled_spec("embedding", embedding, "embed"),
        pooled_spec("scoring", scoring, "score"),
        slab_bytes=2**14,
        weights_bytes=slabs * 2**14,
        kv_bytes=4 * 2**14,
        host_kv_bytes=2**20,
        kv_pressure="swap",
    )
    for round_ in range(3):
        prompts = {name: prompt_of(20 + round_) for name in "gES"}
        engine.add(request("g", prompts["g"], max_tokens=12))
        engine.add(request("E", prompts["E"], instance_id="b", pooling=True))
        engine.add(request("S", prompts["S"], instance_id="c", pooling=True))
        gathered = drain(engine)
        assert gathered.tokens["g"] == greedy_tokens(generating, prompts["g"], 12)
        expected = reference_embedding(embedding, prompts["E"], pooled="mean")
        assert torch.allclose(torch.tensor(gathered.values["E"]), expected, atol=CLOSE)
        assert gathered.values["S"] == pytest.approx((reference_score(scoring, prompts["S"]),), abs=CLOSE)
        engine.check()
    assert engine.stats().switches_total >= 6
    assert sum(stats.kv_used_bytes for stats in engine.stats().instances) == 0
    engine.close()


def test_the_limit_of_an_answers_tokens_has_no_effect(tmp_path: Path) -> None:
    folder = save_embedding("llama", tmp_path / "model")
    engine = engine_of(pooled_spec("model", folder, "embed"))
    engine.add(asked(18, max_tokens=0))
    values = torch.tensor(drain(engine).values["r18"])
    engine.close()
    assert torch.allclose(values, reference_embedding(folder, prompt_of(18)), atol=CLOSE)


def test_a_mean_starts_over_with_its_prompt(tmp_path: Path) -> None:
    """Two long prompts whose KV does not fit together: one is dropped in the middle of its prefill."""
    folder = save_embedding("llama", tmp_path / "model", pooled="mean")
    engine = engine_of(
        pooled_spec("model", folder, "embed"), slab_bytes=4608, kv_bytes=8 * 4608, block_tokens=8
    )  # 64 tokens
    long, short = asked(50, tier="NIW"), asked(40, tier="IW-F")
    gathered = drain(engine, later={0: [long], 3: [short]})
    for length in (50, 40):
        expected = reference_embedding(folder, prompt_of(length), pooled="mean")
        assert torch.allclose(torch.tensor(gathered.values[f"r{length}"]), expected, atol=CLOSE)
    assert engine.stats().extra["recomputed"] >= 1
    engine.close()


def test_a_prompt_may_fill_the_context_and_no_more(tmp_path: Path) -> None:
    folder = save_embedding("llama", tmp_path / "model")
    engine = engine_of(pooled_spec("model", folder, "embed"))
    with pytest.raises(ContextLengthError, match="257 prompt tokens exceed the context of 256 tokens"):
        engine.add(asked(CONTEXT_TOKENS + 1))
    engine.add(asked(CONTEXT_TOKENS))
    assert len(drain(engine).values[f"r{CONTEXT_TOKENS}"]) == 48
    engine.close()


def test_what_is_not_of_the_models_task_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = save_embedding("llama", tmp_path / "model")
    engine = engine_of(pooled_spec("embedding", folder, "embed"), spec_of("generating", checkpoint("llama")))
    with pytest.raises(BadRequestError, match="embedding cannot answer"):
        engine.add(request("r", prompt_of(5)))
    with pytest.raises(BadRequestError, match="generating cannot answer"):
        engine.add(request("r", prompt_of(5), instance_id="b", pooling=True))
    assert not engine.has_work()
    engine.close()


def change_config(folder: Path, file: str, **changes: Any) -> None:
    path = folder / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))


@pytest.mark.parametrize(
    ("task", "file", "changes", "message"),
    [
        ("embed", "config.json", {"is_causal": False}, "bidirectional"),
        (
            "embed",
            "1_Pooling/config.json",
            {"pooling_mode_max_tokens": True},
            "pooling max, lasttoken is not supported",
        ),
        ("embed", "1_Pooling/config.json", {"include_prompt": False}, "include_prompt"),
        ("embed", "sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
        ("embed", "config_sentence_transformers.json", {"default_prompt_name": "query"}, "default_prompt_name"),
        ("score", "config.json", {"id2label": {"0": "a", "1": "b"}}, "2 outputs"),
        ("score", "config.json", {"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, "Tanh"),
    ],
)
def test_what_the_files_ask_for_and_nobody_can_do_is_refused(
    task: Any, file: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save = save_embedding if task == "embed" else save_scoring
    folder = save("qwen3", tmp_path / "model")
    change_config(folder, file, **changes)
    with pytest.raises(ModelLoadError, match=message):
        engine_of(pooled_spec("model", folder, task))


def test_logits_that_are_not_numbers_end_their_request_alone(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    folder = save_embedding("llama", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["embed_tokens.weight"][5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    engine = engine_of(pooled_spec("model", folder, "embed"))
    engine.add(request("bad", [7, 5], pooling=True))
    engine.add(request("good", [7, 8], pooling=True))
    gathered = drain(engine)
    assert "not numbers" in gathered.errors["bad"]
    assert len(gathered.values["good"]) == 48
    engine.close()
