"""Tensors of a Hugging Face checkpoint, read straight into host memory by a few threads."""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from dataplane.checkpoints import safetensors_file
from dataplane.checkpoints.pooling import HEADS
from dataplane.checkpoints.safetensors_file import FLOATS, StoredTensor
from dataplane.protocol.errors import ModelLoadError
from dataplane.protocol.messages import Task

READ_ELEMENTS = 16 * 2**20
"""Elements that one thread reads at a time."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
}
"""By the name of a type in the format; others are refused."""
_TRUNK = "model."
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", ".input_scale", ".k_scale", ".v_scale")
"""Tensors that no model here reads: what follows from the config, and scales of quantized activations and KV."""


def list_tensors(folder: Path, task: Task = "generate") -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint folder that a model needs for its task, by its name there, over all files. Of a
    model that embeds these are those without its head; a checkpoint may have been written without one to begin with.

    Raises:
        ModelLoadError: there are no safetensors, a header does not describe its file, or a dtype is not supported.
    """
    stored_there = safetensors_file.list_tensors(folder)
    tensors = {name: one for name, one in stored_there.items() if not name.endswith(_IGNORED_SUFFIXES)}
    for stored in tensors.values():
        if stored.dtype not in DTYPES:
            raise ModelLoadError(
                f"{stored.file}: tensor {stored.name} has dtype {stored.dtype}; supported are {', '.join(DTYPES)}"
            )
    if task == "embed":
        return {name.removeprefix(_TRUNK): tensor for name, tensor in tensors.items() if not name.startswith(HEADS)}
    return tensors


def can_convert(stored: StoredTensor, dtype: torch.dtype) -> bool:
    """Whether `read_tensors` gives such numbers in a dtype. Packed and 8-bit ones are read as they are."""
    return stored.dtype in FLOATS or DTYPES[stored.dtype] == dtype


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """A part of a stored tensor, and the host tensor it is read to: as many rows as that has along `dim`, from `start`
    on. Along the other dimensions the two have the same size.
    """

    stored: StoredTensor
    target: torch.Tensor
    dim: int = 0
    start: int = 0


def read_tensors(pairs: Iterable[tuple[StoredTensor, torch.Tensor]], *, threads: int = 4) -> None:
    """Fill each target, a contiguous host tensor of the same shape, converting to the target's dtype on the way.

    Raises:
        ModelLoadError: a file ended early or cannot be read.
    """
    read_parts((Part(stored=stored, target=target) for stored, target in pairs), threads=threads)


def read_parts(parts: Iterable[Part], *, threads: int = 4) -> None:
    """As `read_tensors`, for parts of tensors. A tensor that is divided by columns is read once for all its parts.

    Raises:
        ModelLoadError: a file ended early or cannot be read.
    """
    tensors: dict[tuple[Path, int, str], list[Part]] = {}
    for part in parts:
        tensors.setdefault((part.stored.file, part.stored.offset_bytes, part.stored.name), []).append(part)
    try:
        with ExitStack() as stack:
            files = {file: stack.enter_context(FileIO(file)) for file in {file for file, *_ in tensors}}
            pool = stack.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="checkpoint"))
            ordered = sorted(tensors.items(), key=lambda item: item[0])
            reads = [read for (file, *_), of_one in ordered for read in _reads(files[file], of_one)]
            for _ in pool.map(_read, reads):
                pass
    except OSError as error:
        raise ModelLoadError(f"a checkpoint file cannot be read: {error}") from error


@dataclass(frozen=True, eq=False, kw_only=True)
class _Read:
    """Consecutive elements of a stored tensor, in `shape` (outer, along the dimension of its parts, inner), and the
    tensors that some of them are for: each with the first one along that dimension.
    """

    file: FileIO
    stored: StoredTensor
    offset_bytes: int
    shape: tuple[int, int, int]
    targets: tuple[tuple[torch.Tensor, int], ...]


def _reads(file: FileIO, parts: Sequence[Part]) -> Iterator[_Read]:
    """Those of one tensor, whose parts are divided along the same dimension."""
    stored = parts[0].stored
    for part in parts:
        sizes = list(stored.shape)
        if sizes:
            sizes[part.dim] = part.target.shape[part.dim]
        assert list(part.target.shape) == sizes, (stored.name, part.target.shape, stored.shape)
    if parts[0].dim:
        yield from _column_reads(file, stored, parts)
    else:
        for part in parts:
            yield from _row_reads(file, stored, part)


def _row_reads(file: FileIO, stored: StoredTensor, part: Part) -> Iterator[_Read]:
    """Rows are consecutive, and read straight to their target."""
    flat = part.target.view(-1)
    first = part.start * math.prod(stored.shape[1:])
    for start in range(0, flat.numel(), READ_ELEMENTS):
        target = flat[start : start + READ_ELEMENTS].view(1, -1, 1)
        offset_bytes = stored.offset_bytes + (first + start) * DTYPES[stored.dtype].itemsize
        shape = (1, target.numel(), 1)
        yield _Read(file=file, stored=stored, offset_bytes=offset_bytes, shape=shape, targets=((target, 0),))


def _column_reads(file: FileIO, stored: StoredTensor, parts: Sequence[Part]) -> Iterator[_Read]:
    """Columns of all parts are read together."""
    outer, size, inner = _folded(stored.shape, parts[0].dim)
    row_bytes = size * inner * DTYPES[stored.dtype].itemsize
    rows = max(1, READ_ELEMENTS // (size * inner))
    views = [(part.target.view(outer, -1, inner), part.start) for part in parts]
    for row in range(0, outer, rows):
        yield _Read(
            file=file,
            stored=stored,
            offset_bytes=stored.offset_bytes + row * row_bytes,
            shape=(min(rows, outer - row), size, inner),
            targets=tuple((view[row : row + rows], start) for view, start in views),
        )


def _folded(shape: tuple[int, ...], dim: int) -> tuple[int, int, int]:
    """The shape with the dimensions before `dim`, and those after it, as one each."""
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])


def _read(read: _Read) -> None:
    dtype = DTYPES[read.stored.dtype]
    only, _ = read.targets[0]
    straight = read.shape == tuple(only.shape) and only.dtype == dtype and only.is_contiguous()
    buffer = only if straight else torch.empty(read.shape, dtype=dtype)
    array: Any = buffer.view(-1).view(torch.uint8).numpy()
    view = memoryview(array)
    filled = 0
    while filled < len(view):
        count = os.preadv(read.file.fileno(), [view[filled:]], read.offset_bytes + filled)
        if not count:
            raise ModelLoadError(f"{read.stored.file} ends inside tensor {read.stored.name}")
        filled += count
    if not straight:
        for target, start in read.targets:
            target.copy_(buffer[:, start : start + target.shape[1]])
