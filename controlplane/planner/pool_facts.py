"""What `choose_poolable` is told: the inventory of the fleet, as far as it says who can be pooled."""

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
from controlplane.store.fleet import FleetInventory
from controlplane.store.tables import Desired, Instance, Slot
from controlplane.store.weights import room_of


def planned_pools(
    inventory: FleetInventory, demand: Mapping[Endpoint, tuple[float, ...]], settings: Settings
) -> PlannedPools:
    """Gather, and ask."""
    facts = PoolableFacts(
        profiles={
            ModelGpu(model=row.model, gpu_type=row.gpu_type): PoolProfile(gpus=row.gpus, latency=row.latency)
            for row in inventory.profiles
        },
        weights_bytes={model.name: model.weights_bytes for model in inventory.models},
        parameters={model.name: model.parameters for model in inventory.models if model.parameters is not None},
        endpoints=frozenset(
            Endpoint(model=row.model, region=row.region) for row in inventory.endpoints if row.instances_max
        ),
        demand=demand,
        nodes=_nodes(inventory),
        present=_present(inventory),
        pooled=frozenset(_key_of(each) for each in _pooled(inventory)),
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


def _nodes(inventory: FleetInventory) -> tuple[PoolNode, ...]:
    """Those that serve."""
    nodes = {node.name: node for node in inventory.nodes}
    slots: dict[str, list[PoolSlotSize]] = defaultdict(list)
    for slot in inventory.slots:
        weights = room_of(nodes[slot.node], slot)
        slots[slot.node].append(PoolSlotSize(gpus=slot.gpus, workers=slot.workers, weights=weights))
    return tuple(
        PoolNode(region=node.region, gpu_type=node.gpu_type, slots=tuple(slots[node.name]), host_bytes=node.host_bytes)
        for node in inventory.nodes
        if node.accepting and node.name in inventory.alive
    )


def _present(inventory: FleetInventory) -> dict[RegionGpu, int]:
    """GPUs of the slots that hold pooled instances, by place."""
    slots: dict[tuple[str, int], Slot] = {(slot.node, slot.index): slot for slot in inventory.slots}
    places = {
        (each.node, each.slot): RegionGpu(region=each.region, gpu_type=each.gpu_type) for each in _pooled(inventory)
    }
    gpus: Counter[RegionGpu] = Counter()
    for key, place in places.items():
        gpus[place] += slots[key].gpus
    return dict(gpus)


def _pooled(inventory: FleetInventory) -> list[Instance]:
    return [each for each in inventory.instances if each.pooled and each.desired == Desired.RUNNING]


def _key_of(instance: Instance) -> EndpointGpu:
    return EndpointGpu(model=instance.model, region=instance.region, gpu_type=instance.gpu_type)
