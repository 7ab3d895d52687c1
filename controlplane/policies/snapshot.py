"""The fleet at one moment, and the facts that policies take from it.

The planner reads a snapshot from PostgreSQL and Redis, the simulator from its world; what follows from it is the same:

    each hour          poolable_facts -> choose_poolable, placement_facts -> choose_placement
    every 15 seconds   pool_slot_facts, scaling_facts, FleetSnapshot.rooms -> policies.scale.choose_scale
"""

import math
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from msgspec import structs

from controlplane.policies.assignment.facts import PlacedInstance, SlotRef, SlotRoom
from controlplane.policies.assignment.pools import PoolSlotFacts
from controlplane.policies.facts import (
    Backlog,
    Endpoint,
    EndpointGpu,
    InstanceFacts,
    ModelGpu,
    NodeFacts,
    PoolKey,
    RegionGpu,
)
from controlplane.policies.fit import ModelSize, WeightsMemory, why_not_over_hosts, why_too_small, why_unfit
from controlplane.policies.placement.facts import PlacementFacts, PlacementModel, PoolFacts, Profile
from controlplane.policies.placement.poolable import PoolableFacts, PoolProfile
from controlplane.policies.routing import is_usable, predicted_wait_s, utilization_of
from controlplane.policies.scaling.choose import kind_for
from controlplane.policies.scaling.facts import Counts, EndpointScaleFacts, KindFacts, ScalingFacts
from controlplane.policies.step_correction import corrected_latency
from dataplane.protocol.tiers import InstanceKind, Tier

Demand = Mapping[Endpoint, tuple[float, ...]]
"""Input tokens per second for each window of the coming hour."""
NO_STEPS: Mapping[ModelGpu, tuple[float, float]] = {}


@dataclass(frozen=True, kw_only=True)
class PlanPools:
    """The pools of a plan: GPUs by pool, and the share of one GPU that each pooled endpoint takes.
    `held`: endpoints of pools that are the reserve of their region, and have instances of their own beside it.
    """

    gpus: Mapping[PoolKey, int] = field(default_factory=dict)
    occupancy: Mapping[EndpointGpu, float] = field(default_factory=dict)
    held: frozenset[EndpointGpu] = frozenset()

    @cached_property
    def endpoints(self) -> frozenset[Endpoint]:
        return frozenset(key.endpoint for key in self.occupancy)

    @cached_property
    def reserved(self) -> Mapping[Endpoint, str]:
        """The endpoints that reserves hold, and the GPU type of each."""
        return {key.endpoint: key.gpu_type for key in self.held}


