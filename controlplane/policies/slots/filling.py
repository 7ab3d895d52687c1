"""The fleet's slots and instances while a decision fills them: every taking is noted, so nothing is taken twice."""

from collections import Counter
from dataclasses import replace

from controlplane.policies.facts import Endpoint
from controlplane.policies.scaling.facts import KindStep, ScaleStep
from controlplane.policies.slots.facts import PlacedInstance, SlotAdd, SlotFacts, SlotRoom, SlotSettings

Place = tuple[str, int]


class Filling:
    """Slots that fill up."""

    def __init__(self, facts: SlotFacts, settings: SlotSettings) -> None:
        self._settings = settings
        self._gpus = {(profile.model, profile.gpu_type): gpus for profile, gpus in facts.gpus.items()}
        self._slots = sorted(facts.slots, key=_place_of)
        self._open = {
            _place_of(slot): slot for slot in self._slots if slot.accepting and slot.age_s <= settings.stale_s
        }
        self._in_region: dict[str, list[SlotRoom]] = {}
        for slot in self._open.values():
            self._in_region.setdefault(slot.region, []).append(slot)
        self._draining_nodes = {slot.node_id for slot in self._slots if not slot.accepting}
        self._free: dict[Place, int] = {}
        self._free_on: Counter[str] = Counter()
        for place, slot in self._open.items():
            self._free[place] = slot.gpus_free
            self._free_on[slot.node_id] += slot.gpus_free
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
                self._spot.setdefault((each.node_id, each.slot), []).append(each)

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
        """Free GPUs, on the node with fewest instances of the endpoint, then with most free GPUs."""
        found = [slot for slot in self._candidates(step) if self._free[_place_of(slot)] >= self._need(step, slot)]
        return self._placed(step, min(found, key=lambda slot: self._rank(step, slot)), ()) if found else None

    def wait_for_leases(self, step: ScaleStep) -> tuple[PlacedInstance, ...] | None:
        """Spot instances, leased ones among them, whose place will do once the leases have ended; none of them where
        those that others wait for leave room enough.
        """
        found = self._with_spot(step, leased=True)
        if found is None:
            return None
        slot, spare = found
        place, held = _place_of(slot), sum(each.gpus for each in spare)
        missing = self._need(step, slot) - self._promised.get(place, 0) - held
        self._promised[place] = max(0, -missing)
        self._take(slot, max(0, missing))
        self._changed.update(each.instance_id for each in spare)
        return spare

    def let_go(self, step: ScaleStep) -> list[PlacedInstance]:
        """What does not come up, then what is not ready yet, then what has least left to do."""
        found = [each for each in self._of(step) if each.serving and each.kind == step.kind]
        found.sort(key=lambda each: (not each.stuck, each.ready, each.remaining_tokens))
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
        return f"it failed on node {instance.node_id}" if instance.stuck else None

    def why_not(self, step: ScaleStep) -> str:
        """Why a step found no slot, in plain words."""
        gpu_types = sorted(gpu_type for model, gpu_type in self._gpus if model == step.endpoint.model)
        if step.gpu_type is not None and step.gpu_type not in gpu_types:
            return f"{step.endpoint.model} has no profile on {step.gpu_type}"
        wanted = gpu_types if step.gpu_type is None else [step.gpu_type]
        names, region = " or ".join(wanted) or "profiled GPU", step.endpoint.region
        here = [slot for slot in self._slots if slot.region == region and slot.gpu_type in wanted]
        if not here:
            return f"no {names} in {region}"
        silent = len({slot.node_id for slot in here} - {node_id for node_id, _ in self._open})
        free = sum(self._free.get(_place_of(slot), 0) for slot in here)
        need = min(self._gpus[step.endpoint.model, gpu_type] for gpu_type in wanted)
        words = (
            f"GPUs full in {region}: {free} of {sum(slot.gpus for slot in here)} {names} free, needs {need} in one slot"
        )
        return f"{words}; {silent} nodes silent or draining" if silent else words

    def _with_spot(self, step: ScaleStep, *, leased: bool) -> tuple[SlotRoom, tuple[PlacedInstance, ...]] | None:
        """The best slot where spot instances of other models can make room, and those instances."""
        found = []
        for slot in self._candidates(step):
            place, need = _place_of(slot), self._need(step, slot)
            if place not in self._spot:
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
        )

    def _taken(self, instance: PlacedInstance | None) -> PlacedInstance | None:
        if instance is not None:
            self._changed.add(instance.instance_id)
            self._beside[instance.endpoint, instance.node_id] += 1
        return instance

    def _take(self, slot: SlotRoom, gpus: int) -> None:
        self._free[_place_of(slot)] -= gpus
        self._free_on[slot.node_id] -= gpus

    def _candidates(self, step: ScaleStep) -> list[SlotRoom]:
        return [
            slot
            for slot in self._in_region.get(step.endpoint.region, [])
            if step.gpu_type in {None, slot.gpu_type} and (step.endpoint.model, slot.gpu_type) in self._gpus
        ]

    def _need(self, step: ScaleStep, slot: SlotRoom) -> int:
        return self._gpus[step.endpoint.model, slot.gpu_type]

    def _rank(self, step: ScaleStep, slot: SlotRoom) -> tuple[bool, int, int, int, str, int]:
        """Not where the endpoint's instances do not come up, else spread."""
        here = (step.endpoint, slot.node_id)
        free = self._free[_place_of(slot)]
        return (here in self._stuck, self._beside[here], -self._free_on[slot.node_id], -free, slot.node_id, slot.slot)

    def _is_open(self, instance: PlacedInstance) -> bool:
        return (instance.node_id, instance.slot) in self._open

    def _of(self, step: ScaleStep) -> list[PlacedInstance]:
        return [
            each
            for each in self._of_endpoint.get(step.endpoint, [])
            if step.gpu_type in {None, each.gpu_type} and each.instance_id not in self._changed
        ]


def _place_of(slot: SlotRoom) -> Place:
    return (slot.node_id, slot.slot)


def _spot_rank(instance: PlacedInstance) -> tuple[bool, bool, float, str]:
    """Free ones first, then those whose lease has notice; of each, those lent out longest."""
    assert instance.spot is not None, "the caller chose spot ones"
    return (instance.spot.leased, not instance.spot.noticed, -instance.spot.age_s, instance.instance_id)
