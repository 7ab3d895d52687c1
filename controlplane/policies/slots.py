"""Which slot takes a new instance and which instance goes (part of SageServe 6.4): the step from counts to places.

A draining instance is taken back before a new one is started: it still has its weights and its requests. New instances
spread over nodes, so that one lost node costs an endpoint little. A slot's GPUs are never given twice.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from controlplane.policies.facts import Endpoint, ModelGpu
from controlplane.policies.scaling import ScaleStep


@dataclass(frozen=True, kw_only=True)
class SlotRoom:
    """One slot of a node. `gpus_free` are not held by any instance, a draining one included.

    Attributes:
        age_s: seconds since its node's last heartbeat.
        accepting: False for a node that is being drained.
    """

    node_id: str
    slot: int
    region: str
    gpu_type: str
    gpus: int
    gpus_free: int
    age_s: float
    accepting: bool = True


@dataclass(frozen=True, kw_only=True)
class PlacedInstance:
    """An instance that holds GPUs of a slot."""

    instance_id: str
    endpoint: Endpoint
    gpu_type: str
    node_id: str
    slot: int
    draining: bool = False
    ready: bool = True
    remaining_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class SlotFacts:
    """Steps to carry out, the fleet's slots and what is on them. `gpus`: GPUs of one instance, for each profile."""

    steps: tuple[ScaleStep, ...]
    slots: tuple[SlotRoom, ...]
    instances: tuple[PlacedInstance, ...]
    gpus: Mapping[ModelGpu, int]


@dataclass(frozen=True, kw_only=True)
class SlotSettings:
    """`stale_s`: a node silent for longer gets nothing new."""

    stale_s: float = 5.0


@dataclass(frozen=True, kw_only=True)
class SlotAdd:
    """Start an instance here."""

    endpoint: Endpoint
    gpu_type: str
    node_id: str
    slot: int
    gpus: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class InstanceChange:
    """Drain or revive this instance."""

    instance_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Unplaced:
    """Instances of a step that found no slot."""

    endpoint: Endpoint
    gpu_type: str | None
    count: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class SlotDecision:
    """What to start, take back and let go, and what could not be placed."""

    adds: tuple[SlotAdd, ...]
    revives: tuple[InstanceChange, ...]
    drains: tuple[InstanceChange, ...]
    unplaced: tuple[Unplaced, ...]


def choose_slots(facts: SlotFacts, now_s: float, settings: SlotSettings) -> SlotDecision:
    """Turn steps into places. Scarce GPUs go round the endpoints, one instance each, until they are used up.

    Args:
        facts: steps, slots, instances. Their order does not matter.
        now_s: Unix time; ages are in the facts, so it changes nothing.
        settings: see SlotSettings.
    """
    fleet = _Fleet(facts, settings)
    adds: list[SlotAdd] = []
    revives: list[InstanceChange] = []
    missing: dict[ScaleStep, int] = {}
    for step in _one_by_one(facts.steps):
        if revived := fleet.revive(step):
            revives.append(InstanceChange(instance_id=revived, reason=step.reason))
        elif added := fleet.add(step):
            adds.append(added)
        else:
            missing[step] = missing.get(step, 0) + 1
    drains = [
        InstanceChange(instance_id=instance_id, reason=step.reason)
        for step in _ordered(facts.steps)
        for instance_id in fleet.drain(step)
    ]
    unplaced = [
        Unplaced(endpoint=step.endpoint, gpu_type=step.gpu_type, count=count, reason=fleet.why_not(step))
        for step, count in missing.items()
    ]
    return SlotDecision(adds=tuple(adds), revives=tuple(revives), drains=tuple(drains), unplaced=tuple(unplaced))


def _ordered(steps: tuple[ScaleStep, ...]) -> list[ScaleStep]:
    return sorted(steps, key=lambda step: (step.endpoint, step.gpu_type or "", step.delta))


def _one_by_one(steps: tuple[ScaleStep, ...]) -> Iterator[ScaleStep]:
    for turn in range(max((step.delta for step in steps), default=0)):
        for step in _ordered(steps):
            if turn < step.delta:
                yield step


