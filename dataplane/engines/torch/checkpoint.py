"""Hugging Face checkpoints on disk: which tensors a folder holds, and their bytes straight into host memory.

A safetensors file is an 8-byte little-endian length, a JSON header, and flat bytes. A folder holds either
`model.safetensors` or shards listed in `model.safetensors.index.json`.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from dataplane.errors import ModelLoadError

HEADER_BYTES_MAX = 100 * 2**20
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies: `size_bytes` at `offset_bytes` of `file`."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelLoadError: it is missing, unreadable, or no object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{file} does not exist") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} holds no JSON object")
    return content


def list_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint folder by name, over all shards.

    Raises:
        ModelLoadError: no safetensors there, or a header that does not describe its file.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in _files(folder):
        tensors.update(_read_header(file))
    return tensors


def read_tensors(pairs: Iterable[tuple[StoredTensor, torch.Tensor]]) -> None:
    """Fill each target, a contiguous host tensor of the same shape, converting to the target's dtype on the way.

    Raises:
        ModelLoadError: a file ended early or cannot be read.
    """
    ordered = sorted(pairs, key=lambda pair: (pair[0].file, pair[0].offset_bytes))
    handles: dict[Path, FileIO] = {}
    try:
        for stored, target in ordered:
            if stored.file not in handles:
                handles[stored.file] = stored.file.open("rb", buffering=0)
            _read_tensor(handles[stored.file], stored, target)
    except OSError as error:
        raise ModelLoadError(f"a checkpoint file cannot be read: {error}") from error
    finally:
        for handle in handles.values():
            handle.close()


def _read_tensor(handle: FileIO, stored: StoredTensor, target: torch.Tensor) -> None:
    assert tuple(target.shape) == stored.shape, (stored.name, target.shape, stored.shape)
    staging = target if target.dtype == stored.dtype else torch.empty(stored.shape, dtype=stored.dtype)
    flat: Any = staging.reshape(-1).view(torch.uint8).numpy()
    view = memoryview(flat)
    handle.seek(stored.offset_bytes)
    filled = 0
    while filled < stored.size_bytes:
        count = handle.readinto(view[filled:])
        if not count:
            raise ModelLoadError(f"{stored.file} ends inside tensor {stored.name}")
        filled += count
    if staging is not target:
        target.copy_(staging)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError(f"{index} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        if any(Path(name).name != name for name in names):
            raise ModelLoadError(f"{index} names a shard outside of its folder")
        return [folder / name for name in names]
    return [folder / "model.safetensors"]


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        size_bytes = file.stat().st_size
        with file.open("rb") as handle:
            header_bytes = int.from_bytes(handle.read(8), "little")
            if not 2 <= header_bytes <= min(HEADER_BYTES_MAX, size_bytes - 8):
                raise ModelLoadError(f"{file} is no safetensors file: header of {header_bytes} bytes")
            header = json.loads(handle.read(header_bytes))
    except FileNotFoundError:
        raise ModelLoadError(f"{file} does not exist") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} is no readable safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise ModelLoadError(f"{file} is no safetensors file: its header is no JSON object")
    start = 8 + header_bytes
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {name: _stored_tensor(file, name, entry, start, size_bytes) for name, entry in entries.items()}


def _stored_tensor(file: Path, name: str, entry: Any, start: int, file_bytes: int) -> StoredTensor:
    try:
        dtype_name = str(entry["dtype"])
        shape = tuple(int(side) for side in entry["shape"])
        first, last = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{file}: the header of tensor {name} cannot be read: {error}") from error
    dtype = _DTYPES.get(dtype_name)
    if dtype is None:
        raise ModelLoadError(f"{file}: tensor {name} has dtype {dtype_name}; supported are {', '.join(_DTYPES)}")
    elements = 1
    for side in shape:
        elements *= side
    if first < 0 or last - first != elements * dtype.itemsize or min(shape, default=0) < 0:
        raise ModelLoadError(f"{file}: tensor {name} has {last - first} bytes, its shape {shape} says otherwise")
    if start + last > file_bytes:
        raise ModelLoadError(f"{file} is cut short: tensor {name} ends at byte {start + last} of {file_bytes}")
    return StoredTensor(
        name=name, file=file, dtype=dtype, shape=shape, offset_bytes=start + first, size_bytes=last - first
    )
