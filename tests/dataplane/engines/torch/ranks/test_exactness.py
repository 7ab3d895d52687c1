"""Models that several ranks run together make the tokens that transformers makes, in every architecture."""

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.memory import kv_imports
from dataplane.protocol.errors import ModelLoadError
from tests.dataplane.engines.torch.drive import drain, request, stepped
from tests.dataplane.engines.torch.pooled import (
    pooled_spec,
    reference_embedding,
    reference_score,
    save_embedding,
    save_scoring,
)
from tests.dataplane.engines.torch.rank_engines import engine_of
from tests.dataplane.engines.torch.tiny import ARCHITECTURES, VOCABULARY, greedy_tokens, save_tiny, spec_of
from tests.event_loop import PATIENCE_S

PROMPTS = {
    "long": [(11 * n) % (VOCABULARY - 3) + 3 for n in range(37)],
    "short": [(7 * n) % (VOCABULARY - 3) + 3 for n in range(4)],
}
MAX_TOKENS = 8
ROWS_OF_FOUR: dict[str, dict[str, int]] = {
    "mixtral": {"intermediate_size": 64},
    "qwen3_moe": {"moe_intermediate_size": 48},
}
"""Sizes of experts that four ranks can divide."""
Checkpoint = Callable[[str], Path]


def tokens_of(engine: TorchEngine, name: str, folder: Path) -> dict[str, tuple[int, ...]]:
    """What a model that is loaded for it answers to each prompt."""
    engine.load(name, spec_of(name, folder))
    for which, prompt in PROMPTS.items():
        engine.add(request(which, prompt, instance_id=name, max_tokens=MAX_TOKENS))
    gathered = drain(engine)
    engine.unload(name)
    assert gathered.errors == {}
    return gathered.tokens


