"""What a Hugging Face checkpoint folder needs, read from `config.json` and the headers of its safetensors files.

No tensor is read, and nothing but the standard library is needed, so this runs where no torch is.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from dataplane.errors import ModelLoadError
from dataplane.memory.safetensors_file import ITEM_BYTES, list_tensors, read_json

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
    try:
        return _describe(folder)
    except ModelLoadError as error:
        raise CheckpointError(error.message) from error


def _describe(folder: Path) -> dict[str, Any]:
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
        self._whole = read_json(file)
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
    bytes_by_type: Counter[str] = Counter()
    for tensor in list_tensors(folder).values():
        bytes_by_type[tensor.dtype] += tensor.size_bytes
    if bytes_by_type.total() == 0:
        raise CheckpointError(f"{folder} holds no weights")
    return bytes_by_type.total(), ITEM_BYTES[bytes_by_type.most_common(1)[0][0]]
