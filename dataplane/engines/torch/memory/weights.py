"""Weights on the device: which models are in the arena, which are being loaded, and which are evicted for others.

Loading a model is one copy per shard, each tracked by an event. A forward pass may begin at once: it waits for each
shard when it uses it. Evicting costs nothing, because the host keeps a copy of every weight.
"""

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch

from dataplane.engines.torch.copies.base import CopyStream
from dataplane.engines.torch.copies.open import record_event
from dataplane.engines.torch.memory.host_models import HostModel
from dataplane.engines.torch.memory.remapped import RemappedLayers
from dataplane.engines.torch.memory.transfer_rates import TransferRate
from dataplane.memory.events import AllOf, Event
from dataplane.memory.residency import ResidencyFacts, ResidentModel, choose_run
from dataplane.memory.slabs import Run, SlabArena

TRIES_MAX = 5
"""How often in a row the load of a shard may fail before its model's requests fail."""
POLL_S = 0.0002


@dataclass(eq=False, kw_only=True)
class Resident:
    """A model whose shards are in the arena or being loaded. `events`: one for each shard, empty once all are loaded;
    `began_s` by the engine's clock, `sent_s` by `time.monotonic`, that of the events. `remapped`: set once layers have
    been offloaded, also when they are loaded again.
    """

    model: HostModel
    buffers: tuple[torch.Tensor, ...]
    events: list[Event] = field(default_factory=list)
    tries: int = 0
    began_s: float = 0.0
    sent_s: float = 0.0
    remapped: RemappedLayers | None = None

    @property
    def whole(self) -> bool:
        return not self.events and (self.remapped is None or self.remapped.whole)

    @property
    def in_flight(self) -> list[Event]:
        """Copies into its memory that have not ended."""
        in_flight = [event for event in self.events if not event.done()]
        return in_flight if self.remapped is None else in_flight + self.remapped.in_flight


class CachedKv(Protocol):
    """KV that no request uses, which is evicted where weights need its memory."""

    def clearable_slabs(self) -> list[int]:
        """Slabs that hold nothing else: free as soon as they are cleared, and transfers have ended."""

    def clear(self, slabs: Iterable[int]) -> None:
        """Evict it from some slabs."""