@dataclass(frozen=True, kw_only=True)
class FleetSnapshot:
    """The fleet and its load at one moment. A missing key means none, or not known.

    Attributes:
        nodes: all nodes. instances: all instances that are wanted, drain or are lent out.
        profiles: of models on GPU types. latencies: of the same pairs, where they were measured, see `PoolProfile`.
        sizes: weights of all models, by name.
        limits: fewest and most instances of every endpoint that is offered.
        overrides: instances that operators ask for, in place of the limits.
        regions, gpu_cost_per_hour, weights_present: as in `PlacementFacts`; only plans need them.
        planned: instances with GPUs of their own in the plan in force; None: there is no plan.
        pools: its pools. window_start_s: when its hour began.
        observed, forecast: interactive input tokens/s that arrive now, and that were forecast for now.
        backlogs: deferred requests that wait, by model.
        last_scaled_s, settled: as in `EndpointScaleFacts`.
    """

    nodes: tuple[NodeFacts, ...]
    instances: tuple[PlacedInstance, ...]
    profiles: Mapping[ModelGpu, Profile]
    sizes: Mapping[str, ModelSize]
    limits: Mapping[Endpoint, tuple[int, int]]
    latencies: Mapping[ModelGpu, Mapping[str, float]] = field(default_factory=dict)
    overrides: Mapping[Endpoint, int] = field(default_factory=dict)
    regions: tuple[str, ...] = ()
    gpu_cost_per_hour: Mapping[str, float] = field(default_factory=dict)
    weights_present: frozenset[Endpoint] = frozenset()
    planned: Mapping[Endpoint, Counts] | None = None
    pools: PlanPools = PlanPools()
    window_start_s: float | None = None
    observed: Mapping[Endpoint, float] = field(default_factory=dict)
    forecast: Mapping[Endpoint, float] = field(default_factory=dict)
    backlogs: Mapping[str, Backlog] = field(default_factory=dict)
    last_scaled_s: Mapping[Endpoint, float] = field(default_factory=dict)
    settled: Mapping[Endpoint, Counts | None] = field(default_factory=dict)

    @cached_property
    def limits_in_force(self) -> Mapping[Endpoint, tuple[int, int]]:
        """Fewest and most instances of each endpoint; an override is both."""
        return {
            endpoint: (self.overrides[endpoint],) * 2 if endpoint in self.overrides else limits
            for endpoint, limits in self.limits.items()
        }

    @cached_property
    def gpus(self) -> Mapping[ModelGpu, int]:
        """GPUs of one instance, for each profile."""
        return {key: profile.gpus for key, profile in self.profiles.items()}

    @cached_property
    def dedicated(self) -> tuple[PlacedInstance, ...]:
        """Instances with GPUs of their own."""
        return tuple(each for each in self.instances if not each.pooled)

    @cached_property
    def pooled(self) -> tuple[PlacedInstance, ...]:
        return tuple(each for each in self.instances if each.pooled)

    @cached_property
    def rooms(self) -> tuple[SlotRoom, ...]:
        """The slots for `choose_slots` and `choose_pool_slots`, with their free GPUs."""
        held: Counter[SlotRef] = Counter()
        for each in self.instances:
            held[each.ref] += each.gpus
        return tuple(
            SlotRoom(
                node_id=node.name,
                slot=slot.number,
                region=node.region,
                gpu_type=node.gpu_type,
                gpus=slot.gpus,
                gpus_free=max(0, slot.gpus - held[node.name, slot.number]),
                age_s=node.age_s,
                accepting=node.accepting and not slot.going,
                workers=slot.workers,
                weights=slot.weights,
                regroups=node.regroups,
                hosts=slot.hosts,
            )
            for node in self.nodes
            for slot in node.slots
        )

    def serving_nodes(self, stale_s: float) -> tuple[NodeFacts, ...]:
        """Nodes that take instances. `stale_s`: a node silent for longer does not."""
        return tuple(node for node in self.nodes if node.accepting and node.age_s <= stale_s)

    def corrected(
        self, rates: Mapping[ModelGpu, float], steps: Mapping[ModelGpu, tuple[float, float]] = NO_STEPS
    ) -> "FleetSnapshot":
        """The snapshot with profiles multiplied by factors; by 1 where there is none. `rates`: on tokens/s; `steps`: on
        the times of prefills and of decode steps.
        """
        profiles = {
            key: replace(profile, tokens_per_s=rates[key] * profile.tokens_per_s) if key in rates else profile
            for key, profile in self.profiles.items()
        }
        latencies = {
            key: corrected_latency(latency, prefill=steps[key][0], decode=steps[key][1]) if key in steps else latency
            for key, latency in self.latencies.items()
        }
        return replace(self, profiles=profiles, latencies=latencies)

    def as_scaled(
        self, gpus: Mapping[str, int], strategy: str, donated: Container[str] = frozenset()
    ) -> "FleetSnapshot":
        """The snapshot that a scaling strategy starts from: these pooled instances, by id, have so many GPUs of their
        own, and instances with GPUs of their own are of the kinds that the strategy knows. Those that are `donated`
        serve what they have.
        """

        def changed(each: PlacedInstance) -> PlacedInstance:
            if each.pooled and each.instance_id not in gpus:
                return each
            _, most = self.limits_in_force[each.endpoint]
            kind = kind_for(strategy, each.kind, instances_max=most)
            if not each.pooled and each.instance_id not in gpus and kind == each.kind:
                return each
            draining = each.draining or each.instance_id in donated
            own_gpus = gpus.get(each.instance_id, each.gpus)
            return structs.replace(each, pooled=False, gpus=own_gpus, kind=kind, draining=draining)

        instances = tuple(changed(each) for each in self.instances)
        same = all(one is other for one, other in zip(instances, self.instances, strict=True))
        return self if same else replace(self, instances=instances)


