"""What the scale loop gathers: endpoints, slots and instances as the policies want them."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from sqlalchemy.orm import Session

from controlplane.errors import UnavailableError
from controlplane.planner.scale_pools import pooled_instances, pools_of
from controlplane.policies.assignment.evacuation import NodePresence, choose_leaving
from controlplane.policies.assignment.facts import PlacedInstance, SlotRoom, SpotFacts
from controlplane.policies.assignment.pooling import PlanPools, planned_beside, pool_slot_facts
from controlplane.policies.assignment.pools import PoolSlotFacts
from controlplane.policies.demand import forecast_at
from controlplane.policies.facts import Endpoint, EndpointGpu, InstanceFacts, ModelGpu
from controlplane.policies.lifecycle import InstanceState
from controlplane.policies.placement.facts import StartTimes
from controlplane.policies.routing import is_usable, utilization_of
from controlplane.policies.scaling.choose import kind_for
from controlplane.policies.scaling.facts import EndpointScaleFacts, KindFacts, ScalingFacts, StrategyName
from controlplane.settings import Settings
from controlplane.store.demand import IW, read_demand, read_forecasts
from controlplane.store.endpoint_summary import Backlog, backlogs
from controlplane.store.fleet import FleetInventory, fleet_version, read_inventory
from controlplane.store.pins import pins_in_force
from controlplane.store.plans import entries_of, plan_in_force
from controlplane.store.redis.live import EMPTY_VIEW, FleetView, LiveStore, instance_facts
from controlplane.store.session import Database
from controlplane.store.spot import active_leases
from controlplane.store.tables import Desired, EndpointRow, Instance, SpotLease
from controlplane.store.weights import room_of, sizes_of
from dataplane.protocol.tiers import InstanceKind

_OBSERVED_S = 300
_MINUTE_S = 60


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The fleet at one moment. `version`: that of its row at that moment, or before. `reports`: what nodes said of
    instances, by id. `observed`, `forecast`: interactive tokens/s that arrive now, and that were forecast for now (for
    LT-UA alone). `backlogs`: deferred requests, by model. `leaving`: why instances must leave a node, by its name.
    """

    version: int
    inventory: FleetInventory
    view: FleetView
    reports: Mapping[str, InstanceFacts]
    leases: Mapping[str, SpotLease]
    planned: Mapping[Endpoint, dict[str, int]] | None
    pools: PlanPools
    window_start_s: float | None
    observed: Mapping[Endpoint, float]
    forecast: Mapping[Endpoint, float]
    backlogs: Mapping[str, Backlog]
    pins: Mapping[Endpoint, int]
    leaving: Mapping[str, str]
    now_s: float
    settings: Settings

    @cached_property
    def limits(self) -> Mapping[Endpoint, tuple[int, int]]:
        """Fewest and most instances of each endpoint."""
        return {Endpoint(model=row.model, region=row.region): self.limits_of(row) for row in self.inventory.endpoints}

    def limits_of(self, row: EndpointRow) -> tuple[int, int]:
        """Fewest and most instances: an operator's pin is both, while it lasts, in place of the endpoint's own."""
        pin = self.pins.get(Endpoint(model=row.model, region=row.region))
        return (row.instances_min, row.instances_max) if pin is None else (pin, pin)

    def kind(self, instance: Instance) -> InstanceKind:
        """What the instance should be under the strategy in use."""
        _, most = self.limits[endpoint_of(instance)]
        return kind_for(self.settings.scale_strategy, InstanceKind(instance.kind), instances_max=most)

    def is_stuck(self, instance: Instance) -> bool:
        """Whether the instance failed and stays so, whatever its node tries, or should have come up long ago."""
        waited_s = self.now_s - instance.changed_at.timestamp()
        loading = instance.observed == InstanceState.LOADING
        if instance.observed == InstanceState.FAILED or (loading and instance.error is not None):
            return waited_s > self.settings.scale_failed_patience_s
        waits = loading or instance.observed == InstanceState.PENDING
        return waits and instance.desired != Desired.DRAINING and waited_s > self._start_patience_s(instance)

    def _start_patience_s(self, instance: Instance) -> float:
        """Twice what a start without the weights in the region takes by the profile, but not less than the setting."""
        load_time_s = self._load_times_s.get(ModelGpu(model=instance.model, gpu_type=instance.gpu_type), 0.0)
        return max(self.settings.scale_start_patience_s, 2 * StartTimes.of_load(load_time_s).remote_s)

    @cached_property
    def _load_times_s(self) -> Mapping[ModelGpu, float]:
        return {ModelGpu(model=row.model, gpu_type=row.gpu_type): row.load_time_s for row in self.inventory.profiles}


