"""Read the fleet's snapshot: for plans from PostgreSQL, for scaling also from the live view in Redis."""

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from sqlalchemy.orm import Session

from controlplane.errors import UnavailableError
from controlplane.planner.correct import profiles_in_force
from controlplane.policies.assignment.evacuation import NodePresence, choose_leaving
from controlplane.policies.assignment.facts import Donation, PlacedInstance, SlotRef
from controlplane.policies.demand import forecast_at, serving_backlogs
from controlplane.policies.facts import Endpoint, EndpointGpu, InstanceFacts, ModelGpu, NodeFacts, NodeSlot, PoolKey
from controlplane.policies.lifecycle import InstanceState
from controlplane.policies.placement.facts import Profile, StartTimes
from controlplane.policies.rollout import least_instances
from controlplane.policies.scaling.facts import StrategyName
from controlplane.policies.snapshot import FleetSnapshot, PlanPools
from controlplane.settings import Settings
from controlplane.store.adapters import served_bases
from controlplane.store.demand import IW, read_demand, read_forecasts
from controlplane.store.endpoint_summary import backlogs
from controlplane.store.fleet import FleetInventory, fleet_version, read_inventory
from controlplane.store.leases import active_leases
from controlplane.store.overrides import overrides_in_force
from controlplane.store.plans import Plan, entries_of, plan_in_force
from controlplane.store.redis.live import EMPTY_VIEW, FleetView, LiveStore, instance_facts
from controlplane.store.rollouts import kept_capacity
from controlplane.store.session import Database
from controlplane.store.tables import Desired, EndpointRow, Instance, InstanceLease, Node
from controlplane.store.weights import sizes_of, weights_memory
from dataplane.protocol.layouts import going_slots
from dataplane.protocol.tiers import InstanceKind

PLAN_SILENT_S = 60.0
"""Plans do not count on nodes that were silent for longer."""
_OBSERVED_S = 300
_MINUTE_S = 60


@dataclass(frozen=True, kw_only=True)
class ReadFleet:
    """A snapshot with the rows that it was made from. `version`: the fleet's version at that moment."""

    version: int
    inventory: FleetInventory
    snapshot: FleetSnapshot


def read_to_plan(session: Session, settings: Settings, *, now_s: float, window_start_s: float) -> FleetSnapshot:
    """The fleet as the plan of the hour from `window_start_s` takes it, with the overrides that last until then. The
    session must be of one moment, see `Database.one_moment`.
    """
    inventory = read_inventory(session, silent_s=PLAN_SILENT_S)
    overrides = overrides_in_force(session, max(now_s, window_start_s))
    least = least_instances(kept_capacity(session))
    snapshot = _snapshot(inventory, settings, overrides, least, now_s=now_s, ages_s=inventory.silent_s)
    corrected = profiles_in_force(session, settings)
    return replace(
        snapshot,
        regions=tuple(inventory.regions),
        gpu_cost_per_hour={gpu.name: gpu.cost_per_hour for gpu in inventory.gpu_types},
        weights_present=frozenset(each.endpoint for each in snapshot.instances),
        latencies={
            ModelGpu(model=row.model, gpu_type=row.gpu_type): row.latency
            for row in inventory.profiles
            if row.latency is not None
        },
    ).corrected(corrected.factors, corrected.steps)


def read_to_scale(database: Database, live: LiveStore, settings: Settings, *, now_s: float) -> ReadFleet:
    """Read everything once, with the fleet unlocked. Its version is of the same moment, so that it tells of any change
    since. While Redis is away nothing is known of utilization, so nothing is scaled in.
    """
    try:
        view = live.read_view()
    except UnavailableError:
        view = EMPTY_VIEW
    with database.one_moment() as session:
        version = fleet_version(session)
        inventory = read_inventory(session, silent_s=settings.heartbeat_stale_s)
        return ReadFleet(
            version=version,
            inventory=inventory,
            snapshot=_to_scale(session, inventory, view, settings, now_s=now_s),
        )


