"""Which slots are a pool, and which pooled endpoint stands on which of them: from the plan's pools to places.

A slot is in the pool while it holds pooled instances; all its GPUs then belong to the pool. An endpoint has one pooled
instance in a region, and its slot switches between the models it holds (Aegaeon). What stands somewhere stays there, so
that host copies of weights are used again; who leaves is drained only when its replacement is ready.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from controlplane.policies.facts import Endpoint, EndpointGpu, RegionGpu
from controlplane.policies.slots.facts import InstanceChange, SlotAdd, SlotRoom, Unplaced


@dataclass(frozen=True, kw_only=True)
class PooledInstance:
    """An endpoint's share of a pool slot."""

    instance_id: str
    endpoint: Endpoint
    gpu_type: str
    node_id: str
    slot: int
    draining: bool
    ready: bool


@dataclass(frozen=True, kw_only=True)
class PoolSlotFacts:
    """The plan's pools and the fleet now.

    Attributes:
        pool_gpus: GPUs that the plan gives to the pool of a region and GPU type.
        occupancy: endpoints that the plan pools, with the share of one GPU each takes there.
        slots: all slots; one in the pool has no free GPU.
        instances: pooled instances, draining ones included.
        served: endpoints that need no pooled instance where the plan does not pool them: they have a ready dedicated
            one, or shall have nothing at all.
    """

    pool_gpus: Mapping[RegionGpu, int]
    occupancy: Mapping[EndpointGpu, float]
    slots: tuple[SlotRoom, ...]
    instances: tuple[PooledInstance, ...]
    served: frozenset[Endpoint]


@dataclass(frozen=True, kw_only=True)
class PoolSlotDecision:
    """What to add (with no GPU of its own), take back and drain, and what found no slot."""

    adds: tuple[SlotAdd, ...]
    revives: tuple[InstanceChange, ...]
    drains: tuple[InstanceChange, ...]
    unplaced: tuple[Unplaced, ...]


@dataclass(kw_only=True)
class _PoolSlot:
    """A slot of the pool while it is being filled."""

    room: SlotRoom
    occupied: float = 0.0

    def takes(self, share: float) -> bool:
        return not self.occupied or self.occupied + share <= self.room.gpus

    @property
    def fullness(self) -> tuple[float, str, int]:
        return self.occupied / self.room.gpus, self.room.node_id, self.room.slot


def choose_pool_slots(facts: PoolSlotFacts, now_s: float, *, stale_s: float) -> PoolSlotDecision:
    """Size the pools and give every pooled endpoint a slot.

    Args:
        facts: the plan's pools and the fleet. Their order does not matter.
        now_s: Unix time; ages are in the facts, so it changes nothing.
        stale_s: a node silent for longer gets nothing new.
    """
    adds: list[SlotAdd] = []
    revives: list[InstanceChange] = []
    unplaced: list[Unplaced] = []
    kept: set[str] = set()
    for place in sorted({*facts.pool_gpus, *(_place_of(key) for key in facts.occupancy)}):
        slots = _sized(facts, place, stale_s)
        for key in _largest_first(facts, place):
            endpoint = Endpoint(model=key.model, region=key.region)
            present = _standing(facts, key, slots)
            if present is not None:
                kept.add(present.instance_id)
                if present.draining:
                    revives.append(InstanceChange(instance_id=present.instance_id, reason="the plan pools it again"))
                slot = slots[present.node_id, present.slot]
            else:
                if not slots:
                    reason = f"no free slot of {key.gpu_type} in {key.region} for the pool"
                    unplaced.append(Unplaced(endpoint=endpoint, gpu_type=key.gpu_type, count=1, reason=reason))
                    continue
                slot = min(slots.values(), key=lambda each: each.fullness)
                adds.append(_add(endpoint, slot.room))
            slot.occupied += facts.occupancy[key]
    return PoolSlotDecision(
        adds=tuple(adds), revives=tuple(revives), drains=tuple(_drains(facts, kept)), unplaced=tuple(unplaced)
    )


