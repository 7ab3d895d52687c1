"""What a Hugging Face checkpoint folder needs, read from `config.json` and the headers of its safetensors files.

No tensor is read, and nothing but the standard library is needed, so this runs where no torch is.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER_BYTES_MAX = 100 * 2**20
_ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I8": 1,
    "U8": 1,
}
_CONFIG_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class CheckpointError(ValueError):
    """A folder that is no checkpoint; the message names the file and what is wrong with it."""


def describe_checkpoint(folder: Path) -> dict[str, Any]:
    """The body of `PUT /admin/models/{name}` for a checkpoint.

    `weights_bytes` is the size of all stored tensors. `kv_bytes_per_token` is 2 x layers x KV heads x head size x bytes
    of an element in the checkpoint's own type. `context_tokens` is `max_position_embeddings`.

    Raises:
        CheckpointError: a file is missing, cannot be read, or lacks what is needed.
    """
    folder = folder.expanduser().resolve()
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder")
    config = _Config(folder / "config.json")
    weights_bytes, element_bytes = _weigh(folder)
    heads = config.positive("num_attention_heads")
    kv_heads = config.positive("num_key_value_heads", default=heads)
    head_size = config.positive("head_dim", default=config.positive("hidden_size") // heads)
    values = 2 * config.positive("num_hidden_layers") * kv_heads * head_size
    return {
        "path": str(folder),
        "architecture": config.architecture(),
        "weights_bytes": weights_bytes,
        "kv_bytes_per_token": values * (config.element_bytes() or element_bytes),
        "context_tokens": config.positive("max_position_embeddings"),
    }


class _Config:
    """`config.json`; of a multimodal model the part about text."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._whole = _read_object(file)
        text = self._whole.get("text_config")
        self._text = self._whole | text if isinstance(text, dict) else self._whole

    def architecture(self) -> str:
        names = self._whole.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise CheckpointError(f"{self._file}: architectures must be a list that names one")
        return names[0]

    def positive(self, key: str, *, default: int | None = None) -> int:
        value = self._text.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{self._file}: {key} must be a whole number above 0, is {value!r}")
        return value

    def element_bytes(self) -> int | None:
        return _CONFIG_BYTES.get(str(self._text.get("dtype", self._text.get("torch_dtype"))))


def _weigh(folder: Path) -> tuple[int, int]:
    """Bytes of all tensors, and of one element of the type that most of them have."""
    total_bytes = 0
    bytes_by_type: Counter[str] = Counter()
    for file in _files(folder):
        for name, entry in _read_header(file).items():
            kind, size_bytes = _tensor(file, name, entry)
            total_bytes += size_bytes
            bytes_by_type[kind] += size_bytes
    if total_bytes == 0:
        raise CheckpointError(f"{folder} holds no weights")
    return total_bytes, _ITEM_BYTES[bytes_by_type.most_common(1)[0][0]]


def _files(folder: Path) -> Iterator[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        yield folder / "model.safetensors"
        return
    shards = _read_object(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(f"{index} has no weight_map")
    for name in sorted({str(shard) for shard in shards.values()}):
        if Path(name).name != name:
            raise CheckpointError(f"{index} names a shard outside of its folder: {name}")
        yield folder / name


def _read_header(file: Path) -> dict[str, Any]:
    try:
        file_bytes = file.stat().st_size
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if not 2 <= header_bytes <= min(HEADER_BYTES_MAX, file_bytes - 8):
                raise CheckpointError(f"{file} is no safetensors file: its header would take {header_bytes} bytes")
            header = json.loads(stream.read(header_bytes))
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist; only safetensors checkpoints can be registered") from None
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} is no safetensors file: its header is no JSON object")
    header.pop("__metadata__", None)
    last = max((_end(entry) for entry in header.values()), default=0)
    if 8 + header_bytes + last > file_bytes:
        raise CheckpointError(f"{file} is cut short: {8 + header_bytes + last} bytes are described, {file_bytes} there")
    return header


def _end(entry: Any) -> int:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    return offsets[1] if isinstance(offsets, list) and len(offsets) == 2 and isinstance(offsets[1], int) else 0


def _tensor(file: Path, name: str, entry: Any) -> tuple[str, int]:
    try:
        kind, shape = str(entry["dtype"]), [int(side) for side in entry["shape"]]
        first, last = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: tensor {name} is badly described: {error}") from error
    if kind not in _ITEM_BYTES:
        raise CheckpointError(f"{file}: tensor {name} has the type {kind}; known are {', '.join(_ITEM_BYTES)}")
    if last - first != math.prod(shape) * _ITEM_BYTES[kind]:
        raise CheckpointError(f"{file}: tensor {name} has {last - first} bytes, its shape {shape} says otherwise")
    return kind, last - first


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return content
