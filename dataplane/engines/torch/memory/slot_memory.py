"""The arena of the torch engine under KV pressure. Meets `dataplane.engines.core.pressure_handler.SlotMemory`."""

from collections.abc import Collection, Iterable, Mapping

from dataplane.engines.core.pressure_handler import Layers
from dataplane.engines.core.remapping.circle import Rotation
from dataplane.engines.torch.memory.kv import KvStore, SequenceKv
from dataplane.engines.torch.memory.models import TorchModel
from dataplane.engines.torch.memory.weights import WeightStore
from dataplane.memory.slabs import Run, SlabArena


class TorchSlotMemory:
    """The weights and the KV of one slot, in whole slabs."""

    def __init__(
        self, models: Mapping[str, TorchModel], weights: WeightStore, kv: KvStore, arena: SlabArena, *, batch_max: int
    ) -> None:
        self._models = models
        self._weights = weights
        self._kv = kv
        self._arena = arena
        self._batch_max = batch_max

    @property
    def offloaded(self) -> Mapping[str, int]:
        return self._weights.offloaded

    @property
    def free_bytes(self) -> int:
        free_slabs = self._arena.free_kv_slabs + self._arena.free_withheld_slabs
        return (free_slabs + len(self._kv.clearable_slabs())) * self._kv.slab_bytes

    def layers(self, model: TorchModel, *, decoding: bool) -> Layers | None:
        """See `SlotMemory`. Layers of different sizes cannot use each other's memory."""
        slabs = self._weights.layer_slabs(model.weights)
        if slabs is None:
            return None
        return Layers(
            count=model.layers,
            size_bytes=slabs * self._kv.slab_bytes,
            load_s=model.weights.skeleton.shards[1].size_bytes / self._weights.bytes_per_s,
            compute_s=model.layers_compute_s(self._batch_max, decoding=decoding),
            used_s=self._weights.used_s(model.weights),
        )

    @property
    def kv_region_bytes(self) -> int:
        return self._kv.kv_slabs * self._kv.slab_bytes

    @property
    def place_bytes(self) -> int:
        return (self._arena.weights_slabs - self._largest_slabs) * self._kv.slab_bytes

    @property
    def lends_place(self) -> bool:
        return self._arena.kv_from < self._arena.weights_slabs

    def lend_place(self, keep: str | None) -> None:
        """See `SlotMemory`. Models that are there are evicted when KV needs their slabs."""
        self._arena.limit_kv(self._arena.weights_slabs if keep is None else self._largest_slabs)

    @property
    def _largest_slabs(self) -> int:
        return max(self._slabs_of(model) for model in self._models.values())

    def _slabs_of(self, model: TorchModel) -> int:
        return model.weights.skeleton.slabs(self._kv.slab_bytes)

    def fit_together(self, models: Iterable[TorchModel]) -> bool:
        return sum(map(self._slabs_of, models)) <= self._arena.weights_slabs

    def holds(self, model: TorchModel) -> bool:
        return self._weights.holds(model.weights)

    def fits_with(self, model: TorchModel, *, others: Collection[str]) -> bool:
        return self._weights.fits_with(model.weights, others=others)

    def rotate(self, model: TorchModel, rotation: Rotation) -> None:
        self._weights.remapped(model.weights).rotate(rotation)

    def reclaim(self, model: TorchModel, count: int) -> int:
        remapped = self._weights.remapped(model.weights)
        if count > 0:
            slabs = [slab for run in remapped.offloaded_runs for slab in run.slabs]
            self._kv.clear(slabs, now=True)  # while it was copied, other KV would take the memory
        return remapped.reclaim(count)

    def least_used_run(self, model: TorchModel, begun: Iterable[SequenceKv]) -> Run:
        """Of the regions of a model's offloaded layers, the one that the fewest of these sequences have KV in."""
        runs, kvs = self._weights.remapped(model.weights).offloaded_runs, list(begun)
        return min(runs, key=lambda run: sum(self._kv.lies_in(kv, run.slabs) for kv in kvs))