def gather_fleet(database: Database, live: LiveStore, settings: Settings, *, now_s: float) -> Fleet:
    """Read everything once, with the fleet unlocked. Of Postgres its version is read first, so that it tells of any
    change since. While Redis is away nothing is known of utilization, so nothing is scaled in.
    """
    view = _view(live)
    with database.transaction() as session:
        return _gathered(session, view, settings, now_s=now_s)


def _gathered(session: Session, view: FleetView, settings: Settings, *, now_s: float) -> Fleet:
    version = fleet_version(session)
    inventory = read_inventory(session, silent_s=settings.heartbeat_stale_s)
    plan = plan_in_force(session)
    pins = pins_in_force(session, now_s)
    maxima = {Endpoint(model=row.model, region=row.region): row.instances_max for row in inventory.endpoints}
    beyond_plan = settings.scale_strategy == StrategyName.LT_UA
    waiting = settings.scale_strategy in {StrategyName.CHIRON, StrategyName.SILOED}
    return Fleet(
        version=version,
        inventory=inventory,
        view=view,
        reports={facts.instance_id: facts for facts in instance_facts(view)},
        leases=active_leases(session),
        planned=None if plan is None else _planned(session, plan.id, maxima),
        pools=pools_of(plan, pins=pins, offered={endpoint for endpoint, most in maxima.items() if most}),
        window_start_s=None if plan is None else float(plan.window_start_s),
        observed=_observed(session, now_s),
        forecast=_forecast(session, plan.window_start_s, now_s) if plan is not None and beyond_plan else {},
        backlogs=backlogs(session) if waiting else {},
        pins=pins,
        leaving=choose_leaving(_presence(inventory), replace_after_s=settings.node_replace_s),
        now_s=now_s,
        settings=settings,
    )


def scaling_facts(
    fleet: Fleet, *, stranded: Iterable[EndpointGpu] = (), succeeded: Container[str] = ()
) -> ScalingFacts:
    """The endpoints for `choose_scaling`; see `planned_beside`. Pooled instances count for nothing, nor do those
    `succeeded` by one elsewhere.
    """
    planned = planned_beside(fleet.planned, fleet.limits, fleet.pools, stranded)
    mine: dict[Endpoint, list[Instance]] = {}
    spot: dict[str, list[Instance]] = {}
    for instance in fleet.inventory.instances:
        if instance.pooled or instance.id in succeeded:
            continue
        if instance.desired == Desired.RUNNING:
            mine.setdefault(endpoint_of(instance), []).append(instance)
        elif instance.desired == Desired.SPOT:
            spot.setdefault(instance.region, []).append(instance)
    profiles: dict[str, dict[str, float]] = {}
    for profile in fleet.inventory.profiles:
        profiles.setdefault(profile.model, {})[profile.gpu_type] = profile.tokens_per_s
    regions = Counter(row.model for row in fleet.inventory.endpoints)
    endpoints = []
    for row in fleet.inventory.endpoints:
        endpoint = Endpoint(model=row.model, region=row.region)
        if endpoint not in planned:
            continue
        whole = _endpoint_facts(fleet, row, mine.get(endpoint, []), spot.get(row.region, []))
        backlog = fleet.backlogs.get(row.model)
        endpoints.append(
            replace(
                whole,
                planned=planned[endpoint],
                tokens_per_s=profiles.get(row.model, {}),
                backlog_tokens=0.0 if backlog is None else backlog.tokens / regions[row.model],
                backlog_due_s=None if backlog is None else backlog.due_s,
            )
        )
    return ScalingFacts(endpoints=tuple(endpoints), window_start_s=fleet.window_start_s)


def slot_rooms(fleet: Fleet) -> tuple[SlotRoom, ...]:
    """The slots for `choose_slots`; those of nodes that the live view does not know are stale."""
    held: Counter[tuple[str, int]] = Counter()
    for instance in fleet.inventory.instances:
        held[instance.node, instance.slot] += instance.gpus
    nodes = {node.name: node for node in fleet.inventory.nodes}
    unknown_s = fleet.settings.heartbeat_stale_s * 1000
    seen = fleet.view.nodes
    return tuple(
        SlotRoom(
            node_id=slot.node,
            slot=slot.index,
            region=nodes[slot.node].region,
            gpu_type=nodes[slot.node].gpu_type,
            gpus=slot.gpus,
            gpus_free=max(0, slot.gpus - held[slot.node, slot.index]),
            age_s=fleet.view.read_s - seen[slot.node].received_s if slot.node in seen else unknown_s,
            accepting=nodes[slot.node].accepting,
            workers=slot.workers,
            weights=room_of(nodes[slot.node], slot),
        )
        for slot in fleet.inventory.slots
    )


