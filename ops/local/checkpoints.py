"""The sizes of a Hugging Face checkpoint, from `config.json` and the headers of its safetensors files.

It may be a folder, or be in a registry or on the hub. No tensor is read or fetched, so torch is not needed.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2 as httpx
import msgspec

from dataplane.checkpoints.fetch import MANIFEST_BYTES_MAX, Manifest, RemoteFile
from dataplane.checkpoints.pooling import (
    HEADS,
    LENGTHS,
    MODULES,
    PROMPTS,
    module_folders,
    read_embedding_rules,
    read_score_rules,
    task_of,
)
from dataplane.checkpoints.safetensors_file import FLOATS, HEADER_BYTES_MAX, ITEM_BYTES, list_tensors, read_json
from dataplane.checkpoints.sources import FetchError, FetchRules, open_client
from dataplane.protocol.errors import ModelLoadError
from dataplane.protocol.messages import Task
from dataplane.protocol.model_sources import check_source, is_remote

LIKELY_HEADER_BYTES = 100_000
"""The first request; most headers are not longer."""
TIME_MAX_S = 300.0
_READ_WHOLE = {"config.json", "model.safetensors.index.json", MODULES, PROMPTS, LENGTHS}


class RemoteError(ValueError):
    """A source that cannot be reached or is no checkpoint; the message names it."""


def outline_registry(source: str, folder: Path, private_hosts: tuple[str, ...], time_max_s: float) -> None:
    """Copy a registry's checkpoint to `folder` as sparse files with true sizes and headers and no tensors. Its address
    must be public, or one of `private_hosts`.

    Raises:
        RemoteError: the registry is out of reach, not allowed, or refuses, or its manifest is none.
    """
    url = source.rstrip("/")
    rules = FetchRules(private_hosts=private_hosts, time_max_s=time_max_s)
    in_time = rules.deadline(url)
    try:
        with open_client(rules) as client:
            manifest = msgspec.json.decode(
                _read(client, f"{url}/manifest.json", MANIFEST_BYTES_MAX, in_time), type=Manifest
            )
            for file in manifest.files:
                is_whole = file.name in _READ_WHOLE or file.name.endswith("/config.json")
                if is_whole or ("/" not in file.name and file.name.endswith(".safetensors")):
                    _outline_file(client, f"{url}/{file.name}", file, folder / file.name, in_time)
    except FetchError as error:
        raise RemoteError(error.message) from error
    except msgspec.DecodeError as error:
        raise RemoteError(f"{url}/manifest.json is no manifest: {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError, OverflowError) as error:
        raise RemoteError(f"{url} cannot be read: {error}") from error


def read_hub(source: str) -> tuple[Path, dict[str, tuple[str, int]]]:
    """Of a checkpoint on the Hugging Face hub: a folder with its configs, and type and bytes of its tensors by name.

    Raises:
        RemoteError: the hub is out of reach or refuses, or has no such checkpoint.
    """
    try:
        from huggingface_hub import HfApi  # noqa: PLC0415  (comes with the node extra)
        from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415
    except ImportError:
        raise RemoteError(f"{source}: install the node extra to read from the Hugging Face hub") from None
    repository, _, revision = source.removeprefix("hf://").partition("@")
    hub = HfApi()

    def read(name: str) -> Path:
        return Path(hub.hf_hub_download(repository, name, revision=revision or None))

    try:
        folder = read("config.json").parent
        for name in (MODULES, PROMPTS, LENGTHS):
            try:
                read(name)
            except HfHubHTTPError as error:
                if error.response.status_code != httpx.codes.NOT_FOUND:
                    raise
        for module in module_folders(folder):
            with contextlib.suppress(HfHubHTTPError):  # a normalization has no config
                read(f"{module}/config.json")
        metadata = hub.get_safetensors_metadata(repository, revision=revision or None)
    except Exception as error:  # the hub's client knows no common exception
        raise RemoteError(f"{source} cannot be read: {' '.join(str(error).split())}") from error
    tensors: dict[str, tuple[str, int]] = {
        name: (tensor.dtype, tensor.data_offsets[1] - tensor.data_offsets[0])
        for file in metadata.files_metadata.values()
        for name, tensor in file.tensors.items()
    }
    return folder, tensors


def _outline_file(
    client: httpx.Client, address: str, file: RemoteFile, target: Path, in_time: Callable[[], None]
) -> None:
    if not file.name.endswith(".safetensors"):
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(_read(client, address, HEADER_BYTES_MAX, in_time))
        return
    beginning = _read(client, address, LIKELY_HEADER_BYTES, in_time)
    header_end = 8 + int.from_bytes(beginning[:8], "little")
    if len(beginning) < header_end <= min(HEADER_BYTES_MAX, file.size_bytes):
        beginning = _read(client, address, header_end, in_time)
    with target.open("wb") as stream:
        stream.write(beginning)
        stream.truncate(file.size_bytes)


def _read(client: httpx.Client, address: str, bytes_max: int, in_time: Callable[[], None]) -> bytes:
    """The first bytes of a file. Reading stops early if the server ignores ranges, and fails when
    `in_time` says that a slow server has exceeded its time.
    """
    body = bytearray()
    in_time()
    headers = {"Accept-Encoding": "identity", "Range": f"bytes=0-{bytes_max - 1}"}
    with client.stream("GET", address, headers=headers) as answer:
        if not answer.is_success:
            raise RemoteError(f"{address} answers {answer.status_code}")
        for chunk in answer.iter_raw():
            in_time()
            body += chunk
            if len(body) >= bytes_max:
                break
    return bytes(body[:bytes_max])


_OF_QUANTIZED = (".qzeros", ".g_idx", ".scales", ".weight_scale", ".weight_scale_inv", ".input_scale")
_CONFIG_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class CheckpointError(ValueError):
    """A folder or source that is no checkpoint; the message names the file and what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """`model`: as `describe_checkpoint` returns it; `config`: `config.json`, of a multimodal model its text part;
    `types`: of its tensors, by name.
    """

    model: dict[str, Any]
    config: Mapping[str, Any]
    types: Mapping[str, str] = field(default_factory=dict)