def pool_slot_facts(snapshot: FleetSnapshot, *, lends: bool = True) -> PoolSlotFacts:
    """The facts for `choose_pool_slots`. `lends`: whether instances may be lent out."""
    planned = snapshot.planned or {}
    serving = [each for each in snapshot.dedicated if each.serving and not each.stuck]
    present = Counter(each.key for each in serving)
    wanted = {
        EndpointGpu(model=endpoint.model, region=endpoint.region, gpu_type=gpu_type): count
        for endpoint, counts in planned.items()
        for gpu_type, count in counts.items()
    }
    return PoolSlotFacts(
        pool_gpus=snapshot.pools.gpus,
        gpus=snapshot.gpus,
        occupancy=snapshot.pools.occupancy,
        held=snapshot.pools.held,
        leaving=frozenset(key for key in snapshot.pools.held if not wanted.get(key)),
        slots=snapshot.rooms,
        instances=snapshot.pooled,
        served=frozenset(_served(snapshot, serving)),
        dedicated=snapshot.dedicated,
        lends=lends,
        sizes=snapshot.sizes,
        missing={key: count - present[key] for key, count in wanted.items() if count > present[key]},
    )


def _served(snapshot: FleetSnapshot, serving: Iterable[PlacedInstance]) -> Iterable[Endpoint]:
    """Endpoints with as many ready instances of their own as they shall have, or with some while no more start. Those
    of a reserve, ready and on slots that stay, count for the minimum; where none of its own is wanted, there is one.
    """
    ready: Counter[Endpoint] = Counter()
    starting: Counter[Endpoint] = Counter()
    for each in serving:
        (ready if each.ready else starting)[each.endpoint] += 1
    planned, pools = snapshot.planned or {}, snapshot.pools
    staying = (each for each in snapshot.pooled if each.serving and each.ready and each.leaving is None)
    held = Counter(each.endpoint for each in staying if each.key in pools.held)
    for endpoint, (fewest, most) in snapshot.limits_in_force.items():
        wanted = min(most, max(fewest - held[endpoint], sum(planned.get(endpoint, {}).values())))
        if not wanted and most and endpoint in pools.reserved and not held[endpoint]:
            continue
        if ready[endpoint] >= wanted or (ready[endpoint] and not starting[endpoint]):
            yield endpoint


def scaling_facts(
    snapshot: FleetSnapshot,
    *,
    stale_s: float,
    stranded: Iterable[EndpointGpu] = (),
    succeeded: Container[str] = frozenset(),
) -> ScalingFacts:
    """The facts for `choose_scaling`: endpoints that are not pooled, with their instances and plans.

    Args:
        snapshot: the fleet.
        stale_s: reports older than this count as unknown.
        stranded: endpoints that their pool does not serve; each is planned with one instance of its own.
        succeeded: ids of instances that have a successor elsewhere, which counts in their place, as one of their GPU
            type: the plan, or what the endpoint is settled at, asks for that one, and would undo another.
    """
    serving: dict[Endpoint, list[PlacedInstance]] = defaultdict(list)
    donated: dict[str, list[PlacedInstance]] = defaultdict(list)
    before = {each.instance_id: each.gpu_type for each in snapshot.dedicated if each.instance_id in succeeded}
    for each in snapshot.dedicated:
        if each.instance_id in succeeded:
            continue
        if each.serving:
            gpu_type = before.get(each.succeeds or "")
            serving[each.endpoint].append(each if gpu_type is None else structs.replace(each, gpu_type=gpu_type))
        elif each.donation is not None:
            donated[each.endpoint.region].append(each)
    tokens_per_s: dict[str, dict[str, float]] = defaultdict(dict)
    for key, profile in snapshot.profiles.items():
        tokens_per_s[key.model][key.gpu_type] = profile.tokens_per_s
    regions = Counter(endpoint.model for endpoint in snapshot.limits)
    alone = {key.endpoint: {key.gpu_type: 1} for key in stranded}
    reports = _reports(snapshot, stale_s)
    in_reserve = Counter(each.endpoint for each in snapshot.pooled if each.serving and each.ready)
    back = _coming_back(snapshot, stale_s)
    endpoints = []
    for endpoint in snapshot.limits:
        if endpoint in snapshot.pools.endpoints and endpoint not in alone:
            continue
        backlog = snapshot.backlogs.get(endpoint.model)
        facts = _endpoint_facts(snapshot, endpoint, serving[endpoint], donated[endpoint.region], stale_s)
        if (reserve := snapshot.pools.reserved.get(endpoint)) is not None and endpoint not in snapshot.overrides:
            free = back[endpoint, reserve]
            facts = _held_facts(facts, reserve, in_reserve[endpoint], free, reports[endpoint])
        endpoints.append(
            replace(
                facts,
                planned=alone.get(endpoint, _planned_of(snapshot, endpoint)),
                tokens_per_s=tokens_per_s[endpoint.model],
                backlog_tokens=0.0 if backlog is None else backlog.tokens / regions[endpoint.model],
                backlog_due_s=None if backlog is None else backlog.due_s,
            )
        )
    return ScalingFacts(endpoints=tuple(endpoints), window_start_s=snapshot.window_start_s)