def _sized(facts: PoolSlotFacts, place: RegionGpu, stale_s: float) -> dict[tuple[str, int], _PoolSlot]:
    """The slots that make up a pool of the planned size: those that are one already, the fullest first, then free
    ones. A pool is never smaller than one slot where anything is pooled.
    """
    usable = [
        slot
        for slot in facts.slots
        if (slot.region, slot.gpu_type) == (place.region, place.gpu_type) and slot.accepting and slot.age_s <= stale_s
    ]
    running = [each for each in facts.instances if not each.draining]
    held = {(each.node_id, each.slot) for each in facts.instances}

    def rank(slot: SlotRoom) -> tuple[int, float, str, int]:
        mine = [each for each in running if (each.node_id, each.slot) == (slot.node_id, slot.slot)]
        keys = (_key_of(each) for each in mine)
        return -len(mine), -sum(facts.occupancy.get(key, 0.0) for key in keys), slot.node_id, slot.slot

    pools = sorted((slot for slot in usable if (slot.node_id, slot.slot) in held), key=rank)
    free = sorted(
        (slot for slot in usable if slot.gpus_free == slot.gpus and (slot.node_id, slot.slot) not in held),
        key=lambda slot: (slot.node_id, slot.slot),
    )
    wanted = max(1, facts.pool_gpus.get(place, 0)) if any(_place_of(key) == place for key in facts.occupancy) else 0
    chosen: dict[tuple[str, int], _PoolSlot] = {}
    for slot in [*pools, *free]:
        if sum(each.room.gpus for each in chosen.values()) >= wanted:
            break
        chosen[slot.node_id, slot.slot] = _PoolSlot(room=slot)
    return chosen


def _largest_first(facts: PoolSlotFacts, place: RegionGpu) -> list[EndpointGpu]:
    """First who has a place already, so that the rest fills up around them; then by falling occupancy."""
    standing = {_key_of(each) for each in facts.instances}
    keys = [key for key in facts.occupancy if _place_of(key) == place]
    return sorted(keys, key=lambda key: (key not in standing, -facts.occupancy[key], key))


def _standing(
    facts: PoolSlotFacts, key: EndpointGpu, slots: Mapping[tuple[str, int], _PoolSlot]
) -> PooledInstance | None:
    """The endpoint's pooled instance on one of these slots that has room for it: a running one rather than a draining
    one, a ready one rather than a starting one. Where all slots are full it stays where it is.
    """
    mine = [each for each in facts.instances if _key_of(each) == key and (each.node_id, each.slot) in slots]
    mine.sort(key=lambda each: (each.draining, not each.ready, each.instance_id))
    share = facts.occupancy[key]
    roomy = [each for each in mine if slots[each.node_id, each.slot].takes(share)]
    if roomy or any(slot.takes(share) for slot in slots.values()):
        return roomy[0] if roomy else None
    return mine[0] if mine else None


def _drains(facts: PoolSlotFacts, kept: set[str]) -> Iterable[InstanceChange]:
    """Who need not stay: once its replacement is ready, or at once where it is not ready itself."""
    pooled = {Endpoint(model=key.model, region=key.region) for key in facts.occupancy}
    placed = [each for each in facts.instances if each.instance_id in kept]
    kept_endpoints = {each.endpoint for each in placed}
    ready = {each.endpoint for each in placed if each.ready and not each.draining}
    for each in sorted(facts.instances, key=lambda each: each.instance_id):
        if each.instance_id in kept or each.draining:
            continue
        if each.endpoint in pooled:
            replaced = each.endpoint in (ready if each.ready else kept_endpoints)
            reason = "the plan keeps it elsewhere"
        else:
            replaced = each.endpoint in facts.served or not each.ready
            reason = "the plan no longer pools it"
        if replaced:
            yield InstanceChange(instance_id=each.instance_id, reason=reason)


def _add(endpoint: Endpoint, room: SlotRoom) -> SlotAdd:
    return SlotAdd(
        endpoint=endpoint,
        gpu_type=room.gpu_type,
        node_id=room.node_id,
        slot=room.slot,
        gpus=0,
        reason="the plan pools it",
    )


def _key_of(each: PooledInstance) -> EndpointGpu:
    return EndpointGpu(model=each.endpoint.model, region=each.endpoint.region, gpu_type=each.gpu_type)


def _place_of(key: EndpointGpu) -> RegionGpu:
    return RegionGpu(region=key.region, gpu_type=key.gpu_type)
