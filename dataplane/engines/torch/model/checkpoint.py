"""Tensors of a Hugging Face checkpoint, read straight into host memory by a few threads."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from dataplane.checkpoints import safetensors_file
from dataplane.checkpoints.pooling import HEADS
from dataplane.checkpoints.safetensors_file import StoredTensor
from dataplane.protocol.errors import ModelLoadError
from dataplane.protocol.messages import Task

READ_ELEMENTS = 16 * 2**20
"""Elements that one thread reads at a time."""
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES = {**_FLOATS, "F8_E4M3": torch.float8_e4m3fn, "I32": torch.int32}
_TRUNK = "model."
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", ".input_scale", ".k_scale", ".v_scale")
"""Tensors that no model here reads: what follows from the config, and scales of quantized activations and KV."""


def list_tensors(folder: Path, task: Task = "generate") -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint folder that a model needs for its task, by its name there, over all files. Of a
    model that embeds these are those without its head; a checkpoint may have been written without one to begin with.

    Raises:
        ModelLoadError: there are no safetensors, a header does not describe its file, or a dtype is not supported.
    """
    tensors = {name: one for name, one in safetensors_file.list_tensors(folder).items() if _is_read(name)}
    for stored in tensors.values():
        if stored.dtype not in _DTYPES:
            raise ModelLoadError(
                f"{stored.file}: tensor {stored.name} has dtype {stored.dtype}; supported are {', '.join(_DTYPES)}"
            )
    if task == "embed":
        return {name.removeprefix(_TRUNK): tensor for name, tensor in tensors.items() if name not in HEADS}
    return tensors


def can_convert(stored: StoredTensor, dtype: torch.dtype) -> bool:
    """Whether `read_tensors` gives such numbers in a dtype. Packed and 8-bit ones are read as they are."""
    return stored.dtype in _FLOATS or _DTYPES[stored.dtype] == dtype


def _is_read(name: str) -> bool:
    return not name.endswith(IGNORED_SUFFIXES)


def read_tensors(pairs: Iterable[tuple[StoredTensor, torch.Tensor]], *, threads: int = 4) -> None:
    """Fill each target, a contiguous host tensor of the same shape, converting to the target's dtype on the way.

    Raises:
        ModelLoadError: a file ended early or cannot be read.
    """
    pairs = sorted(pairs, key=lambda pair: (pair[0].file, pair[0].offset_bytes))
    try:
        with ExitStack() as stack:
            files = {file: stack.enter_context(FileIO(file)) for file in {stored.file for stored, _ in pairs}}
            pool = stack.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="checkpoint"))
            reads = [read for stored, target in pairs for read in _split(files[stored.file], stored, target)]
            for _ in pool.map(_read, reads):
                pass
    except OSError as error:
        raise ModelLoadError(f"a checkpoint file cannot be read: {error}") from error


@dataclass(frozen=True, eq=False, kw_only=True)
class _Read:
    file: FileIO
    stored: StoredTensor
    offset_bytes: int
    target: torch.Tensor


def _split(file: FileIO, stored: StoredTensor, target: torch.Tensor) -> Iterator[_Read]:
    assert tuple(target.shape) == stored.shape, (stored.name, target.shape, stored.shape)
    flat = target.view(-1)
    item_bytes = _DTYPES[stored.dtype].itemsize
    for start in range(0, flat.numel(), READ_ELEMENTS):
        offset_bytes = stored.offset_bytes + start * item_bytes
        yield _Read(file=file, stored=stored, offset_bytes=offset_bytes, target=flat[start : start + READ_ELEMENTS])


def _read(read: _Read) -> None:
    dtype = _DTYPES[read.stored.dtype]
    same = read.target.dtype == dtype
    buffer = read.target if same else torch.empty(read.target.shape, dtype=dtype)
    array: Any = buffer.view(torch.uint8).numpy()
    view = memoryview(array)
    filled = 0
    while filled < len(view):
        count = os.preadv(read.file.fileno(), [view[filled:]], read.offset_bytes + filled)
        if not count:
            raise ModelLoadError(f"{read.stored.file} ends inside tensor {read.stored.name}")
        filled += count
    if not same:
        read.target.copy_(buffer)