def _reports(snapshot: FleetSnapshot, stale_s: float) -> Mapping[Endpoint, list[InstanceFacts]]:
    """The usable reports of endpoints that reserves hold."""
    found: dict[Endpoint, list[InstanceFacts]] = defaultdict(list)
    for each in snapshot.instances if snapshot.pools.held else ():
        if each.report is not None and is_usable(each.report, stale_s):
            found[each.endpoint].append(each.report)
    return found


def _held_facts(
    facts: EndpointScaleFacts, gpu_type: str, in_reserve: int, reclaimable: int, reports: list[InstanceFacts]
) -> EndpointScaleFacts:
    """An endpoint that a reserve of this GPU type holds, with so many ready instances there, and so many that come back
    in a minute. `reports`: of all its instances. Without a minimum, one of its own stays until one is ready there.
    """
    fewest = max(facts.min, min(1, facts.working, facts.max))
    waits = [wait_s for one in reports if (wait_s := _outlook_s(one)) is not None]
    return replace(
        facts,
        min=max(0, fewest - in_reserve),
        reserve=gpu_type,
        in_reserve=in_reserve,
        reclaimable=reclaimable,
        in_flight=sum(one.requests for one in reports),
        waiting=sum(one.waiting for one in reports),
        batch_max=min((one.batch_max for one in reports if one.batch_max is not None), default=None),
        wait_s=min(waits, default=None),
    )


def _coming_back(snapshot: FleetSnapshot, stale_s: float) -> Counter[tuple[Endpoint, str]]:
    """Instances of each endpoint and GPU type that serve again in a minute once they are wanted: those lent out without
    a lease and those that drain, on slots that are heard of and take instances.
    """
    open_slots = {room.ref for room in snapshot.rooms if room.accepting and room.age_s <= stale_s}
    return Counter(
        (each.endpoint, each.gpu_type)
        for each in snapshot.dedicated
        if each.ref in open_slots and not (each.serving or each.leased or each.stuck)
    )


def _outlook_s(report: InstanceFacts) -> float | None:
    """When an instance would begin a request; never, as far as is known, while it runs as many as it can."""
    full = report.batch_max is not None and report.requests >= report.batch_max
    return math.inf if full else predicted_wait_s(report, Tier.IW_F)


def _planned_of(snapshot: FleetSnapshot, endpoint: Endpoint) -> Counts | None:
    """The plan's instances of an endpoint; one that a reserve holds may have none."""
    if snapshot.planned is None:
        return None
    return snapshot.planned.get(endpoint, {} if endpoint in snapshot.pools.reserved else None)


def _endpoint_facts(
    snapshot: FleetSnapshot,
    endpoint: Endpoint,
    serving: list[PlacedInstance],
    donated: list[PlacedInstance],
    stale_s: float,
) -> EndpointScaleFacts:
    """An endpoint with its instances, and the instances of its region that are lent out."""
    whole = _kind_facts(serving, stale_s)
    fewest, most = snapshot.limits_in_force[endpoint]
    return EndpointScaleFacts(
        endpoint=endpoint,
        present=whole.present,
        starting=whole.starting,
        stuck=whole.stuck,
        utilization=whole.utilization,
        kinds={kind: _kind_facts([each for each in serving if each.kind == kind], stale_s) for kind in InstanceKind},
        min=fewest,
        max=most,
        last_scaled_s=snapshot.last_scaled_s.get(endpoint),
        settled=snapshot.settled.get(endpoint),
        observed_tokens_per_s=snapshot.observed.get(endpoint),
        forecast_tokens_per_s=snapshot.forecast.get(endpoint),
        donated_same=_by_gpu_type(each for each in donated if each.endpoint.model == endpoint.model),
        donated_other=_by_gpu_type(each for each in donated if each.endpoint.model != endpoint.model),
    )


def _kind_facts(instances: list[PlacedInstance], stale_s: float) -> KindFacts:
    reports = [each.report for each in instances if each.report is not None and is_usable(each.report, stale_s)]
    return KindFacts(
        present=_by_gpu_type(instances),
        starting=_by_gpu_type(each for each in instances if not (each.ready or each.stuck)),
        stuck=_by_gpu_type(each for each in instances if each.stuck),
        utilization=utilization_of(reports) if reports else None,
    )