def _to_scale(
    session: Session, inventory: FleetInventory, view: FleetView, settings: Settings, *, now_s: float
) -> FleetSnapshot:
    plan = plan_in_force(session)
    overrides = overrides_in_force(session, now_s)
    snapshot = _snapshot(
        inventory,
        settings,
        overrides,
        least_instances(kept_capacity(session)),
        now_s=now_s,
        ages_s={name: view.read_s - node.received_s for name, node in view.nodes.items()},
        reports={facts.instance_id: facts for facts in instance_facts(view)},
        leases=active_leases(session),
        leaving=choose_leaving(_presence(inventory), replace_after_s=settings.node_replace_s),
    )
    rows = {Endpoint(model=row.model, region=row.region): row for row in inventory.endpoints}
    poolable = {endpoint for endpoint, (_, most) in snapshot.limits.items() if most} - overrides.keys()
    beyond_plan = settings.scale_strategy == StrategyName.LT_UA
    corrected = profiles_in_force(session, settings)
    by_backlog = settings.scale_strategy in {StrategyName.CHIRON, StrategyName.SILOED}
    return replace(
        snapshot,
        planned=None if plan is None else _planned(session, plan.id, rows),
        pools=PlanPools() if plan is None else _pools(plan, poolable, snapshot.gpus),
        window_start_s=None if plan is None else float(plan.window_start_s),
        observed=_observed(session, now_s),
        forecast=_forecast(session, plan.window_start_s, now_s) if plan is not None and beyond_plan else {},
        backlogs=serving_backlogs(backlogs(session), served_bases(session)) if by_backlog else {},
        last_scaled_s={
            at: row.last_scaled_at.timestamp() for at, row in rows.items() if row.last_scaled_at is not None
        },
        settled={endpoint: row.settled for endpoint, row in rows.items()},
    ).corrected(corrected.factors, corrected.steps)


def _snapshot(
    inventory: FleetInventory,
    settings: Settings,
    overrides: Mapping[Endpoint, int],
    least: Mapping[Endpoint, int],
    *,
    now_s: float,
    ages_s: Mapping[str, float],
    reports: Mapping[str, InstanceFacts] | None = None,
    leases: Mapping[str, InstanceLease] | None = None,
    leaving: Mapping[str, str] | None = None,
) -> FleetSnapshot:
    """What plans and scaling both look at. `least`: instances that roll-outs ask for, within an endpoint's maximum;
    `ages_s`: seconds since the last heartbeat of each node that sent one; `reports`, `leases`: by instance; `leaving`:
    why instances must leave a node, by its name.
    """
    reports, leases, leaving = reports or {}, leases or {}, leaving or {}
    going, late = _going(inventory), _regrouped_late(inventory, settings, now_s)
    profiles = {
        ModelGpu(model=row.model, gpu_type=row.gpu_type): Profile(
            tokens_per_s=row.tokens_per_s, gpus=row.gpus, start=StartTimes.of_load(row.load_time_s)
        )
        for row in inventory.profiles
    }
    return FleetSnapshot(
        nodes=_nodes(inventory, settings, ages_s, going, now_s),
        instances=tuple(
            PlacedInstance(
                instance_id=row.id,
                endpoint=Endpoint(model=row.model, region=row.region),
                gpu_type=row.gpu_type,
                node_id=row.node,
                slot=row.slot,
                gpus=row.gpus,
                draining=row.desired == Desired.DRAINING,
                ready=row.observed == InstanceState.READY,
                stuck=_is_stuck(row, profiles, settings, now_s),
                remaining_tokens=reports[row.id].remaining_tokens if row.id in reports else 0,
                kind=InstanceKind(row.kind),
                donation=_donation(row, leases.get(row.id), now_s),
                leaving=leaving.get(row.node) or going.get((row.node, row.slot)),
                overdue=row.node in late and (row.node, row.slot) in going,
                succeeds=row.succeeds,
                pooled=row.pooled,
                report=reports.get(row.id),
            )
            for row in inventory.instances
        ),
        profiles=profiles,
        sizes=sizes_of(inventory.models),
        limits=dict(_limits(row, least) for row in inventory.endpoints),
        overrides=overrides,
    )


