"""A model that runs while some of its layers are in host memory only, and KV uses their regions (Oneiros 5.4).

Each region that is left holds one layer at a time. A layer is loaded when it gets a region: before a step begins, or
when the layer whose region it takes has run. Three rules ensure that the bytes are right. A copy into a region begins
only after the kernels that use the region, and after the last copy into it. A layer runs only after its copy. KV gets
slabs only once no copy writes to them.
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
"""How often in a row the load of a layer that is to run may fail before its step fails."""

Send = Callable[[int, torch.Tensor, Sequence[Event]], Event]
"""Copies a shard of the model from host memory to a region, after some events."""


class RemappedLayers:
    """The layers of one model, whose run in `arena` is `owner`'s. `slabs` and `buffers` are those of each region."""

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
        self._locations = LayerLocations(len(self._buffers))
        self._arrivals: dict[int, Event] = {}  # by region: the last copy into it
        self.loads_total = 0

    @property
    def offloaded(self) -> int:
        """How many layers are offloaded."""
        return len(self._locations.lent)

    @property
    def whole(self) -> bool:
        """Whether every layer is loaded. One whose copy failed is not: it is loaded again when it is to run."""
        arrived = (event.done() and event.error is None for event in self._arrivals.values())
        return self._locations.whole and all(arrived)

    @property
    def in_flight(self) -> list[Event]:
        return [event for event in self._arrivals.values() if not event.done()]

    @property
    def offloaded_runs(self) -> tuple[Run, ...]:
        """The slabs of each offloaded layer's region, whether KV uses them or not."""
        return tuple(self._slabs[location] for location in sorted(self._locations.lent))

    def rotate(self, rotation: Rotation) -> None:
        """Offload as many layers as the rotation says, at least as many as now; the others share the regions left."""
        more = rotation.offloaded - self.offloaded
        assert more >= 0, f"{self.offloaded} layers are offloaded, not {rotation.offloaded}: `reclaim` gives back"
        self._locations.rotate(rotation.rotating)
        for location, layer in self._locations.lend(more) if more else ():
            if layer is not None:
                self._skeleton.unbind_shard(layer + 1)
            self._arena.lend(self._owner, self._slabs[location].slabs, Settled(self._arrivals.pop(location, PASSED)))
        self._locations.check()

    def reclaim(self, count: int) -> int:
        """Reclaim the regions of at most `count` layers, as far as KV has left them; of how many. Then `rotate`."""
        reclaimed = 0
        for location in sorted(self._locations.lent):
            if reclaimed < count and self._arena.reclaim(self._owner, self._slabs[location].slabs):
                self._locations.reclaim(location)
                reclaimed += 1
        return reclaimed

    def fill(self) -> None:
        """Load the layers that must be there before a step begins."""
        for load in self._locations.loads():
            self._load(load)

    def await_shard(self, shard: int) -> None:
        """See `Skeleton`.

        Raises:
            TransferError: the load of the layer failed.
        """
        if shard == 0:
            self.fill()
        layer = shard - 1
        if 0 <= layer < len(self._buffers):
            self._await(layer)

    def passed_shard(self, shard: int) -> None:
        """See `Skeleton`."""
        load = self._locations.load_after(shard - 1)
        if load is not None:
            self._load(load)

    def _await(self, layer: int) -> None:
        location = self._locations.location_of(layer)
        if location is None:  # the last step was aborted, so that layers are not where a step expects them
            load = self._locations.load_now(layer)
            self._load(load)
            location = load.location
        for _ in range(LOAD_TRIES_MAX):
            try:
                self._arrivals.get(location, PASSED).wait()
            except TransferError:
                self._load(Load(layer=layer, location=location, replaces=None))
            else:
                return
        self._arrivals[location].wait()

    def _load(self, load: Load) -> None:
        """Assign the region to the layer: running the one it held before then fails loudly."""
        if load.replaces is not None:
            self._skeleton.unbind_shard(load.replaces + 1)
        shard = load.layer + 1
        target = self._buffers[load.location][: self._skeleton.shards[shard].size_bytes]
        after = (record_event(target.device), Settled(self._arrivals.get(load.location, PASSED)))
        self._arrivals[load.location] = self._send(shard, target, after)
        self._skeleton.bind_shard(shard, target)
        self.loads_total += 1
