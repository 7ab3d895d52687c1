"""What the torch engine tells of its arena when KV has no room. Meets `dataplane.engines.core.relief.SlotMemory`."""

from collections.abc import Collection, Iterable, Mapping

from dataplane.engines.core.relief import Layers
from dataplane.engines.core.remapping.circle import Rotation
from dataplane.engines.torch.memory.kv import KvStore, SequenceKv
from dataplane.engines.torch.memory.pooled import Pooled
from dataplane.engines.torch.memory.weights import WeightStore
from dataplane.memory.slabs import Run, SlabArena


class TorchSlotMemory:
    """The weights and the KV of one slot, in whole slabs."""

    def __init__(self, weights: WeightStore, kv: KvStore, arena: SlabArena, *, batch_max: int) -> None:
        self._weights = weights
        self._kv = kv
        self._arena = arena
        self._batch_max = batch_max

    @property
    def given_up(self) -> Mapping[str, int]:
        """See `SlotMemory`."""
        return self._weights.given_up

    @property
    def free_bytes(self) -> int:
        """See `SlotMemory`."""
        return self._arena.free_kv_slabs * self._kv.slab_bytes

    def out_bytes_per_s(self, kv: SequenceKv) -> float:
        """See `SlotMemory`."""
        return self._kv.out_bytes_per_s

    def in_bytes_per_s(self, kv: SequenceKv) -> float:
        """See `SlotMemory`."""
        return self._kv.in_bytes_per_s

    def layers(self, model: Pooled, *, decoding: bool) -> Layers | None:
        """See `SlotMemory`. Layers of different sizes cannot take each other's place."""
        slabs = self._weights.layer_slabs(model.weights)
        if slabs is None:
            return None
        return Layers(
            count=model.layers,
            size_bytes=slabs * self._kv.slab_bytes,
            load_s=model.weights.skeleton.parts[1].size_bytes / self._weights.bytes_per_s,
            compute_s=model.layers_compute_s(self._batch_max, decoding=decoding),
            used_s=self._weights.used_s(model.weights),
        )

    def holds(self, model: Pooled) -> bool:
        """See `SlotMemory`."""
        return self._weights.holds(model.weights)

    def has_place(self, model: Pooled, *, beside: Collection[str]) -> bool:
        """See `SlotMemory`."""
        return self._weights.has_place(model.weights, beside=beside)

    def rotate(self, model: Pooled, rotation: Rotation) -> None:
        """See `SlotMemory`."""
        self._weights.remapped(model.weights).rotate(rotation)

    def take_back(self, model: Pooled, count: int) -> int:
        """See `SlotMemory`."""
        return self._weights.remapped(model.weights).take_back(count)

    def least_used_place(self, model: Pooled, held: Iterable[SequenceKv]) -> Run:
        """Of the places that a model has lent, the one that the fewest of these have KV in."""
        places, kvs = self._weights.remapped(model.weights).lent_places, list(held)
        return min(places, key=lambda place: sum(self._kv.lies_in(kv, place.slabs) for kv in kvs))
