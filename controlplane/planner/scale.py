"""Scaling: the plan and the live view become desired instances on slots, with their engines; spot and leases."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from sqlalchemy.orm import Session

from controlplane.planner.engines import send_back_failed, settle_engines
from controlplane.planner.scale_facts import (
    Fleet,
    gather_fleet,
    placed_instances,
    pool_facts,
    scaling_facts,
    slot_rooms,
)
from controlplane.policies.assignment.choose import choose_slots, moved_endpoints, settled_endpoints
from controlplane.policies.assignment.evacuation import Evacuation, choose_evacuation
from controlplane.policies.assignment.facts import (
    InstanceChange,
    SlotDecision,
    SlotFacts,
    SlotSettings,
    Unplaced,
)
from controlplane.policies.assignment.pooling import joined, release_steps, rooms_beside
from controlplane.policies.assignment.pools import choose_pool_slots
from controlplane.policies.facts import Endpoint, InstanceKind, ModelGpu
from controlplane.policies.scaling.choose import choose_scaling
from controlplane.policies.scaling.facts import ScaleStep, ScalingSettings
from controlplane.settings import Settings
from controlplane.store.endpoint_summary import note_outcome
from controlplane.store.fleet import fleet_index
from controlplane.store.instances import add_instance, set_desired, set_kind, set_succeeds, touch_generations
from controlplane.store.keys import record, snapshot
from controlplane.store.redis.live import LiveStore
from controlplane.store.spot import end_due_leases, give_notice
from controlplane.store.tables import Desired, EndpointRow, LeaseEnd
from controlplane.store.weights import sizes_of

ACTOR = "scale"


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """What a run changed: instances by what became of them, leases that ended or got notice."""

    started: int = 0
    revived: int = 0
    reclaimed: int = 0
    redeployed: int = 0
    drained: int = 0
    donated: int = 0
    stopped: int = 0
    moved: int = 0
    leases_ended: int = 0
    leases_noticed: int = 0
    unplaced: tuple[str, ...] = ()

    def changes(self) -> dict[str, int]:
        """What is not zero, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int) and value}


def scale(session: Session, live: LiveStore, settings: Settings, *, now_s: float) -> Scaled:
    """Gather, decide, apply, under the fleet's lock, so that two runs at once do not add up."""
    fleet_index(session, lock=True)
    ended = _end_leases(session)
    fleet = gather_fleet(session, live, settings, now_s=now_s)
    send_back_failed(session, fleet.census, settings, actor=ACTOR, now_s=now_s)
    pooling = choose_pool_slots(pool_facts(fleet), now_s, stale_s=settings.heartbeat_stale_s)
    gpus = {ModelGpu(model=row.model, gpu_type=row.gpu_type): row.gpus for row in fleet.census.profiles}
    _dedicate(session, fleet, pooling.dedicates, gpus)
    instances, rooms = placed_instances(fleet), rooms_beside(pooling, slot_rooms(fleet))
    leaving = choose_evacuation(instances, rooms, stale_s=settings.heartbeat_stale_s)
    facts = scaling_facts(fleet, stranded=pooling.stranded, succeeded=leaving.succeeded)
    scaling = choose_scaling(facts, now_s, _scaling_settings(settings))
    slots = SlotFacts(
        steps=(*scaling.steps, *leaving.steps, *release_steps(pooling, instances)),
        kinds=scaling.kinds,
        slots=rooms,
        instances=instances,
        gpus=gpus,
        sizes=sizes_of(fleet.census.models),
    )
    decision = joined(choose_slots(slots, now_s, _slot_settings(settings)), pooling)
    let_go = {change.instance_id for change in (*decision.drains, *decision.donates)}
    drains = tuple(change for change in leaving.drains if change.instance_id not in let_go)
    decision = replace(decision, drains=(*decision.drains, *drains))
    kinds = {change.instance_id: change.kind for change in decision.changed_kinds}
    kinds = {each.instance_id: each.kind for each in slots.instances if each.serving} | kinds
    _apply(session, fleet, decision, kinds)
    set_succeeds(session, _successors(decision, leaving))
    moved = settle_engines(session, fleet.census, settings, actor=ACTOR, now_s=now_s)
    noticed = _give_notice(session, decision.notices, settings)
    _note_scaled(session, (*scaling.steps, *leaving.steps), decision.unplaced, now_s=now_s)
    settled = settled_endpoints(scaling.settled, decision.unplaced)
    note_outcome(session, settled=settled, unplaced=_unplaced_of(decision.unplaced))
    return Scaled(
        started=len(decision.adds),
        revived=len(decision.revives),
        reclaimed=len(decision.reclaims),
        redeployed=len(decision.redeploys),
        drained=len(decision.drains),
        donated=len(decision.donates),
        stopped=len(decision.stops),
        moved=moved,
        leases_ended=ended,
        leases_noticed=noticed,
        unplaced=tuple(f"{u.count} x {u.endpoint.model} in {u.endpoint.region}: {u.reason}" for u in decision.unplaced),
    )