def placed_instances(fleet: Fleet) -> tuple[PlacedInstance, ...]:
    """The instances for `choose_slots`: those with GPUs of their own."""
    reports = fleet.reports
    return tuple(
        PlacedInstance(
            instance_id=instance.id,
            endpoint=endpoint_of(instance),
            gpu_type=instance.gpu_type,
            node_id=instance.node,
            slot=instance.slot,
            gpus=instance.gpus,
            draining=instance.desired == Desired.DRAINING,
            ready=instance.observed == InstanceState.READY,
            stuck=fleet.is_stuck(instance),
            remaining_tokens=reports[instance.id].remaining_tokens if instance.id in reports else 0,
            kind=fleet.kind(instance),
            spot=_spot_facts(fleet, instance),
            leaving=fleet.leaving.get(instance.node),
            succeeds=instance.succeeds,
        )
        for instance in fleet.inventory.instances
        if not instance.pooled
    )


def pool_facts(fleet: Fleet) -> PoolSlotFacts:
    """What `choose_pool_slots` is told."""
    stuck = frozenset(each.id for each in fleet.inventory.instances if each.pooled and fleet.is_stuck(each))
    return pool_slot_facts(
        fleet.pools,
        planned=fleet.planned or {},
        limits=fleet.limits,
        rooms=slot_rooms(fleet),
        placed=placed_instances(fleet),
        pooled=pooled_instances(fleet.inventory, stuck),
        sizes=sizes_of(fleet.inventory.models),
    )


def endpoint_of(instance: Instance) -> Endpoint:
    """The endpoint of an instance."""
    return Endpoint(model=instance.model, region=instance.region)


def _endpoint_facts(fleet: Fleet, row: EndpointRow, mine: list[Instance], spot: list[Instance]) -> EndpointScaleFacts:
    """An endpoint with its running instances, and the spot instances of its region."""
    endpoint = Endpoint(model=row.model, region=row.region)
    whole = _kind_facts(fleet, mine)
    fewest, most = fleet.limits_of(row)
    return EndpointScaleFacts(
        endpoint=endpoint,
        present=whole.present,
        starting=whole.starting,
        stuck=whole.stuck,
        utilization=whole.utilization,
        kinds={kind: _kind_facts(fleet, [each for each in mine if fleet.kind(each) == kind]) for kind in InstanceKind},
        min=fewest,
        max=most,
        last_scaled_s=None if row.last_scaled_at is None else row.last_scaled_at.timestamp(),
        settled=row.settled,
        observed_tokens_per_s=fleet.observed.get(endpoint),
        forecast_tokens_per_s=fleet.forecast.get(endpoint),
        spot_same=_by_gpu_type(each for each in spot if each.model == row.model),
        spot_other=_by_gpu_type(each for each in spot if each.model != row.model),
    )


def _kind_facts(fleet: Fleet, instances: list[Instance]) -> KindFacts:
    reports = [fleet.reports[each.id] for each in instances if each.id in fleet.reports]
    seen = [facts for facts in reports if is_usable(facts, fleet.settings.heartbeat_stale_s)]
    stuck = [instance for instance in instances if fleet.is_stuck(instance)]
    unready = [instance for instance in instances if instance.observed != InstanceState.READY]
    return KindFacts(
        present=_by_gpu_type(instances),
        starting=_by_gpu_type(instance for instance in unready if instance not in stuck),
        stuck=_by_gpu_type(stuck),
        utilization=utilization_of(seen) if seen else None,
    )


def _by_gpu_type(instances: Iterable[Instance]) -> Counter[str]:
    return Counter(instance.gpu_type for instance in instances)


def _spot_facts(fleet: Fleet, instance: Instance) -> SpotFacts | None:
    if instance.spot_at is None:
        return None
    lease = fleet.leases.get(instance.id)
    return SpotFacts(
        age_s=fleet.now_s - instance.spot_at.timestamp(),
        leased=lease is not None,
        noticed=lease is not None and lease.reclaim_at is not None,
    )


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


def _view(live: LiveStore) -> FleetView:
    try:
        return live.read_view()
    except UnavailableError:
        return EMPTY_VIEW


def _planned(session: Session, plan_id: str, endpoints: Container[Endpoint]) -> dict[Endpoint, dict[str, int]]:
    """A plan by endpoint and GPU type, for the endpoints that there are still."""
    planned: dict[Endpoint, dict[str, int]] = {}
    for entry in entries_of(session, plan_id):
        endpoint = Endpoint(model=entry.model, region=entry.region)
        if endpoint in endpoints:
            planned.setdefault(endpoint, {})[entry.gpu_type] = entry.after
    return planned


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
