"""The part of a slot that switches: models in host memory, an arena for some of them, and the stream between."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dataplane.engines.torch.copies.base import Copy, CopyStream
from dataplane.engines.torch.copies.open import make_stream
from dataplane.engines.torch.memory.host_models import HostModel, HostModels
from dataplane.engines.torch.memory.weights import WeightStore
from dataplane.engines.torch.memory.wire_rate import wire_rates
from dataplane.memory.events import PASSED, Event
from dataplane.memory.slabs import SlabArena
from ops.profiling.checkpoints import BenchModel, DtypeName

SLAB_BYTES = 2**20


class NullStream:
    """A copy stream that moves nothing."""

    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> Event:
        """Nothing happens, and it is over."""
        return PASSED

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True, kw_only=True)
class BenchSlot:
    """`models` are in host memory; `weights` holds as many of them as the arena takes."""

    device: torch.device
    buffer: torch.Tensor
    weights: WeightStore
    models: tuple[HostModel, ...]

    def switch(self, model: HostModel) -> None:
        """What a step does before it may run a model, and the wait for all of its weights."""
        self.weights.settle()
        self._bring(model, keep=None)
        self.weights.await_all(model)

    def prefetch(self, model: HostModel, *, keep: HostModel) -> None:
        """Send for a model while another one stays."""
        self._bring(model, keep=keep.name)

    def _bring(self, model: HostModel, *, keep: str | None) -> None:
        brought = self.weights.bring(model, 0.0, keep=keep)
        assert brought, f"the arena has no room for {model.name}"


@contextmanager
def open_slot(
    models: Sequence[BenchModel], *, device: str, dtype: DtypeName, residents: int, moves: bool = True
) -> Iterator[BenchSlot]:
    """A slot whose arena holds `residents` of the largest model. `moves` False: everything but the bytes."""
    place = torch.device(device)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    host_models = HostModels(None, torch_dtype, place, SLAB_BYTES, leave_rank=lambda _: None, in_use=lambda _: False)
    stream: CopyStream = make_stream(place, "bench", threads=torch.get_num_threads()) if moves else NullStream()
    try:
        known = tuple(host_models.prepare(model.name, model.folder, slabs_max=sys.maxsize) for model in models)
        slabs = residents * max(model.skeleton.slabs(SLAB_BYTES) for model in known)
        buffer = torch.zeros(slabs * SLAB_BYTES, dtype=torch.uint8, device=place)
        arena = SlabArena(slabs, weights_slabs=slabs)
        weights = WeightStore(arena, buffer, SLAB_BYTES, stream, wire_rates(buffer).weights)
        yield BenchSlot(device=place, buffer=buffer, weights=weights, models=known)
    finally:
        stream.close()
        host_models.close()
