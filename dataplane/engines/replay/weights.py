"""The weights on a replayed slot, counted in bytes: whose are there, what is lent to KV, and when what moves arrives.

All weights come over one wire, one model after another at the full rate; single layers beside them. A model that lends
layers keeps its place. KV that lies in its layers stays when it leaves: so much less room is left for others then.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from dataplane.engines.core.remapping.circle import Circle, Rotation, is_hidden, step_s


class Wire:
    """One transfer after another."""

    def __init__(self) -> None:
        self._free_s = float("-inf")

    def send(self, time_s: float, now_s: float) -> float:
        """When a transfer of `time_s` that is submitted now is over."""
        self._free_s = now_s + self.waits_s(now_s) + time_s
        return self._free_s

    def send_beside(self, time_s: float, now_s: float) -> float:
        """The same of one that does not wait for those before it: while there are any, each has half of the wire."""
        waits_s = self.waits_s(now_s)
        self._free_s = now_s + waits_s + time_s
        return now_s + time_s + min(waits_s, time_s)

    def waits_s(self, now_s: float) -> float:
        """How long a transfer submitted now would wait for those before it."""
        return max(0.0, self._free_s - now_s)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Those of one model, in `layers` layers that are alike. `switch_s`: how long they take to arrive."""

    model: str
    size_bytes: int
    switch_s: float
    layers: int = 32

    @property
    def layer_bytes(self) -> int:
        """Of one layer."""
        return self.size_bytes // self.layers

    @property
    def load_s(self) -> float:
        """How long a layer takes to arrive."""
        return self.switch_s / self.layers


@dataclass(eq=False, kw_only=True)
class Resident:
    """A model that is there or arriving. `there_s`: when it is whole, but for the layers it gives up; `loaded_s`: when
    the last of those is there that it got back; `used_s`: when it was last brought.
    """

    weights: Weights
    there_s: float
    used_s: float
    rotation: Rotation
    loaded_s: float = float("-inf")

    def is_whole(self, now_s: float) -> bool:
        """Whether every layer is there."""
        return not self.rotation.given_up and max(self.there_s, self.loaded_s) <= now_s

    @property
    def lent_bytes(self) -> int:
        """What KV has of its memory, or may have."""
        return self.rotation.given_up * self.weights.layer_bytes