def describe_checkpoint(
    source: Path | str,
    private_hosts: tuple[str, ...] = (),
    *,
    time_max_s: float = TIME_MAX_S,
    task: Task | None = None,
) -> dict[str, Any]:
    """The body of `PUT /admin/models/{name}` for a checkpoint: a folder, `https://HOST/PATH/`, or `hf://ORG/NAME`.

    `weights_bytes` is the size of all stored tensors, `parameters` the number of their elements, an output head that is
    tied to the embedding left out; of weights that are quantized by AWQ, GPTQ or to FP8 as many as they stand for; None
    where some are of other types. `kv_bytes_per_token` is 2 x layers x KV heads x head size x bytes of an element in
    the checkpoint's own type. `context_tokens` is `max_position_embeddings`, or the longest text that an embedding
    model takes. `task`: what the model shall answer with; None: what its files say. `private_hosts`: names and networks
    that may be read although they are not public. `time_max_s`: the longest time to read from a registry.

    Raises:
        CheckpointError: a file is missing, cannot be read, or lacks what is needed; a source is out of reach.
    """
    return read_checkpoint(source, private_hosts, time_max_s=time_max_s, task=task).model


def read_checkpoint(
    source: Path | str,
    private_hosts: tuple[str, ...] = (),
    *,
    time_max_s: float = TIME_MAX_S,
    task: Task | None = None,
) -> Checkpoint:
    """The same, and the checkpoint's own config."""
    if is_remote(str(source)):
        try:
            check_source(str(source))
        except ValueError as error:
            raise CheckpointError(f"{source}: {error}") from error
        return _describe_remote(str(source), private_hosts, time_max_s, task)
    if "://" in str(source):
        raise CheckpointError(f"{source}: must be a folder, https://HOST/PATH/ or hf://ORG/NAME[@REVISION]")
    folder = Path(source).expanduser().resolve()
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder")
    return _describe_folder(folder, str(folder), task)


def _describe_remote(source: str, private_hosts: tuple[str, ...], time_max_s: float, task: Task | None) -> Checkpoint:
    try:
        if source.startswith("hf://"):
            folder, tensors = read_hub(source)
            return _describe(source, folder, tensors, task)
        with TemporaryDirectory() as outline:
            outline_registry(source, Path(outline), private_hosts, time_max_s)
            return _describe_folder(Path(outline), source, task)
    except RemoteError as error:
        raise CheckpointError(str(error)) from error


