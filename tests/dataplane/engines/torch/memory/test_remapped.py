"""Layers that rotate in the regions left to them, with copies that end when the test finishes them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dataplane.engines.core.remapping.circle import Rotation
from dataplane.engines.torch.memory.remapped import LOAD_TRIES_MAX, RemappedLayers
from dataplane.memory.events import Event, FlagEvent, TransferError
from dataplane.memory.slabs import Run, SlabArena

LAYERS = 4


class Slot:
    """A model of `LAYERS` layers, a slab each. Copies fail at once as long as `fails`, else they never end."""

    def __init__(self) -> None:
        self.arena = SlabArena(LAYERS, weights_slabs=LAYERS)
        self.arena.take_run("a", 0, LAYERS)
        self.bound = set(range(LAYERS))
        self.events: list[FlagEvent] = []
        self.fails = False
        skeleton: Any = SimpleNamespace(
            shards=[SimpleNamespace(size_bytes=8)] * (LAYERS + 1),
            bind_shard=lambda shard, _: self.bound.add(shard - 1),
            unbind_shard=lambda shard: self.bound.remove(shard - 1),
        )
        self.layers = RemappedLayers(
            "a",
            skeleton,
            self.arena,
            slabs=[Run(start=layer, count=1) for layer in range(LAYERS)],
            buffers=[torch.zeros(8, dtype=torch.uint8) for _ in range(LAYERS)],
            send=self._send,
        )

    def _send(self, shard: int, target: torch.Tensor, after: Sequence[Event]) -> Event:
        self.events.append(FlagEvent())
        if self.fails:
            self.events[-1].finish(OSError("lost"))
        return self.events[-1]

    def offload_and_reclaim(self) -> None:
        """One layer loses its place and is sent for again."""
        self.layers.rotate(Rotation(layers=LAYERS, offloaded=1, frames=1))
        assert self.bound == {0, 1, 3}
        assert self.layers.reclaim(1) == 1
        self.layers.rotate(Rotation(layers=LAYERS))
        self.layers.fill()


def test_a_model_is_whole_once_the_last_copy_is_over() -> None:
    slot = Slot()
    slot.offload_and_reclaim()
    assert not slot.layers.whole
    slot.events[-1].finish()
    assert slot.layers.whole


def test_a_layer_whose_copy_failed_is_not_there_until_it_came_after_all() -> None:
    """Else its host copy could leave, and nothing could be sent once more."""
    slot = Slot()
    slot.fails = True
    slot.offload_and_reclaim()
    assert not slot.layers.whole
    with pytest.raises(TransferError, match="lost"):
        slot.layers.await_shard(3)
    assert len(slot.events) == 1 + LOAD_TRIES_MAX
    assert not slot.layers.whole


def test_kv_gets_a_place_once_no_copy_writes_to_it() -> None:
    slot = Slot()
    slot.offload_and_reclaim()
    slot.layers.rotate(Rotation(layers=LAYERS, offloaded=1, frames=1))
    assert slot.arena.take_kv() is None
    slot.events[-1].finish(OSError("lost"))
    slot.arena.settle()
    assert slot.arena.take_kv() == 2
    assert slot.layers.reclaim(1) == 0, "KV has it"
