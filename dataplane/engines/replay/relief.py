"""What a replayed slot tells of its memory when KV has no room. Meets `dataplane.engines.core.relief.SlotMemory`."""

from collections.abc import Callable, Collection, Mapping

from dataplane.engines.core.relief import Layers
from dataplane.engines.core.remapping.circle import Rotation
from dataplane.engines.replay.memory import ReplayKvMemory, SequenceKv
from dataplane.engines.replay.models import ReplayModel
from dataplane.engines.replay.settings import ReplaySettings
from dataplane.engines.replay.weights import WeightsMemory


class ReplaySlotMemory:
    """The weights and the KV of one slot, in bytes: any part of them can be free."""

    def __init__(
        self, settings: ReplaySettings, weights: WeightsMemory, kv: ReplayKvMemory, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._weights = weights
        self._kv = kv
        self._clock = clock

    @property
    def given_up(self) -> Mapping[str, int]:
        """See `SlotMemory`."""
        return self._weights.given_up

    @property
    def free_bytes(self) -> int:
        """See `SlotMemory`."""
        return self._kv.free_bytes

    def out_bytes_per_s(self, kv: SequenceKv) -> float:
        """See `SlotMemory`."""
        return kv.bytes_per_s

    def in_bytes_per_s(self, kv: SequenceKv) -> float:
        """See `SlotMemory`."""
        return kv.bytes_per_s

    def layers(self, model: ReplayModel, *, decoding: bool) -> Layers | None:
        """See `SlotMemory`."""
        resident = self._weights.resident(model.name)
        if resident is None or resident.there_s > self._clock():
            return None
        return Layers(
            count=model.weights.layers,
            size_bytes=model.weights.layer_bytes,
            load_s=model.weights.load_s,
            compute_s=model.compute_s(self._settings.batch_max, decoding=decoding),
            used_s=resident.used_s,
        )

    def holds(self, model: ReplayModel) -> bool:
        """See `SlotMemory`."""
        return self._weights.resident(model.name) is not None

    def has_place(self, model: ReplayModel, *, beside: Collection[str]) -> bool:
        """See `SlotMemory`."""
        return self._weights.has_place(model.weights, beside=beside, strayed_bytes=self._kv.strayed_bytes)

    def rotate(self, model: ReplayModel, rotation: Rotation) -> None:
        """See `SlotMemory`."""
        self._weights.rotate(model.name, rotation)

    def take_back(self, model: ReplayModel, count: int) -> int:
        """See `SlotMemory`."""
        taken = min(count, self._kv.free_bytes // model.weights.layer_bytes)
        if taken:
            self._weights.take_back(model.name, taken, self._clock())
        return taken
