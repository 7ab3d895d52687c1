"""The memory of a replayed slot under KV pressure. Meets `dataplane.engines.core.pressure_handler.SlotMemory`."""

from collections.abc import Callable, Collection, Iterable, Mapping

from dataplane.engines.core.pressure_handler import Layers
from dataplane.engines.core.remapping.circle import Rotation
from dataplane.engines.replay.kv import ReplayKvMemory
from dataplane.engines.replay.models import ReplayModel
from dataplane.engines.replay.settings import ReplaySettings
from dataplane.engines.replay.weights import WeightsMemory


class ReplaySlotMemory:
    """The weights and the KV of one slot, in bytes: any number of them can be free."""

    def __init__(
        self,
        settings: ReplaySettings,
        models: Mapping[str, ReplayModel],
        weights: WeightsMemory,
        kv: ReplayKvMemory,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._models = models
        self._weights = weights
        self._kv = kv
        self._clock = clock

    @property
    def offloaded(self) -> Mapping[str, int]:
        return self._weights.offloaded

    @property
    def free_bytes(self) -> int:
        return self._kv.free_bytes

    def layers(self, model: ReplayModel, *, decoding: bool) -> Layers | None:
        resident = self._weights.resident(model.name)
        if resident is None or resident.loaded_s > self._clock():
            return None
        return Layers(
            count=model.weights.layers,
            size_bytes=model.weights.layer_bytes,
            load_s=model.weights.load_s,
            compute_s=model.compute_s(self._settings.batch_max, decoding=decoding),
            used_s=resident.used_s,
        )

    @property
    def kv_region_bytes(self) -> int:
        return self._settings.kv_bytes

    @property
    def place_bytes(self) -> int:
        return self._settings.weights_bytes - max(model.weights_bytes for model in self._models.values())

    @property
    def lends_place(self) -> bool:
        return self._weights.capacity_bytes < self._settings.weights_bytes

    def lend_place(self, keep: str | None) -> None:
        lent_bytes = 0 if keep is None else self.place_bytes
        self._weights.capacity_bytes = self._settings.weights_bytes - lent_bytes
        self._kv.capacity_bytes = self._settings.kv_bytes + lent_bytes
        self._weights.evict_but(keep)

    def fit_together(self, models: Iterable[ReplayModel]) -> bool:
        return sum(model.weights_bytes for model in models) <= self._settings.weights_bytes

    def holds(self, model: ReplayModel) -> bool:
        return self._weights.resident(model.name) is not None

    def fits_with(self, model: ReplayModel, *, others: Collection[str]) -> bool:
        return self._weights.fits_with(model.weights, others=others, out_of_region_bytes=self._kv.out_of_region_bytes)

    def rotate(self, model: ReplayModel, rotation: Rotation) -> None:
        self._weights.rotate(model.name, rotation)

    def reclaim(self, model: ReplayModel, count: int) -> int:
        reclaimed = min(count, self._kv.free_bytes // model.weights.layer_bytes)
        if reclaimed:
            self._weights.reclaim(model.name, reclaimed, self._clock())
        return reclaimed