def _by_gpu_type(instances: Iterable[PlacedInstance]) -> Counter[str]:
    return Counter(each.gpu_type for each in instances)


def poolable_facts(snapshot: FleetSnapshot, demand: Demand, *, stale_s: float) -> PoolableFacts:
    """The facts for `choose_poolable`. `stale_s`: a node silent for longer does not serve."""
    pooled = [each for each in snapshot.pooled if each.serving]
    slots = {(node.name, slot.number): slot for node in snapshot.nodes for slot in node.slots}
    present: Counter[PoolKey] = Counter()
    for ref, key in {each.ref: each.key for each in pooled}.items():
        present[key.pool(slots[ref].worker_gpus)] += slots[ref].gpus
    return PoolableFacts(
        profiles={
            key: PoolProfile(gpus=profile.gpus, latency=snapshot.latencies.get(key))
            for key, profile in snapshot.profiles.items()
        },
        sizes=snapshot.sizes,
        endpoints=frozenset(endpoint for endpoint, (_, most) in snapshot.limits.items() if most),
        demand=demand,
        nodes=tuple(_of_one_host(snapshot.serving_nodes(stale_s))),
        present=present,
        pooled=frozenset(each.key for each in pooled),
    )


def _of_one_host(nodes: Iterable[NodeFacts]) -> Iterable[NodeFacts]:
    """The nodes without their slots of several hosts."""
    for node in nodes:
        slots = tuple(slot for slot in node.slots if slot.hosts == 1)
        if slots:
            yield node if len(slots) == len(node.slots) else replace(node, slots=slots)


def placement_facts(
    snapshot: FleetSnapshot, demand: Demand, *, pool: PoolFacts | None, stale_s: float
) -> PlacementFacts:
    """The facts for `choose_placement`. Demand of models or regions that are not registered is left out, and what is
    not offered gets no instance. `stale_s`: GPUs of a node silent for longer do not count.
    """
    capacity: Counter[RegionGpu] = Counter()
    for node in snapshot.serving_nodes(stale_s):
        capacity[node.place] += sum(slot.gpus for slot in node.slots)
    everywhere = {
        Endpoint(model=model, region=region): (0, 0) for model in snapshot.sizes for region in snapshot.regions
    }
    return PlacementFacts(
        regions=snapshot.regions,
        models=tuple(PlacementModel(name=name) for name in snapshot.sizes),
        capacity=capacity,
        profiles=snapshot.profiles,
        present=Counter(each.key for each in snapshot.dedicated if each.serving),
        donated=Counter(each.key for each in snapshot.dedicated if each.donation is not None),
        demand={endpoint: windows for endpoint, windows in demand.items() if endpoint in everywhere},
        overrides=snapshot.overrides,
        limits={**everywhere, **snapshot.limits},
        gpu_cost_per_hour=snapshot.gpu_cost_per_hour,
        weights_present=snapshot.weights_present,
        pool=pool,
        unfit=_unfit(snapshot),
    )


def _unfit(snapshot: FleetSnapshot) -> dict[EndpointGpu, str]:
    """Where a model with a profile fits on no slot of the GPU type in the region that is there or that plans may make,
    and why.
    """
    slots: dict[RegionGpu, set[tuple[int, WeightsMemory]]] = defaultdict(set)
    spanning: dict[RegionGpu, set[int]] = defaultdict(set)
    for node in snapshot.nodes:
        slots[node.place] |= {(slot.worker_gpus, slot.weights) for slot in node.possible_slots}
        spanning[node.place] |= {slot.gpus for slot in node.slots if slot.hosts > 1}
    unfit = {}
    for pair, gpus in snapshot.gpus.items():
        for at, found in slots.items():
            if at.gpu_type != pair.gpu_type:
                continue
            memories = {(at.gpu_type, weights) for _, weights in found}
            reason = why_unfit(pair.model, snapshot.sizes[pair.model], memories, at.region)
            place = f"{at.gpu_type} in {at.region}"
            reason = reason or why_too_small(pair.model, gpus, {size for size, _ in found}, place)
            reason = reason or why_not_over_hosts(pair.model, gpus, snapshot.sizes[pair.model], spanning[at], place)
            if reason is not None:
                unfit[EndpointGpu(model=pair.model, region=at.region, gpu_type=at.gpu_type)] = reason
    return unfit
