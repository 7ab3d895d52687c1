"""A model that runs while some of its layers are in host memory only: KV has their places (Oneiros 5.4).

Each place that is left has one layer at a time. A layer is sent for when it has a place: before a step begins, or when
the layer whose place it takes has run. Three rules keep the bytes right. A copy into a place begins only after what was
computed there, and after the last copy into it. A layer runs only after its copy. Slabs are KV's only once no copy
writes to them.
"""

from collections.abc import Callable, Sequence

import torch

from dataplane.engines.core.remapping.circle import Rotation
from dataplane.engines.torch.copies.open import record_event
from dataplane.engines.torch.model.skeleton import Skeleton
from dataplane.memory.events import PASSED, Event, Settled, TransferError
from dataplane.memory.layer_locations import LayerLocations, Load
from dataplane.memory.slabs import Run, SlabArena

LOAD_TRIES_MAX = 5
"""How often in a row the load of a layer that is to run may fail before its step does."""

Send = Callable[[int, torch.Tensor, Sequence[Event]], Event]
"""Copies a part of the model from host memory to a place, after some events."""


class RemappedLayers:
    """The layers of one model, whose run in `arena` is `owner`'s. `slabs` and `buffers` are those of each place."""

    def __init__(
        self,
        owner: str,
        skeleton: Skeleton,
        arena: SlabArena,
        *,
        slabs: Sequence[Run],
        buffers: Sequence[torch.Tensor],
        send: Send,
    ) -> None:
        self._owner = owner
        self._skeleton = skeleton
        self._arena = arena
        self._slabs = tuple(slabs)
        self._buffers = tuple(buffers)
        self._send = send
        self._places = LayerLocations(len(self._buffers))
        self._arrivals: dict[int, Event] = {}  # by place: the last copy into it
        self.loads_total = 0

    @property
    def offloaded(self) -> int:
        """How many layers' places KV has."""
        return len(self._places.lent)

    @property
    def whole(self) -> bool:
        """Whether every layer is there. One whose copy failed is not: it is sent for again when it is to run."""
        arrived = (event.done() and event.error is None for event in self._arrivals.values())
        return self._places.whole and all(arrived)

    @property
    def in_flight(self) -> list[Event]:
        """Copies that are not over."""
        return [event for event in self._arrivals.values() if not event.done()]

    @property
    def offloaded_runs(self) -> tuple[Run, ...]:
        """The slabs of each lent place, whether KV has taken them or not."""
        return tuple(self._slabs[place] for place in sorted(self._places.lent))

    def rotate(self, rotation: Rotation) -> None:
        """Lend as many places as `rotation` gives up, at least as many as now, and have its layers share the rest."""
        more = rotation.offloaded - self.offloaded
        assert more >= 0, f"{self.offloaded} are given up, not {rotation.offloaded}: `take_back` gives back"
        self._places.rotate(rotation.rotating)
        for place, layer in self._places.lend(more) if more else ():
            if layer is not None:
                self._skeleton.unbind_shard(layer + 1)
            self._arena.lend(self._owner, self._slabs[place].slabs, Settled(self._arrivals.pop(place, PASSED)))
        self._places.check()

    def reclaim(self, count: int) -> int:
        """End the loan of at most `count` places, those that KV has left; of how many. `rotate` must follow."""
        taken = 0
        for place in sorted(self._places.lent):
            if taken < count and self._arena.reclaim(self._owner, self._slabs[place].slabs):
                self._places.reclaim(place)
                taken += 1
        return taken

    def fill(self) -> None:
        """Send for what is to be there before a step begins."""
        for load in self._places.loads():
            self._load(load)

    def await_shard(self, shard: int) -> None:
        """See `Skeleton`.

        Raises:
            TransferError: the layer fails to come.
        """
        if shard == 0:
            self.fill()
        layer = shard - 1
        if 0 <= layer < len(self._buffers):
            self._await(layer)

    def passed_shard(self, shard: int) -> None:
        """See `Skeleton`."""
        load = self._places.load_after(shard - 1)
        if load is not None:
            self._load(load)

    def _await(self, layer: int) -> None:
        place = self._places.location_of(layer)
        if place is None:  # the step before broke off, so that the layers are not where a step expects them
            load = self._places.load_now(layer)
            self._load(load)
            place = load.location
        for _ in range(LOAD_TRIES_MAX):
            try:
                self._arrivals.get(place, PASSED).wait()
            except TransferError:
                self._load(Load(layer=layer, location=place, replaces=None))
            else:
                return
        self._arrivals[place].wait()

    def _load(self, load: Load) -> None:
        """The place is the layer's from now on: what it held before fails loudly if it runs."""
        if load.replaces is not None:
            self._skeleton.unbind_shard(load.replaces + 1)
        shard = load.layer + 1
        target = self._buffers[load.location][: self._skeleton.shards[shard].size_bytes]
        after = (record_event(target.device), Settled(self._arrivals.get(load.location, PASSED)))
        self._arrivals[load.location] = self._send(shard, target, after)
        self._skeleton.bind_shard(shard, target)
        self.loads_total += 1
