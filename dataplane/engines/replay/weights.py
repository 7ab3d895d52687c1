"""The weights on a replayed slot, counted in bytes: whose are on it, what KV uses, and when transfers end.

All weights cross one host link, one model after another at the full rate; single layers are loaded concurrently. A
model with offloaded layers keeps its region. KV in those layers stays when the model is evicted, and its bytes are not
available to other models then.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from dataplane.engines.core.remapping.circle import Circle, Rotation, is_hidden, step_s


class HostLink:
    """A link that carries one transfer after another. Methods return the time at which a transfer of `time_s` that is
    submitted now ends.
    """

    def __init__(self) -> None:
        self._free_s = float("-inf")

    def send(self, time_s: float, now_s: float) -> float:
        """After the transfers before it."""
        self._free_s = now_s + self.wait_s(now_s) + time_s
        return self._free_s

    def send_concurrently(self, time_s: float, now_s: float) -> float:
        """Concurrently with the transfers before it: while there are any, each has half of the bandwidth."""
        wait_s = self.wait_s(now_s)
        self._free_s = now_s + wait_s + time_s
        return now_s + time_s + min(wait_s, time_s)

    def wait_s(self, now_s: float) -> float:
        """How long a transfer submitted now would wait for those before it."""
        return max(0.0, self._free_s - now_s)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of one model in `layers` equal layers. `switch_s`: seconds to load all of them."""

    model: str
    size_bytes: int
    switch_s: float
    layers: int = 32

    @property
    def layer_bytes(self) -> int:
        return self.size_bytes // self.layers

    @property
    def load_s(self) -> float:
        """Seconds to load one layer."""
        return self.switch_s / self.layers


@dataclass(eq=False, kw_only=True)
class Resident:
    """A model that is loaded or being loaded. `loaded_s`: when it is whole, except for offloaded layers; `reloaded_s`:
    when the last reclaimed layer is loaded; `used_s`: when the model was last needed.
    """

    weights: Weights
    loaded_s: float
    used_s: float
    rotation: Rotation
    reloaded_s: float = float("-inf")

    def is_whole(self, now_s: float) -> bool:
        return not self.rotation.offloaded and max(self.loaded_s, self.reloaded_s) <= now_s

    @property
    def offloaded_bytes(self) -> int:
        """The memory of its offloaded layers, which KV may use."""
        return self.rotation.offloaded * self.weights.layer_bytes


