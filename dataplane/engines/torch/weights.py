"""Weights: a host copy of each loaded model, and the one device buffer they take turns in."""

from dataclasses import dataclass
from pathlib import Path

import torch

from dataplane.engines.torch.checkpoint import StoredTensor, list_tensors, read_tensors
from dataplane.engines.torch.skeleton import PlacedTensor, Skeleton, build_skeleton
from dataplane.errors import ModelLoadError
from dataplane.memory.arena import Arena
from dataplane.memory.residency import ResidencyFacts, ResidentModel, choose_evictions

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Old checkpoints store these; they follow from the config."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in host memory. `host` is flat uint8 in its final dtype and layout: switching in is one copy."""

    name: str
    skeleton: Skeleton
    host: torch.Tensor


def load_model(name: str, folder: Path, dtype: torch.dtype, device: torch.device, weights_bytes: int) -> LoadedModel:
    """Build a model and read its checkpoint into host memory.

    Raises:
        ModelLoadError: the folder cannot be used, or the weights exceed the arena's `weights_bytes`.
    """
    skeleton = build_skeleton(folder, dtype, device)
    if skeleton.size_bytes > weights_bytes:
        raise ModelLoadError(
            f"{name}: weights of {skeleton.size_bytes} bytes do not fit weights_bytes={weights_bytes} of the slot"
        )
    pairs = _match(folder, skeleton.places, list_tensors(folder))
    host = torch.empty(skeleton.size_bytes, dtype=torch.uint8)
    read_tensors((stored, place.view(host)) for place, stored in pairs)
    return LoadedModel(name=name, skeleton=skeleton, host=host)


def _match(
    folder: Path, places: tuple[PlacedTensor, ...], stored: dict[str, StoredTensor]
) -> list[tuple[PlacedTensor, StoredTensor]]:
    """Each weight's tensor in the checkpoint. A tied weight may be stored under any of its names."""
    pairs = []
    missing = []
    for place in places:
        name = next((name for name in place.names if name in stored), None)
        if name is None:
            missing.append(place.names[0])
        else:
            pairs.append((place, stored[name]))
    known = {name for place in places for name in place.names}
    unexpected = [name for name in sorted(stored) if name not in known and not name.endswith(_IGNORED_SUFFIXES)]
    for what, names in (("misses", missing), ("has unexpected", unexpected)):
        if names:
            raise ModelLoadError(
                f"{folder}: the checkpoint {what} {len(names)} tensors, such as {', '.join(names[:3])}"
            )
    for place, tensor in pairs:
        if place.shape != tensor.shape:
            raise ModelLoadError(
                f"{folder}: tensor {tensor.name} has shape {tensor.shape}, the config says {place.shape}"
            )
    return pairs


class WeightArena:
    """The device buffer and who is in it. Each model's skeleton is bound exactly while its weights are inside."""

    def __init__(self, capacity_bytes: int, device: torch.device) -> None:
        self._arena = Arena(capacity_bytes)
        self._buffer = torch.empty(capacity_bytes, dtype=torch.uint8, device=device)
        self._residents: dict[str, LoadedModel] = {}
        self._used_s: dict[str, float] = {}

    @property
    def resident_models(self) -> tuple[str, ...]:
        """Names of the models whose weights are inside, in name order."""
        return tuple(sorted(self._residents))

    def make_resident(self, model: LoadedModel, now_s: float) -> None:
        """See to it that the model's weights are inside and its skeleton points at them."""
        self._used_s[model.name] = now_s
        if model.name in self._residents:
            return
        evictions = choose_evictions(self._facts(model))
        assert evictions is not None, f"{model.name} was checked against the capacity when it was loaded"
        for name in evictions:
            self.evict(name)
        run = self._arena.allocate(model.name, model.skeleton.size_bytes)
        assert run is not None, "the evictions made room"
        target = self._buffer[run.offset_bytes : run.offset_bytes + model.skeleton.size_bytes]
        target.copy_(model.host)
        model.skeleton.bind(target)
        self._residents[model.name] = model

    def evict(self, name: str) -> None:
        """Forget a model's weights on the device; nothing happens when they are not there."""
        model = self._residents.pop(name, None)
        if model is not None:
            model.skeleton.unbind()
            self._arena.free(name)

    def _facts(self, model: LoadedModel) -> ResidencyFacts:
        residents = tuple(
            ResidentModel(model=name, run=run, used_s=self._used_s[name]) for name, run in self._arena.runs.items()
        )
        return ResidencyFacts(
            residents=residents,
            capacity_bytes=self._arena.capacity_bytes,
            needed_bytes=model.skeleton.size_bytes,
        )