class _Fleet:
    """The slots while they fill up."""

    def __init__(self, facts: SlotFacts, settings: SlotSettings) -> None:
        self._gpus = facts.gpus
        self._slots = sorted(facts.slots, key=lambda slot: (slot.node_id, slot.slot))
        self._open = [slot for slot in self._slots if slot.accepting and slot.age_s <= settings.stale_s]
        self._free = {(slot.node_id, slot.slot): slot.gpus_free for slot in self._open}
        self._instances = sorted(facts.instances, key=lambda instance: instance.instance_id)
        self._changed: set[str] = set()
        self._beside = [(instance.endpoint, instance.node_id) for instance in self._instances if not instance.draining]

    def revive(self, step: ScaleStep) -> str | None:
        """Take back the draining instance that has most left to do, if its node can be relied on."""
        places = {(slot.node_id, slot.slot) for slot in self._open}
        found = [each for each in self._of(step, draining=True) if (each.node_id, each.slot) in places]
        if not found:
            return None
        best = max(found, key=lambda each: (each.ready, each.remaining_tokens))
        self._changed.add(best.instance_id)
        self._beside.append((best.endpoint, best.node_id))
        return best.instance_id

    def add(self, step: ScaleStep) -> SlotAdd | None:
        """Take GPUs on the node with fewest instances of the endpoint, then most free GPUs."""
        found = [
            slot for slot in self._candidates(step) if self._free[slot.node_id, slot.slot] >= self._need(step, slot)
        ]
        if not found:
            return None
        best = min(found, key=lambda slot: self._rank(step, slot))
        gpus = self._need(step, best)
        self._free[best.node_id, best.slot] -= gpus
        self._beside.append((step.endpoint, best.node_id))
        return SlotAdd(
            endpoint=step.endpoint,
            gpu_type=best.gpu_type,
            node_id=best.node_id,
            slot=best.slot,
            gpus=gpus,
            reason=step.reason,
        )

    def drain(self, step: ScaleStep) -> list[str]:
        """Let go what is not ready yet, then what has least left to do."""
        found = sorted(self._of(step, draining=False), key=lambda each: (each.ready, each.remaining_tokens))
        chosen = [each.instance_id for each in found[: max(0, -step.delta)]]
        self._changed.update(chosen)
        return chosen

    def why_not(self, step: ScaleStep) -> str:
        """Why a step found no slot, in plain words."""
        gpu_types = sorted(key.gpu_type for key in self._gpus if key.model == step.endpoint.model)
        if step.gpu_type is not None and step.gpu_type not in gpu_types:
            return f"{step.endpoint.model} has no profile on {step.gpu_type}"
        wanted = gpu_types if step.gpu_type is None else [step.gpu_type]
        names, region = " or ".join(wanted) or "profiled GPU", step.endpoint.region
        here = [slot for slot in self._slots if slot.region == region and slot.gpu_type in wanted]
        if not here:
            return f"no {names} in {region}"
        silent = len({slot.node_id for slot in here} - {slot.node_id for slot in self._open})
        free = sum(self._free.get((slot.node_id, slot.slot), 0) for slot in here)
        need = min(self._gpus[ModelGpu(model=step.endpoint.model, gpu_type=gpu_type)] for gpu_type in wanted)
        words = (
            f"GPUs full in {region}: {free} of {sum(slot.gpus for slot in here)} {names} free, needs {need} in one slot"
        )
        return f"{words}; {silent} nodes silent or draining" if silent else words

    def _candidates(self, step: ScaleStep) -> list[SlotRoom]:
        return [
            slot
            for slot in self._open
            if slot.region == step.endpoint.region
            and step.gpu_type in {None, slot.gpu_type}
            and ModelGpu(model=step.endpoint.model, gpu_type=slot.gpu_type) in self._gpus
        ]

    def _need(self, step: ScaleStep, slot: SlotRoom) -> int:
        return self._gpus[ModelGpu(model=step.endpoint.model, gpu_type=slot.gpu_type)]

    def _rank(self, step: ScaleStep, slot: SlotRoom) -> tuple[int, int, int, str, int]:
        on_node = sum(free for (node_id, _), free in self._free.items() if node_id == slot.node_id)
        beside = self._beside.count((step.endpoint, slot.node_id))
        return (beside, -on_node, -self._free[slot.node_id, slot.slot], slot.node_id, slot.slot)

    def _of(self, step: ScaleStep, *, draining: bool) -> list[PlacedInstance]:
        return [
            each
            for each in self._instances
            if each.endpoint == step.endpoint
            and each.draining is draining
            and step.gpu_type in {None, each.gpu_type}
            and each.instance_id not in self._changed
        ]
