"""Hugging Face checkpoints on disk: the tensors of a folder and the offsets of their bytes. No tensor is read.

A safetensors file is an 8-byte little-endian length, a JSON header, and flat bytes. A folder holds either
`model.safetensors` or shards listed in `model.safetensors.index.json`. Standard library only.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane.protocol.errors import ModelLoadError

HEADER_BYTES_MAX = 100 * 2**20
JSON_BYTES_MAX = 100 * 2**20
ITEM_BYTES = {
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
"""Bytes of an element, by the name of its type in the format."""
FLOATS = frozenset(("F64", "F32", "F16", "BF16"))
"""The types of weights that are not quantized."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A stored tensor: `size_bytes` at `offset_bytes` of `file`. `dtype` is a key of `ITEM_BYTES`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelLoadError if it is missing, unreadable, too large, or no object."""
    content = _read_json(file)
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} holds no JSON object")
    return content


def read_json_list(file: Path) -> list[Any]:
    """A JSON array from a file. Raises ModelLoadError if it is missing, unreadable, too large, or no array."""
    content = _read_json(file)
    if not isinstance(content, list):
        raise ModelLoadError(f"{file} holds no JSON array")
    return content


def _read_json(file: Path) -> Any:
    try:
        with file.open("rb") as stream:
            content = stream.read(JSON_BYTES_MAX + 1)
        if len(content) > JSON_BYTES_MAX:
            raise ModelLoadError(f"{file} has over {JSON_BYTES_MAX} bytes")
        return json.loads(content)
    except FileNotFoundError:
        raise ModelLoadError(f"{file} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error


def list_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint folder by name, over all shards.

    Raises:
        ModelLoadError: there is no safetensors file, or a header does not describe its file.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in _files(folder):
        tensors.update(read_header(file))
    return tensors


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelLoadError(f"{index} names a shard outside of its folder: {name}")
    return [folder / name for name in names]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Every tensor of one file by name.

    Raises:
        ModelLoadError: it is no safetensors file, or its header does not describe it.
    """
    try:
        with file.open("rb") as stream:
            file_bytes = file.stat().st_size
            header_bytes = int.from_bytes(stream.read(8), "little")
            if not 2 <= header_bytes <= min(HEADER_BYTES_MAX, file_bytes - 8):
                raise ModelLoadError(f"{file} is no safetensors file: its header would take {header_bytes} bytes")
            header = json.loads(stream.read(header_bytes))
    except FileNotFoundError:
        raise ModelLoadError(f"{file} does not exist; checkpoints are read as safetensors only") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} is no readable safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise ModelLoadError(f"{file} is no safetensors file: its header is no JSON object")
    header.pop("__metadata__", None)
    start = 8 + header_bytes
    return {name: _stored_tensor(file, name, entry, start, file_bytes) for name, entry in header.items()}


def _stored_tensor(file: Path, name: str, entry: Any, start: int, file_bytes: int) -> StoredTensor:
    try:
        dtype = str(entry["dtype"])
        shape = tuple(int(side) for side in entry["shape"])
        first, last = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ModelLoadError(f"{file}: the header of tensor {name} cannot be read: {error}") from error
    if dtype not in ITEM_BYTES:
        raise ModelLoadError(f"{file}: tensor {name} has dtype {dtype}; known are {', '.join(ITEM_BYTES)}")
    if first < 0 or last - first != math.prod(shape) * ITEM_BYTES[dtype] or min(shape, default=0) < 0:
        raise ModelLoadError(f"{file}: tensor {name} has {last - first} bytes, its shape {shape} says otherwise")
    if start + last > file_bytes:
        raise ModelLoadError(f"{file} is cut short: tensor {name} ends at byte {start + last} of {file_bytes}")
    return StoredTensor(
        name=name, file=file, dtype=dtype, shape=shape, offset_bytes=start + first, size_bytes=last - first
    )
