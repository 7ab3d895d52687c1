"""The mapping of a checkpoint's tensors to a model's run-time layout, and the cache key of the resulting bytes."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from dataplane.checkpoints.safetensors_file import StoredTensor
from dataplane.engines.torch.model.checkpoint import Part, can_convert
from dataplane.engines.torch.model.skeleton import PlacedTensor, WeightShard
from dataplane.protocol.errors import ModelLoadError

LAYOUT_VERSION = 1
"""Part of the cache key: increment it when the layout changes."""


def match_tensors(
    folder: Path, places: tuple[PlacedTensor, ...], stored: dict[str, StoredTensor]
) -> list[tuple[PlacedTensor, StoredTensor]]:
    """Each weight's tensor in the checkpoint. A tied weight may be stored under any of its names.

    Raises:
        ModelLoadError: names tensors that are missing, unexpected or of another shape.
    """
    pairs = []
    missing = []
    for place in places:
        name = next((name for name in place.names if name in stored), None)
        if name is None:
            missing.append(place.names[0])
        else:
            pairs.append((place, stored[name]))
    known = {name for place in places for name in place.names}
    unexpected = [name for name in sorted(stored) if name not in known]
    for what, names in (("misses", missing), ("has unexpected", unexpected)):
        if names:
            raise ModelLoadError(
                f"{folder}: the checkpoint {what} {len(names)} tensors, such as {', '.join(names[:3])}"
            )
    for place, tensor in pairs:
        if place.whole_shape != tensor.shape:
            raise ModelLoadError(
                f"{folder}: tensor {tensor.name} has shape {tensor.shape}, the config says {place.whole_shape}"
            )
        if not can_convert(tensor, place.dtype):
            raise ModelLoadError(
                f"{folder}: tensor {tensor.name} has dtype {tensor.dtype}, which needs a quantization_config"
            )
    return pairs


def parts_of(
    pairs: Iterable[tuple[PlacedTensor, StoredTensor]], shards: Sequence[WeightShard], host: torch.Tensor, rank: int
) -> Iterator[Part]:
    """What is read to the host copy of a rank's weights, flat uint8 in run-time layout."""
    for place, stored in pairs:
        target = place.view(shards[place.shard].of(host))
        if place.split is None:
            yield Part(stored=stored, target=target)
            continue
        dim = place.split.dim
        for cut in place.split.cuts(rank):
            yield Part(stored=stored, target=target.narrow(dim, cut.at, cut.count), dim=dim, start=cut.start)


def cache_key(folder: Path, dtype: torch.dtype, pairs: list[tuple[PlacedTensor, StoredTensor]]) -> str:
    """A key of all that determines the bytes: the files' state, the dtype and the layout."""
    files = sorted({stored.file for _, stored in pairs})
    state = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    layout = [(place.names[0], place.shard, place.offset_bytes, place.split) for place, _ in pairs]
    described = repr((LAYOUT_VERSION, str(dtype), state, layout))
    return f"{folder.name}-{hashlib.blake2b(described.encode(), digest_size=12).hexdigest()}"