def _describe_folder(folder: Path, path: str, task: Task | None) -> Checkpoint:
    """Describe the folder as what lies at `path`."""
    try:
        read_json(folder / "config.json")
        tensors = {name: (tensor.dtype, tensor.size_bytes) for name, tensor in list_tensors(folder).items()}
    except ModelLoadError as error:
        raise CheckpointError(error.message.replace(str(folder), path.rstrip("/"))) from error
    return _describe(path, folder, tensors, task)


def _describe(path: str, folder: Path, tensors: Mapping[str, tuple[str, int]], task: Task | None = None) -> Checkpoint:
    """`folder` has the configs of what lies at `path`; `tensors`: type and bytes of each by name."""
    try:
        content = read_json(folder / "config.json")
        task = task or task_of(folder, content)
        tokens_max = read_embedding_rules(folder).tokens_max if task == "embed" else None
        if task == "score":
            read_score_rules(folder)
    except ModelLoadError as error:
        raise CheckpointError(error.message.replace(str(folder), path.rstrip("/"))) from error
    if task == "embed":
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(HEADS)}
    config = _Config(f"{path.rstrip('/')}/config.json", content)
    bytes_by_type: Counter[str] = Counter()
    for dtype, size_bytes in tensors.values():
        bytes_by_type[dtype] += size_bytes
    element_bytes = _element_bytes(path, bytes_by_type)
    heads = config.positive("num_attention_heads")
    kv_heads = config.positive("num_key_value_heads", default=heads)
    head_size = config.positive("head_dim", default=config.positive("hidden_size") // heads)
    values = 2 * config.positive("num_hidden_layers") * kv_heads * head_size
    model = {
        "path": path,
        "architecture": config.architecture(),
        "weights_bytes": bytes_by_type.total(),
        "parameters": _parameters(tensors, tied=config.is_tied(), bits=config.quantized_bits()),
        "kv_bytes_per_token": values * (config.element_bytes() or element_bytes),
        "context_tokens": min(config.positive("max_position_embeddings"), tokens_max or sys.maxsize),
        "task": task,
    }
    return Checkpoint(model=model, config=config.text, types={name: dtype for name, (dtype, _) in tensors.items()})


class _Config:
    """`config.json`; `text`: of a multimodal model its text part."""

    def __init__(self, file: str, whole: dict[str, Any]) -> None:
        self._file = file
        self._whole = whole
        text = self._whole.get("text_config")
        self.text = self._whole | text if isinstance(text, dict) else self._whole

    def architecture(self) -> str:
        names = self._whole.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise CheckpointError(f"{self._file}: architectures must be a list that names one")
        return names[0]

    def positive(self, key: str, *, default: int | None = None) -> int:
        value = self.text.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{self._file}: {key} must be a whole number above 0, is {value!r}")
        return value

    def is_tied(self) -> bool:
        return self.text.get("tie_word_embeddings") is True

    def quantized_bits(self) -> int | None:
        given = self._whole.get("quantization_config")
        bits = given.get("bits") if isinstance(given, dict) else None
        return bits if isinstance(bits, int) and 1 <= bits <= 8 else None

    def element_bytes(self) -> int | None:
        return _CONFIG_BYTES.get(str(self.text.get("dtype", self.text.get("torch_dtype"))))


def _parameters(tensors: Mapping[str, tuple[str, int]], *, tied: bool, bits: int | None) -> int | None:
    """`bits`: of a packed weight, by the config. Scales and zero points of quantized weights are no parameters."""
    counted = 0
    for name, (dtype, size_bytes) in tensors.items():
        if name.endswith(_OF_QUANTIZED) or (tied and len(tensors) > 1 and name == "lm_head.weight"):
            continue
        if dtype in FLOATS or dtype == "F8_E4M3":
            counted += size_bytes // ITEM_BYTES[dtype]
        elif dtype == "I32" and name.endswith(".qweight") and bits is not None:
            counted += size_bytes * 8 // bits
        else:
            return None
    return counted


def _element_bytes(path: str, bytes_by_type: Counter[str]) -> int:
    """Bytes of one element of the type that most weights have."""
    if bytes_by_type.total() == 0:
        raise CheckpointError(f"{path} holds no weights")
    dtype = bytes_by_type.most_common(1)[0][0]
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"{path} has weights of type {dtype}; known are {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]
