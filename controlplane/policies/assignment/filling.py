"""The fleet's slots and instances while a decision fills them: every taking is noted, so nothing is taken twice."""

import heapq
from collections import Counter
from dataclasses import replace

from controlplane.policies.assignment.facts import PlacedInstance, SlotAdd, SlotFacts, SlotRoom, SlotSettings
from controlplane.policies.facts import Endpoint
from controlplane.policies.fit import fits, why_unfit
from controlplane.policies.scaling.facts import KindStep, ScaleStep

Place = tuple[str, int]
_Room = tuple[int, int, int, str, int]
"""A slot in a heap, the best first: how dear it is to others, minus the free GPUs of its node and of itself, its place.
"""


class Filling:
    """Slots that fill up."""

    def __init__(self, facts: SlotFacts, settings: SlotSettings) -> None:
        self._settings = settings
        self._gpus = {(profile.model, profile.gpu_type): gpus for profile, gpus in facts.gpus.items()}
        self._sizes = facts.sizes
        self._profiled: dict[str, list[str]] = {}
        for model, gpu_type in sorted(self._gpus):
            self._profiled.setdefault(model, []).append(gpu_type)
        self._slots = sorted(facts.slots, key=lambda slot: slot.place)
        alive = [slot for slot in self._slots if slot.accepting and slot.age_s <= settings.stale_s]
        self._alive = {slot.node_id for slot in alive}
        self._pooled = {slot.place for slot in self._slots if slot.pooled}
        self._open = {slot.place: slot for slot in alive if not slot.pooled}
        self._draining_nodes = {slot.node_id for slot in self._slots if not slot.accepting}
        self._free: dict[Place, int] = {}
        self._free_on: Counter[str] = Counter()
        for place, slot in self._open.items():
            self._free[place] = slot.gpus_free
            self._free_on[slot.node_id] += slot.gpus_free
        self._on_node: dict[str, list[SlotRoom]] = {}
        self._emptiest: dict[tuple[str, str], list[_Room]] = {}
        for slot in self._open.values():
            self._on_node.setdefault(slot.node_id, []).append(slot)
            self._emptiest.setdefault((slot.region, slot.gpu_type), []).append(self._room(slot))
        for rooms in self._emptiest.values():
            heapq.heapify(rooms)
        self._promised: dict[Place, int] = {}
        self._changed: set[str] = set()
        instances = sorted(facts.instances, key=lambda each: each.instance_id)
        self._beside = Counter((each.endpoint, each.node_id) for each in instances if each.serving)
        self._stuck = {(each.endpoint, each.node_id) for each in instances if each.stuck}
        self._of_endpoint: dict[Endpoint, list[PlacedInstance]] = {}
        self._spot: dict[Place, list[PlacedInstance]] = {}
        for each in instances:
            self._of_endpoint.setdefault(each.endpoint, []).append(each)
            if each.spot is not None:
                self._spot.setdefault(each.place, []).append(each)
        self._spot_places: dict[str, list[Place]] = {}
        for place in sorted(self._spot):
            if place in self._open:
                self._spot_places.setdefault(self._open[place].region, []).append(place)

    def take_draining(self, step: ScaleStep) -> PlacedInstance | None:
        """The draining instance that has most left to do, if its node can be relied on."""
        found = [each for each in self._of(step) if each.draining and not each.stuck and self._is_open(each)]
        return self._taken(max(found, key=lambda each: (each.ready, each.remaining_tokens), default=None))

    def take_spot(self, step: ScaleStep) -> PlacedInstance | None:
        """A spot instance of the same model that nobody leases."""
        found = [each for each in self._spot_of(step) if each.spot and not each.spot.leased]
        return self._taken(min(found, key=_spot_rank, default=None))

    def await_spot(self, step: ScaleStep, *, noticed: bool) -> PlacedInstance | None:
        """A spot instance of the same model to be taken once its lease has ended, which has notice or not."""
        found = [
            each for each in self._spot_of(step) if each.spot and each.spot.leased and each.spot.noticed == noticed
        ]
        return self._taken(min(found, key=_spot_rank, default=None))

    def replace_spot(self, step: ScaleStep) -> SlotAdd | None:
        """The place of spot instances that nobody leases: of as few as possible, then of those lent out longest."""
        found = self._with_spot(step, leased=False)
        return self._placed(step, found[0], found[1]) if found else None

    def add(self, step: ScaleStep) -> SlotAdd | None:
        """Free GPUs, on the node with fewest instances of the endpoint; then where workers do not serve together, and
        where a pool could not grow anyway; then on the node with most free GPUs.
        """
        found = [slot for gpu_type in self._gpu_types(step) if (slot := self._best_free(step, gpu_type)) is not None]
        return self._placed(step, min(found, key=lambda slot: self._rank(step, slot)), ()) if found else None

    def wait_for_leases(self, step: ScaleStep) -> tuple[PlacedInstance, ...] | None:
        """Spot instances, leased ones among them, whose place will do once the leases have ended; none of them where
        those that others wait for leave room enough.
        """
        found = self._with_spot(step, leased=True)
        if found is None:
            return None
        slot, spare = found
        place, held = slot.place, sum(each.gpus for each in spare)
        missing = self._need(step, slot) - self._promised.get(place, 0) - held
        self._promised[place] = max(0, -missing)
        self._take(slot, max(0, missing))
        self._changed.update(each.instance_id for each in spare)
        return spare

    def let_go(self, step: ScaleStep) -> list[PlacedInstance]:
        """What does not come up, then what must leave its node anyway, then what is not ready yet, then what has least
        left to do.
        """
        found = [each for each in self._of(step) if each.serving and each.kind == step.kind]
        found.sort(key=lambda each: (not each.stuck, each.leaving is None, each.ready, each.remaining_tokens))
        chosen = found[: max(0, -step.delta)]
        self._changed.update(each.instance_id for each in chosen)
        return chosen

    def change_kind(self, step: KindStep) -> list[PlacedInstance]:
        """Instances that shall be of another kind, ready ones first; from here on they are."""
        mine = self._of_endpoint.get(step.endpoint, [])
        found = [each for each in mine if each.serving and each.kind == step.before]
        chosen = sorted(found, key=lambda each: not each.ready)[: step.count]
        self._of_endpoint[step.endpoint] = [replace(each, kind=step.after) if each in chosen else each for each in mine]
        return chosen

    def spot_left(self) -> list[PlacedInstance]:
        """Spot instances that no step took."""
        found = [each for held in self._spot.values() for each in held if each.instance_id not in self._changed]
        return sorted(found, key=lambda each: each.instance_id)

    def may_be_lent(self, instance: PlacedInstance) -> bool:
        """Whether an instance that is let go is worth keeping: it has its model, and its node may go on."""
        return instance.ready and self._is_open(instance) and self.why_not_lent(instance) is None

    def why_not_lent(self, instance: PlacedInstance) -> str | None:
        """Why an instance should not be lent out; None: it may be."""
        if not self._settings.spot_enabled:
            return "spot is disabled"
        if instance.node_id in self._draining_nodes:
            return f"node {instance.node_id} is being drained"
        if instance.place in self._pooled:
            return f"slot {instance.slot} of node {instance.node_id} goes to the pool"
        return f"it failed on node {instance.node_id}" if instance.stuck else None

    def why_not(self, step: ScaleStep) -> str:
        """Why a step found no slot, in plain words."""
        gpu_types = sorted(gpu_type for model, gpu_type in self._gpus if model == step.endpoint.model)
        if not gpu_types:
            return f"{step.endpoint.model} has no profile on any GPU type (`tidepool model profile` sets one)"
        if step.gpu_type is not None and step.gpu_type not in gpu_types:
            return f"{step.endpoint.model} has no profile on {step.gpu_type}"
        wanted = gpu_types if step.gpu_type is None else [step.gpu_type]
        names, region = " or ".join(wanted), step.endpoint.region
        here = [slot for slot in self._slots if slot.region == region and slot.gpu_type in wanted]
        if not here:
            return f"no {names} in {region}"
        size = self._sizes.get(step.endpoint.model)
        if size is not None:
            rooms = [(slot.gpu_type, slot.weights) for slot in here]
            if (unfit := why_unfit(step.endpoint.model, size, rooms, region)) is not None:
                return unfit
            here = [slot for slot in here if fits(size, slot.weights)]
        silent = len({slot.node_id for slot in here} - self._alive)
        free = sum(self._free.get(slot.place, 0) for slot in here)
        need = min(self._gpus[step.endpoint.model, gpu_type] for gpu_type in wanted)
        words = (
            f"GPUs full in {region}: {free} of {sum(slot.gpus for slot in here)} {names} free, needs {need} in one slot"
        )
        if all(slot.worker_gpus < need for slot in here):
            words += f", whose workers have {max(slot.worker_gpus for slot in here)} at most"
        return f"{words}; {silent} nodes silent or draining" if silent else words

    def _with_spot(self, step: ScaleStep, *, leased: bool) -> tuple[SlotRoom, tuple[PlacedInstance, ...]] | None:
        """The best slot where spot instances of other models can make room, and those instances."""
        found = []
        gpu_types = self._gpu_types(step)
        for place in self._spot_places.get(step.endpoint.region, ()):
            slot = self._open[place]
            if slot.gpu_type not in gpu_types:
                continue
            need = self._need(step, slot)
            if need > slot.worker_gpus or not self._holds_weights(step, slot):
                continue
            spare: tuple[PlacedInstance, ...] = ()
            promised = self._promised.get(place, 0) if leased else 0
            free = self._free[place] + promised
            for each in self._spot_on(place, step, leased=leased):
                if free < need or not (spare or promised):
                    spare, free = (*spare, each), free + each.gpus
            if (spare or promised) and free >= need:
                noticed = sum(not each.spot.noticed for each in spare if each.spot and each.spot.leased)
                found.append(((noticed, len(spare), self._rank(step, slot)), slot, spare))
        if not found:
            return None
        _, slot, spare = min(found, key=lambda each: each[0])
        return slot, spare

    def _spot_of(self, step: ScaleStep) -> list[PlacedInstance]:
        return [each for each in self._of(step) if each.spot and not each.stuck and self._is_open(each)]

    def _spot_on(self, place: Place, step: ScaleStep, *, leased: bool) -> list[PlacedInstance]:
        found = [
            each
            for each in self._spot.get(place, [])
            if each.endpoint != step.endpoint
            and each.instance_id not in self._changed
            and (leased or not (each.spot and each.spot.leased))
        ]
        return sorted(found, key=_spot_rank)

    def _placed(self, step: ScaleStep, slot: SlotRoom, spare: tuple[PlacedInstance, ...]) -> SlotAdd:
        """Take GPUs of a slot, with those of spot instances that make room."""
        gpus = self._need(step, slot)
        self._take(slot, gpus - sum(each.gpus for each in spare))
        self._changed.update(each.instance_id for each in spare)
        self._beside[step.endpoint, slot.node_id] += 1
        return SlotAdd(
            endpoint=step.endpoint,
            gpu_type=slot.gpu_type,
            node_id=slot.node_id,
            slot=slot.slot,
            gpus=gpus,
            reason=step.reason,
            kind=step.kind,
            replaces=tuple(each.instance_id for each in spare),
            succeeds=step.succeeds,
        )

    def _taken(self, instance: PlacedInstance | None) -> PlacedInstance | None:
        if instance is not None:
            self._changed.add(instance.instance_id)
            self._beside[instance.endpoint, instance.node_id] += 1
        return instance

    def _take(self, slot: SlotRoom, gpus: int) -> None:
        """Note GPUs that are gone; the node's slots are in the heap anew, as they are now."""
        self._free[slot.place] -= gpus
        self._free_on[slot.node_id] -= gpus
        for each in self._on_node[slot.node_id] if gpus else ():
            heapq.heappush(self._emptiest[each.region, each.gpu_type], self._room(each))

    def _room(self, slot: SlotRoom) -> _Room:
        free = self._free[slot.place]
        return (self._dearness(slot), -self._free_on[slot.node_id], -free, slot.node_id, slot.slot)

    def _dearness(self, slot: SlotRoom) -> int:
        """How much a pool would rather have the slot. Pools gain by workers that serve together, an instance of its own
        does not, and a pool takes a slot whole: so single workers come first, then slots that hold one already.
        """
        if slot.workers == 1:
            return 0
        return 1 if self._free[slot.place] < slot.gpus else 2

    def _best_free(self, step: ScaleStep, gpu_type: str) -> SlotRoom | None:
        """The slot of best rank that has the GPUs: as a rule the emptiest, which is at the top of the heap. Only those
        on nodes where the endpoint is already are looked at one by one.
        """
        rooms = self._emptiest.get((step.endpoint.region, gpu_type), [])
        seen: list[_Room] = []
        beside: list[SlotRoom] = []
        while rooms:
            room = heapq.heappop(rooms)
            slot = self._open[room[3:]]
            if room != self._room(slot) or not self._free[slot.place] or (seen and room == seen[-1]):
                continue  # as it was once
            seen.append(room)
            need = self._need(step, slot)
            if need > min(self._free[slot.place], slot.worker_gpus) or not self._holds_weights(step, slot):
                continue
            beside.append(slot)
            here = (step.endpoint, slot.node_id)
            if here not in self._stuck and not self._beside[here]:
                break
        for room in seen:
            heapq.heappush(rooms, room)
        return min(beside, key=lambda slot: self._rank(step, slot), default=None)

    def _gpu_types(self, step: ScaleStep) -> list[str]:
        """Those that the step may take and the model has a profile for."""
        if step.gpu_type is not None:
            return [step.gpu_type] if (step.endpoint.model, step.gpu_type) in self._gpus else []
        return self._profiled.get(step.endpoint.model, [])

    def _need(self, step: ScaleStep, slot: SlotRoom) -> int:
        return self._gpus[step.endpoint.model, slot.gpu_type]

    def _holds_weights(self, step: ScaleStep, slot: SlotRoom) -> bool:
        size = self._sizes.get(step.endpoint.model)
        return size is None or fits(size, slot.weights)

    def _rank(self, step: ScaleStep, slot: SlotRoom) -> tuple[bool, int, _Room]:
        """Not where the endpoint's instances do not come up, else spread."""
        here = (step.endpoint, slot.node_id)
        return (here in self._stuck, self._beside[here], self._room(slot))

    def _is_open(self, instance: PlacedInstance) -> bool:
        return instance.place in self._open

    def _of(self, step: ScaleStep) -> list[PlacedInstance]:
        return [
            each
            for each in self._of_endpoint.get(step.endpoint, [])
            if step.gpu_type in {None, each.gpu_type} and each.instance_id not in self._changed
        ]


def _spot_rank(instance: PlacedInstance) -> tuple[bool, bool, float, str]:
    """Free ones first, then those whose lease has notice; of each, those lent out longest."""
    assert instance.spot is not None, "the caller chose spot ones"
    return (instance.spot.leased, not instance.spot.noticed, -instance.spot.age_s, instance.instance_id)