def _limits(row: EndpointRow, least: Mapping[Endpoint, int]) -> tuple[Endpoint, tuple[int, int]]:
    endpoint = Endpoint(model=row.model, region=row.region)
    asked = min(least.get(endpoint, 0), row.instances_max)
    return endpoint, (max(row.instances_min, asked), row.instances_max)


def _regrouped_late(inventory: FleetInventory, settings: Settings, now_s: float) -> frozenset[str]:
    """The nodes that have waited to be regrouped for longer than `regroup_patience_s`."""
    return frozenset(
        node.name
        for node in inventory.nodes
        if node.layout_at is not None and now_s - node.layout_at.timestamp() > settings.regroup_patience_s
    )


def _going(inventory: FleetInventory) -> dict[SlotRef, str]:
    """The slots that wait to be regrouped, and how they are spoken of."""
    present: dict[str, list[int]] = {node.name: [] for node in inventory.nodes}
    for slot in inventory.slots:
        present[slot.node].append(slot.gpus)
    return {
        (node.name, slot): f"slot {slot} of node {node.name} is regrouped"
        for node in inventory.nodes
        if node.layout is not None
        for slot in going_slots(tuple(present[node.name]), tuple(node.layout))
    }


def _layout_age_s(node: Node, now_s: float) -> float:
    """For how long the slots that are wanted of a node have been; for ever where nobody chose them."""
    return math.inf if node.layout_chosen_at is None else now_s - node.layout_chosen_at.timestamp()


def _nodes(
    inventory: FleetInventory,
    settings: Settings,
    ages_s: Mapping[str, float],
    going: Container[SlotRef],
    now_s: float,
) -> tuple[NodeFacts, ...]:
    """The nodes; one that never sent a heartbeat, or that the live view does not know, is silent for ever."""
    slots: dict[str, list[NodeSlot]] = {node.name: [] for node in inventory.nodes}
    nodes = {node.name: node for node in inventory.nodes}
    for slot in inventory.slots:
        weights = weights_memory(nodes[slot.node], slot)
        slots[slot.node].append(
            NodeSlot(
                number=slot.index,
                gpus=slot.gpus,
                workers=slot.workers,
                weights=weights,
                going=(slot.node, slot.index) in going,
                hosts=slot.hosts or 1,
            )
        )
    return tuple(
        NodeFacts(
            name=node.name,
            region=node.region,
            gpu_type=node.gpu_type,
            slots=tuple(slots[node.name]),
            host_bytes=node.host_bytes,
            age_s=ages_s.get(node.name, math.inf),
            accepting=node.accepting,
            regroups=settings.plan_layouts and node.regroups and not node.layout_held,
            layout=None if node.layout is None else tuple(node.layout),
            layout_age_s=_layout_age_s(node, now_s),
        )
        for node in inventory.nodes
    )


def _is_stuck(row: Instance, profiles: Mapping[ModelGpu, Profile], settings: Settings, now_s: float) -> bool:
    """Whether the instance failed and stays so, whatever its node tries, or should have come up long ago: after twice
    what a start without the weights in the region takes by the profile, but not less than the setting.
    """
    waited_s = now_s - row.changed_at.timestamp()
    loading = row.observed == InstanceState.LOADING
    if row.observed == InstanceState.FAILED or (loading and row.error is not None):
        return waited_s > settings.scale_failed_patience_s
    if not (loading or row.observed == InstanceState.PENDING) or row.desired == Desired.DRAINING:
        return False
    profile = profiles.get(ModelGpu(model=row.model, gpu_type=row.gpu_type))
    start_s = 0.0 if profile is None else 2 * profile.start.remote_s
    return waited_s > max(settings.scale_start_patience_s, start_s)


