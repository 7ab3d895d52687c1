"""The fleet's free GPUs and instances while a decision assigns them; nothing is assigned twice."""

import heapq
from collections import Counter
from functools import cached_property

from msgspec.structs import replace

from controlplane.policies.assignment.facts import PlacedInstance, SlotAdd, SlotFacts, SlotRef, SlotRoom, SlotSettings
from controlplane.policies.facts import Endpoint
from controlplane.policies.fit import fits, why_not_over_hosts, why_unfit
from controlplane.policies.scaling.facts import KindStep, ScaleStep

_Room = tuple[int, int, int, int, str, int]
"""A slot in a heap, the best first: its worth to pools, its GPUs, minus the free ones of its node and its own, its
`SlotRef`.
"""


class Filling:
    """The slots and instances that are left for the next step."""

    def __init__(self, facts: SlotFacts, settings: SlotSettings) -> None:
        self._settings = settings
        self._gpus = {(profile.model, profile.gpu_type): gpus for profile, gpus in facts.gpus.items()}
        self._sizes = facts.sizes
        self._profiled: dict[str, list[str]] = {}
        for model, gpu_type in sorted(self._gpus):
            self._profiled.setdefault(model, []).append(gpu_type)
        self._slots = sorted(facts.slots, key=lambda slot: slot.ref)
        alive = [slot for slot in self._slots if slot.accepting and slot.age_s <= settings.stale_s]
        self._alive = {slot.node_id for slot in alive}
        self._pooled = {slot.ref for slot in self._slots if slot.pooled}
        self._open = {slot.ref: slot for slot in alive if not slot.pooled}
        self._draining = {slot.ref for slot in self._slots if not slot.accepting}
        self._free: dict[SlotRef, int] = {}
        self._free_on: Counter[str] = Counter()
        for ref, slot in self._open.items():
            self._free[ref] = slot.gpus_free
            self._free_on[slot.node_id] += slot.gpus_free
        self._on_node: dict[str, list[SlotRoom]] = {}
        for slot in self._open.values():
            self._on_node.setdefault(slot.node_id, []).append(slot)
        self._promised: dict[SlotRef, int] = {}
        self._changed: set[str] = set()
        instances = sorted(facts.instances, key=lambda each: each.instance_id)
        kept = {slot.ref for slot in alive}
        self._can_stay = {each.instance_id for each in instances if each.ref in kept}
        self._serving_on = Counter((each.endpoint, each.node_id) for each in instances if each.serving)
        self._stuck = {(each.endpoint, each.node_id) for each in instances if each.stuck}
        self._of_endpoint: dict[Endpoint, list[PlacedInstance]] = {}
        self._donated: dict[SlotRef, list[PlacedInstance]] = {}
        for each in instances:
            self._of_endpoint.setdefault(each.endpoint, []).append(each)
            if each.donation is not None:
                self._donated.setdefault(each.ref, []).append(each)
        self._donated_slots: dict[str, list[SlotRef]] = {}
        for ref in sorted(self._donated):
            if ref in self._open:
                self._donated_slots.setdefault(self._open[ref].region, []).append(ref)

    @cached_property
    def _emptiest(self) -> dict[tuple[str, str], list[_Room]]:
        """The slots of each region and GPU type, as heaps. Where nothing starts, nobody asks for them."""
        emptiest: dict[tuple[str, str], list[_Room]] = {}
        for slot in self._open.values():
            emptiest.setdefault((slot.region, slot.gpu_type), []).append(self._room(slot))
        for rooms in emptiest.values():
            heapq.heapify(rooms)
        return emptiest

    def can_stay(self, step: ScaleStep) -> bool:
        """Whether the instance that the step succeeds can stay: its slot is only meant for larger models."""
        return step.succeeds in self._can_stay

    def take_draining(self, step: ScaleStep) -> PlacedInstance | None:
        """The draining instance with the most tokens left, on a node that accepts instances."""
        found = [each for each in self._of(step) if each.draining and not each.stuck and self._is_open(each)]
        return self._taken(max(found, key=lambda each: (each.ready, each.remaining_tokens), default=None))

    def take_donated(self, step: ScaleStep) -> PlacedInstance | None:
        """A donated instance of the same model without a lease."""
        found = [each for each in self._donated_of(step) if not each.leased]
        return self._taken(min(found, key=_donation_rank, default=None))

    def await_donated(self, step: ScaleStep, *, noticed: bool) -> PlacedInstance | None:
        """A leased instance of the same model to be reclaimed once its lease has ended, which has notice or not."""
        found = [each for each in self._donated_of(step) if each.leased and each.noticed == noticed]
        return self._taken(min(found, key=_donation_rank, default=None))

    def replace_donated(self, step: ScaleStep) -> SlotAdd | None:
        """GPUs of donated instances without leases: of as few as possible, then of those donated longest ago."""
        found = self._with_donated(step, leased=False)
        return self._placed(step, found[0], found[1]) if found else None

    def add(self, step: ScaleStep) -> SlotAdd | None:
        """Free GPUs, on the node with fewest instances of the endpoint; then on the slot that pools need least (see
        `_worth`), then on the smallest, which leaves larger ones to models that need them, then on the node with most
        free GPUs.
        """
        found = [slot for gpu_type in self._gpu_types(step) if (slot := self._best_free(step, gpu_type)) is not None]
        return self._placed(step, min(found, key=lambda slot: self._rank(step, slot)), ()) if found else None

    def wait_for_leases(self, step: ScaleStep) -> tuple[PlacedInstance, ...] | None:
        """Donated instances, leased ones among them, whose GPUs suffice once the leases have ended; none of them where
        the GPUs that other steps wait for suffice.
        """
        found = self._with_donated(step, leased=True)
        if found is None:
            return None
        slot, spare = found
        ref, held = slot.ref, sum(each.gpus for each in spare)
        missing = self._need(step, slot) - self._promised.get(ref, 0) - held
        self._promised[ref] = max(0, -missing)
        self._take(slot, max(0, missing))
        self._changed.update(each.instance_id for each in spare)
        return spare

    def let_go(self, step: ScaleStep) -> list[PlacedInstance]:
        """Stuck instances, then those that leave their node anyway, then those not ready yet, then those with the
        fewest tokens left. One that serves stays until all that do not are gone, also where it leaves.
        """
        found = [each for each in self._of(step) if each.serving and each.kind == step.kind]
        serving = [each for each in found if each.ready and not each.stuck]
        last = max(serving, key=lambda each: (each.leaving is None, each.remaining_tokens), default=None)
        found.sort(
            key=lambda each: (not each.stuck, each.leaving is None or each is last, each.ready, each.remaining_tokens)
        )
        chosen = found[: max(0, -step.delta)]
        self._changed.update(each.instance_id for each in chosen)
        return chosen

    def change_kind(self, step: KindStep) -> list[PlacedInstance]:
        """Instances that become another kind, ready ones first."""
        mine = self._of_endpoint.get(step.endpoint, [])
        found = [each for each in mine if each.serving and each.kind == step.before]
        chosen = sorted(found, key=lambda each: not each.ready)[: step.count]
        self._of_endpoint[step.endpoint] = [replace(each, kind=step.after) if each in chosen else each for each in mine]
        return chosen

    def donated_left(self) -> list[PlacedInstance]:
        """Donated instances that no step took."""
        found = [each for held in self._donated.values() for each in held if each.instance_id not in self._changed]
        return sorted(found, key=lambda each: each.instance_id)

    def may_be_donated(self, instance: PlacedInstance) -> bool:
        """Whether an instance that is not needed can be donated: its model is loaded, and its node and slot stay."""
        return instance.ready and self._is_open(instance) and self.why_not_donated(instance) is None

    def why_not_donated(self, instance: PlacedInstance) -> str | None:
        """Why an instance must not be donated; None: it may be."""
        if not self._settings.donation_enabled:
            return "donations are disabled"
        if instance.ref in self._draining:
            return f"slot {instance.slot} of node {instance.node_id} is being drained"
        if instance.ref in self._pooled:
            return f"slot {instance.slot} of node {instance.node_id} goes to the pool"
        return f"it failed on node {instance.node_id}" if instance.stuck else None

    def why_not(self, step: ScaleStep) -> str:
        """Why a step found no slot, for operators."""
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
        reasons = {slot.ref: self._why_not_over_hosts(step, slot) for slot in here}
        if all(reasons.values()):
            return "; ".join(sorted({reason for reason in reasons.values() if reason is not None}))
        here = [slot for slot in here if reasons[slot.ref] is None]
        silent = len({slot.node_id for slot in here} - self._alive)
        free = sum(self._free.get(slot.ref, 0) for slot in here)
        need = min(self._need(step, slot) for slot in here)
        words = (
            f"GPUs full in {region}: {free} of {sum(slot.gpus for slot in here)} {names} free, needs {need} in one slot"
        )
        if all(slot.worker_gpus < need for slot in here):
            words += f", whose workers have {max(slot.worker_gpus for slot in here)} at most"
        return f"{words}; {silent} nodes silent or draining" if silent else words

    def _why_not_over_hosts(self, step: ScaleStep, slot: SlotRoom) -> str | None:
        sizes = {slot.gpus} if slot.hosts > 1 else set[int]()
        model, place = step.endpoint.model, f"{slot.gpu_type} in {slot.region}"
        return why_not_over_hosts(model, self._need(step, slot), self._sizes.get(model), sizes, place)

    def _with_donated(self, step: ScaleStep, *, leased: bool) -> tuple[SlotRoom, tuple[PlacedInstance, ...]] | None:
        """The best slot where donated instances of other models can be stopped for the step, and those instances."""
        found = []
        gpu_types = self._gpu_types(step)
        for ref in self._donated_slots.get(step.endpoint.region, ()):
            slot = self._open[ref]
            if slot.gpu_type not in gpu_types:
                continue
            need = self._need(step, slot)
            if not slot.suits(need) or not self._holds_weights(step, slot) or self._is_no_better(step, slot, need):
                continue
            spare: tuple[PlacedInstance, ...] = ()
            promised = self._promised.get(ref, 0) if leased else 0
            free = self._free[ref] + promised
            for each in self._donated_on(ref, step, leased=leased):
                if free < need or not (spare or promised):
                    spare, free = (*spare, each), free + each.gpus
            if (spare or promised) and free >= need:
                notices = sum(each.leased and not each.noticed for each in spare)
                found.append(((notices, len(spare), self._rank(step, slot)), slot, spare))
        if not found:
            return None
        _, slot, spare = min(found, key=lambda each: each[0])
        return slot, spare

    def _donated_of(self, step: ScaleStep) -> list[PlacedInstance]:
        return [each for each in self._of(step) if each.donation and not each.stuck and self._is_open(each)]

    def _donated_on(self, ref: SlotRef, step: ScaleStep, *, leased: bool) -> list[PlacedInstance]:
        found = [
            each
            for each in self._donated.get(ref, [])
            if each.endpoint != step.endpoint and each.instance_id not in self._changed and (leased or not each.leased)
        ]
        return sorted(found, key=_donation_rank)

    def _placed(self, step: ScaleStep, slot: SlotRoom, spare: tuple[PlacedInstance, ...]) -> SlotAdd:
        """Take GPUs of a slot, with those of donated instances that are stopped."""
        gpus = self._need(step, slot)
        self._take(slot, gpus - sum(each.gpus for each in spare))
        self._changed.update(each.instance_id for each in spare)
        self._serving_on[step.endpoint, slot.node_id] += 1
        return SlotAdd(
            endpoint=step.endpoint,
            gpu_type=slot.gpu_type,
            node_id=slot.node_id,
            slot=slot.slot,
            gpus=gpus,
            kind=step.kind,
            replaces=tuple(each.instance_id for each in spare),
            succeeds=step.succeeds,
        )

    def _taken(self, instance: PlacedInstance | None) -> PlacedInstance | None:
        if instance is not None:
            self._changed.add(instance.instance_id)
            self._serving_on[instance.endpoint, instance.node_id] += 1
        return instance

    def _take(self, slot: SlotRoom, gpus: int) -> None:
        """Note that GPUs are taken, and push the node's slots into the heap with their new rank."""
        self._free[slot.ref] -= gpus
        self._free_on[slot.node_id] -= gpus
        for each in self._on_node[slot.node_id] if gpus else ():
            heapq.heappush(self._emptiest[each.region, each.gpu_type], self._room(each))

    def _room(self, slot: SlotRoom) -> _Room:
        free = self._free[slot.ref]
        return (self._worth(slot), slot.gpus, -self._free_on[slot.node_id], -free, slot.node_id, slot.slot)

    def _worth(self, slot: SlotRoom) -> int:
        """How much a slot is worth to pools, the smaller the better. A pool gains from slots with several workers, an
        instance with GPUs of its own does not, and a pool takes a slot whole: so slots with one worker come first, then
        slots that hold an instance already.
        """
        if slot.workers == 1:
            return 0
        return 1 if self._free[slot.ref] < slot.gpus else 2

    def _best_free(self, step: ScaleStep, gpu_type: str) -> SlotRoom | None:
        """The slot of best rank that has the GPUs: as a rule the emptiest, which is at the top of the heap. Only slots
        on nodes that have the endpoint already are compared one by one.
        """
        rooms = self._emptiest.get((step.endpoint.region, gpu_type), [])
        seen: list[_Room] = []
        found: list[SlotRoom] = []
        while rooms:
            room = heapq.heappop(rooms)
            slot = self._open[room[4:]]
            if room != self._room(slot) or not self._free[slot.ref] or (seen and room == seen[-1]):
                continue  # an outdated entry
            seen.append(room)
            need = self._need(step, slot)
            if need > self._free[slot.ref] or not slot.suits(need) or not self._holds_weights(step, slot):
                continue
            if self._is_no_better(step, slot, need):
                continue
            found.append(slot)
            here = (step.endpoint, slot.node_id)
            if here not in self._stuck and not self._serving_on[here]:
                break
        for room in seen:
            heapq.heappush(rooms, room)
        return min(found, key=lambda slot: self._rank(step, slot), default=None)

    def _gpu_types(self, step: ScaleStep) -> list[str]:
        """GPU types that the step may take and the model has a profile for."""
        if step.gpu_type is not None:
            return [step.gpu_type] if (step.endpoint.model, step.gpu_type) in self._gpus else []
        return self._profiled.get(step.endpoint.model, [])

    def _need(self, step: ScaleStep, slot: SlotRoom) -> int:
        return self._gpus[step.endpoint.model, slot.gpu_type]

    def _holds_weights(self, step: ScaleStep, slot: SlotRoom) -> bool:
        size = self._sizes.get(step.endpoint.model)
        return size is None or (fits(size, slot.weights) and (slot.hosts == 1 or size.adapter is None))

    def _rank(self, step: ScaleStep, slot: SlotRoom) -> tuple[bool, bool, int, _Room]:
        """The smaller the better: nodes where the endpoint's instances are stuck come last, then slots that plans make
        for larger models, then instances spread.
        """
        here = (step.endpoint, slot.node_id)
        larger = _is_for_larger(slot, self._need(step, slot))
        return (here in self._stuck, larger, self._serving_on[here], self._room(slot))

    def _is_no_better(self, step: ScaleStep, slot: SlotRoom, gpus: int) -> bool:
        """Whether an instance that can stay would gain nothing on a slot, since that is for larger models too: it would
        move, and load its weights, every time that scaling decides.
        """
        return self.can_stay(step) and _is_for_larger(slot, gpus)

    def _is_open(self, instance: PlacedInstance) -> bool:
        return instance.ref in self._open

    def _of(self, step: ScaleStep) -> list[PlacedInstance]:
        return [
            each
            for each in self._of_endpoint.get(step.endpoint, [])
            if step.gpu_type in {None, each.gpu_type}
            and each.instance_id not in self._changed
            and not (each.ref in self._open and self._is_no_better(step, self._open[each.ref], each.gpus))
        ]


def _is_for_larger(slot: SlotRoom, gpus: int) -> bool:
    """Whether plans make a slot for models that take more GPUs."""
    return slot.regroups and slot.worker_gpus > gpus


def _donation_rank(instance: PlacedInstance) -> tuple[bool, bool, float, str]:
    """Instances without a lease first, then those whose lease has notice; of each, those donated longest ago."""
    assert instance.donation is not None, "the caller chose donated ones"
    return (instance.leased, not instance.noticed, -instance.donation.age_s, instance.instance_id)
