"""Which checkpoints load, and the errors of those that do not."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.model.checkpoint import list_tensors, read_tensors
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.protocol.errors import ModelLoadError
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.tiny import greedy_tokens, spec_of

PROMPT = [5, 9, 33, 60, 12]
Checkpoint = Callable[[str], Path]


@pytest.fixture
def folder(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A copy of a checkpoint that may be spoilt."""
    return copytree(checkpoint("llama"), tmp_path / "copy")


def engine(**changes: Any) -> TorchEngine:
    given: dict[str, Any] = {"weights_bytes": 2**20, "kv_bytes": 2**18, **changes}
    return TorchEngine(TorchEngineSettings(**given), lambda: 0.0)


def change_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


SPOILT: list[tuple[str, Callable[[Path], object]]] = [
    ("config.json does not exist", lambda f: (f / "config.json").unlink()),
    ("config.json cannot be read", lambda f: (f / "config.json").write_text("{")),
    ("unsupported architecture 'mamba'", lambda f: change_json(f / "config.json", model_type="mamba")),
    ("describes no model that can be built", lambda f: change_json(f / "config.json", num_attention_heads="many")),
    ("'hqq' is not supported", lambda f: change_json(f / "config.json", quantization_config={"quant_method": "hqq"})),
    (
        "rope type 'dynamic' is not supported",
        lambda f: change_json(f / "config.json", rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
    ),
    ("eos_token_id must be", lambda f: change_json(f / "generation_config.json", eos_token_id="</s>")),
    ("model.safetensors does not exist", lambda f: (f / "model.safetensors").unlink()),
    ("no safetensors file", lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64)),
    ("cut short", lambda f: truncate(f / "model.safetensors")),
    ("misses 1 tensors, such as model.norm.weight", lambda f: change_tensors(f, lambda t: t.pop("model.norm.weight"))),
    ("has unexpected 1 tensors", lambda f: change_tensors(f, lambda t: t.update(other=torch.zeros(2)))),
    (
        r"shape \(3,\), the config says \(48,\)",
        lambda f: change_tensors(f, lambda t: t.update({"model.norm.weight": torch.zeros(3)})),
    ),
    (
        "dtype I64",
        lambda f: change_tensors(f, lambda t: t.update({"model.norm.weight": torch.zeros(48, dtype=torch.int64)})),
    ),
]


@pytest.mark.parametrize(("message", "spoil"), SPOILT, ids=[message for message, _ in SPOILT])
def test_a_bad_checkpoint_is_refused_with_its_reason_and_nothing_is_kept(
    message: str, spoil: Callable[[Path], object], folder: Path
) -> None:
    spoil(folder)
    slot = engine()
    with pytest.raises(ModelLoadError, match=message):
        slot.load("a", spec_of("model", folder))
    assert slot.stats().instances == ()


def test_a_missing_folder_and_sizes_that_do_not_fit(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="is no folder"):
        engine().load("a", spec_of("model", folder / "nowhere"))
    with pytest.raises(ModelLoadError, match="weights_bytes of the slot hold 0"):
        engine(weights_bytes=10_000).load("a", spec_of("model", folder))
    with pytest.raises(ModelLoadError, match="slab_bytes"):
        engine(slab_bytes=512, weights_bytes=2**20).load("a", spec_of("model", folder))


def test_shards_are_read_like_one_file(folder: Path) -> None:
    whole = greedy_tokens(folder, PROMPT, 12)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{len(name) % 2}.safetensors" for name in tensors}
    for shard in sorted(set(weight_map.values())):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    slot = engine()
    slot.load("a", spec_of("model", folder))
    slot.add(request("r", PROMPT, max_tokens=12))
    assert drain(slot).tokens["r"] == whole
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-1\.safetensors does not exist"):
        engine().load("a", spec_of("model", folder))


def test_a_tied_weight_may_be_stored_twice_or_under_its_other_name(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    def duplicate(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    expected = greedy_tokens(checkpoint("gemma2"), PROMPT, 12)
    for change in (rename, duplicate):
        folder = copytree(checkpoint("gemma2"), tmp_path / change.__name__)
        change_tensors(folder, change)
        slot = engine()
        slot.load("a", spec_of("model", folder))
        slot.add(request("r", PROMPT, max_tokens=12))
        assert drain(slot).tokens["r"] == expected


def test_other_dtypes_are_converted_when_read(folder: Path) -> None:
    change_tensors(folder, lambda t: t.update({name: tensor.bfloat16() for name, tensor in t.items()}))
    stored = list_tensors(folder)["model.norm.weight"]
    assert stored.dtype == "BF16"
    target = torch.zeros(48)
    read_tensors([(stored, target)])
    assert target.tolist() == [1.0] * 48
    slot = engine()
    slot.load("a", spec_of("model", folder))
    slot.add(request("r", PROMPT, max_tokens=12))
    assert drain(slot).tokens["r"] == greedy_tokens(folder, PROMPT, 12)


def test_bfloat16_engine_agrees_with_transformers_in_bfloat16(checkpoint: Checkpoint) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"), dtype=torch.bfloat16)
    model.eval()
    with torch.inference_mode():
        expected = int(model(input_ids=torch.tensor([PROMPT])).logits[0, -1].argmax())
    slot = engine(dtype="bfloat16")
    slot.load("a", spec_of("model", checkpoint("qwen3")))
    slot.add(request("r", PROMPT, max_tokens=1))
    assert drain(slot).tokens["r"] == (expected,)


def test_end_of_sequence_ids_may_be_a_list(folder: Path) -> None:
    free = engine()
    free.load("a", spec_of("model", folder))
    free.add(request("r", PROMPT, max_tokens=12, ignore_eos=True))
    tokens = drain(free).tokens["r"]
    change_json(folder / "generation_config.json", eos_token_id=[2, tokens[5]])
    slot = engine()
    slot.load("a", spec_of("model", folder))
    slot.add(request("r", PROMPT, max_tokens=12))
    gathered = drain(slot)
    assert gathered.tokens["r"] == tokens[: tokens.index(tokens[5])]
    assert gathered.finished["r"] == "stop"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_tensors_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr("dataplane.engines.torch.model.checkpoint.READ_ELEMENTS", 100)
    tensors = {f"t{size}": torch.randn(size, 3).bfloat16() for size in (1, 33, 34, 400)}
    tensors |= {"scalar": torch.tensor(2.5).bfloat16(), "empty": torch.zeros(0, 3).bfloat16()}
    save_file(tensors, tmp_path / "model.safetensors")
    stored = list_tensors(tmp_path)
    targets = {name: torch.full_like(tensor, 7, dtype=dtype) for name, tensor in tensors.items()}
    read_tensors([(stored[name], targets[name]) for name in tensors], threads=3)
    assert all(targets[name].equal(tensor.to(dtype)) for name, tensor in tensors.items())


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    save_file({"t": torch.zeros(1000)}, tmp_path / "model.safetensors")
    stored = list_tensors(tmp_path)["t"]
    truncate(tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="ends inside tensor t"):
        read_tensors([(stored, torch.zeros(1000))])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"cannot be read: .*No such file"):
        read_tensors([(stored, torch.zeros(1000))])


@pytest.mark.parametrize("name", ["weights_bytes", "kv_bytes", "block_tokens", "batch_max"])
def test_settings_name_the_field_at_fault(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        engine(**{name: 0})
