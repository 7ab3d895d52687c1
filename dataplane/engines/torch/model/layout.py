"""The mapping of a checkpoint's tensors to a model's run-time layout, and the cache key of the resulting bytes."""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from dataplane.checkpoints.safetensors_file import StoredTensor
from dataplane.engines.torch.model.checkpoint import Part, can_convert, read_parts
from dataplane.engines.torch.model.skeleton import PlacedTensor, Skeleton
from dataplane.protocol.errors import ModelLoadError

LAYOUT_VERSION = 3
"""Part of the cache key: increment it when the layout changes, or what is repacked."""
REPACK_THREADS = 4


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


def read_weights(
    pairs: Sequence[tuple[PlacedTensor, StoredTensor]], skeleton: Skeleton, hosts: Sequence[torch.Tensor]
) -> None:
    """Read the weights of all ranks to their host copies, flat uint8 in run-time layout.

    Raises:
        ModelLoadError: a file ended early or cannot be read, or a layer's tensors contradict each other.
    """
    straight = [pair for pair in pairs if not pair[0].layer]
    read_parts(
        part
        for rank, host in enumerate(hosts)
        for place, stored in straight
        for part in _parts(place, stored, skeleton.shards[place.shard].of(host), rank)
    )
    layers: dict[str, list[tuple[PlacedTensor, StoredTensor]]] = {name: [] for name in skeleton.repacked}
    for place, stored in pairs:
        if place.layer:
            layers[place.layer].append((place, stored))
    with ThreadPoolExecutor(REPACK_THREADS, thread_name_prefix="repack") as pool:
        for _ in pool.map(lambda name: _repack(skeleton, name, layers[name], hosts), layers):
            pass


def _repack(
    skeleton: Skeleton,
    name: str,
    pairs: Sequence[tuple[PlacedTensor, StoredTensor]],
    hosts: Sequence[torch.Tensor],
) -> None:
    """Read one layer's tensors, and fill its part of the host copies from them."""
    layer = skeleton.repacked[name]
    buffers = [torch.empty(layer.stored_bytes, dtype=torch.uint8) for _ in hosts]
    read_parts(
        (
            part
            for rank, buffer in enumerate(buffers)
            for place, stored in pairs
            for part in _parts(place, stored, buffer, rank)
        ),
        threads=1,
    )
    shard = skeleton.shards[next(iter(layer.kept.values())).shard]
    for buffer, host in zip(buffers, hosts, strict=True):
        try:
            layer.repack(buffer, shard.of(host))
        except ValueError as error:
            raise ModelLoadError(f"{pairs[0][1].file}: {name}: {error}") from error


def _parts(place: PlacedTensor, stored: StoredTensor, buffer: torch.Tensor, rank: int) -> Iterator[Part]:
    """What a rank has of a stored tensor, read to its place in `buffer`."""
    target = place.view(buffer)
    if place.split is None:
        yield Part(stored=stored, target=target)
        return
    dim = place.split.dim
    for cut in place.split.cuts(rank):
        yield Part(stored=stored, target=target.narrow(dim, cut.at, cut.count), dim=dim, start=cut.start)


def cache_key(folder: Path, skeleton: Skeleton, pairs: Sequence[tuple[PlacedTensor, StoredTensor]]) -> str:
    """A key of all that determines the bytes: the files' state, the dtype, the layout, and what the config says of
    weights that are repacked.
    """
    files = sorted({stored.file for _, stored in pairs})
    state = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    layout = [(place.names[0], place.shard, place.offset_bytes, place.split) for place, _ in pairs]
    kept = [(place.names[0], place.shard, place.offset_bytes, place.shape) for place in skeleton.places]
    repacked = [(name, layer.weights.form.quantization) for name, layer in skeleton.repacked.items()]
    described = repr((LAYOUT_VERSION, str(skeleton.dtype), state, layout, kept, repacked))
    return f"{folder.name}-{hashlib.blake2b(described.encode(), digest_size=12).hexdigest()}"
