"""Adapters in folders: what is read of them, and which files are none."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dataplane.checkpoints.adapters import CONFIG_FILE, WEIGHTS_FILE, check_adapter, read_adapter
from dataplane.checkpoints.local import Sources
from dataplane.checkpoints.safetensors_file import JSON_BYTES_MAX
from dataplane.protocol.errors import ModelLoadError
from tests.ops.local.test_checkpoints import write_safetensors

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
FACTORS = {f"{LAYER}.lora_A.weight": ("BF16", [4, 16]), f"{LAYER}.lora_B.weight": ("BF16", [8, 4])}


def write(folder: Path, tensors: dict[str, tuple[str, list[int]]] | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    described = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, **config}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    write_safetensors(folder / "adapter_model.safetensors", FACTORS if tensors is None else tensors)
    return folder


def test_what_is_read(tmp_path: Path) -> None:
    adapter = read_adapter(write(tmp_path, loftq_config={}, lora_dropout=0.1, use_dora=False, rank_pattern={}))
    assert list(adapter.layers) == ["model.layers.0.self_attn.q_proj"]
    assert (adapter.rank, adapter.scale) == (4, 4.0)
    assert (adapter.parameters, adapter.stored_bytes) == (96, 192)
    assert read_adapter(write(tmp_path, use_rslora=True)).scale == 8.0


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (None, {"r": "4"}, "r must be 1 to 128, not '4'"),
        (None, {"r": 0}, "r must be 1 to 128, not 0"),
        (None, {"lora_alpha": None}, "lora_alpha must be a number from -1048576 to 1048576, not None"),
        (None, {"lora_alpha": 10**400}, "lora_alpha must be a number from -1048576 to 1048576, not 1000"),
        (None, {"lora_alpha": float("nan")}, "lora_alpha must be a number from -1048576 to 1048576, not nan"),
        (None, {"init_lora_weights": "OLoRA"}, "init_lora_weights 'OLoRA' is not supported"),
        (None, {"arrow_config": {"top_k": 3}}, "arrow_config is not supported"),
        ({}, {}, "has no tensors"),
        ({"base_model.model.lm_head.weight": ("F32", [4, 4])}, {}, "supported are factors of linear layers"),
        ({f"{LAYER}.lora_embedding_A": ("F32", [4, 4])}, {}, "supported are factors of linear layers"),
        ({f"{LAYER}.lora_magnitude_vector.weight": ("F32", [4])}, {}, "supported are factors of linear layers"),
        (dict(list(FACTORS.items())[:1]), {}, "misses tensor .*q_proj.lora_B.weight"),
        (FACTORS | {f"{LAYER}.lora_A.weight": ("BF16", [5, 16])}, {}, "which is not of rank r=4"),
        (FACTORS | {f"{LAYER}.lora_A.weight": ("I8", [4, 16])}, {}, "has dtype I8; supported are BF16, F16, F32, F64"),
    ],
)
def test_what_is_no_adapter_is_refused(
    tensors: dict[str, tuple[str, list[int]]] | None, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_adapter(write(tmp_path, tensors, **config))


def _nested(file: Path, key: str = "") -> None:
    content = (f'{{"{key}": ' + "[" * 100_000).encode()
    file.write_bytes(len(content).to_bytes(8, "little") * bool(key) + content)


def _infinite(file: Path) -> None:
    header = b'{"t": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}'
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


@pytest.mark.parametrize(
    ("file", "spoil", "message"),
    [
        (CONFIG_FILE, _nested, "adapter_config.json cannot be read"),
        (CONFIG_FILE, lambda file: os.truncate(file, JSON_BYTES_MAX + 1), "has over 104857600 bytes"),
        (WEIGHTS_FILE, partial(_nested, key="t"), "is no readable safetensors file"),
        (WEIGHTS_FILE, _infinite, "the header of tensor t cannot be read"),
    ],
)
def test_files_that_are_made_to_harm_are_refused(
    file: str, spoil: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    spoil(write(tmp_path) / file)
    with pytest.raises(ModelLoadError, match=message):
        read_adapter(tmp_path)


def test_a_folder_without_one_and_a_remote_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"adapter_config.json does not exist"):
        read_adapter(tmp_path)
    sources = Sources(folder=tmp_path, roots=(tmp_path / "inside",))
    with pytest.raises(ModelLoadError, match="remote ones are not supported"):
        check_adapter("hf://org/adapter", sources, files=False)
    with pytest.raises(ModelLoadError, match="in none of this node's checkpoint_roots"):
        check_adapter(str(tmp_path), sources, files=False)
    check_adapter(str(write(tmp_path / "inside")), sources, files=True)
