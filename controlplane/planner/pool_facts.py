"""What `choose_poolable` is told: the census of the fleet, as far as it says who can be pooled."""

from collections import Counter, defaultdict
from collections.abc import Mapping

from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, RegionGpu
from controlplane.policies.placement.poolable import (
    PlannedPools,
    PoolableFacts,
    PoolableSettings,
    PoolNode,
    PoolProfile,
    PoolSlotSize,
    choose_poolable,
)
from controlplane.settings import Settings
from controlplane.store.fleet import Census
from controlplane.store.tables import Desired, Instance, Slot
from controlplane.store.weights import room_of


def planned_pools(census: Census, demand: Mapping[Endpoint, tuple[float, ...]], settings: Settings) -> PlannedPools:
    """Gather, and ask."""
    facts = PoolableFacts(
        profiles={
            ModelGpu(model=row.model, gpu_type=row.gpu_type): PoolProfile(gpus=row.gpus, latency=row.latency)
            for row in census.profiles
        },
        weights_bytes={model.name: model.weights_bytes for model in census.models},
        parameters={model.name: model.parameters for model in census.models if model.parameters is not None},
        endpoints=frozenset(
            Endpoint(model=row.model, region=row.region) for row in census.endpoints if row.instances_max
        ),
        demand=demand,
        nodes=_nodes(census),
        present=_present(census),
        pooled=frozenset(_key_of(each) for each in _pooled(census)),
    )
    return choose_poolable(facts, poolable_settings(settings))


def poolable_settings(settings: Settings) -> PoolableSettings:
    """Those of the policy."""
    return PoolableSettings(
        enabled=settings.pools_enabled,
        fill=settings.pool_fill,
        prompt_tokens=settings.pool_prompt_tokens,
        output_tokens=settings.pool_output_tokens,
        tbt_s=settings.pool_tbt_s,
        round_s=settings.pool_round_s,
    )


def _nodes(census: Census) -> tuple[PoolNode, ...]:
    """Those that serve."""
    nodes = {node.name: node for node in census.nodes}
    slots: dict[str, list[PoolSlotSize]] = defaultdict(list)
    for slot in census.slots:
        weights = room_of(nodes[slot.node], slot)
        slots[slot.node].append(PoolSlotSize(gpus=slot.gpus, workers=slot.workers, weights=weights))
    return tuple(
        PoolNode(region=node.region, gpu_type=node.gpu_type, slots=tuple(slots[node.name]), host_bytes=node.host_bytes)
        for node in census.nodes
        if node.accepting and node.name in census.alive
    )


def _present(census: Census) -> dict[RegionGpu, int]:
    """GPUs of the slots that hold pooled instances, by place."""
    slots: dict[tuple[str, int], Slot] = {(slot.node, slot.index): slot for slot in census.slots}
    places = {(each.node, each.slot): RegionGpu(region=each.region, gpu_type=each.gpu_type) for each in _pooled(census)}
    gpus: Counter[RegionGpu] = Counter()
    for key, place in places.items():
        gpus[place] += slots[key].gpus
    return dict(gpus)


def _pooled(census: Census) -> list[Instance]:
    return [each for each in census.instances if each.pooled and each.desired == Desired.RUNNING]


def _key_of(instance: Instance) -> EndpointGpu:
    return EndpointGpu(model=instance.model, region=instance.region, gpu_type=instance.gpu_type)