def check_greedy(engine: TorchEngine, name: str, folder: Path) -> None:
    expected = {which: greedy_tokens(folder, prompt, MAX_TOKENS) for which, prompt in PROMPTS.items()}
    assert tokens_of(engine, name, folder) == expected


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_ranks_make_the_tokens_of_transformers(architecture: str, two: TorchEngine, checkpoint: Checkpoint) -> None:
    check_greedy(two, architecture, checkpoint(architecture))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_so_do_four_of_which_two_have_the_same_kv_heads(
    architecture: str, four: TorchEngine, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    changes = ROWS_OF_FOUR.get(architecture)
    folder = save_tiny(architecture, tmp_path / "wider", **changes) if changes else checkpoint(architecture)
    check_greedy(four, architecture, folder)


def test_experts_may_be_stored_together(two: TorchEngine, checkpoint: Checkpoint, tmp_path: Path) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    folder = checkpoint("qwen3_moe")
    load: Any = AutoModelForCausalLM.from_pretrained
    together = {name: tensor.clone() for name, tensor in load(folder).state_dict().items()}
    assert any(name.endswith(".experts.gate_up_proj") for name in together)
    for file in ("config.json", "generation_config.json"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    save_file(together, tmp_path / "model.safetensors", metadata={"format": "pt"})
    two.load("together", spec_of("together", tmp_path))
    two.add(request("r", PROMPTS["long"], instance_id="together", max_tokens=MAX_TOKENS))
    made = drain(two).tokens["r"]
    two.unload("together")
    assert made == greedy_tokens(folder, PROMPTS["long"], MAX_TOKENS)


def test_two_ranks_embed_and_score_as_transformers_does(two: TorchEngine, tmp_path: Path) -> None:
    embedding = save_embedding("qwen3", tmp_path / "embedding", pooled="mean")
    scoring = save_scoring("llama", tmp_path / "scoring")
    two.load("e", pooled_spec("e", embedding, "embed"))
    two.load("s", pooled_spec("s", scoring, "score"))
    prompt = PROMPTS["long"]
    for name in ("e", "s"):
        two.add(request(name, prompt, instance_id=name, pooling=True))
    values = drain(two).values
    two.unload("e")
    two.unload("s")
    expected = reference_embedding(embedding, prompt, pooled="mean")
    torch.testing.assert_close(torch.tensor(values["e"]), expected, atol=1e-4, rtol=1e-3)
    assert values["s"] == pytest.approx((reference_score(scoring, prompt),), abs=1e-4)


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3}, "num_attention_heads=3 cannot be divided"),
        ("llama", {"intermediate_size": 97}, "intermediate_size=97 cannot be divided among 2 GPUs"),
        ("qwen3_moe", {"moe_intermediate_size": 12}, "moe_intermediate_size=12 among 2 GPUs makes rows of 24 bytes"),
    ],
)
def test_what_cannot_be_divided_is_refused_and_nothing_is_kept_of_it(
    architecture: str, changes: dict[str, int], reason: str, two: TorchEngine, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = save_tiny(architecture, tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=reason):
        two.load("a", spec_of("a", folder))
    check_greedy(two, "llama", checkpoint("llama"))


def test_kv_heads_that_neither_divide_nor_repeat_are_refused(four: TorchEngine, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path, num_attention_heads=12, num_key_value_heads=6, head_dim=4)
    with pytest.raises(ModelLoadError, match="num_key_value_heads=6 can neither be divided among 4 GPUs nor repeated"):
        four.load("a", spec_of("a", folder))


@pytest.mark.parametrize(("prefilling", "decoding"), [(1, 2), (2, 1), (2, 2)])
def test_kv_of_another_number_of_ranks_is_not_taken_over(
    prefilling: int, decoding: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has one KV head, of which each rank has a copy: the shapes of its KV are the same. Of a slot that has
    ended no memory is kept.
    """
    folder = save_tiny("llama", tmp_path / "one-head", num_key_value_heads=1)
    monkeypatch.setattr(kv_imports, "LOOK_EVERY_S", 0.0)
    file = {"host_kv_bytes": 2**18, "host_kv_file": tmp_path / "kv"}
    first = engine_of(prefilling, tmp_path / "first", prefill_only=True, kv_events="off", **file)
    second = engine_of(decoding, tmp_path / "second")
    for engine in (first, second):
        engine.load("a", spec_of("a", folder))
    asked = request("r", PROMPTS["long"], max_tokens=MAX_TOKENS)
    first.add(asked)
    outputs = []
    while first.has_work():
        outputs += stepped(first)
    made, (kv,) = sum((output.token_ids for output in outputs), ()), [output.kv for output in outputs if output.kv]
    second.add(replace(asked, generated=made, kv=kv))
    assert second.kv.imports.waited_for["nothing"] == (prefilling == decoding)
    made += drain(second).tokens["r"]
    first.close()
    file["host_kv_file"].unlink()
    del first, file, kv, outputs
    until_unmapped(second, tmp_path / "kv")
    second.close()
    assert made == greedy_tokens(folder, asked.prompt, MAX_TOKENS)


def until_unmapped(engine: TorchEngine, file: Path) -> None:
    """Step until no rank, all of which are threads of this process, maps the file of a slot that has ended."""
    until_s = time.monotonic() + PATIENCE_S
    while str(file) in Path("/proc/self/maps").read_text():
        assert time.monotonic() < until_s, "it is still mapped"
        engine.step()
        gc.collect()  # the slot that has ended is of this process, too


def test_kv_is_reported_for_all_ranks(two: TorchEngine, checkpoint: Checkpoint) -> None:
    spec = spec_of("llama", checkpoint("llama"))
    two.load("llama", replace(spec))
    two.add(request("r", PROMPTS["long"], instance_id="llama", max_tokens=MAX_TOKENS))
    while not two.stats().instances[0].running:
        two.step()
    [stats] = two.stats().instances
    blocks = -(-(len(PROMPTS["long"]) + 1) // 16)
    assert stats.kv_used_bytes == blocks * 16 * (2 * 3 * 2 * 12 * 4)  # keys and values, layers, heads of 12, float32
    drain(two)
    two.unload("llama")
