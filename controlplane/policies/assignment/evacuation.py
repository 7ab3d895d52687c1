"""Evacuation of nodes and slots: a successor starts elsewhere first, and the instance drains once that is ready.

A node is evacuated when an operator drains it, when its agent shuts down, or when it has been silent for a while; a
slot when its GPUs are to be regrouped. Then the others wait for it, so that an instance without a place elsewhere
drains all the same when it is overdue and no successor is being started. Where plans regroup, a model that is on a slot
of more GPUs than it takes, since there was no other, leaves it for a free one of its size.
Pooled instances are moved by `policies.assignment.pools`, which assigns slots on accepting nodes only.
"""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from controlplane.policies.assignment.facts import InstanceChange, PlacedInstance, SlotRoom
from controlplane.policies.facts import EndpointGpu
from controlplane.policies.fit import ModelSize, WeightsMemory, fits
from controlplane.policies.scaling.facts import ScaleStep


@dataclass(frozen=True, kw_only=True)
class Evacuation:
    """Changes of instances on nodes that are evacuated.

    Attributes:
        steps: successors to start, one instance each; `succeeds` names the instance.
        drains: instances whose successor is ready, and those that never served and have one.
        succeeded: ids of instances with a live successor, which counts for the endpoint instead of them.
        settled: successors of instances whose node stays after all; they are ordinary instances from now on.
    """

    steps: tuple[ScaleStep, ...] = ()
    drains: tuple[InstanceChange, ...] = ()
    succeeded: frozenset[str] = frozenset()
    settled: tuple[str, ...] = ()


def leaving_larger_slots(
    instances: Iterable[PlacedInstance],
    rooms: Iterable[SlotRoom],
    sizes: Mapping[str, ModelSize],
    *,
    stale_s: float,
) -> tuple[PlacedInstance, ...]:
    """All instances; those on slots that plans make for larger models leave these, as far as slots of their own size
    are free, so that a plan that counts a slot of four finds it free for a model of four.

    Args:
        instances: all dedicated instances.
        rooms: all slots.
        sizes: weights of the models; a slot that is too small for them is not free for an instance.
        stale_s: no instance starts on a node that is silent for longer.
    """
    instances, rooms = tuple(instances), tuple(rooms)
    larger = {room.ref: room.worker_gpus for room in rooms if room.regroups}
    free: dict[tuple[str, str, int], Counter[WeightsMemory]] = defaultdict(Counter)
    for room in rooms:
        starts = room.accepting and not room.pooled and room.age_s <= stale_s
        if room.regroups and starts and room.gpus_free == room.gpus:
            free[room.region, room.gpu_type, room.gpus][room.weights] += 1
    succeeded = {each.succeeds for each in instances if each.serving}
    leaving: dict[str, str] = {}
    for each in sorted(instances, key=lambda each: each.instance_id):
        if not each.serving or each.leaving is not None or larger.get(each.ref, 0) <= each.gpus:
            continue
        if each.instance_id not in succeeded:
            own, size = free[each.endpoint.region, each.gpu_type, each.gpus], sizes.get(each.endpoint.model)
            holds = (one for one, count in own.items() if count and (size is None or fits(size, one)))
            if (weights := next(holds, None)) is None:
                continue
            own[weights] -= 1
        leaving[each.instance_id] = f"slot {each.slot} of node {each.node_id} is for larger models"
    return tuple(
        replace(each, leaving=leaving[each.instance_id]) if each.instance_id in leaving else each for each in instances
    )


def choose_evacuation(
    instances: Iterable[PlacedInstance], keep_type: Container[EndpointGpu] = frozenset()
) -> Evacuation:
    """Successors and drains for the instances that leave their nodes.

    A stuck successor is replaced by the rules of scaling (`policies.scaling.limits`), not by another successor, so a
    broken model starts no chain of them. A successor is of the same GPU type; where that has no slot for it,
    `choose_slots` starts it on any other profiled type.

    Args:
        instances: all dedicated instances; `leaving` is the reason why an instance must leave its node.
        keep_type: endpoints whose successors wait for a slot of this GPU type, theirs: those at their maximum would be
            taken back to the type of their plan one by one, each by the end of a ready instance.
    """
    serving = sorted((each for each in instances if each.serving), key=lambda each: each.instance_id)
    successors = {each.succeeds: each for each in serving if each.succeeds is not None}
    staying = {each.instance_id for each in serving if each.leaving is None}
    steps: list[ScaleStep] = []
    drains: list[InstanceChange] = []
    succeeded: set[str] = set()
    for each in serving:
        if each.leaving is None:
            continue
        successor = successors.get(each.instance_id)
        if successor is not None:
            succeeded.add(each.instance_id)
            if successor.ready or not each.ready:
                drains.append(InstanceChange(instance_id=each.instance_id, reason=each.leaving, kind=each.kind))
        elif not each.stuck:
            steps.append(
                ScaleStep(
                    endpoint=each.endpoint,
                    gpu_type=each.gpu_type,
                    delta=1,
                    reason=each.leaving,
                    kind=each.kind,
                    succeeds=each.instance_id,
                    other_types=each.key not in keep_type,
                )
            )
    return Evacuation(
        steps=tuple(steps),
        drains=tuple(drains),
        succeeded=frozenset(succeeded),
        settled=tuple(each.instance_id for each in serving if each.succeeds in staying),
    )


def choose_overdue(instances: Iterable[PlacedInstance], gone: Container[str]) -> tuple[InstanceChange, ...]:
    """Instances, pooled ones too, that drain because their slot has waited for them long enough. One whose successor
    is being started goes on to serve until that is ready or stuck.

    Args:
        instances: all instances.
        gone: ids of those that drain or are donated by another decision.
    """
    serving = sorted((each for each in instances if each.serving), key=lambda each: each.instance_id)
    succeeded = {each.succeeds for each in serving if not each.stuck}
    return tuple(
        InstanceChange(instance_id=each.instance_id, reason=f"{each.leaving}, and waited long enough", kind=each.kind)
        for each in serving
        if each.overdue and each.instance_id not in gone and each.instance_id not in succeeded
    )


@dataclass(frozen=True, kw_only=True)
class NodePresence:
    """The facts by which a node is evacuated or not.

    Attributes:
        silent_s: seconds since its last heartbeat; None: it never sent one.
        has_instances: whether an instance is wanted there or still drains.
    """

    name: str
    draining: bool
    leaving: bool
    silent_s: float | None
    has_instances: bool


def choose_leaving(nodes: Iterable[NodePresence], *, replace_after_s: float) -> dict[str, str]:
    """The nodes that are evacuated, with the reason.

    Silent nodes with instances are evacuated only while they are no more than the nodes with fresh heartbeats: else the
    control plane itself was unreachable, and replacing everything would make an outage worse. Silent nodes without
    instances, which were never deleted, do not count.
    """
    nodes = list(nodes)
    reported = [(node, node.silent_s) for node in nodes if node.silent_s is not None]
    alive = [node for node, silent_s in reported if silent_s <= replace_after_s]
    silent = [node for node, silent_s in reported if silent_s > replace_after_s and node.has_instances]
    reasons: dict[str, str] = {}
    if len(silent) <= len(alive):
        reasons |= {node.name: f"node {node.name} has been silent for over {replace_after_s:g} s" for node in silent}
    reasons |= {node.name: f"node {node.name} is shutting down" for node in nodes if node.leaving}
    return reasons | {node.name: f"node {node.name} is being drained" for node in nodes if node.draining}
