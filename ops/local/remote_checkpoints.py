"""What a checkpoint elsewhere consists of, without its weights: its small files, and the headers of the large ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import msgspec

from dataplane.checkpoints.fetch import MANIFEST_BYTES_MAX, Manifest, RemoteFile
from dataplane.checkpoints.safetensors_file import HEADER_BYTES_MAX, read_json
from dataplane.checkpoints.sources import FetchError, FetchRules, open_client

LIKELY_HEADER_BYTES = 100_000
"""Asked for first; the header of most files is not longer."""
_TIME_MAX_S = 300.0
_READ_WHOLE = {"config.json", "model.safetensors.index.json"}


class RemoteError(ValueError):
    """A source that is out of reach or no checkpoint; the message names it."""


def outline_registry(source: str, folder: Path, private_hosts: tuple[str, ...] = ()) -> None:
    """Make a registry's checkpoint in `folder`, with holes where tensors would be: sizes and headers are true. It must
    be at a public address, or at one of `private_hosts`.

    Raises:
        RemoteError: the registry is out of reach, not allowed, or refuses, or its manifest is none.
    """
    url = source.rstrip("/")
    rules = FetchRules(private_hosts=private_hosts, time_max_s=_TIME_MAX_S)
    in_time = rules.deadline(url)
    try:
        with open_client(rules) as client:
            manifest = msgspec.json.decode(
                _read(client, f"{url}/manifest.json", MANIFEST_BYTES_MAX, in_time), type=Manifest
            )
            for file in manifest.files:
                if file.name in _READ_WHOLE or file.name.endswith(".safetensors"):
                    _outline_file(client, f"{url}/{file.name}", file, folder / file.name, in_time)
    except FetchError as error:
        raise RemoteError(error.message) from error
    except msgspec.DecodeError as error:
        raise RemoteError(f"{url}/manifest.json is no manifest: {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError, OverflowError) as error:
        raise RemoteError(f"{url} cannot be read: {error}") from error


def read_hub(source: str) -> tuple[dict[str, Any], dict[str, tuple[str, int]]]:
    """Of a checkpoint on the Hugging Face hub: `config.json`, and type and bytes of its tensors by name.

    Raises:
        RemoteError: the hub is out of reach or refuses, or has no such checkpoint.
    """
    try:
        from huggingface_hub import HfApi  # noqa: PLC0415  (comes with the torch extra)
    except ImportError:
        raise RemoteError(f"{source}: install the torch extra to read from the Hugging Face hub") from None
    repository, _, revision = source.removeprefix("hf://").partition("@")
    hub = HfApi()
    try:
        config = read_json(Path(hub.hf_hub_download(repository, "config.json", revision=revision or None)))
        metadata = hub.get_safetensors_metadata(repository, revision=revision or None)
    except Exception as error:  # the hub's client knows no common exception
        raise RemoteError(f"{source} cannot be read: {' '.join(str(error).split())}") from error
    tensors: dict[str, tuple[str, int]] = {
        name: (tensor.dtype, tensor.data_offsets[1] - tensor.data_offsets[0])
        for file in metadata.files_metadata.values()
        for name, tensor in file.tensors.items()
    }
    return config, tensors


def _outline_file(
    client: httpx.Client, address: str, file: RemoteFile, target: Path, in_time: Callable[[], None]
) -> None:
    if file.name in _READ_WHOLE:
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
    """The first bytes of a file. A server that knows no ranges is not heard to the end, and one that drips not for
    longer than `in_time` allows.
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