class WeightsMemory:
    """The models that are loaded or being loaded, evicted least recently used first. `out_of_region_bytes` is the KV
    outside of its own region: in layers that are offloaded, or were when their model was evicted.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        """Less while KV has some of it."""
        self._link = HostLink()
        self._residents: dict[str, Resident] = {}
        """In order of last use."""
        self.offloaded_bytes = 0
        """The memory of offloaded layers, which KV may use."""

    @property
    def used_bytes(self) -> int:
        """Bytes of all residents, offloaded layers included."""
        return sum([resident.weights.size_bytes for resident in self._residents.values()])

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    @property
    def offloaded(self) -> dict[str, int]:
        """How many layers are offloaded, by model."""
        if not self.offloaded_bytes:
            return {}
        return {name: one.rotation.offloaded for name, one in self._residents.items() if one.rotation.offloaded}

    def resident(self, model: str) -> Resident | None:
        return self._residents.get(model)

    def fit(self, wanted: Iterable[Weights], *, out_of_region_bytes: int = 0) -> bool:
        """Whether all of these could be resident, together with the KV in layers of evicted models."""
        needed_bytes = sum([weights.size_bytes for weights in wanted])
        return needed_bytes + max(out_of_region_bytes - self.offloaded_bytes, 0) <= self.capacity_bytes

    def fits_with(self, weights: Weights, *, others: Collection[str], out_of_region_bytes: int = 0) -> bool:
        """Whether a model that is not resident could be loaded while `others` and all KV stay."""
        staying = [resident for name, resident in self._residents.items() if name in others]
        kept_bytes = sum(resident.weights.size_bytes for resident in staying)
        orphaned_bytes = max(out_of_region_bytes - sum(resident.offloaded_bytes for resident in staying), 0)
        return weights.size_bytes + kept_bytes + orphaned_bytes <= self.capacity_bytes

    def resident_models(self, now_s: float) -> tuple[str, ...]:
        """Models that are whole, in name order."""
        return tuple(sorted(model for model, resident in self._residents.items() if resident.is_whole(now_s)))

    def arriving_models(self, now_s: float) -> tuple[str, ...]:
        """Models that are being loaded, in name order."""
        return tuple(sorted(model for model, resident in self._residents.items() if resident.loaded_s > now_s))

    def load(
        self, weights: Weights, now_s: float, *, keep: str | None = None, out_of_region_bytes: int = 0
    ) -> float | None:
        """Load a model if it is not resident; the time at which it is loaded. None: it does not fit with the model
        `keep` and the KV outside of its region.
        """
        resident = self._residents.pop(weights.model, None)
        if resident is None:
            others = () if keep is None else (keep,)
            if not self.fits_with(weights, others=others, out_of_region_bytes=out_of_region_bytes):
                return None
            while self.free_bytes - max(out_of_region_bytes - self.offloaded_bytes, 0) < weights.size_bytes:
                self.evict(next(model for model in self._residents if model != keep))
            loaded_s = self._link.send(weights.switch_s, now_s)
            rotation = Rotation(layers=weights.layers)
            resident = Resident(weights=weights, loaded_s=loaded_s, used_s=now_s, rotation=rotation)
        resident.used_s = now_s
        self._residents[weights.model] = resident
        return resident.loaded_s

    def missing_s(self, weights: Weights, now_s: float) -> float:
        """Seconds until the model would be loaded if it were requested now."""
        if weights.model in self._residents:
            return max(0.0, self._residents[weights.model].loaded_s - now_s)
        return self._link.wait_s(now_s) + weights.switch_s

    def ends_s(self, weights: Weights, compute_s: float, now_s: float) -> float:
        """When a step of the model ends that begins now and computes for `compute_s`. It loads each rotating layer
        once, concurrently with other transfers, and waits for reclaimed layers.
        """
        resident = self._residents[weights.model]
        rotation, layer_s = resident.rotation, compute_s / weights.layers
        ends_s = max(now_s + compute_s, resident.reloaded_s + layer_s)
        if not rotation.offloaded:
            return ends_s
        circle = Circle(layers=weights.layers, load_s=weights.load_s, compute_s=layer_s)
        if not is_hidden(circle, rotation):
            ends_s = max(ends_s, now_s + step_s(circle, rotation))
        return max(ends_s, self._link.send_concurrently(rotation.rotating_layers * weights.load_s, now_s))

    def rotate(self, model: str, rotation: Rotation) -> None:
        """Offload as many layers as the rotation says, at least as many as now."""
        resident = self._residents[model]
        assert rotation.offloaded >= resident.rotation.offloaded, "use `reclaim` for fewer"
        self._set_rotation(resident, rotation)

    def reclaim(self, model: str, count: int, now_s: float) -> None:
        """Reclaim the memory of so many layers, which KV has left, and load them. `rotate` must follow."""
        resident = self._residents[model]
        before = resident.rotation
        offloaded = before.offloaded - count
        resident.reloaded_s = self._link.send_concurrently(count * resident.weights.load_s, now_s)
        frames = before.frames if offloaded else 0
        self._set_rotation(resident, Rotation(layers=before.layers, offloaded=offloaded, frames=frames))

    def evict(self, model: str) -> None:
        """Evict a model if it is resident."""
        resident = self._residents.pop(model, None)
        if resident is not None:
            self.offloaded_bytes -= resident.offloaded_bytes

    def evict_but(self, model: str | None) -> None:
        """Evict what the capacity does not hold, but not this model."""
        for other in [other for other in self._residents if other != model]:
            if self.free_bytes < 0:
                self.evict(other)

    def evict_all(self) -> None:
        self._residents.clear()
        self.offloaded_bytes = 0

    def _set_rotation(self, resident: Resident, rotation: Rotation) -> None:
        self.offloaded_bytes -= resident.offloaded_bytes
        resident.rotation = rotation
        self.offloaded_bytes += resident.offloaded_bytes