def _donation(row: Instance, lease: InstanceLease | None, now_s: float) -> Donation | None:
    if row.spot_at is None:
        return None
    noticed = lease is not None and lease.reclaim_at is not None
    return Donation(age_s=now_s - row.spot_at.timestamp(), leased=lease is not None, noticed=noticed)


def _presence(inventory: FleetInventory) -> Iterable[NodePresence]:
    holding = {instance.node for instance in inventory.instances}
    return (
        NodePresence(
            name=node.name,
            draining=node.draining,
            leaving=node.leaving,
            silent_s=inventory.silent_s.get(node.name),
            has_instances=node.name in holding,
        )
        for node in inventory.nodes
    )


def _planned(session: Session, plan_id: str, endpoints: Container[Endpoint]) -> dict[Endpoint, dict[str, int]]:
    """A plan's instances with GPUs of their own, by endpoint and GPU type, for the endpoints that there are still."""
    planned: dict[Endpoint, dict[str, int]] = {}
    for entry in entries_of(session, plan_id):
        endpoint = Endpoint(model=entry.model, region=entry.region)
        if endpoint in endpoints:
            planned.setdefault(endpoint, {})[entry.gpu_type] = entry.after
    return planned


def _pools(plan: Plan, poolable: Container[Endpoint], gpus_of: Mapping[ModelGpu, int]) -> PlanPools:
    """A plan's pools and reserves. An override takes its endpoint out of them, and so does its deletion, or a maximum
    of 0: only what is `poolable` is in them. `gpus_of`: of an instance of each model. A plan of an older
    release does not say how many GPUs the workers of a pool have: as many as its models take. Nor does what a rollback
    restores of it, beside the pools that say so and that it ends.
    """
    gpus: Counter[PoolKey] = Counter()
    occupancy: dict[EndpointGpu, float] = {}
    held: set[EndpointGpu] = set()
    for pool in plan.pools:
        region, gpu_type = pool["region"], pool["gpu_type"]
        held_here = pool.get("reserve", {}).get("held", ())
        pairs = (ModelGpu(model=each["model"], gpu_type=gpu_type) for each in (*pool["pooled"], *held_here))
        size = pool.get("worker_gpus") or min((gpus_of[pair] for pair in pairs if pair in gpus_of), default=1)
        gpus[PoolKey(region=region, gpu_type=gpu_type, worker_gpus=size)] += pool["after"]
        for each in pool["pooled"]:
            key = EndpointGpu(model=each["model"], region=region, gpu_type=gpu_type)
            if key.endpoint in poolable:
                occupancy[key] = each["occupancy"]
        for each in held_here:
            key = EndpointGpu(model=each["model"], region=region, gpu_type=gpu_type)
            if key.endpoint in poolable:
                held.add(key)
    return PlanPools(gpus=gpus, occupancy=occupancy, held=frozenset(held))


def _observed(session: Session, now_s: float) -> dict[Endpoint, float]:
    """The mean of the last minutes that were counted."""
    until_s = int(now_s)
    rows = read_demand(session, kind=IW, since_s=until_s - _OBSERVED_S - _MINUTE_S, until_s=until_s)
    known = {endpoint: [value for _, value in series if value is not None] for endpoint, series in rows.items()}
    return {endpoint: fmean(values) for endpoint, values in known.items() if values}


def _forecast(session: Session, window_start_s: int, now_s: float) -> dict[Endpoint, float]:
    """What was forecast for this moment by the newest forecast from before the window."""
    rows = read_forecasts(session, origin_s=None, until_s=window_start_s)
    values = {
        Endpoint(model=row.model, region=row.region): forecast_at(
            row.path, peak_q50=row.peak_q50, peak_upper=row.peak_upper, late_s=now_s - row.origin_s
        )
        for row in rows
    }
    return {endpoint: value for endpoint, value in values.items() if value is not None}
