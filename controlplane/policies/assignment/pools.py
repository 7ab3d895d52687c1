"""Which slots make up a plan's pools, and the slot of each pooled endpoint.

A slot belongs to the pool while it holds pooled instances; all its GPUs then belong to the pool. An endpoint has one
pooled instance in a region, and its slot switches between the models it holds (Aegaeon). A worker runs each model on
all of its GPUs, so a place has a pool for each size of workers, on slots of that size alone. Pooled instances keep
their slots, so that host copies of weights are reused; an instance that moves is drained only when its replacement is
ready.

A pool grows by slots that are in it already, then by free slots, then by slots that hold only instances of endpoints
that are to be pooled: those serve until the pooled instances are ready. Then come slots of donated instances, which are
stopped, those of models that have most of them first; and last those of leased ones, which get notice first. A pool
takes slots whole, see `pool_sizes`. Where the last endpoint on a slot that leaves the pool is to have instances of its
own, its pooled instance gets the GPUs of the slot.

A pool that is the reserve of its region has an instance of every endpoint that it holds on each of its slots, beside
the endpoints' own instances, which scaling goes on to scale. Of a slot that it leaves an instance that the plan wants
gets the GPUs at once. If there is none, and instances may be lent out, another one gets them once the others are gone,
and is lent out.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from controlplane.policies.assignment.facts import InstanceChange, PlacedInstance, SlotAdd, SlotRef, SlotRoom, Unplaced
from controlplane.policies.assignment.pool_sizes import Holds, Rank, whole_slots
from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, PoolKey
from controlplane.policies.fit import ModelSize, fits, why_unfit


@dataclass(frozen=True, kw_only=True)
class PoolSlotFacts:
    """The plan's pools and the fleet now.

    Attributes:
        pool_gpus: GPUs that the plan gives to each pool.
        occupancy: endpoints that the plan pools, with the share of one GPU each takes there.
        held: endpoints of pools that are reserves.
        leaving: of these, the ones that are to have no instance of their own.
        lends: whether instances may be lent out.
        slots: all slots.
        instances: pooled instances, draining ones included.
        served: endpoints that need no pooled instance where the plan does not pool them: they have ready dedicated
            instances, or are to have none.
        dedicated: instances with GPUs of their own, draining and donated ones included.
        missing: dedicated instances that are wanted and do not exist yet, by endpoint and GPU type.
        sizes: sizes of models' weights; a missing model fits on every slot.
        gpus: that an instance of each model takes, which are those of a worker of its pool; 1 where missing.
    """

    pool_gpus: Mapping[PoolKey, int]
    occupancy: Mapping[EndpointGpu, float]
    slots: tuple[SlotRoom, ...]
    instances: tuple[PlacedInstance, ...]
    served: frozenset[Endpoint]
    dedicated: tuple[PlacedInstance, ...] = ()
    missing: Mapping[EndpointGpu, int] = field(default_factory=dict)
    held: frozenset[EndpointGpu] = frozenset()
    leaving: frozenset[EndpointGpu] = frozenset()
    lends: bool = True
    sizes: Mapping[str, ModelSize] = field(default_factory=dict)
    gpus: Mapping[ModelGpu, int] = field(default_factory=dict)

    def pool(self, key: EndpointGpu) -> PoolKey:
        """The pool that an endpoint is to be in."""
        return key.pool(self.gpus.get(key.pair, 1))


@dataclass(frozen=True, kw_only=True)
class PoolSlotDecision:
    """Changes of pooled instances.

    Attributes:
        adds: instances to start, with no GPU of their own.
        revives: draining instances that are wanted again.
        drains: instances to be stopped once they are empty.
        dedicates: instances that get the GPUs of their slot and are no longer pooled.
        donates: those of them that are lent out, since the plan wants no more of their own.
        unplaced: pooled endpoints that found no slot.
        slots: all slots of the pool: those it has, those it leaves and those it waits for.
        ready: endpoints that the pool serves now: their dedicated instances may go.
        stranded: endpoints whose pooled instances are all stuck: they need a dedicated instance as fallback.
    """

    adds: tuple[SlotAdd, ...] = ()
    revives: tuple[InstanceChange, ...] = ()
    drains: tuple[InstanceChange, ...] = ()
    dedicates: tuple[InstanceChange, ...] = ()
    donates: tuple[InstanceChange, ...] = ()
    unplaced: tuple[Unplaced, ...] = ()
    slots: frozenset[SlotRef] = frozenset()
    ready: frozenset[Endpoint] = frozenset()
    stranded: frozenset[EndpointGpu] = frozenset()


@dataclass(kw_only=True)
class _PoolSlot:
    """A slot of the pool while it is being filled. `leased`: an instance there is still leased, so nothing starts.
    `weights`: the models whose weights it has, which are the bases of adapters.
    """

    room: SlotRoom
    leased: bool = False
    occupied: float = 0.0
    weights: set[str] = field(default_factory=set)

    def takes(self, share: float) -> bool:
        return not self.occupied or self.occupied + share <= self.room.gpus

    def fullness(self, share: float) -> float:
        return (self.occupied + share) / self.room.gpus


def choose_pool_slots(facts: PoolSlotFacts, now_s: float, *, stale_s: float) -> PoolSlotDecision:
    """Size the pools and give every pooled endpoint a slot.

    Args:
        facts: the plan's pools and the fleet. Their order does not matter.
        now_s: Unix time; ages are in the facts, so it changes nothing.
        stale_s: no instance starts on a node that is silent for longer.
    """
    filling = _Filling(facts, stale_s)
    for pool in sorted({*facts.pool_gpus, *(facts.pool(key) for key in (*facts.occupancy, *facts.held))}):
        filling.fill(pool)
    dedicates, donates = filling.dedicates()
    staying = {change.instance_id for change in dedicates}
    return PoolSlotDecision(
        adds=tuple(filling.adds),
        revives=tuple(filling.revives),
        drains=tuple(change for change in filling.drains() if change.instance_id not in staying),
        dedicates=tuple(dedicates),
        donates=tuple(donates),
        unplaced=tuple(filling.unplaced),
        slots=frozenset({*filling.chosen, *(each.ref for each in facts.instances if each.instance_id not in staying)}),
        ready=frozenset(each.endpoint for each in filling.pooled_kept() if each.ready and not each.draining),
        stranded=frozenset(each.key for each in filling.pooled_kept() if each.stuck),
    )


class _Filling:
    """The pools while they are filled. `kept`: pooled instances that stay, by id. `chosen`: slots of the pools."""

    def __init__(self, facts: PoolSlotFacts, stale_s: float) -> None:
        self.adds: list[SlotAdd] = []
        self.revives: list[InstanceChange] = []
        self.unplaced: list[Unplaced] = []
        self.kept: dict[str, PlacedInstance] = {}
        self.chosen: dict[SlotRef, _PoolSlot] = {}
        self._facts = facts
        self._usable: dict[PoolKey, list[SlotRoom]] = defaultdict(list)
        for slot in facts.slots:
            if slot.accepting and slot.age_s <= stale_s and slot.hosts == 1:
                self._usable[slot.pool].append(slot)
        self._pooled_on: dict[SlotRef, list[PlacedInstance]] = defaultdict(list)
        self._pooled_of: dict[EndpointGpu, list[PlacedInstance]] = defaultdict(list)
        for each in sorted(facts.instances, key=lambda each: each.instance_id):
            self._pooled_on[each.ref].append(each)
            self._pooled_of[each.key].append(each)
        self._dedicated_on: dict[SlotRef, list[PlacedInstance]] = defaultdict(list)
        for placed in facts.dedicated:
            self._dedicated_on[placed.ref].append(placed)
        self._lent = Counter(each.key for each in facts.dedicated if each.donation)
        self._keys: dict[PoolKey, list[EndpointGpu]] = defaultdict(list)
        for key in sorted({*facts.occupancy, *facts.held}):
            self._keys[facts.pool(key)].append(key)

    def fill(self, pool: PoolKey) -> None:
        """Choose the slots of one pool and a slot for each of its endpoints: first for endpoints that have one already,
        then by falling occupancy. Endpoints that a reserve holds are on all of them.
        """
        slots = {slot.room.ref: slot for slot in self._sized(pool)}
        self.chosen |= slots
        open_slots = {at: slot for at, slot in slots.items() if not slot.leased}
        self._hold(pool, open_slots.values())
        occupancy = self._facts.occupancy
        pooled = [key for key in self._keys[pool] if key in occupancy]
        for key in sorted(pooled, key=lambda key: (key not in self._pooled_of, -occupancy[key], key)):
            fitting = {at: slot for at, slot in open_slots.items() if self._holds_weights(key, slot.room)}
            slot = self._keep(key, fitting) or self._start(key, fitting)
            if slot is not None:
                slot.occupied += occupancy[key]
                slot.weights.add(self._weights_of(key))
            else:
                unfit = self._why_unfit(key, open_slots.values())
                size = f" with {pool.worker_gpus} GPUs" if pool.worker_gpus > 1 else ""
                what = f"slot of {pool.gpu_type}{size} in {pool.region} for the pool"
                reason = unfit or (f"no {what} but leased ones" if slots else f"no free {what}")
                self.unplaced.append(Unplaced(endpoint=key.endpoint, gpu_type=key.gpu_type, count=1, reason=reason))

    def pooled_kept(self) -> Iterator[PlacedInstance]:
        """Instances that stay, of endpoints that have no others."""
        return (each for each in self.kept.values() if each.key in self._facts.occupancy)

    def _hold(self, pool: PoolKey, slots: Iterable[_PoolSlot]) -> None:
        """Keep or start an instance of each endpoint that a reserve holds on each of its slots."""
        for slot in slots:
            here: dict[EndpointGpu, PlacedInstance] = {}
            for each in self._pooled_on[slot.room.ref]:
                if each.key not in here or here[each.key].draining:
                    here[each.key] = each
            for key in self._keys[pool]:
                if key not in self._facts.held or not self._holds_weights(key, slot.room):
                    continue
                if (mine := here.get(key)) is None:
                    self.adds.append(_add_on(slot, key.endpoint))
                    continue
                self.kept[mine.instance_id] = mine
                if mine.draining:
                    self.revives.append(
                        InstanceChange(instance_id=mine.instance_id, reason="the reserve holds it again")
                    )

    def _weights_of(self, key: EndpointGpu) -> str:
        """The model whose weights an endpoint needs."""
        size = self._facts.sizes.get(key.model)
        return key.model if size is None or size.adapter is None else size.adapter.base

    def _holds_weights(self, key: EndpointGpu, room: SlotRoom) -> bool:
        size = self._facts.sizes.get(key.model)
        return size is None or fits(size, room.weights)

    def _why_unfit(self, key: EndpointGpu, slots: Iterable[_PoolSlot]) -> str | None:
        size = self._facts.sizes.get(key.model)
        rooms = [(slot.room.gpu_type, slot.room.weights) for slot in slots]
        return None if size is None else why_unfit(key.model, size, rooms, key.region)

    def dedicates(self) -> tuple[list[InstanceChange], list[InstanceChange]]:
        """Pooled instances that get the GPUs of a slot that leaves the pool, and those of them that are lent out: these
        once the others there are gone and their endpoint has another one that is ready, or is to have none.
        """
        pooled = {key.endpoint for key in self._facts.occupancy}
        ready = self._ready() | {each.endpoint for each in self._facts.dedicated if each.serving and each.ready}
        missing, dedicated, donated = Counter(self._facts.missing), list[InstanceChange](), list[InstanceChange]()
        for ref in self._left():
            here = self._pooled_on[ref]
            chosen = next((each for each in here if each.instance_id in self._heirs), None)
            if chosen is None:
                running = [each for each in here if not each.draining]
                chosen = running[0] if len(running) == 1 else None
                if chosen is None or not chosen.ready or chosen.endpoint in pooled or chosen.key in self._facts.held:
                    continue
                if missing[chosen.key] <= 0:
                    continue
                missing[chosen.key] -= 1
            elif not self._heirs[chosen.instance_id]:
                if len(here) > 1 or not (chosen.endpoint in ready or self._ends(chosen)):
                    continue
                reason = "the plan wants no more of its own"
                donated.append(InstanceChange(instance_id=chosen.instance_id, reason=reason))
            dedicated.append(InstanceChange(instance_id=chosen.instance_id, reason="the slot is its own now"))
        return dedicated, donated

    def _ends(self, each: PlacedInstance) -> bool:
        """Whether an endpoint needs no more instance of its reserve: its own serve, or neither is to have any."""
        own = any(one.serving and one.ready for one in self._facts.dedicated if one.endpoint == each.endpoint)
        reserve = self._facts.pool_gpus.get(self._facts.pool(each.key))
        return each.endpoint in self._facts.served and (own or not reserve)

    def _ready(self) -> set[Endpoint]:
        """Endpoints with an instance that stays pooled and serves."""
        return {each.endpoint for each in self.kept.values() if each.ready and not each.draining}

    def _left(self) -> list[SlotRef]:
        """Slots that leave the pool, with nothing on them but pooled instances."""
        left = self._fresh & self._pooled_on.keys() - self.chosen.keys()
        return sorted(ref for ref in left if not self._dedicated_on[ref])

    @cached_property
    def _fresh(self) -> frozenset[SlotRef]:
        """Slots that are heard of, where instances may start."""
        return frozenset(slot.ref for slots in self._usable.values() for slot in slots)

    def drains(self) -> Iterator[InstanceChange]:
        """Instances that are not needed: once their replacement is ready, or at once where they are not ready. Where
        all instances of an endpoint are stuck, all stay: their nodes retry.
        """
        pooled = {key.endpoint for key in self._facts.occupancy}
        kept_endpoints = {each.endpoint for each in self.kept.values()}
        ready = self._ready() | {each.endpoint for each in self._facts.instances if each.instance_id in self._heirs}
        for each in sorted(self._facts.instances, key=lambda each: each.instance_id):
            if each.instance_id in self.kept or each.instance_id in self._heirs or each.draining:
                continue
            if each.key in self._facts.held:
                replaced = each.endpoint in ready or self._ends(each) or not each.ready
                reason = "the reserve leaves its slot"
            elif each.endpoint in pooled:
                replaced = each.endpoint in (ready if each.ready or each.stuck else kept_endpoints)
                reason = "the plan keeps it elsewhere"
            else:
                replaced = each.endpoint in self._facts.served or not each.ready
                reason = "the plan no longer pools it"
            if replaced:
                yield InstanceChange(instance_id=each.instance_id, reason=reason)

    @cached_property
    def _heirs(self) -> Mapping[str, bool]:
        """Of each slot that a reserve leaves, the instance that gets its GPUs, and whether the plan wants it: of an
        endpoint that misses one, else of that with the fewest lent out, so that it serves again in a minute.
        """
        lent, missing, heirs = Counter(self._lent), Counter(self._facts.missing), dict[str, bool]()
        back = [each for each in self._facts.dedicated if each.donation and not (each.leased or each.stuck)]
        missing.subtract(each.key for each in back if each.ref in self._fresh)
        for ref in self._left():
            here = [each for each in self._pooled_on[ref] if each.key in self._facts.held]
            open_to = [each for each in here if each.ready and not each.draining]
            open_to = [each for each in open_to if self._facts.lends or missing[each.key] > 0]
            if open_to:
                heir = min(open_to, key=lambda each: (missing[each.key] <= 0, lent[each.key], each.key))
                heirs[heir.instance_id] = missing[heir.key] > 0
                missing[heir.key] -= 1
                lent[heir.key] += 1
        return heirs

    def _sized(self, pool: PoolKey) -> list[_PoolSlot]:
        """The slots that make up a pool of the planned size; at least one slot where anything is pooled."""
        wanted = self._facts.pool_gpus.get(pool, 0) if self._keys[pool] else 0
        if any(key in self._facts.occupancy for key in self._keys[pool]):
            wanted = max(1, wanted)
        ranked = sorted(
            ((rank, slot) for slot in self._usable[pool] if (rank := self._rank(slot)) is not None),
            key=lambda each: each[0],
        )
        return [_PoolSlot(room=slot, leased=self._is_leased(slot)) for slot in whole_slots(ranked, wanted)]

    def _rank(self, slot: SlotRoom) -> Rank | None:
        """How well a slot suits the pool, whatever its size, the smaller the better; None: it must not join."""
        going = {*self._facts.occupancy, *self._facts.leaving}
        if any(each.serving and each.key not in going for each in self._dedicated_on[slot.ref]):
            return None
        if slot.ref in self._pooled_on:
            running = [each for each in self._pooled_on[slot.ref] if not each.draining]
            occupied = sum(self._facts.occupancy.get(each.key, 0.0) for each in running)
            return Holds.POOLED, -len(running), -occupied, 0, slot.ref
        dedicated = self._dedicated_on[slot.ref]
        if not dedicated:
            return (Holds.NOTHING, -slot.workers, 0.0, 0, slot.ref) if slot.gpus_free == slot.gpus else None
        if self._is_leased(slot):
            kind = Holds.LEASED
        elif any(each.donation for each in dedicated):
            kind = Holds.DONATED
        else:
            kind = Holds.LEAVING
        going = {*self._facts.occupancy, *self._facts.leaving}
        leaves = all(each.donation is not None or each.key in going for each in dedicated)
        lent = 0 if kind is Holds.LEASED else max(self._lent[each.key] for each in dedicated)
        return (kind, -slot.workers, float(len(dedicated)), -lent, slot.ref) if leaves else None

    def _is_leased(self, slot: SlotRoom) -> bool:
        return any(each.leased for each in self._dedicated_on[slot.ref])

    def _keep(self, key: EndpointGpu, slots: Mapping[SlotRef, _PoolSlot]) -> _PoolSlot | None:
        """The slot that the endpoint keeps: one of the pool with capacity for it, or its present one if all are full.
        Running instances go before draining ones, ready ones before starting ones. A stuck instance is retried on one
        other slot only: where that fails too, their nodes retry, and a dedicated instance is the fallback.
        """
        mine = [each for each in self._pooled_of[key] if each.ref in slots]
        mine.sort(key=lambda each: (each.stuck, each.draining, not each.ready, each.instance_id))
        if mine and mine[0].stuck and len(mine) == 1 and len(slots) > 1:
            return None
        share = self._facts.occupancy[key]
        with_capacity = [each for each in mine if slots[each.ref].takes(share)]
        if not with_capacity and any(slot.takes(share) for slot in slots.values()):
            return None
        chosen = next(iter(with_capacity or mine), None)
        if chosen is None:
            return None
        self.kept[chosen.instance_id] = chosen
        if chosen.draining:
            self.revives.append(InstanceChange(instance_id=chosen.instance_id, reason="the plan pools it again"))
        return slots[chosen.ref]

    def _start(self, key: EndpointGpu, slots: Mapping[SlotRef, _PoolSlot]) -> _PoolSlot | None:
        """The slot that is emptiest with the endpoint and does not hold it yet, if possible on a node where it did not
        fail, and with its base or another adapter of that; among equals, one with a dedicated instance of it, since its
        weights are there.
        """
        share = self._facts.occupancy[key]
        taken = {each.ref for each in self._pooled_of[key]}
        failed_on = {each.node_id for each in self._pooled_of[key] if each.stuck}
        found = [slot for at, slot in slots.items() if at not in taken]
        if not found:
            return None

        def rank(slot: _PoolSlot) -> tuple[bool, bool, float, bool, SlotRef]:
            here = any(each.endpoint == key.endpoint for each in self._dedicated_on[slot.room.ref])
            beside = self._weights_of(key) in slot.weights and slot.takes(share)
            return slot.room.node_id in failed_on, not beside, slot.fullness(share), not here, slot.room.ref

        slot = min(found, key=rank)
        self.adds.append(_add_on(slot, key.endpoint))
        return slot


def _add_on(slot: _PoolSlot, endpoint: Endpoint) -> SlotAdd:
    """A pooled instance to start."""
    room = slot.room
    return SlotAdd(endpoint=endpoint, gpu_type=room.gpu_type, node_id=room.node_id, slot=room.slot, gpus=0)
