"""Weights on the device: who is in the arena, who is arriving part by part, and who makes room.

Bringing a model in is one copy per part, tracked by one event each. A forward pass may begin at once: each part is
waited for when it is used. Leaving costs nothing, for the host keeps a copy of every weight.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from dataplane.engines.torch.host_models import HostModel
from dataplane.engines.torch.streams import Copy, CopyStream, mark, pinned, unpinned
from dataplane.memory.events import PASSED, Event, TimedEvent
from dataplane.memory.residency import ResidencyFacts, ResidentModel, choose_run
from dataplane.memory.slabs import SlabArena

TRIES_MAX = 5
"""How often in a row a part may fail to arrive before its model's requests fail."""
RATE_SAMPLE_BYTES = 2**25
RATE_LOAD_BYTES_MIN = 2**24
"""A load of fewer bytes says little about the rate: starting its copies takes as long as they do."""
RATE_SHARE = 0.25
"""What the last load counts in the rate; those before it fade by the rest."""
POLL_S = 0.0002


@dataclass(eq=False, kw_only=True)
class Resident:
    """A model whose parts are in the arena or on their way. `events`: one for each part, empty once all are there;
    `began_s` by the engine's clock, `sent_s` by `time.monotonic`, that of the events.
    """

    model: HostModel
    buffers: tuple[torch.Tensor, ...]
    events: list[Event] = field(default_factory=list)
    tries: int = 0
    began_s: float = 0.0
    sent_s: float = 0.0