def _dedicate(session: Session, fleet: Fleet, changes: Iterable[InstanceChange], gpus: Mapping[ModelGpu, int]) -> None:
    """Give pooled instances their slots for themselves; from here on they are as others are."""
    rows = {instance.id: instance for instance in fleet.census.instances}
    mine = [rows[change.instance_id] for change in changes]
    touch_generations(session, sorted({instance.node for instance in mine}))
    for instance in mine:
        instance.gpus = gpus[ModelGpu(model=instance.model, gpu_type=instance.gpu_type)]
        instance.pooled = False


def _scaling_settings(settings: Settings) -> ScalingSettings:
    return ScalingSettings(
        strategy=settings.scale_strategy,
        out_above=settings.scale_out_above,
        in_below=settings.scale_in_below,
        cooldown_s=settings.scale_cooldown_s,
        retry_s=settings.scale_retry_s,
        room_out=settings.scale_room_out,
        room_in=settings.scale_room_in,
    )


def _slot_settings(settings: Settings) -> SlotSettings:
    return SlotSettings(
        stale_s=settings.heartbeat_stale_s,
        spot_enabled=settings.spot_enabled,
        spot_max_age_s=settings.spot_max_age_s,
    )


def _end_leases(session: Session) -> int:
    """End what is due; the nodes are told to take no more of those leases' requests."""
    ended = end_due_leases(session)
    touch_generations(session, sorted({each.node for each in ended}))
    for each in ended:
        action = "spot.reclaim" if each.lease.end_reason == LeaseEnd.RECLAIMED else "spot.expire"
        record(session, actor=ACTOR, action=action, subject=each.lease.instance_id, after=snapshot(each.lease))
    return len(ended)


def _apply(session: Session, fleet: Fleet, decision: SlotDecision, kinds: Mapping[str, InstanceKind]) -> None:
    """Write what is wanted. `kinds`: what instances that serve shall be; those that are it already are left alone."""
    present = {instance.id: instance for instance in fleet.census.instances}
    running = {change.instance_id: change.kind for change in (*decision.revives, *decision.reclaims)}
    kinds = {name: kind for name, kind in {**kinds, **running}.items() if present[name].kind != kind}
    adds = (*decision.adds, *decision.redeploys)
    drained, donated = _ids(decision.drains), _ids(decision.donates)
    stopped = [*_ids(decision.stops), *(name for add in decision.redeploys for name in add.replaces)]
    changed = [*running, *kinds, *drained, *donated, *stopped]
    touch_generations(session, sorted({add.node_id for add in adds} | {present[name].node for name in changed}))
    set_desired(session, running, Desired.RUNNING)
    set_desired(session, drained, Desired.DRAINING)
    set_desired(session, donated, Desired.DRAINING, donate=True)
    set_desired(session, stopped, Desired.STOPPED)
    for kind in InstanceKind:
        set_kind(session, [name for name, new in kinds.items() if new == kind], kind)
    for add in adds:
        add_instance(
            session,
            model=add.endpoint.model,
            region=add.endpoint.region,
            gpu_type=add.gpu_type,
            node=add.node_id,
            slot=add.slot,
            gpus=add.gpus,
            kind=add.kind,
            succeeds=add.succeeds,
        )


def _successors(decision: SlotDecision, leaving: Evacuation) -> dict[str, str | None]:
    """What running instances succeed from now on: those taken back for that, and those that no longer do."""
    taken = {change.instance_id: change.succeeds for change in (*decision.revives, *decision.reclaims)}
    return {**dict.fromkeys(leaving.settled), **taken}


def _give_notice(session: Session, changes: Iterable[InstanceChange], settings: Settings) -> int:
    reasons = {change.instance_id: change.reason for change in changes}
    noticed = give_notice(session, reasons, notice_s=settings.spot_notice_s)
    for lease in noticed:
        after = snapshot(lease) | {"reason": reasons[lease.instance_id]}
        record(session, actor=ACTOR, action="spot.notice", subject=lease.instance_id, after=after)
    return len(noticed)


def _note_scaled(session: Session, steps: Iterable[ScaleStep], unplaced: Iterable[Unplaced], *, now_s: float) -> None:
    """When endpoints were scaled."""
    for endpoint in moved_endpoints(steps, unplaced):
        row = session.get_one(EndpointRow, (endpoint.model, endpoint.region))
        row.last_scaled_at = datetime.fromtimestamp(now_s, UTC)


def _unplaced_of(unplaced: Iterable[Unplaced]) -> dict[Endpoint, list[dict[str, Any]]]:
    found: dict[Endpoint, list[dict[str, Any]]] = {}
    for each in unplaced:
        what = {"gpu_type": each.gpu_type, "count": each.count, "reason": each.reason}
        found.setdefault(each.endpoint, []).append(what)
    return found


def _ids(changes: Iterable[InstanceChange]) -> list[str]:
    return [change.instance_id for change in changes]
