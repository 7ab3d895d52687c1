"""Which layer of a model is in which location while KV cache uses some locations (Oneiros 5.4). No bytes are touched.

A model of n layers has n locations of one layer's size; at first layer i is in location i. Lent locations hold no
layer. The *rotating* layers may be replaced in their location; all others are fixed, and a fixed layer that was evicted
while it rotated is loaded first. So with alpha locations lent and alpha + beta layers rotating, the rotating layers
share beta locations, whichever these are.

    n = 8, location 4 lent, 0 and 4 rotate:   location  0   1   2   3   4     5   6   7
    before layer 0 runs                       layer     0   1   2   3   lent  5   6   7
    after layer 0 has run                     layer     4   1   2   3   lent  5   6   7
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Load:
    """A transfer of a layer to a location, where it replaces another layer or none."""

    layer: int
    location: int
    replaces: int | None


class LayerLocations:
    """The locations of one model. The load of a layer that has a location may still be in progress."""

    def __init__(self, layers: int) -> None:
        assert layers > 0, layers
        self._layers = layers
        self._location_of: dict[int, int] = {layer: layer for layer in range(layers)}  # location by layer
        self._layer_in: dict[int, int] = dict(self._location_of)  # layer by location
        self._lent: set[int] = set()
        self._rotating: tuple[int, ...] = ()

    @property
    def lent(self) -> frozenset[int]:
        """Locations that KV cache may use."""
        return frozenset(self._lent)

    @property
    def whole(self) -> bool:
        return len(self._location_of) == self._layers

    def location_of(self, layer: int) -> int | None:
        """None if the layer is in host memory only."""
        return self._location_of.get(layer)

    def rotate(self, rotating: Iterable[int]) -> None:
        """Let these layers rotate, and no others."""
        self._rotating = tuple(sorted(rotating))
        assert set(self._rotating) <= set(range(self._layers)), self._rotating

    def lend(self, count: int) -> tuple[tuple[int, int | None], ...]:
        """Lend `count` more locations: empty ones, then those of the rotating layers that run last. Returns each with
        the layer evicted from it. At least one location must remain for the rotating layers.
        """
        locations = self._spare_locations()
        assert count < len(locations), f"{count} of {len(locations)} locations cannot be lent"
        return tuple((location, self._evict(location)) for location in locations[:count])

    def reclaim(self, location: int) -> None:
        """End the loan of a location, which is empty then."""
        self._lent.remove(location)

    def loads(self) -> tuple[Load, ...]:
        """The loads before the first layer runs, in the order of use: fixed layers, and rotating ones as far as there
        are empty locations. They count as done when this returns.
        """
        fixed = [n for n in range(self._layers) if n not in self._location_of and n not in self._rotating]
        loads = [self._load(layer, location) for layer, location in zip(fixed, self._spare_locations(), strict=False)]
        empty = [location for location in self._spare_locations() if location not in self._layer_in]
        absent = [layer for layer in self._rotating if layer not in self._location_of]
        loads += [self._load(layer, location) for layer, location in zip(absent, empty, strict=False)]
        return tuple(sorted(loads, key=lambda load: load.layer))

    def load_after(self, layer: int) -> Load | None:
        """The load after `layer` has run: if it rotates, the next rotating layer without a location, in circular
        order, replaces it. It counts as done when this returns.
        """
        location = self._location_of.get(layer)
        if location is None or layer not in self._rotating:
            return None
        absent = [other for other in self._rotating if other not in self._location_of]
        if not absent:
            return None
        return self._load(min(absent, key=lambda other: (other - layer) % self._layers), location)

    def load_now(self, layer: int) -> Load:
        """The load of a layer that runs next and has no location: into an empty location, or that of the rotating layer
        that runs last. It counts as done when this returns.
        """
        assert layer not in self._location_of, layer
        locations = self._spare_locations()
        empty = next((location for location in locations if location not in self._layer_in), None)
        furthest = max(locations, key=lambda location: (self._layer_in.get(location, layer) - layer) % self._layers)
        return self._load(layer, furthest if empty is None else empty)

    def check(self) -> None:
        """Assert that no location has two layers, that lent ones have none, and that every layer can be loaded."""
        assert {location: layer for layer, location in self._location_of.items()} == self._layer_in, (
            "the two maps differ"
        )
        assert self._lent.isdisjoint(self._layer_in), "a lent location holds a layer"
        fixed = sum(layer not in self._rotating for layer in range(self._layers))
        frames = self._layers - len(self._lent) - fixed
        assert frames >= bool(self._rotating), f"{len(self._lent)} locations lent, {fixed} layers fixed"

    def _spare_locations(self) -> list[int]:
        """Locations that are empty, then those of rotating layers, the layer that runs last first."""
        of_layer = {location: self._layer_in.get(location, self._layers) for location in range(self._layers)}
        spare = [
            location
            for location, layer in of_layer.items()
            if location not in self._lent and (layer == self._layers or layer in self._rotating)
        ]
        return sorted(spare, key=lambda location: -of_layer[location])

    def _evict(self, location: int) -> int | None:
        self._lent.add(location)
        layer = self._layer_in.pop(location, None)
        if layer is not None:
            del self._location_of[layer]
        return layer

    def _load(self, layer: int, location: int) -> Load:
        replaces = self._layer_in.get(location)
        if replaces is not None:
            del self._location_of[replaces]
        self._location_of[layer], self._layer_in[location] = location, layer
        return Load(layer=layer, location=location, replaces=replaces)