class WeightStore:
    """The weights in one arena, whose bytes are `buffer`. Called by one thread. Rotating layers are loaded by
    `layer_stream`, concurrently with a prefetched model and not after it; None: by the same stream as all.
    """

    def __init__(
        self,
        arena: SlabArena,
        buffer: torch.Tensor,
        slab_bytes: int,
        stream: CopyStream,
        rate: TransferRate,
        layer_stream: CopyStream | None = None,
        cached_kv: CachedKv | None = None,
    ) -> None:
        self._arena = arena
        self._cached_kv = cached_kv
        self._buffer = buffer
        self._slab_bytes = slab_bytes
        self._stream = stream
        self._layer_stream = layer_stream or stream
        self._residents: dict[str, Resident] = {}
        self._homes: dict[str, int] = {}
        self._used_s: dict[str, float] = {}
        self.rate = rate
        self.loads_total = 0

    @property
    def resident_models(self) -> tuple[str, ...]:
        """Names of the models that are whole, in name order."""
        return tuple(sorted(name for name, resident in list(self._residents.items()) if resident.whole))

    @property
    def arriving_models(self) -> tuple[str, ...]:
        """Names of the models that are being loaded."""
        return tuple(sorted(name for name, resident in list(self._residents.items()) if resident.events))

    @property
    def offloaded(self) -> dict[str, int]:
        """How many layers are offloaded, by model."""
        remapped = {name: resident.remapped for name, resident in self._residents.items()}
        return {name: layers.offloaded for name, layers in remapped.items() if layers is not None and layers.offloaded}

    @property
    def bytes_per_s(self) -> float:
        """The rate of weight transfers; see `TransferRate`."""
        return self.rate.bytes_per_s

    def used_s(self, model: HostModel) -> float:
        """When the model was last needed, by the engine's clock."""
        return self._used_s[model.name]

    def whole_s(self, model: HostModel) -> float:
        """Estimated seconds to load all of the model's weights."""
        return model.skeleton.size_bytes * self.rate.s_per_byte

    def missing_s(self, model: HostModel, *, now_s: float) -> float:
        """Estimated seconds until the model would be loaded if it were requested now."""
        resident = self._residents.get(model.name)
        whole_s = self.whole_s(model)
        if resident is None:
            return whole_s
        return max(0.0, resident.began_s + whole_s - now_s) if resident.events else 0.0

    def fit_together(self, models: Iterable[HostModel]) -> bool:
        """Whether all of them fit in the arena with the present KV, except for KV in their offloaded layers."""
        needed = sum(model.skeleton.slabs(self._slab_bytes) for model in models)
        return needed <= self._arena.slabs - self._arena.unlent_kv_slabs(but=self._clearable_slabs())

    def holds(self, model: HostModel) -> bool:
        return model.name in self._residents

    def fits_with(self, model: HostModel, *, others: Collection[str]) -> bool:
        """Whether a model that is not resident could be loaded into the weight region while `others` and KV stay."""
        facts = self._facts(model, None)
        residents = tuple(replace(resident, pinned=resident.model in others) for resident in facts.residents)
        return choose_run(replace(facts, residents=residents)) is not None

    def load(self, model: HostModel, now_s: float, *, keep: str | None = None) -> bool:
        """Load a model if it is not resident, evicting others; False if there is no memory now, or no host copy. With
        `keep`, the model that runs meanwhile, it may borrow slabs of KV; without, it is to run now and is loaded into
        the weight region.
        """
        self._used_s[model.name] = now_s
        resident, host = self._residents.get(model.name), model.host
        if resident is not None and resident.remapped is not None and not resident.remapped.whole:
            if host is not None:
                resident.remapped.fill()
                return True
            self.evict(model.name)  # there is no copy to load the missing layers from
        elif resident is not None:
            return True
        if host is None:
            return False
        choice = choose_run(self._facts(model, keep))
        if choice is None:
            return False
        for name in choice.evictions:
            self.evict(name)
        if not self._clear(range(choice.start, choice.start + model.skeleton.slabs(self._slab_bytes))):
            return False
        self._arena.take_run(model.name, choice.start, model.skeleton.slabs(self._slab_bytes))
        self._homes[model.name] = choice.start
        resident = Resident(model=model, buffers=self._shard_buffers(model, choice.start), began_s=now_s)
        self._residents[model.name] = resident
        model.copies = [event for event in model.copies if not event.done()]
        resident.sent_s = time.monotonic()
        computed = record_event(self._buffer.device)  # the kernels that use these slabs
        resident.events = [
            model.send(self._stream, number, buffer, [computed]) for number, buffer in enumerate(resident.buffers)
        ]
        model.skeleton.bind(resident.buffers)
        model.skeleton.await_shard = lambda shard: self._await(resident, shard)
        model.fresh = False
        self.loads_total += 1
        return True

    def layer_slabs(self, model: HostModel) -> int | None:
        """How many slabs each layer takes; None if they differ, or the model is not resident or still being loaded."""
        resident = self._residents.get(model.name)
        if resident is None or resident.events:
            return None
        layers = model.skeleton.shards[1 : model.skeleton.geometry.layers + 1]
        sizes = {-(-shard.size_bytes // self._slab_bytes) for shard in layers}
        return sizes.pop() if len(sizes) == 1 else None

    def remapped(self, model: HostModel) -> RemappedLayers:
        """The layers of a model that has `layer_slabs`, for remapping."""
        resident, count = self._residents[model.name], self.layer_slabs(model)
        assert count is not None, f"{model.name} cannot offload layers"
        if resident.remapped is None:
            first = self._arena.runs[model.name].start + -(-model.skeleton.shards[0].size_bytes // self._slab_bytes)
            layers = range(model.skeleton.geometry.layers)
            slabs = [Run(start=first + number * count, count=count) for number in layers]
            resident.remapped = RemappedLayers(
                model.name,
                model.skeleton,
                self._arena,
                slabs=slabs,
                buffers=[self._buffer[run.start * self._slab_bytes : run.end * self._slab_bytes] for run in slabs],
                send=partial(model.send, self._layer_stream),
            )
            model.skeleton.await_shard = resident.remapped.await_shard
            model.skeleton.passed_shard = resident.remapped.passed_shard
        return resident.remapped

    def blocking_kv_slabs(self, model: HostModel) -> frozenset[int]:
        """Slabs with KV that a model to run needs in the weight region. That KV must be evicted; the models with
        offloaded layers there are evicted here, so that nothing else uses the slabs. Empty if something else is in the
        way.
        """
        facts = self._facts(model, None)
        choice = choose_run(replace(facts, blocked=facts.blocked - self._arena.borrowed_slabs))
        if self.holds(model) or choice is None:
            return frozenset()
        for name in choice.evictions:
            self.evict(name)
        return self._arena.borrowed_slabs.intersection(range(choice.start, choice.start + facts.slabs_needed))

    def ran(self, model: HostModel) -> None:
        """Record that a step of the model has completed."""
        resident = self._residents[model.name]
        if not resident.events:
            resident.tries = 0
            model.copies = [event for event in model.copies if not event.done()]

    def settle(self) -> None:
        """Complete the loads that have ended, and measure their rate."""
        for resident in self._residents.values():
            if resident.events and all(event.done() and event.error is None for event in resident.events):
                if not resident.tries:
                    self.rate.learn(resident.model.skeleton.size_bytes, resident.sent_s, resident.events)
                resident.events = []
                resident.tries = 0
                resident.model.skeleton.await_shard = None

    def await_all(self, model: HostModel) -> None:
        """Wait for every shard.

        Raises:
            TransferError: a load failed.
        """
        AllOf(self._residents[model.name].events).wait()

    def try_again(self, model: HostModel) -> bool:
        """Repeat failed loads; False if they failed too often."""
        resident = self._residents[model.name]
        host = model.host
        resident.tries += 1
        if resident.tries > TRIES_MAX or host is None:
            return False
        for number, event in enumerate(resident.events):
            if event.done() and event.error is not None:
                resident.events[number] = model.send(self._stream, number, resident.buffers[number])
        return True

    def evict(self, name: str) -> None:
        """Evict a model if it is resident. Its slabs are free once no transfer writes to them."""
        resident = self._residents.pop(name, None)
        if resident is not None:
            resident.model.skeleton.await_shard = resident.model.skeleton.passed_shard = None
            resident.model.skeleton.unbind()
            self._arena.free_run(name, AllOf(resident.in_flight))

    def evict_idle_above(self, slab: int, *, keep: str | None) -> bool:
        """Evict the least recently used model of those with slabs above `slab`; False if there is none."""
        runs = self._arena.runs
        idle = [
            name
            for name, resident in self._residents.items()
            if name != keep and not resident.in_flight and runs[name].end > slab
        ]
        if not idle:
            return False
        self.evict(min(idle, key=lambda name: self._used_s[name]))
        return True

    def await_one(self) -> None:
        """Wait until a load has ended, if one is under way."""
        in_flight = [event for resident in self._residents.values() for event in resident.in_flight]
        time.sleep(POLL_S)
        while in_flight and not any(event.done() for event in in_flight):
            time.sleep(POLL_S)

    def _await(self, resident: Resident, shard: int) -> None:
        if resident.events:
            resident.events[shard].wait()

    def _clearable_slabs(self) -> list[int]:
        return [] if self._cached_kv is None else self._cached_kv.clearable_slabs()

    def _clear(self, slabs: range) -> bool:
        """Evict cached KV from slabs; False while it is copied to host memory."""
        if self._cached_kv is not None and self._arena.holds_kv(slabs):
            self._cached_kv.clear(slabs)
        return not self._arena.holds_kv(slabs)

    def _shard_buffers(self, model: HostModel, start: int) -> tuple[torch.Tensor, ...]:
        buffers = []
        for shard in model.skeleton.shards:
            first = start * self._slab_bytes
            buffers.append(self._buffer[first : first + shard.size_bytes])
            start += -(-shard.size_bytes // self._slab_bytes)
        return tuple(buffers)

    def _facts(self, model: HostModel, keep: str | None) -> ResidencyFacts:
        """A model's last location counts only while no other model is there: two with one location would evict each
        other again and again.
        """
        slabs = model.skeleton.slabs(self._slab_bytes)
        home = self._homes.get(model.name, self._arena.slabs)
        limit = self._arena.slabs if keep is not None else self._arena.kv_from
        runs = self._arena.runs.values()
        taken = home + slabs > limit or any(run.start < home + slabs and home < run.end for run in runs)
        residents = tuple(
            ResidentModel(
                model=name,
                start=run.start,
                count=run.count,
                used_s=self._used_s[name],
                pinned=name == keep or bool(self._residents[name].in_flight),
            )
            for name, run in self._arena.runs.items()
        )
        return ResidencyFacts(
            model=model.name,
            slabs_needed=slabs,
            home=None if taken else home,
            slabs=limit,
            residents=residents,
            blocked=self._arena.blocked.difference(self._clearable_slabs()),
        )
