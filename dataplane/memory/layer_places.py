"""Which layer of a model is in which place, once some places are lent to KV (Oneiros 5.4). Bookkeeping only: no bytes.

A model of n layers has n places of one layer's size; at first layer i is in place i. Lent places hold no layer. Of the
layers, the *rotating* ones may lose their place to another; all others stay in theirs, and those that lost theirs
before they were to stay come back first. So with alpha places lent and alpha + beta layers rotating, beta places are
shared by the rotating layers, whichever these places are.

    n = 8, place 4 lent, 0 and 4 rotate:   place  0   1   2   3   4     5   6   7
    before layer 0 runs                    layer  0   1   2   3   lent  5   6   7
    once it has run                        layer  4   1   2   3   lent  5   6   7
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Load:
    """A layer to be brought to a place, in the stead of the one that is there."""

    layer: int
    place: int
    instead_of: int | None


class LayerPlaces:
    """The places of one model. What is said to be in a place may still be on its way there."""

    def __init__(self, layers: int) -> None:
        assert layers > 0, layers
        self._layers = layers
        self._there: dict[int, int] = {layer: layer for layer in range(layers)}  # place by layer
        self._holds: dict[int, int] = dict(self._there)  # layer by place
        self._lent: set[int] = set()
        self._rotating: tuple[int, ...] = ()

    @property
    def lent(self) -> frozenset[int]:
        """Places that KV may have."""
        return frozenset(self._lent)

    @property
    def whole(self) -> bool:
        """Whether every layer is in a place."""
        return len(self._there) == self._layers

    def place_of(self, layer: int) -> int | None:
        """Where a layer is; None when it is in host memory only."""
        return self._there.get(layer)

    def rotate(self, rotating: Iterable[int]) -> None:
        """From now on these layers may lose their place, and no others."""
        self._rotating = tuple(sorted(rotating))
        assert set(self._rotating) <= set(range(self._layers)), self._rotating

    def lend(self, count: int) -> tuple[tuple[int, int | None], ...]:
        """Lend `count` places more: empty ones, then those of the rotating layers that run last. Each with the layer
        that loses it. One place at least must stay for the rotating layers.
        """
        places = self._spare_places()
        assert count < len(places), f"{count} of {len(places)} places cannot be lent"
        return tuple((place, self._lend(place)) for place in places[:count])

    def take_back(self, place: int) -> None:
        """A lent place is empty again."""
        self._lent.remove(place)

    def loads(self) -> tuple[Load, ...]:
        """What is to come before the first layer runs, in the order of use: the layers that stay, and rotating ones
        as far as there are empty places. Done once they are returned.
        """
        staying = [n for n in range(self._layers) if n not in self._there and n not in self._rotating]
        loads = [self._load(layer, place) for layer, place in zip(staying, self._spare_places(), strict=False)]
        empty = [place for place in self._spare_places() if place not in self._holds]
        absent = [layer for layer in self._rotating if layer not in self._there]
        loads += [self._load(layer, place) for layer, place in zip(absent, empty, strict=False)]
        return tuple(sorted(loads, key=lambda load: load.layer))

    def load_after(self, layer: int) -> Load | None:
        """The layer to come now that `layer` has run: where it rotates, the next of the others on the circle that is
        nowhere takes its place. Done once it is returned.
        """
        place = self._there.get(layer)
        if place is None or layer not in self._rotating:
            return None
        absent = [other for other in self._rotating if other not in self._there]
        if not absent:
            return None
        return self._load(min(absent, key=lambda other: (other - layer) % self._layers), place)

    def load_now(self, layer: int) -> Load:
        """Where a layer goes that is to run and is nowhere: an empty place, or that of the rotating layer whose turn is
        the furthest. Done once it is returned.
        """
        assert layer not in self._there, layer
        places = self._spare_places()
        empty = next((place for place in places if place not in self._holds), None)
        furthest = max(places, key=lambda place: (self._holds.get(place, layer) - layer) % self._layers)
        return self._load(layer, furthest if empty is None else empty)

    def check(self) -> None:
        """Assert that no place has two layers, no lent one any, and that every layer can come when it is to run."""
        assert {place: layer for layer, place in self._there.items()} == self._holds, "the two books differ"
        assert self._lent.isdisjoint(self._holds), "a lent place holds a layer"
        staying = sum(layer not in self._rotating for layer in range(self._layers))
        frames = self._layers - len(self._lent) - staying
        assert frames >= bool(self._rotating), f"{len(self._lent)} places lent, {staying} layers stay"

    def _spare_places(self) -> list[int]:
        """Places that are empty, then those of rotating layers, the layer that runs last first."""
        of_layer = {place: self._holds.get(place, self._layers) for place in range(self._layers)}
        spare = [
            place
            for place, layer in of_layer.items()
            if place not in self._lent and (layer == self._layers or layer in self._rotating)
        ]
        return sorted(spare, key=lambda place: -of_layer[place])

    def _lend(self, place: int) -> int | None:
        self._lent.add(place)
        layer = self._holds.pop(place, None)
        if layer is not None:
            del self._there[layer]
        return layer

    def _load(self, layer: int, place: int) -> Load:
        instead_of = self._holds.get(place)
        if instead_of is not None:
            del self._there[instead_of]
        self._there[layer], self._holds[place] = place, layer
        return Load(layer=layer, place=place, instead_of=instead_of)
