"""End-of-sequence tokens of a checkpoint."""

from pathlib import Path
from typing import Any

from dataplane.checkpoints.safetensors_file import read_json
from dataplane.protocol.errors import ModelLoadError


def read_eos_ids(folder: Path, described: dict[str, Any]) -> frozenset[int]:
    """The end-of-sequence tokens of a checkpoint folder with the config `described`.

    Raises:
        ModelLoadError: `eos_token_id` is no token id or list of them.
    """
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    if eos is None:
        eos = described.get("eos_token_id")
    if eos is None:
        return frozenset()
    ids = eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ModelLoadError(f"{folder}: eos_token_id must be a token id or a list of them, got {eos!r}")
    return frozenset(ids)