class WeightsMemory:
    """Who is there or arriving. The longest unused ones give way. `strayed_bytes` is how much of KV lies outside of its
    own memory: in layers that are lent, or were when their model left.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._wire = Wire()
        self._residents: dict[str, Resident] = {}
        """In order of last use."""
        self.lent_bytes = 0
        """What KV may have."""

    @property
    def used_bytes(self) -> int:
        """Bytes of models that are there or arriving, and what they have lent."""
        return sum([resident.weights.size_bytes for resident in self._residents.values()])

    @property
    def free_bytes(self) -> int:
        """What is left."""
        return self._capacity_bytes - self.used_bytes

    @property
    def given_up(self) -> dict[str, int]:
        """How many layers' places KV has, by model."""
        if not self.lent_bytes:
            return {}
        return {name: one.rotation.given_up for name, one in self._residents.items() if one.rotation.given_up}

    def resident(self, model: str) -> Resident | None:
        """A model that is there or arriving."""
        return self._residents.get(model)

    def fit(self, wanted: Iterable[Weights], *, strayed_bytes: int = 0) -> bool:
        """Whether these could all be there at once, beside the KV that lies in layers that nobody lends."""
        needed_bytes = sum([weights.size_bytes for weights in wanted])
        return needed_bytes + max(strayed_bytes - self.lent_bytes, 0) <= self._capacity_bytes

    def has_place(self, weights: Weights, *, beside: Collection[str], strayed_bytes: int = 0) -> bool:
        """Whether a model that is away could come in while these stay, and all KV."""
        staying = [resident for name, resident in self._residents.items() if name in beside]
        kept_bytes = sum(resident.weights.size_bytes for resident in staying)
        homeless_bytes = max(strayed_bytes - sum(resident.lent_bytes for resident in staying), 0)
        return weights.size_bytes + kept_bytes + homeless_bytes <= self._capacity_bytes

    def resident_models(self, now_s: float) -> tuple[str, ...]:
        """Models that are wholly there, in name order."""
        return tuple(sorted(model for model, resident in self._residents.items() if resident.is_whole(now_s)))

    def arriving_models(self, now_s: float) -> tuple[str, ...]:
        """Models on their way, in name order."""
        return tuple(sorted(model for model, resident in self._residents.items() if resident.there_s > now_s))

    def bring(self, weights: Weights, now_s: float, *, keep: str | None = None, strayed_bytes: int = 0) -> float | None:
        """When the weights are there; they are sent for if need be. None: they do not fit beside those of `keep` and
        the KV in layers.
        """
        resident = self._residents.pop(weights.model, None)
        if resident is None:
            if not self.has_place(weights, beside=() if keep is None else (keep,), strayed_bytes=strayed_bytes):
                return None
            while self.free_bytes - max(strayed_bytes - self.lent_bytes, 0) < weights.size_bytes:
                self.evict(next(model for model in self._residents if model != keep))
            there_s = self._wire.send(weights.switch_s, now_s)
            rotation = Rotation(layers=weights.layers)
            resident = Resident(weights=weights, there_s=there_s, used_s=now_s, rotation=rotation)
        resident.used_s = now_s
        self._residents[weights.model] = resident
        return resident.there_s

    def missing_s(self, weights: Weights, now_s: float) -> float:
        """How long it would take until the weights are there, were they sent for now."""
        if weights.model in self._residents:
            return max(0.0, self._residents[weights.model].there_s - now_s)
        return self._wire.waits_s(now_s) + weights.switch_s

    def ends_s(self, weights: Weights, compute_s: float, now_s: float) -> float:
        """When a step of the model is over that begins now and computes for so long. Layers that take turns are each
        loaded once meanwhile, beside what is on the wire; those that came back are waited for.
        """
        resident = self._residents[weights.model]
        rotation, layer_s = resident.rotation, compute_s / weights.layers
        ends_s = max(now_s + compute_s, resident.loaded_s + layer_s)
        if not rotation.given_up:
            return ends_s
        circle = Circle(layers=weights.layers, load_s=weights.load_s, compute_s=layer_s)
        if not is_hidden(circle, rotation):
            ends_s = max(ends_s, now_s + step_s(circle, rotation))
        return max(ends_s, self._wire.send_beside(rotation.rotating_layers * weights.load_s, now_s))

    def rotate(self, model: str, rotation: Rotation) -> None:
        """Lend as many layers as `rotation` gives up, at least as many as now; the others take turns as it says."""
        resident = self._residents[model]
        assert rotation.given_up >= resident.rotation.given_up, "`take_back` gives back"
        self._turn(resident, rotation)

    def take_back(self, model: str, count: int, now_s: float) -> None:
        """End the loan of so many layers, which KV has left: they are sent for. `rotate` must follow."""
        resident = self._residents[model]
        before = resident.rotation
        given_up = before.given_up - count
        resident.loaded_s = self._wire.send_beside(count * resident.weights.load_s, now_s)
        frames = before.frames if given_up else 0
        self._turn(resident, Rotation(layers=before.layers, given_up=given_up, frames=frames))

    def evict(self, model: str) -> None:
        """Forget the weights of a model, if they are there."""
        resident = self._residents.pop(model, None)
        if resident is not None:
            self.lent_bytes -= resident.lent_bytes

    def evict_all(self) -> None:
        """Forget all weights."""
        self._residents.clear()
        self.lent_bytes = 0

    def _turn(self, resident: Resident, rotation: Rotation) -> None:
        """Have the layers of a model take turns in another way."""
        self.lent_bytes -= resident.lent_bytes
        resident.rotation = rotation
        self.lent_bytes += resident.lent_bytes
