"""Scale the fleet: from the plan and the live view to desired instances, their slots and engines, and leases.

Only applying locks the fleet, so that a slow Redis or a long decision delays no other transaction. A decision is
applied only if the fleet's version is still the one that was read first.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import structlog
from sqlalchemy.orm import Session

from controlplane.errors import StaleIndexError
from controlplane.planner.engines import send_back_failed, settle_engines
from controlplane.planner.snapshot import ReadFleet, read_to_scale
from controlplane.policies.assignment.facts import InstanceChange, SlotSettings, Unplaced
from controlplane.policies.facts import Endpoint
from controlplane.policies.scale import ScaleDecision, choose_scale
from controlplane.policies.scaling.facts import ScalingSettings
from controlplane.policies.snapshot import FleetSnapshot
from controlplane.settings import Settings
from controlplane.store.endpoint_summary import note_outcome
from controlplane.store.fleet import fleet_version, note_change
from controlplane.store.instances import (
    add_instance,
    set_dedicated,
    set_desired,
    set_kind,
    set_succeeds,
    touch_generations,
)
from controlplane.store.keys import record, snapshot
from controlplane.store.layouts import regroup
from controlplane.store.leases import end_due_leases, give_notice
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database
from controlplane.store.tables import Desired, EndpointRow, LeaseEnd
from dataplane.protocol.tiers import InstanceKind

ACTOR = "scale"
_ATTEMPTS_MAX = 5
"""Decisions of one run before it gives up, if the fleet changes meanwhile."""
log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """What a run changed: counts of instances by kind of change, leases that ended or got notice."""

    started: int = 0
    revived: int = 0
    reclaimed: int = 0
    redeployed: int = 0
    drained: int = 0
    donated: int = 0
    stopped: int = 0
    dedicated: int = 0
    moved: int = 0
    leases_ended: int = 0
    leases_noticed: int = 0
    unplaced: tuple[str, ...] = ()

    def changes(self) -> dict[str, int]:
        """The counts that are not zero, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int) and value}


def scale(database: Database, live: LiveStore, settings: Settings, *, now_s: float) -> Scaled:
    """Gather and decide with the fleet unlocked, then apply under its lock; decide again if it changed meanwhile.

    Raises:
        StaleIndexError: it changed during every decision; nothing was applied, the next run decides again.
    """
    ended = _begin(database, settings, now_s=now_s)
    for attempt in range(1, _ATTEMPTS_MAX + 1):
        fleet = read_to_scale(database, live, settings, now_s=now_s)
        decision = choose_scale(fleet.snapshot, now_s, _scaling_settings(settings), _slot_settings(settings))
        try:
            return replace(_apply(database, fleet, decision, settings, now_s=now_s), leases_ended=ended)
        except StaleIndexError as error:
            log.warning("the fleet changed while scaling decided", attempt=attempt, error=error.message)
    raise StaleIndexError(f"the fleet changed under {_ATTEMPTS_MAX} decisions of scaling; the next run decides again")


def _begin(database: Database, settings: Settings, *, now_s: float) -> int:
    """End leases that are over, regroup slots that are empty, and change the engines of instances that failed on
    theirs. How many leases ended.
    """
    with database.transaction() as session:
        fleet_version(session, lock=True)
        ended = _end_leases(session)
        regrouped = _regroup(session)
        # The last to lock nodes, since it changes instances of any.
        sent_back = send_back_failed(session, settings, actor=ACTOR, now_s=now_s)
        if ended or sent_back or regrouped:
            note_change(session)
    return ended


def _regroup(session: Session) -> int:
    """Replace the slots that are to be regrouped and are empty; how many nodes have others now."""
    done = regroup(session)
    for one in done:
        before, after = {"layout": list(one.before)}, {"layout": list(one.after)}
        record(session, actor=ACTOR, action="node.regroup", subject=one.node, before=before, after=after)
    return len(done)


def _apply(
    database: Database, fleet: ReadFleet, decision: ScaleDecision, settings: Settings, *, now_s: float
) -> Scaled:
    """Write a decision, if the fleet is still the one that it was made for.

    Raises:
        StaleIndexError: it has changed; nothing is written.
    """
    slots = decision.slots
    with database.transaction() as session:
        version = fleet_version(session, lock=True)
        if version != fleet.version:
            raise StaleIndexError(f"the fleet is at version {version}, the decision is of version {fleet.version}")
        _write_instances(session, fleet.snapshot, decision)
        moved = settle_engines(session, fleet.inventory, settings, actor=ACTOR, now_s=now_s)
        set_succeeds(session, decision.successors)  # after the last node is locked: these instances may be of any
        noticed = _give_notice(session, slots.notices, settings)
        _note_scaled(session, decision.scaled, now_s=now_s)
        note_outcome(session, settled=decision.settled, unplaced=_unplaced_of(slots.unplaced))
        note_change(session)
    return Scaled(
        started=len(slots.adds),
        revived=len(slots.revives),
        reclaimed=len(slots.reclaims),
        redeployed=len(slots.redeploys),
        drained=len(slots.drains),
        donated=len(slots.donates),
        stopped=len(slots.stops),
        dedicated=len(decision.dedicated),
        moved=moved,
        leases_noticed=noticed,
        unplaced=tuple(f"{u.count} x {u.endpoint.model} in {u.endpoint.region}: {u.reason}" for u in slots.unplaced),
    )


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
        donation_enabled=settings.spot_enabled,
        donation_max_age_s=settings.spot_max_age_s,
    )


def _end_leases(session: Session) -> int:
    """End leases that are due; their nodes get a new desired state and refuse further requests of these leases."""
    ended = end_due_leases(session)
    touch_generations(session, sorted({each.node for each in ended}))
    for each in ended:
        action = "spot.reclaim" if each.lease.end_reason == LeaseEnd.RECLAIMED else "spot.expire"
        record(session, actor=ACTOR, action=action, subject=each.lease.instance_id, after=snapshot(each.lease))
    return len(ended)


def _write_instances(session: Session, fleet: FleetSnapshot, decided: ScaleDecision) -> None:
    """Write the desired state of instances that change."""
    decision, kinds = decided.slots, decided.kinds
    present = {each.instance_id: each for each in fleet.instances}
    running = {change.instance_id: change.kind for change in (*decision.revives, *decision.reclaims)}
    kinds = {name: kind for name, kind in {**kinds, **running}.items() if present[name].kind != kind}
    adds = (*decision.adds, *decision.redeploys)
    drained, donated = _ids(decision.drains), _ids(decision.donates)
    stopped = [*_ids(decision.stops), *(name for add in decision.redeploys for name in add.replaces)]
    changed = [*decided.dedicated, *running, *kinds, *drained, *donated, *stopped]
    touch_generations(session, sorted({add.node_id for add in adds} | {present[name].node_id for name in changed}))
    set_dedicated(session, decided.dedicated)
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


def _give_notice(session: Session, changes: Iterable[InstanceChange], settings: Settings) -> int:
    reasons = {change.instance_id: change.reason for change in changes}
    noticed = give_notice(session, reasons, notice_s=settings.spot_notice_s)
    for lease in noticed:
        after = snapshot(lease) | {"reason": reasons[lease.instance_id]}
        record(session, actor=ACTOR, action="spot.notice", subject=lease.instance_id, after=after)
    return len(noticed)


def _note_scaled(session: Session, endpoints: Iterable[Endpoint], *, now_s: float) -> None:
    """Write when endpoints were scaled."""
    for endpoint in endpoints:
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
