"""Pools in the scale loop: what the plan in force says of them, and the pooled instances of the inventory."""

from collections.abc import Container, Mapping
from dataclasses import replace

from controlplane.policies.assignment.pooling import PlanPools
from controlplane.policies.assignment.pools import PooledInstance
from controlplane.policies.facts import Endpoint, EndpointGpu, RegionGpu
from controlplane.policies.lifecycle import InstanceState
from controlplane.store.fleet import FleetInventory
from controlplane.store.instances import dedicated_copy
from controlplane.store.plans import Plan
from controlplane.store.tables import Desired, Instance


def pools_of(plan: Plan | None, *, pins: Mapping[Endpoint, int], offered: Container[Endpoint]) -> PlanPools:
    """What a plan says of pools; nothing without a plan. A pin that came later takes its endpoint out, and so does its
    deletion, or a maximum of 0: only what is `offered` is pooled.
    """
    gpus: dict[RegionGpu, int] = {}
    occupancy: dict[EndpointGpu, float] = {}
    for pool in plan.pools if plan is not None else ():
        region, gpu_type = pool["region"], pool["gpu_type"]
        gpus[RegionGpu(region=region, gpu_type=gpu_type)] = pool["after"]
        for each in pool["pooled"]:
            endpoint = Endpoint(model=each["model"], region=region)
            if endpoint in offered and endpoint not in pins:
                occupancy[EndpointGpu(model=each["model"], region=region, gpu_type=gpu_type)] = each["occupancy"]
    return PlanPools(gpus=gpus, occupancy=occupancy)


def with_dedicated(inventory: FleetInventory, gpus: Mapping[str, int]) -> FleetInventory:
    """The inventory as it is once these pooled instances, by id, have so many GPUs for themselves."""
    instances = [dedicated_copy(each, gpus=gpus[each.id]) if each.id in gpus else each for each in inventory.instances]
    return replace(inventory, instances=instances)


def pooled_instances(inventory: FleetInventory, stuck: frozenset[str]) -> tuple[PooledInstance, ...]:
    """The pooled instances for `choose_pool_slots`. `stuck`: ids of those that do not come up."""
    return tuple(_pooled(each, stuck) for each in inventory.instances if each.pooled)


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
