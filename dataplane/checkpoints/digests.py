"""The digest of a checkpoint's content, by which two hosts see that they have the same."""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from dataplane.checkpoints.safetensors_file import list_tensors
from dataplane.protocol.errors import ModelLoadError

_CONFIGURATIONS = ("config.json", "hf_quant_config.json", "quantize_config.json")
_THREADS = 4
_CHUNK_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class _File:
    """A file as it is now, which compares equal until it has changed. `is_wanted`: whether it shall be read on."""

    path: Path
    size_bytes: int
    modified_ns: int
    is_wanted: Callable[[], bool] = field(compare=False)


def checkpoint_digest(folder: Path, is_wanted: Callable[[], bool]) -> str:
    """The SHA-256 of a checkpoint's weights and configuration, with the names of their files, in hexadecimal digits.
    Reads all of them, but a file that has not changed since the last call only once. Blocks. `is_wanted` is asked
    before each MiB, in several threads.

    Raises:
        ModelLoadError: it cannot be read, or is not wanted any longer.
    """
    try:
        weights = {tensor.file for tensor in list_tensors(folder).values()}
        files = sorted(weights | {file for name in _CONFIGURATIONS if (file := folder / name).exists()})
        found = [(file.resolve(), file.stat()) for file in files]
        states = [
            _File(path=path, size_bytes=stat.st_size, modified_ns=stat.st_mtime_ns, is_wanted=is_wanted)
            for path, stat in found
        ]
        with ThreadPoolExecutor(_THREADS) as threads:
            digests = list(threads.map(_file_digest, states))
    except OSError as error:
        raise ModelLoadError(f"{folder} cannot be read: {error}") from error
    named = "".join(f"{digest} {file.name}\n" for digest, file in zip(digests, files, strict=True))
    return hashlib.sha256(named.encode()).hexdigest()


@lru_cache(maxsize=4096)
def _file_digest(file: _File) -> str:
    digest = hashlib.sha256()
    with file.path.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            if not file.is_wanted():
                raise ModelLoadError(f"{file.path.parent} is not wanted any longer")
            digest.update(chunk)
    return digest.hexdigest()
