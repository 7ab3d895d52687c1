"""The digest of a checkpoint's content, by which two hosts see that they have the same."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from dataplane.checkpoints.safetensors_file import list_tensors
from dataplane.protocol.errors import ModelLoadError

_CONFIGURATIONS = ("config.json", "hf_quant_config.json", "quantize_config.json")
_THREADS = 4


def checkpoint_digest(folder: Path) -> str:
    """The SHA-256 of a checkpoint's weights and configuration, with the names of their files, in hexadecimal digits.
    Reads all of them, but a file that has not changed since the last call only once. Blocks.

    Raises:
        ModelLoadError: it cannot be read.
    """
    try:
        weights = {tensor.file for tensor in list_tensors(folder).values()}
        files = sorted(weights | {file for name in _CONFIGURATIONS if (file := folder / name).exists()})
        states = [(file.resolve(), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        with ThreadPoolExecutor(_THREADS) as threads:
            digests = list(threads.map(lambda state: _file_digest(*state), states))
    except OSError as error:
        raise ModelLoadError(f"{folder} cannot be read: {error}") from error
    named = "".join(f"{digest} {file.name}\n" for digest, file in zip(digests, files, strict=True))
    return hashlib.sha256(named.encode()).hexdigest()


@lru_cache(maxsize=4096)
def _file_digest(file: Path, size_bytes: int, modified_ns: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
