"""What a plan is told of pools: who could share a GPU, how much each takes, and why others cannot."""

from typing import Any

import pytest

from controlplane.planner.pool_facts import planned_pools, poolable_settings
from controlplane.policies.facts import Endpoint, EndpointGpu, RegionGpu
from controlplane.policies.placement.poolable import PlannedPools, PoolableSettings
from controlplane.policies.placement.pools import LATENCY_FIELDS, PoolLoad, occupancy_of
from controlplane.settings import Settings
from controlplane.store import fleet
from controlplane.store.fleet import read_inventory
from controlplane.store.instances import add_instance
from controlplane.store.tables import Profile
from tests.controlplane.planner.pool_fleet import HOST_BYTES, LATENCY, add_models, join
from tests.controlplane.world import World

EAST = Endpoint(model="a", region="us-east")
ON_H800 = EndpointGpu(model="a", region="us-east", gpu_type="H800")


@pytest.fixture
def world(world: World) -> World:
    add_models(world, "a", "b")
    return world


def told(world: World, settings: Settings, demand: dict[Endpoint, tuple[float, ...]]) -> PlannedPools:
    with world.database.transaction() as session:
        return planned_pools(read_inventory(session, silent_s=60.0), demand, settings)


def test_what_an_endpoint_takes_is_that_of_its_busiest_window(world: World, settings: Settings) -> None:
    join(world, "n1", slots=2)
    settings = settings.model_copy(update={"pool_prompt_tokens": 100.0, "pool_output_tokens": 50.0, "pool_fill": 0.7})
    pools = told(world, settings, {EAST: (3.0, 20.0)})
    assert pools.facts is not None
    load = PoolLoad(
        **{name: LATENCY[name] for name in LATENCY_FIELDS}, requests_per_s=0.2, input_tokens=100.0, output_tokens=50.0
    )
    assert pools.facts.occupancy[ON_H800] == pytest.approx(occupancy_of(load).total)
    idle = pools.facts.occupancy[EndpointGpu(model="b", region="us-east", gpu_type="H800")]
    assert 0 < idle < 1e-3, "without demand it takes host memory and next to nothing of the GPU"
    assert pools.facts.weights_bytes == {"a": 1, "b": 1, "tide": 1}
    assert pools.facts.host_bytes_per_gpu == {"H800": HOST_BYTES // 2}
    assert pools.facts.fill == 0.7


def test_present_pools_are_slots_that_hold_pooled_instances(world: World, settings: Settings) -> None:
    join(world, "n1", slots=3)
    with world.database.transaction() as session:
        for model, slot, gpus in (("a", 0, 0), ("b", 0, 0), ("tide", 1, 1)):
            add_instance(session, model=model, region="us-east", gpu_type="H800", node="n1", slot=slot, gpus=gpus)
    pools = told(world, settings, {})
    assert pools.facts is not None
    assert pools.facts.present == {RegionGpu(region="us-east", gpu_type="H800"): 1}
    assert {key.model for key in pools.facts.pooled} == {"a", "b"}


def test_a_model_that_no_slot_can_carry_alone_is_not_pooled(world: World, settings: Settings) -> None:
    join(world, "n1", slots=4)
    pools = told(world, settings, {EAST: (50_000.0,)})
    assert pools.facts is not None
    assert ON_H800 not in pools.facts.occupancy


def test_the_least_host_memory_of_a_gpu_type_counts(world: World, settings: Settings) -> None:
    join(world, "n1", slots=4)
    join(world, "n2", host_bytes=HOST_BYTES // 8)
    pools = told(world, settings, {})
    assert pools.facts is not None
    assert pools.facts.host_bytes_per_gpu == {"H800": HOST_BYTES // 8}


def put_profile(world: World, **changes: Any) -> None:
    values: dict[str, Any] = {
        "model": "a",
        "gpu_type": "H800",
        "tokens_per_s": 1000.0,
        "gpus": 1,
        "load_time_s": 30.0,
        "latency": None,
    }
    values |= changes
    with world.database.transaction() as session:
        fleet.put_profile(session, Profile(**values))


def test_who_is_left_out_and_why(world: World, settings: Settings) -> None:
    put_profile(world)
    assert told(world, settings, {}).facts is None
    assert told(world, settings, {}).words() == "not poolable: 3 x no node with H800 serves"
    join(world, "n1")
    pools = told(world, settings, {})
    assert pools.words() == "not poolable: 2 x no latency in the profile on H800"
    assert pools.record()["left_out"][0] == {
        "model": "a",
        "gpu_type": "H800",
        "reason": "no latency in the profile on H800",
    }
    join(world, "old", host_bytes=None)
    silent = told(world, settings, {})
    assert silent.facts is None
    assert "1 x some node with H800 does not tell its host memory" in silent.words()


def test_slots_must_be_as_large_as_the_model(world: World, settings: Settings) -> None:
    join(world, "n1", gpus=2)
    assert "workers on H800 have 2 GPUs, the model takes 1" in told(world, settings, {}).words()
    put_profile(world, gpus=2, latency=LATENCY)
    pools = told(world, settings, {EAST: (20.0,)})
    assert pools.facts is not None
    assert {key.model for key in pools.facts.occupancy} == {"a"}


def test_slots_that_serve_together_carry_more_and_are_taken_whole(world: World, settings: Settings) -> None:
    place = RegionGpu(region="us-east", gpu_type="H800")
    busy = {EAST: (6_000.0,)}
    join(world, "n1", slots=4)
    alone = told(world, settings, busy)
    assert alone.facts is not None
    assert ON_H800 not in alone.facts.occupancy
    join(world, "n1", gpus=4, workers=4)
    together = told(world, settings, busy)
    assert together.facts is not None
    assert settings.pool_fill < together.facts.occupancy[ON_H800] <= 4 * settings.pool_fill
    assert together.facts.slot_gpus == {place: 4}
    assert together.facts.host_bytes_per_gpu == {"H800": HOST_BYTES // 4}


def test_they_can_be_disabled(world: World, settings: Settings) -> None:
    join(world, "n1")
    pools = told(world, settings.model_copy(update={"pools_enabled": False}), {})
    assert pools.facts is None
    assert (pools.words(), pools.record()["enabled"]) == ("no pools: they are disabled", False)


def test_the_policy_has_the_defaults_of_the_service(settings: Settings) -> None:
    assert poolable_settings(settings) == PoolableSettings()
