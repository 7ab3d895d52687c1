"""Each architecture's checkpoint is read as transformers reads it, and nothing that sets it apart is forgotten."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dataplane.engines.torch.memory.host_models import HostModels
from dataplane.engines.torch.model.skeleton import MODEL_TYPES
from dataplane.protocol.errors import ModelLoadError
from tests.dataplane.engines.torch.tiny import ARCHITECTURES, VOCABULARY, save_tiny

PROMPT = [(7 * n) % (VOCABULARY - 3) + 3 for n in range(33)]
SLAB_BYTES = 4096
Checkpoint = Callable[[str], Path]


def host_models() -> HostModels:
    return HostModels(
        None, torch.float32, torch.device("cpu"), SLAB_BYTES, leave_rank=lambda name: None, in_use=lambda name: False
    )


def assert_read_like_transformers(folder: Path, *, like: Path | None = None) -> None:
    """Every weight of `folder` is what transformers finds in it, or in another one that holds the same."""
    load: Any = AutoModelForCausalLM.from_pretrained
    expected = load(like or folder, dtype=torch.float32).state_dict()
    models = host_models()
    model = models.prepare("model", folder, slabs_max=1000)
    assert model.host is not None
    read = set()
    for place in model.skeleton.places:
        shard = model.skeleton.shards[place.shard].of(model.host)
        for name in place.names:
            assert torch.equal(place.view(shard), expected[name]), name
            read.add(name)
    assert read == set(expected)
    models.close()


def refusal(folder: Path) -> str:
    models = host_models()
    with pytest.raises(ModelLoadError) as refused:
        models.prepare("model", folder, slabs_max=1000)
    models.close()
    return refused.value.message


def rewritten(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_there_are_sixteen() -> None:
    assert set(ARCHITECTURES) == MODEL_TYPES
    assert len(ARCHITECTURES) == 16


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_weight_is_read_as_transformers_reads_it(architecture: str, checkpoint: Checkpoint) -> None:
    assert_read_like_transformers(checkpoint(architecture))


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_experts_may_be_stored_together(architecture: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    load: Any = AutoModelForCausalLM.from_pretrained
    together = {name: tensor.clone() for name, tensor in load(checkpoint(architecture)).state_dict().items()}

    def replace(tensors: dict[str, torch.Tensor]) -> None:
        assert any(".experts.0." in name for name in tensors), "stored expert by expert to begin with"
        tensors.clear()
        tensors.update(together)

    folder = rewritten(checkpoint(architecture), tmp_path / "together", replace)
    assert any(name.endswith(".experts.gate_up_proj") for name in load_file(folder / "model.safetensors"))
    assert_read_like_transformers(folder, like=checkpoint(architecture))


def test_a_missing_a_strange_and_a_misshapen_expert_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    other = name.replace("experts.3", "experts.5")
    missing = rewritten(checkpoint("qwen3_moe"), tmp_path / "missing", lambda t: t.pop(name))
    assert f"misses 1 tensors, such as {name}" in refusal(missing)
    strange = rewritten(checkpoint("qwen3_moe"), tmp_path / "strange", lambda t: t.update({other: t[name].clone()}))
    assert f"has unexpected 1 tensors, such as {other}" in refusal(strange)
    misshapen = rewritten(checkpoint("qwen3_moe"), tmp_path / "misshapen", lambda t: t.update({name: t[name][:5]}))
    assert "has shape (5, 48), the config says (24, 48)" in refusal(misshapen)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("cohere2", {"sliding_window": 256}),
        ("mixtral", {"sliding_window": 256}),
        ("starcoder2", {"sliding_window": 256}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("glm4", {"partial_rotary_factor": 1.0}),
        ("granite", {"residual_multiplier": 1.0}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("smollm3", {"no_rope_layers": [1, 1, 1]}),
    ],
)
def test_what_sets_an_architecture_apart_shows_in_its_checkpoint(
    architecture: str, changes: dict[str, Any], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    without = save_tiny(architecture, tmp_path / "without", **changes)
    load: Any = AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        logits = [load(folder)(torch.tensor([PROMPT])).logits for folder in (without, checkpoint(architecture))]
    assert float((logits[0] - logits[1]).abs().max() / logits[1].abs().max()) > 0.01
