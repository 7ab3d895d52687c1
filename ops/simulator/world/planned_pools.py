"""Pools in simulated plans: what `choose_poolable` is told of the fleet, and what a placement says of pools."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from controlplane.policies.assignment.pooling import PlanPools
from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, RegionGpu
from controlplane.policies.placement.decision import Placement
from controlplane.policies.placement.facts import PoolFacts
from controlplane.policies.placement.poolable import (
    PoolableFacts,
    PoolableSettings,
    PoolNode,
    PoolProfile,
    PoolSlotSize,
    choose_poolable,
)
from ops.simulator.world.fleet import Fleet
from ops.simulator.world.held import Held


@dataclass(frozen=True, kw_only=True)
class PoolMeans:
    """What pools are planned from. `profiles` and `weights_bytes` as in `PoolableFacts`."""

    settings: PoolableSettings
    profiles: Mapping[ModelGpu, PoolProfile]
    weights_bytes: Mapping[str, int]


def pool_facts(
    means: PoolMeans, fleet: Fleet, demand: Mapping[Endpoint, tuple[float, ...]], endpoints: Iterable[Endpoint]
) -> PoolFacts | None:
    """What the placement is told of pools; None: nothing can be pooled."""
    pooled = {one.place: one for one in fleet.held.values() if one.pooled and one.wanted}
    present = Counter[RegionGpu]()
    for one in pooled.values():
        present[RegionGpu(region=one.node.region, gpu_type=one.node.gpu_type)] += one.node.gpus
    facts = PoolableFacts(
        profiles=means.profiles,
        weights_bytes=means.weights_bytes,
        endpoints=frozenset(endpoints),
        demand=demand,
        nodes=tuple(
            PoolNode(
                region=node.region,
                gpu_type=node.gpu_type,
                slots=(PoolSlotSize(gpus=node.gpus),) * node.slots,
                host_bytes=node.host_bytes,
            )
            for node in fleet.nodes.values()
            if node.name not in fleet.down
        ),
        present=present,
        pooled=frozenset(_key_of(one) for one in fleet.held.values() if one.pooled and one.wanted),
    )
    return choose_poolable(facts, means.settings).facts


def pools_of(placement: Placement) -> PlanPools:
    """What a placement says of pools."""
    return PlanPools(
        gpus={RegionGpu(region=pool.region, gpu_type=pool.gpu_type): pool.after for pool in placement.pools},
        occupancy={
            EndpointGpu(model=one.endpoint.model, region=one.endpoint.region, gpu_type=one.gpu_type): one.occupancy
            for one in placement.pooled
        },
    )


def _key_of(one: Held) -> EndpointGpu:
    return EndpointGpu(model=one.endpoint.model, region=one.endpoint.region, gpu_type=one.node.gpu_type)
