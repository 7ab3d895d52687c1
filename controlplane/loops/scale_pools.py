"""Pools in the scale loop: what the plan in force says of them, and what `choose_pool_slots` is told."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from controlplane.policies.facts import Endpoint, EndpointGpu, InstanceKind, RegionGpu
from controlplane.policies.lifecycle import InstanceState
from controlplane.policies.scaling.facts import ScaleStep
from controlplane.policies.slots.facts import PlacedInstance, SlotRoom
from controlplane.policies.slots.pools import PooledInstance, PoolSlotDecision, PoolSlotFacts
from controlplane.store.fleet import Census
from controlplane.store.plan_tables import Plan
from controlplane.store.tables import Desired, Instance


@dataclass(frozen=True, kw_only=True)
class PlanPools:
    """The pools of the plan in force: GPUs by place, and what each pooled endpoint takes of one."""

    gpus: Mapping[RegionGpu, int] = field(default_factory=dict)
    occupancy: Mapping[EndpointGpu, float] = field(default_factory=dict)

    @cached_property
    def endpoints(self) -> frozenset[Endpoint]:
        """The pooled endpoints."""
        return frozenset(Endpoint(model=key.model, region=key.region) for key in self.occupancy)


def pools_of(plan: Plan | None, *, pins: Mapping[Endpoint, int]) -> PlanPools:
    """What a plan says of pools; nothing without a plan. A pin that came later takes its endpoint out."""
    gpus: dict[RegionGpu, int] = {}
    occupancy: dict[EndpointGpu, float] = {}
    for pool in plan.pools if plan is not None else ():
        region, gpu_type = pool["region"], pool["gpu_type"]
        gpus[RegionGpu(region=region, gpu_type=gpu_type)] = pool["after"]
        for each in pool["pooled"]:
            if Endpoint(model=each["model"], region=region) not in pins:
                occupancy[EndpointGpu(model=each["model"], region=region, gpu_type=gpu_type)] = each["occupancy"]
    return PlanPools(gpus=gpus, occupancy=occupancy)


def pool_slot_facts(
    census: Census,
    pools: PlanPools,
    *,
    planned: Mapping[Endpoint, Mapping[str, int]],
    limits: Mapping[Endpoint, tuple[int, int]],
    rooms: tuple[SlotRoom, ...],
    placed: tuple[PlacedInstance, ...],
    stuck: frozenset[str],
) -> PoolSlotFacts:
    """The facts for `choose_pool_slots`. `planned`: instances of their own, by endpoint and GPU type; `limits`: fewest
    and most of them; `placed`: those there are; `stuck`: ids of instances that do not come up.
    """
    serving = [each for each in placed if each.serving and not each.stuck]
    present = Counter(_key(each) for each in serving)
    wanted = {
        EndpointGpu(model=endpoint.model, region=endpoint.region, gpu_type=gpu_type): count
        for endpoint, counts in planned.items()
        for gpu_type, count in counts.items()
    }
    return PoolSlotFacts(
        pool_gpus=pools.gpus,
        occupancy=pools.occupancy,
        slots=rooms,
        instances=tuple(_pooled(each, stuck) for each in census.instances if each.pooled),
        served=frozenset(_served(planned, limits, serving)),
        dedicated=placed,
        missing={key: count - present[key] for key, count in wanted.items() if count > present[key]},
    )


def release_steps(decision: PoolSlotDecision, placed: Iterable[PlacedInstance]) -> tuple[ScaleStep, ...]:
    """Instances of their own that endpoints need no more: the pool serves them."""
    left: Counter[tuple[Endpoint, InstanceKind]] = Counter(
        (each.endpoint, each.kind) for each in placed if each.serving and each.endpoint in decision.ready
    )
    return tuple(
        ScaleStep(endpoint=endpoint, gpu_type=None, delta=-count, kind=kind, reason="the pool serves it now")
        for (endpoint, kind), count in sorted(left.items())
    )


def _served(
    planned: Mapping[Endpoint, Mapping[str, int]],
    limits: Mapping[Endpoint, tuple[int, int]],
    serving: Iterable[PlacedInstance],
) -> Iterable[Endpoint]:
    """Endpoints with as many ready instances of their own as they shall have, or with some while no more start."""
    ready: Counter[Endpoint] = Counter()
    starting: Counter[Endpoint] = Counter()
    for each in serving:
        (ready if each.ready else starting)[each.endpoint] += 1
    for endpoint, (fewest, most) in limits.items():
        wanted = min(most, max(fewest, sum(planned.get(endpoint, {}).values())))
        if ready[endpoint] >= wanted or (ready[endpoint] and not starting[endpoint]):
            yield endpoint


def _pooled(instance: Instance, stuck: frozenset[str]) -> PooledInstance:
    return PooledInstance(
        instance_id=instance.id,
        endpoint=Endpoint(model=instance.model, region=instance.region),
        gpu_type=instance.gpu_type,
        node_id=instance.node,
        slot=instance.slot,
        draining=instance.desired == Desired.DRAINING,
        ready=instance.observed == InstanceState.READY,
        stuck=instance.id in stuck,
    )


def _key(each: PlacedInstance) -> EndpointGpu:
    return EndpointGpu(model=each.endpoint.model, region=each.endpoint.region, gpu_type=each.gpu_type)
