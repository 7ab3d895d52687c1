"""The header of a GGUF file: metadata, and the offsets of its tensors. No tensor is read.

The file is untrusted. Every count and length is checked against the rest of the header before memory is allocated, and
every tensor must be within the file.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

HEADER_BYTES_MAX = 64 * 2**20
"""A vocabulary of 256,000 tokens with its merges takes some 20 MiB."""
ARRAY_MAX = 4 * 2**20
TENSORS_MAX = 100_000
ALIGNMENT_MAX = 2**16
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DIMENSIONS_MAX = 4
_NAME_BYTES_MAX = 2**16
_ALIGNMENT_DEFAULT = 32
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GgufError(ValueError):
    """A file that cannot be converted; the message names it and says why."""


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """A stored tensor: `size_bytes` at `offset_bytes` of the file. `shape` is in torch's order: rows first."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """`metadata` by key, as numbers, texts and lists of them; `tensors` by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file.

    Raises:
        GgufError: it is no GGUF file, truncated, inconsistent, or one of several shards.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _read(path, content)
    except (OSError, ValueError) as error:
        if isinstance(error, GgufError):
            raise
        raise GgufError(f"{path} is no readable GGUF file: {error}") from error


def _read(path: Path, content: mmap.mmap) -> GgufHeader:
    cursor = _Cursor(path, content)
    if cursor.take(4) != _MAGIC:
        raise GgufError(f"{path} is no GGUF file: it does not begin with {_MAGIC.decode()}")
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise GgufError(f"{path} is of GGUF version {version}; read are {_VERSIONS[0]} and {_VERSIONS[1]}")
    tensor_count, field_count = cursor.number("Q"), cursor.number("Q")
    if tensor_count > TENSORS_MAX:
        raise GgufError(f"{path} claims {tensor_count} tensors; the limit is {TENSORS_MAX}")
    metadata: dict[str, Any] = {}
    for _ in range(field_count):
        key = cursor.text(_NAME_BYTES_MAX)
        if key in metadata:
            raise GgufError(f"{path} has {key} twice")
        metadata[key] = cursor.value(cursor.number("I"))
    if metadata.get("split.count", 1) != 1:
        parts = metadata["split.count"]
        raise GgufError(f"{path} is one of {parts} parts; join them first, with llama-gguf-split --merge")
    listed = [_listed(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _ALIGNMENT_DEFAULT)
    if not isinstance(alignment, int) or not 0 < alignment <= ALIGNMENT_MAX or alignment & (alignment - 1):
        raise GgufError(f"{path}: general.alignment must be a power of two up to {ALIGNMENT_MAX}, is {alignment}")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in listed:
        if name in tensors:
            raise GgufError(f"{path} has the tensor {name} twice")
        tensors[name] = _placed(path, name, shape, kind, start + offset, len(content))
    return GgufHeader(path=path, metadata=metadata, tensors=tensors)


def _listed(cursor: "_Cursor") -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, number of the type, and offset from the start of the tensors."""
    name = cursor.text(_NAME_BYTES_MAX)
    dimensions = cursor.number("I")
    if not 1 <= dimensions <= _DIMENSIONS_MAX:
        raise GgufError(
            f"{cursor.path}: tensor {name} has {dimensions} dimensions; there may be 1 to {_DIMENSIONS_MAX}"
        )
    sides = cursor.numbers("Q", dimensions)
    return name, tuple(reversed(sides)), cursor.number("I"), cursor.number("Q")


def _placed(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, file_bytes: int) -> GgufTensor:
    try:
        quantization = GGMLQuantizationType(kind)
    except ValueError:
        raise GgufError(f"{path}: tensor {name} is of the unknown type {kind}") from None
    block, block_bytes = GGML_QUANT_SIZES[quantization]
    if min(shape) < 1 or shape[-1] % block:
        raise GgufError(f"{path}: tensor {name} of shape {shape} does not consist of {quantization.name} blocks")
    size = math.prod(shape) // block * block_bytes
    if offset + size > file_bytes:
        raise GgufError(f"{path} is cut short: tensor {name} ends at byte {offset + size} of {file_bytes}")
    return GgufTensor(name=name, kind=quantization, shape=shape, offset_bytes=offset, size_bytes=size)


class _Cursor:
    """A reader that never passes the end of the file or `HEADER_BYTES_MAX`."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path = path
        self.at = 0
        self._content = content
        self._end = min(len(content), HEADER_BYTES_MAX)

    def take(self, count: int) -> bytes:
        if count > self._end - self.at:
            limit = "its end" if self._end < HEADER_BYTES_MAX else f"the limit of {HEADER_BYTES_MAX} bytes"
            raise GgufError(f"{self.path} is cut short or no GGUF file: its header exceeds {limit}")
        self.at += count
        return self._content[self.at - count : self.at]

    def numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{kind}", self.take(count * struct.calcsize(f"<{kind}")))

    def number(self, kind: str) -> Any:
        return self.numbers(kind, 1)[0]

    def text(self, bytes_max: int = HEADER_BYTES_MAX) -> str:
        length = self.number("Q")
        if length > bytes_max:
            raise GgufError(f"{self.path} has a name of {length} bytes; the limit is {bytes_max}")
        return str(self.take(length), encoding="utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(self._format(kind))
        kind, count = self.number("I"), self.number("Q")
        if count > ARRAY_MAX:
            raise GgufError(f"{self.path} has an array of {count} values; the limit is {ARRAY_MAX}")
        if kind != _STRING:
            return list(self.numbers(self._format(kind), count))
        return [self.text() for _ in range(count)]

    def _format(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise GgufError(f"{self.path} has a value of the unknown type {kind}")
        return _NUMBERS[kind]
