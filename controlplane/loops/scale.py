"""Scaling: the plan and the live view become desired instances on slots, which nodes then follow."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy.orm import Session

from controlplane.errors import UnavailableError
from controlplane.policies.facts import Endpoint, InstanceFacts, ModelGpu
from controlplane.policies.lifecycle import InstanceState
from controlplane.policies.routing import is_usable, utilization_of
from controlplane.policies.scaling import EndpointScaleFacts, ScalingFacts, ScalingSettings, choose_scaling
from controlplane.policies.slots import PlacedInstance, SlotDecision, SlotFacts, SlotRoom, SlotSettings, choose_slots
from controlplane.settings import Settings
from controlplane.store.fleet import Census, fleet_index, take_census
from controlplane.store.instances import add_instance, set_desired, touch_generations
from controlplane.store.live import EMPTY_VIEW, FleetView, LiveStore, instance_facts
from controlplane.store.plans import entries_of, plan_in_force
from controlplane.store.tables import Desired, EndpointRow, Instance


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """What a run changed."""

    started: int
    revived: int
    drained: int
    unplaced: tuple[str, ...]


def scale(session: Session, live: LiveStore, settings: Settings, *, now_s: float) -> Scaled:
    """Gather, decide, apply, under the fleet's lock, so that two runs at once do not add up."""
    fleet_index(session, lock=True)
    census = take_census(session, silent_s=settings.heartbeat_stale_s)
    view = _view(live)
    reported = instance_facts(view, kv_bytes_per_token={}, sent_tokens={})
    scaling = choose_scaling(
        ScalingFacts(endpoints=_endpoints(session, census, reported, settings)), now_s, _scaling_settings(settings)
    )
    slots = SlotFacts(
        steps=scaling.steps,
        slots=_slots(census, view, settings),
        instances=_placed(census, reported),
        gpus={ModelGpu(model=row.model, gpu_type=row.gpu_type): row.gpus for row in census.profiles},
    )
    decision = choose_slots(slots, now_s, SlotSettings(stale_s=settings.heartbeat_stale_s))
    _apply(session, census, decision, scaling.last_scaled_s, now_s=now_s)
    return Scaled(
        started=len(decision.adds),
        revived=len(decision.revives),
        drained=len(decision.drains),
        unplaced=tuple(f"{u.count} x {u.endpoint.model} in {u.endpoint.region}: {u.reason}" for u in decision.unplaced),
    )


def _view(live: LiveStore) -> FleetView:
    """The live view; an empty one (nothing is known, so nothing is scaled in) while Redis is away."""
    try:
        return live.read_view()
    except UnavailableError:
        return EMPTY_VIEW


def _scaling_settings(settings: Settings) -> ScalingSettings:
    return ScalingSettings(
        strategy=settings.scale_strategy,
        out_above=settings.scale_out_above,
        in_below=settings.scale_in_below,
        cooldown_s=settings.scale_cooldown_s,
    )


def _endpoints(
    session: Session, census: Census, reported: tuple[InstanceFacts, ...], settings: Settings
) -> tuple[EndpointScaleFacts, ...]:
    planned = _planned(session)
    wanted = [instance for instance in census.instances if instance.desired == Desired.RUNNING]
    usable = [facts for facts in reported if is_usable(facts, settings.heartbeat_stale_s)]
    facts = []
    for row in census.endpoints:
        endpoint = Endpoint(model=row.model, region=row.region)
        mine = [instance for instance in wanted if _endpoint_of(instance) == endpoint]
        seen = [instance for instance in usable if instance.endpoint == endpoint]
        facts.append(
            EndpointScaleFacts(
                endpoint=endpoint,
                present=Counter(instance.gpu_type for instance in mine),
                starting=Counter(instance.gpu_type for instance in mine if instance.observed != InstanceState.READY),
                utilization=utilization_of(seen) if seen else None,
                min=row.instances_min,
                max=row.instances_max,
                planned=planned.get(endpoint) if planned is not None else None,
                last_scaled_s=None if row.last_scaled_at is None else row.last_scaled_at.timestamp(),
            )
        )
    return tuple(facts)


def _planned(session: Session) -> dict[Endpoint, dict[str, int]] | None:
    """The plan in force, by endpoint and GPU type."""
    plan = plan_in_force(session)
    if plan is None:
        return None
    planned: dict[Endpoint, dict[str, int]] = {}
    for entry in entries_of(session, plan.id):
        planned.setdefault(Endpoint(model=entry.model, region=entry.region), {})[entry.gpu_type] = entry.after
    return planned


def _slots(census: Census, view: FleetView, settings: Settings) -> tuple[SlotRoom, ...]:
    held: Counter[tuple[str, int]] = Counter()
    for instance in census.instances:
        held[instance.node, instance.slot] += instance.gpus
    nodes = {node.name: node for node in census.nodes}
    unknown_s = settings.heartbeat_stale_s * 1000
    return tuple(
        SlotRoom(
            node_id=slot.node,
            slot=slot.index,
            region=nodes[slot.node].region,
            gpu_type=nodes[slot.node].gpu_type,
            gpus=slot.gpus,
            gpus_free=max(0, slot.gpus - held[slot.node, slot.index]),
            age_s=view.read_s - view.nodes[slot.node].received_s if slot.node in view.nodes else unknown_s,
            accepting=not nodes[slot.node].draining,
        )
        for slot in census.slots
    )


def _placed(census: Census, reported: tuple[InstanceFacts, ...]) -> tuple[PlacedInstance, ...]:
    remaining = {facts.instance_id: facts.remaining_tokens for facts in reported}
    return tuple(
        PlacedInstance(
            instance_id=instance.id,
            endpoint=_endpoint_of(instance),
            gpu_type=instance.gpu_type,
            node_id=instance.node,
            slot=instance.slot,
            draining=instance.desired == Desired.DRAINING,
            ready=instance.observed == InstanceState.READY,
            remaining_tokens=remaining.get(instance.id, 0),
        )
        for instance in census.instances
    )


def _apply(
    session: Session, census: Census, decision: SlotDecision, last_scaled_s: Mapping[Endpoint, float], *, now_s: float
) -> None:
    at = {instance.id: instance.node for instance in census.instances}
    revived, drained = [c.instance_id for c in decision.revives], [c.instance_id for c in decision.drains]
    nodes = {add.node_id for add in decision.adds} | {at[instance_id] for instance_id in revived + drained}
    if not nodes:
        return
    touch_generations(session, sorted(nodes))
    for add in decision.adds:
        add_instance(
            session,
            model=add.endpoint.model,
            region=add.endpoint.region,
            gpu_type=add.gpu_type,
            node=add.node_id,
            slot=add.slot,
            gpus=add.gpus,
        )
    set_desired(session, revived, Desired.RUNNING)
    set_desired(session, drained, Desired.DRAINING)
    for row in census.endpoints:
        scaled_s = last_scaled_s.get(Endpoint(model=row.model, region=row.region))
        if scaled_s == now_s:
            session.get_one(EndpointRow, (row.model, row.region)).last_scaled_at = datetime.fromtimestamp(now_s, UTC)


def _endpoint_of(instance: Instance) -> Endpoint:
    return Endpoint(model=instance.model, region=instance.region)
