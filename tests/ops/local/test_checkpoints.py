"""A model's sizes from its folder, and what is said of folders that are none."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataplane.checkpoints.safetensors_file import ITEM_BYTES
from ops.local.checkpoints import CheckpointError, describe_checkpoint

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}
TENSORS = {"a": ("BF16", [4, 8]), "b": ("BF16", [16])}


def write_safetensors(file: Path, tensors: dict[str, tuple[str, list[int]]], item_bytes: int | None = None) -> int:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (kind, shape) in tensors.items():
        start, size = end, item_bytes or ITEM_BYTES.get(kind, 2)
        for side in shape:
            size *= side
        end = start + size
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return end


def write_checkpoint(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {name: value for name, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", TENSORS)
    return folder


def test_sizes_are_derived(tmp_path: Path) -> None:
    assert describe_checkpoint(write_checkpoint(tmp_path)) == {
        "path": str(tmp_path),
        "architecture": "LlamaForCausalLM",
        "weights_bytes": (32 + 16) * 2,
        "parameters": 32 + 16,
        "kv_bytes_per_token": 2 * 3 * 2 * 16 * 2,
        "context_tokens": 2048,
        "task": "generate",
    }


GPTQ = {"quant_method": "gptq", "bits": 4}


@pytest.mark.parametrize(
    ("config", "tensors", "parameters"),
    [
        (
            GPTQ,
            {
                "a.qweight": ("I32", [4, 10]),
                "a.qzeros": ("I32", [2, 2]),
                "a.g_idx": ("I32", [32]),
                "a.scales": ("F16", [2, 10]),
            },
            320,
        ),
        ({"quant_method": "fp8"}, {"a.weight": ("F8_E4M3", [8, 10]), "a.weight_scale_inv": ("F32", [1, 1])}, 80),
        (GPTQ | {"bits": "four"}, {"a.qweight": ("I32", [4, 10])}, None),
        ({"quant_method": "other"}, {"a.weight": ("I8", [4, 10])}, None),
    ],
)
def test_quantized_weights_count_as_the_parameters_they_stand_for(
    config: dict[str, Any], tensors: dict[str, tuple[str, list[int]]], parameters: int | None, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, quantization_config=config)
    write_safetensors(folder / "model.safetensors", TENSORS | tensors)
    counted = describe_checkpoint(folder)["parameters"]
    assert counted == (None if parameters is None else parameters + 32 + 16)


def write_modules(folder: Path, *, pooling: dict[str, Any] | None = None) -> None:
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {"pooling_mode_lasttoken": True}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512}))


def test_an_embedding_model_has_no_head_and_a_longest_text(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    write_safetensors(folder / "model.safetensors", TENSORS | {"lm_head.weight": ("BF16", [100])})
    write_modules(folder)
    described = describe_checkpoint(folder)
    assert (described["task"], described["context_tokens"]) == ("embed", 512)
    assert (described["weights_bytes"], described["parameters"]) == ((32 + 16) * 2, 32 + 16)
    asked = describe_checkpoint(folder, task="generate")
    assert (asked["task"], asked["context_tokens"], asked["weights_bytes"]) == ("generate", 2048, (32 + 16 + 100) * 2)


@pytest.mark.parametrize(
    ("architecture", "changes", "task"),
    [
        ("Qwen3Model", {}, "embed"),
        ("Qwen3ForCausalLM", {}, "generate"),
        ("Qwen3ForSequenceClassification", {"id2label": {"0": "relevant"}}, "score"),
    ],
)
def test_the_task_follows_the_architecture(
    architecture: str, changes: dict[str, Any], task: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, architectures=[architecture], **changes)
    assert describe_checkpoint(folder)["task"] == task


def test_what_no_node_could_pool_is_said_when_it_is_registered(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    write_modules(folder, pooling={"pooling_mode_max_tokens": True})
    with pytest.raises(CheckpointError, match="pooling max is not supported"):
        describe_checkpoint(folder)
    with pytest.raises(CheckpointError, match="its head has 2 outputs"):
        describe_checkpoint(write_checkpoint(tmp_path / "head", architectures=["LlamaForSequenceClassification"]))
    with pytest.raises(CheckpointError, match="bidirectional"):
        describe_checkpoint(write_checkpoint(tmp_path / "both", is_causal=False), task="embed")


@pytest.mark.parametrize(
    ("changes", "kv_bytes_per_token"),
    [
        ({"head_dim": 32}, 2 * 3 * 2 * 32 * 2),
        ({"num_key_value_heads": None}, 2 * 3 * 4 * 16 * 2),
        ({"dtype": "float32"}, 2 * 3 * 2 * 16 * 4),
        ({"dtype": None, "torch_dtype": "float32"}, 2 * 3 * 2 * 16 * 4),
        ({"dtype": None}, 2 * 3 * 2 * 16 * 2),
        ({"num_hidden_layers": None, "text_config": {"num_hidden_layers": 5}}, 2 * 5 * 2 * 16 * 2),
    ],
)
def test_kv_follows_the_config(tmp_path: Path, changes: dict[str, Any], kv_bytes_per_token: int) -> None:
    assert describe_checkpoint(write_checkpoint(tmp_path, **changes))["kv_bytes_per_token"] == kv_bytes_per_token


def test_shards_are_added_up(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    one = write_safetensors(tmp_path / "one.safetensors", {"a": ("BF16", [5])})
    two = write_safetensors(tmp_path / "two.safetensors", {"b": ("BF16", [7]), "c": ("BF16", [1])})
    weight_map = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert describe_checkpoint(tmp_path)["weights_bytes"] == one + two == 26


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _leave_the_folder(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))


def _lie_about_a_shape(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"shape": [16]', b'"shape": [17]'))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json does not exist"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json holds no JSON object"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors does not exist"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64), "is no safetensors file"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "is no safetensors file"),
        (lambda folder: write_safetensors(folder / "model.safetensors", {}), "holds no weights"),
        (lambda folder: write_safetensors(folder / "model.safetensors", {"a": ("Q4", [2])}), "dtype Q4"),
        (lambda folder: write_checkpoint(folder, num_hidden_layers="3"), "num_hidden_layers"),
        (lambda folder: write_checkpoint(folder, max_position_embeddings=None), "max_position_embeddings"),
        (lambda folder: write_checkpoint(folder, architectures=[]), "architectures"),
        (_cut, "cut short"),
        (_lie_about_a_shape, "tensor b"),
        (_leave_the_folder, "outside of its folder"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, spoil: Callable[[Path], Any], words: str) -> None:
    spoil(write_checkpoint(tmp_path))
    with pytest.raises(CheckpointError, match=words):
        describe_checkpoint(tmp_path)


def test_a_source_of_another_kind_is_told_which_there_are() -> None:
    with pytest.raises(CheckpointError, match="ftp://x/m: must be a folder, https://HOST/PATH/ or hf://ORG/NAME"):
        describe_checkpoint("ftp://x/m")


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no folder"):
        describe_checkpoint(tmp_path / "none")