class Together:
    """Events that are over when the last of them is."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = tuple(events)

    def done(self) -> bool:
        """Whether all are."""
        return all(event.done() for event in self._events)

    def wait(self) -> None:
        """Wait for each.

        Raises:
            TransferError: one failed.
        """
        for event in self._events:
            event.wait()

    @property
    def error(self) -> BaseException | None:
        """The first error."""
        return next((event.error for event in self._events if event.error is not None), None)


class WeightStore:
    """The weights in one arena, whose bytes are `buffer`. Called by one thread."""

    def __init__(self, arena: SlabArena, buffer: torch.Tensor, slab_bytes: int, stream: CopyStream) -> None:
        self._arena = arena
        self._buffer = buffer
        self._slab_bytes = slab_bytes
        self._stream = stream
        self._residents: dict[str, Resident] = {}
        self._homes: dict[str, int] = {}
        self._used_s: dict[str, float] = {}
        self._s_per_byte = 1 / measured_rate(buffer)
        self.brought_total = 0

    @property
    def resident_models(self) -> tuple[str, ...]:
        """Names of the models that are wholly there, in name order."""
        return tuple(sorted(name for name, resident in list(self._residents.items()) if not resident.events))

    @property
    def arriving_models(self) -> tuple[str, ...]:
        """Names of the models of which parts are on their way."""
        return tuple(sorted(name for name, resident in list(self._residents.items()) if resident.events))

    @property
    def bytes_per_s(self) -> float:
        """How fast weights come: first as a plain copy did, then as the loads of whole models do."""
        return 1 / self._s_per_byte

    def whole_s(self, model: HostModel) -> float:
        """Estimated seconds that all of the model's weights take to come."""
        return model.skeleton.size_bytes * self._s_per_byte

    def missing_s(self, model: HostModel, *, now_s: float) -> float:
        """Estimated seconds until the model would be wholly there, were it brought now."""
        resident = self._residents.get(model.name)
        whole_s = self.whole_s(model)
        if resident is None:
            return whole_s
        return max(0.0, resident.began_s + whole_s - now_s) if resident.events else 0.0

    def fit_together(self, models: Iterable[HostModel]) -> bool:
        """Whether all of them can stay in the arena beside the KV that is there."""
        needed = sum(model.skeleton.slabs(self._slab_bytes) for model in models)
        return needed <= self._arena.slabs - self._arena.kv_slabs

    def holds(self, model: HostModel) -> bool:
        """Whether the model is there or arriving."""
        return model.name in self._residents

    def bring(self, model: HostModel, now_s: float, *, keep: str | None = None) -> bool:
        """See to it that the model is there or arriving, evicting others; False if there is no room now, or its host
        copy is away. With `keep`, the model that runs meanwhile, it may borrow slabs of KV; without, it is to run now
        and takes the reserve.
        """
        self._used_s[model.name] = now_s
        if model.name in self._residents:
            return True
        host = model.host
        if host is None:
            return False
        choice = choose_run(self._facts(model, keep))
        if choice is None:
            return False
        for name in choice.evictions:
            self.evict(name)
        self._arena.take_run(model.name, choice.start, model.skeleton.slabs(self._slab_bytes))
        self._homes[model.name] = choice.start
        resident = Resident(model=model, buffers=self._part_buffers(model, choice.start), began_s=now_s)
        self._residents[model.name] = resident
        model.copies = [event for event in model.copies if not event.done()]
        resident.sent_s = time.monotonic()
        computed = mark(self._buffer.device)  # what ran on these slabs until now
        resident.events = [
            self._submit(host, resident, number, after=computed) for number in range(len(model.skeleton.parts))
        ]
        model.skeleton.bind(resident.buffers)
        model.skeleton.await_part = lambda part: self._await(resident, part)
        model.fresh = False
        self.brought_total += 1
        return True

    def settle(self) -> None:
        """Note what has arrived whole, and how long it took."""
        for resident in self._residents.values():
            if resident.events and all(event.done() and event.error is None for event in resident.events):
                self._learn_rate(resident)
                resident.events = []
                resident.tries = 0
                resident.model.skeleton.await_part = None

    def await_all(self, model: HostModel) -> None:
        """Wait for every part.

        Raises:
            TransferError: one failed.
        """
        Together(self._residents[model.name].events).wait()

    def try_again(self, model: HostModel) -> bool:
        """Send failed parts once more; False when they failed too often."""
        resident = self._residents[model.name]
        host = model.host
        resident.tries += 1
        if resident.tries > TRIES_MAX or host is None:
            return False
        for number, event in enumerate(resident.events):
            if event.done() and event.error is not None:
                resident.events[number] = self._submit(host, resident, number)
        return True

    def evict(self, name: str) -> None:
        """Forget a model's weights on the device; nothing happens when they are not there. Its slabs are free once
        no transfer writes to them.
        """
        resident = self._residents.pop(name, None)
        if resident is not None:
            resident.model.skeleton.await_part = None
            resident.model.skeleton.unbind()
            self._arena.free_run(name, Together(resident.events))

    def evict_idle_above(self, slab: int, *, keep: str | None) -> bool:
        """Evict the model that was used longest ago of those that lie above `slab`; False when there is none."""
        runs = self._arena.runs
        idle = [
            name
            for name, resident in self._residents.items()
            if name != keep and not _flying(resident) and runs[name].end > slab
        ]
        if not idle:
            return False
        self.evict(min(idle, key=lambda name: self._used_s[name]))
        return True

    def await_one(self) -> None:
        """Wait until a part that is on its way has arrived, if there is one."""
        flying = [event for resident in self._residents.values() for event in resident.events if not event.done()]
        time.sleep(POLL_S)
        while flying and not any(event.done() for event in flying):
            time.sleep(POLL_S)

    def _learn_rate(self, resident: Resident) -> None:
        """Let a whole load that went well correct the estimate."""
        size_bytes = resident.model.skeleton.size_bytes
        if size_bytes < RATE_LOAD_BYTES_MIN or resident.tries:
            return
        ends_s = [event.ended_s for event in resident.events if isinstance(event, TimedEvent)]
        took_s = max((end_s for end_s in ends_s if end_s is not None), default=time.monotonic()) - resident.sent_s
        self._s_per_byte += RATE_SHARE * (took_s / size_bytes - self._s_per_byte)

    def _await(self, resident: Resident, part: int) -> None:
        if resident.events:
            resident.events[part].wait()

    def _submit(self, host: torch.Tensor, resident: Resident, number: int, *, after: Event = PASSED) -> Event:
        source = resident.model.skeleton.parts[number].of(host)
        event = self._stream.submit([Copy(source=source, target=resident.buffers[number])], [after])
        resident.model.copies.append(event)
        return event

    def _part_buffers(self, model: HostModel, start: int) -> tuple[torch.Tensor, ...]:
        buffers = []
        for part in model.skeleton.parts:
            first = start * self._slab_bytes
            buffers.append(self._buffer[first : first + part.size_bytes])
            start += -(-part.size_bytes // self._slab_bytes)
        return tuple(buffers)

    def _facts(self, model: HostModel, keep: str | None) -> ResidencyFacts:
        """Home counts only while nobody else lives there: two models with one home would drive each other out."""
        slabs = model.skeleton.slabs(self._slab_bytes)
        home = self._homes.get(model.name, self._arena.slabs)
        limit = self._arena.slabs if keep is not None else self._arena.weights_slabs
        runs = self._arena.runs.values()
        taken = home + slabs > limit or any(run.start < home + slabs and home < run.end for run in runs)
        residents = tuple(
            ResidentModel(
                model=name,
                start=run.start,
                count=run.count,
                used_s=self._used_s[name],
                pinned=name == keep or _flying(self._residents[name]),
            )
            for name, run in self._arena.runs.items()
        )
        return ResidencyFacts(
            model=model.name,
            slabs_needed=slabs,
            home=None if taken else home,
            slabs=limit,
            residents=residents,
            blocked=self._arena.blocked,
            weights_slabs=self._arena.weights_slabs,
        )


def _flying(resident: Resident) -> bool:
    return any(not event.done() for event in resident.events)


def measured_rate(buffer: torch.Tensor) -> float:
    """Bytes per second of a plain copy into `buffer`, whose content is lost, from host memory such as models have:
    written before, and pinned where CUDA allows it. The best of three; the first one takes the pages of `buffer`.
    """
    target = buffer[:RATE_SAMPLE_BYTES]
    source = pinned(torch.ones(target.shape, dtype=torch.uint8), buffer.device)
    times_s = []
    for _ in range(3):
        began_s = time.perf_counter()
        target.copy_(source)
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)
        times_s.append(time.perf_counter() - began_s)
    unpinned(source, buffer.device)
    return source.nbytes / min(times_s)
