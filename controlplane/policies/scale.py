"""What scaling changes in a fleet: pools first, then nodes that go, then each endpoint's count, and at last the slots.

FleetSnapshot --> choose_pool_slots --> choose_evacuation --> choose_scaling --> choose_slots --> ScaleDecision
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from msgspec import structs

from controlplane.policies.assignment.choose import choose_slots, moved_endpoints, settled_endpoints
from controlplane.policies.assignment.evacuation import choose_evacuation, choose_overdue, leaving_larger_slots
from controlplane.policies.assignment.facts import PlacedInstance, SlotDecision, SlotFacts, SlotRoom, SlotSettings
from controlplane.policies.assignment.pools import PoolSlotDecision, choose_pool_slots
from controlplane.policies.facts import Endpoint, EndpointGpu
from controlplane.policies.scaling.choose import choose_scaling
from controlplane.policies.scaling.facts import Counts, ScaleStep, ScalingSettings
from controlplane.policies.snapshot import FleetSnapshot, pool_slot_facts, scaling_facts
from dataplane.protocol.tiers import InstanceKind


@dataclass(frozen=True, kw_only=True)
class ScaleDecision:
    """What changes.

    Attributes:
        slots: instances that start and go, on their slots.
        dedicated: GPUs that pooled instances get for themselves, by id.
        kinds: the requests that each serving instance with GPUs of its own is for, by id.
        successors: the instance that each of these succeeds from now on; None: it is an ordinary one. The successors of
            an instance that serves again are: one instance never stands for two.
        scaled: endpoints whose count changes.
        settled: what each endpoint is settled at, see `EndpointScaleFacts`.
    """

    slots: SlotDecision
    dedicated: Mapping[str, int] = field(default_factory=dict)
    kinds: Mapping[str, InstanceKind] = field(default_factory=dict)
    successors: Mapping[str, str | None] = field(default_factory=dict)
    scaled: tuple[Endpoint, ...] = ()
    settled: Mapping[Endpoint, Counts | None] = field(default_factory=dict)


def choose_scale(
    snapshot: FleetSnapshot, now_s: float, scaling: ScalingSettings, placing: SlotSettings
) -> ScaleDecision:
    """Decide what changes now in the whole fleet.

    Args:
        snapshot: the fleet.
        now_s: Unix time.
        scaling: how endpoints are scaled.
        placing: how slots are chosen; its `stale_s` holds for nodes and reports alike.
    """
    stale_s = placing.stale_s
    given = pool_slot_facts(snapshot, lends=placing.donation_enabled)
    pooling = choose_pool_slots(given, now_s, stale_s=stale_s)
    pooled = {each.instance_id: each for each in snapshot.pooled}
    alone = [pooled[change.instance_id] for change in pooling.dedicates]
    dedicated = {each.instance_id: snapshot.gpus[each.key.pair] for each in alone}
    snapshot = snapshot.as_scaled(dedicated, scaling.strategy, {change.instance_id for change in pooling.donates})
    slots = _without_pools(pooling, snapshot.rooms)
    instances = leaving_larger_slots(snapshot.dedicated, slots, snapshot.sizes, stale_s=stale_s)
    leaving = choose_evacuation(instances, _at_maximum(snapshot, instances, slots, stale_s=stale_s))
    facts = scaling_facts(snapshot, stale_s=stale_s, stranded=pooling.stranded, succeeded=leaving.succeeded)
    counts = choose_scaling(facts, now_s, scaling)
    slot_facts = SlotFacts(
        steps=(*counts.steps, *leaving.steps, *_release_steps(pooling, instances)),
        kinds=counts.kinds,
        slots=slots,
        instances=instances,
        gpus=snapshot.gpus,
        sizes=snapshot.sizes,
    )
    chosen = _joined(choose_slots(slot_facts, now_s, placing), pooling)
    let_go = {change.instance_id for change in (*chosen.drains, *chosen.donates)}
    drains = tuple(change for change in leaving.drains if change.instance_id not in let_go)
    let_go |= {change.instance_id for change in drains}
    chosen = replace(chosen, drains=(*chosen.drains, *drains, *choose_overdue(snapshot.instances, let_go)))
    changed_kinds = {change.instance_id: change.kind for change in chosen.changed_kinds}
    taken = {change.instance_id: change.succeeds for change in (*chosen.revives, *chosen.reclaims)}
    unlinked = [each.instance_id for each in instances if each.serving and each.succeeds in taken]
    return ScaleDecision(
        slots=chosen,
        dedicated=dedicated,
        kinds={each.instance_id: each.kind for each in instances if each.serving} | changed_kinds,
        successors={**dict.fromkeys((*leaving.settled, *unlinked)), **taken},
        scaled=moved_endpoints((*counts.steps, *leaving.steps), chosen),
        settled=settled_endpoints(counts.settled, chosen.unplaced),
    )


def _at_maximum(
    snapshot: FleetSnapshot, instances: Iterable[PlacedInstance], slots: Iterable[SlotRoom], *, stale_s: float
) -> frozenset[EndpointGpu]:
    """The endpoints with a plan that have as many instances as they may have, with the GPU types that they are on and
    that some node of the region still takes instances for.
    """
    serving = [each for each in instances if each.serving]
    count, limits = Counter(each.endpoint for each in serving), snapshot.limits_in_force
    full = {each for each in snapshot.planned or {} if each in limits and count[each] >= limits[each][1]}
    open_types = {(room.region, room.gpu_type) for room in slots if room.accepting and room.age_s <= stale_s}
    return frozenset(
        each.key for each in serving if each.endpoint in full and (each.endpoint.region, each.gpu_type) in open_types
    )


def _release_steps(decision: PoolSlotDecision, instances: Iterable[PlacedInstance]) -> tuple[ScaleStep, ...]:
    """The steps that let go instances of their own of endpoints that a pool serves now."""
    left: Counter[tuple[Endpoint, InstanceKind]] = Counter(
        (each.endpoint, each.kind) for each in instances if each.serving and each.endpoint in decision.ready
    )
    return tuple(
        ScaleStep(endpoint=endpoint, gpu_type=None, delta=-count, kind=kind, reason="the pool serves it now")
        for (endpoint, kind), count in sorted(left.items())
    )


def _without_pools(decision: PoolSlotDecision, slots: Iterable[SlotRoom]) -> tuple[SlotRoom, ...]:
    """The slots as `choose_slots` may fill them: those of the pools are full."""
    return tuple(
        structs.replace(slot, gpus_free=0, pooled=True) if slot.ref in decision.slots else slot for slot in slots
    )


def _joined(decision: SlotDecision, pooling: PoolSlotDecision) -> SlotDecision:
    """Both decisions as one; what the pools start is tried first. What a start has called back is not lent out."""
    revived = {change.instance_id for change in decision.revives}
    return replace(
        decision,
        donates=(*decision.donates, *(change for change in pooling.donates if change.instance_id not in revived)),
        adds=(*pooling.adds, *decision.adds),
        revives=(*pooling.revives, *decision.revives),
        drains=(*pooling.drains, *decision.drains),
        unplaced=(*pooling.unplaced, *decision.unplaced),
    )
