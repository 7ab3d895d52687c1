"""Convert a GGUF file into a Hugging Face checkpoint that all nodes can read.

    FILE.gguf -> config.json, generation_config.json, tokenizer.json, tokenizer_config.json, model.safetensors

Weights are dequantized in chunks of rows, so that a large model needs no more memory than a small one. They are stored
in the type of the file, or as bfloat16 if the file is quantized; the precision lost there is not restored.
"""

import hashlib
import json
import math
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from numpy.typing import NDArray

from ops.gguf.configs import read_config
from ops.gguf.header import GgufError, GgufHeader, read_header
from ops.gguf.tokenizers import build_tokenizer
from ops.gguf.weights import Weight, find_weights

SOURCE_FILE = "tidepool-gguf.json"
_RECIPE = 1
"""To be increased when the same file would be converted to other bytes."""
_CHUNK_VALUES = 4 * 2**20
_SPARE_BYTES = 64 * 2**20
_STORED = {
    GGMLQuantizationType.F32: (torch.float32, "F32"),
    GGMLQuantizationType.F16: (torch.float16, "F16"),
    GGMLQuantizationType.BF16: (torch.bfloat16, "BF16"),
}
_QUANTIZED = (torch.bfloat16, "BF16")
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in total."""


def convert(file: Path, folder: Path, progress: Progress = lambda _done, _total: None) -> bool:
    """Convert a GGUF file into `folder`, which is created when it is complete; False if it was converted before.

    Raises:
        GgufError: the file cannot be converted, the disk is too full, or `folder` has other content.
    """
    header = read_header(file)
    config = read_config(header)
    source = {"recipe": _RECIPE, "sha256": _sha256(file)}
    if folder.exists():
        return _check_existing(folder, source, file)
    weights = find_weights(header, config)
    dtype, _ = _stored_type(header)
    total_bytes = sum(weight.values for weight in weights) * dtype.itemsize
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _check_disk_space(folder, total_bytes)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            _write(partial, header, config, weights, lambda done: progress(done, total_bytes))
            _write_json(partial / SOURCE_FILE, source)
            partial.chmod(0o755)
            if folder.exists():  # another process was faster
                return _check_existing(folder, source, file)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise GgufError(f"{folder} cannot be written: {error}") from error
    return True


def _check_existing(folder: Path, source: dict[str, Any], file: Path) -> bool:
    """False, which `convert` returns, if the folder was converted from the same file; else raises GgufError."""
    try:
        present = json.loads((folder / SOURCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        present = None
    if present != source:
        raise GgufError(f"{folder} exists and was not made from {file}; remove it, or name another folder")
    return False


def _check_disk_space(folder: Path, weights_bytes: int) -> None:
    needed_bytes, free_bytes = weights_bytes + _SPARE_BYTES, shutil.disk_usage(folder.parent).free
    if free_bytes < needed_bytes:
        needed, free = needed_bytes / 2**20, free_bytes / 2**20
        raise GgufError(f"{folder} needs {needed:,.0f} MiB of disk, and {free:,.0f} MiB are free")


def _write(
    folder: Path, header: GgufHeader, config: dict[str, Any], weights: list[Weight], progress: Callable[[int], None]
) -> None:
    dtype, stored_as = _stored_type(header)
    _write_json(folder / "config.json", config | {"dtype": str(dtype).removeprefix("torch.")})
    _write_json(folder / "generation_config.json", _generation(header, config))
    tokenizer, tokenizer_config = build_tokenizer(header)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    with (folder / "model.safetensors").open("wb") as out:
        _write_weights(out, header.path, weights, dtype, stored_as, progress)


def _stored_type(header: GgufHeader) -> tuple[torch.dtype, str]:
    """The type of most bytes of the file, in torch and in safetensors."""
    bytes_by_kind: Counter[GGMLQuantizationType] = Counter()
    for tensor in header.tensors.values():
        bytes_by_kind[tensor.kind] += tensor.size_bytes
    return _STORED.get(bytes_by_kind.most_common(1)[0][0], _QUANTIZED)


def _write_weights(
    out: BinaryIO,
    file: Path,
    weights: list[Weight],
    dtype: torch.dtype,
    stored_as: str,
    progress: Callable[[int], None],
) -> None:
    """Write a safetensors file: length of the header, header, bytes."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        start, end = end, end + weight.values * dtype.itemsize
        described[weight.name] = {"dtype": stored_as, "shape": weight.shape, "data_offsets": [start, end]}
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)
    content = np.memmap(file, dtype=np.uint8, mode="r")
    done = 0
    for weight in weights:
        for values in read_values(content, weight):
            chunk = torch.from_numpy(values).to(dtype).view(torch.uint8).numpy()
            out.write(chunk.data)
            done += chunk.nbytes
            progress(done)


def read_values(content: NDArray[np.uint8], weight: Weight) -> Iterator[NDArray[np.float32]]:
    """A weight in float32, in chunks of rows."""
    stored = weight.stored
    whole = content[stored.offset_bytes : stored.offset_bytes + stored.size_bytes]
    table = whole.reshape(weight.stored_rows, -1)
    step = max(1, _CHUNK_VALUES * weight.stored_rows // math.prod(stored.shape))
    for start in range(0, len(weight.rows), step):
        values = dequantize(table[weight.rows[start : start + step]], stored.kind)
        yield np.ascontiguousarray(values, dtype=np.float32) - np.float32(weight.shift)


def _generation(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    """The `generation_config.json`. Answers end at the end-of-sequence token and at the end-of-turn token."""
    ends = [config["eos_token_id"], header.metadata.get("tokenizer.ggml.eot_token_id")]
    known = sorted({token for token in ends if token is not None})
    return {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": known or None,
        "pad_token_id": config["pad_token_id"],
    }


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
