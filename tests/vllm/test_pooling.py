"""Embeddings and scores by vLLM are transformers' own, and models that embed sleep and wake as others do."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from dataplane.protocol.errors import ModelLoadError
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.pooled import (
    pooled_spec,
    reference_embedding,
    reference_score,
    save_scoring,
    write_modules,
)
from tests.dataplane.engines.torch.test_pooling import prompt_of
from tests.dataplane.engines.torch.tiny import greedy_tokens, spec_of
from tests.vllm.conftest import HEAD_DIM, SHAPES

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

LENGTHS = (1, 33, 150)
CLOSE = 1e-3
Checkpoint = Callable[[str], Path]
MakeEngine = Callable[..., Any]


def embedding(checkpoint: Checkpoint, folder: Path, **rules: Any) -> Path:
    """A causal checkpoint with the files of sentence-transformers."""
    copytree(checkpoint("llama"), folder)
    write_modules(folder, **rules)
    return folder


def ask(engine: Any, instance_id: str = "a") -> dict[int, tuple[float, ...]]:
    for length in LENGTHS:
        engine.add(request(f"r{length}", prompt_of(length), instance_id=instance_id, pooling=True, max_tokens=1))
    gathered = drain(engine)
    assert gathered.finished == {f"r{length}": "stop" for length in LENGTHS}
    return {length: gathered.values[f"r{length}"] for length in LENGTHS}


@pytest.mark.parametrize(("pooled", "normalize"), [("last", True), ("mean", False)])
def test_embeddings_are_those_of_transformers(
    pooled: str, normalize: bool, checkpoint: Checkpoint, make_engine: MakeEngine, tmp_path: Path
) -> None:
    folder = embedding(checkpoint, tmp_path / "model", pooled=pooled, normalize=normalize)
    engine = make_engine()
    engine.load("a", pooled_spec("model", folder, "embed"))
    for length, values in ask(engine).items():
        expected = reference_embedding(folder, prompt_of(length), pooled=pooled, normalize=normalize)
        assert torch.allclose(torch.tensor(values), expected, atol=CLOSE), length
    assert engine.stats().instances[0].kv_used_bytes == 0


def test_scores_are_those_of_transformers(make_engine: MakeEngine, tmp_path: Path) -> None:
    folder = save_scoring("llama", tmp_path / "model", head_dim=HEAD_DIM, **SHAPES["llama"])
    engine = make_engine()
    engine.load("a", pooled_spec("model", folder, "score"))
    for length, values in ask(engine).items():
        assert values == pytest.approx((reference_score(folder, prompt_of(length)),), abs=CLOSE)


def test_a_model_that_embeds_takes_turns_with_one_that_generates(
    checkpoint: Checkpoint, make_engine: MakeEngine, tmp_path: Path
) -> None:
    folder = embedding(checkpoint, tmp_path / "model", pooled="last")
    engine = make_engine(models_max=2)
    engine.load("a", pooled_spec("model", folder, "embed"))
    engine.load("b", spec_of("llama", checkpoint("llama")))
    for _ in range(2):
        for length, values in ask(engine).items():
            expected = reference_embedding(folder, prompt_of(length), pooled="last")
            assert torch.allclose(torch.tensor(values), expected, atol=CLOSE), length
        engine.add(request("text", prompt_of(9), instance_id="b", max_tokens=6))
        assert drain(engine).tokens["text"] == greedy_tokens(checkpoint("llama"), prompt_of(9), 6)


def test_a_causal_model_does_not_score_here(checkpoint: Checkpoint, make_engine: MakeEngine) -> None:
    with pytest.raises(ModelLoadError, match="engine torch scores by two tokens"):
        make_engine().load("a", pooled_spec("model", checkpoint("llama"), "score"))
