"""What a plan reads from the database of nodes, profiles and pools."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from controlplane.planner.draft import DraftOf
from controlplane.planner.plan import draft_plan, poolable_settings
from controlplane.planner.snapshot import read_to_plan, read_to_scale
from controlplane.planner.what_if.changes import WhatIfChanges
from controlplane.planner.what_if.facts import write_facts
from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, NodeFacts, NodeSlot, PoolKey
from controlplane.policies.fit import WeightsMemory
from controlplane.policies.placement.poolable import PoolableFacts, PoolableSettings
from controlplane.policies.snapshot import poolable_facts
from controlplane.settings import Settings
from controlplane.store import fleet
from controlplane.store.instances import add_instance
from controlplane.store.plans import roll_back
from controlplane.store.tables import Profile
from tests.controlplane.planner.pool_fleet import HOST_BYTES, LATENCY, add_models, join
from tests.controlplane.world import World

AT = PoolKey(region="us-east", gpu_type="H800")


def read(world: World, settings: Settings) -> PoolableFacts:
    with world.database.transaction() as session:
        snapshot = read_to_plan(session, settings, now_s=0.0, window_start_s=0.0)
    return poolable_facts(snapshot, {}, stale_s=60.0)


def test_nodes_that_serve_with_their_slots_and_profiles_with_latencies(world: World, settings: Settings) -> None:
    add_models(world, "a")
    add_models(world, "b", latency=None)
    join(world, "drained")
    join(world, "n1", slots=2, gpus=4, workers=4)
    join(world, "old", host_bytes=None)
    with world.database.transaction() as session:
        fleet.set_node_draining(session, "drained", draining=True)
    facts = read(world, settings)
    first, second = facts.nodes
    weights = WeightsMemory(weights_bytes=None, dtype=None)
    slots = tuple(NodeSlot(number=number, gpus=4, workers=4, weights=weights) for number in range(2))
    assert first == NodeFacts(
        name="n1", region="us-east", gpu_type="H800", slots=slots, host_bytes=HOST_BYTES, age_s=first.age_s
    )
    assert 0 <= first.age_s < 60
    assert (second.name, second.host_bytes) == ("old", None)
    profiles = {model: facts.profiles[ModelGpu(model=model, gpu_type="H800")] for model in "ab"}
    assert (profiles["a"].gpus, profiles["a"].latency, profiles["b"].latency) == (1, LATENCY, None)
    assert Endpoint(model="a", region="us-east") in facts.endpoints


def test_present_pools_are_slots_that_hold_pooled_instances(world: World, settings: Settings) -> None:
    add_models(world, "a", "b")
    join(world, "n1", slots=3)
    with world.database.transaction() as session:
        for model, slot, gpus in (("a", 0, 0), ("b", 0, 0), ("tide", 1, 1)):
            add_instance(session, model=model, region="us-east", gpu_type="H800", node="n1", slot=slot, gpus=gpus)
    facts = read(world, settings)
    assert facts.present == {AT: 1}
    assert facts.pooled == {EndpointGpu(model=model, region="us-east", gpu_type="H800") for model in "ab"}


def test_the_pools_of_a_plan_have_the_sizes_that_it_says_or_those_of_their_models(
    world: World, settings: Settings
) -> None:
    """A plan of the release before says none, and had one size."""
    add_models(world, "a", "b")
    with world.database.transaction() as session:
        for model, gpus in (("a", 1), ("b", 4)):
            profile = Profile(
                model=model, gpu_type="H800", tokens_per_s=1000.0, gpus=gpus, load_time_s=30.0, latency=LATENCY
            )
            fleet.put_profile(session, profile)
    pools = [
        {"region": AT.region, "gpu_type": AT.gpu_type, "after": after, "pooled": [{"model": model, "occupancy": 0.3}]}
        for model, after in (("a", 2), ("b", 8))
    ]
    large = PoolKey(region=AT.region, gpu_type=AT.gpu_type, worker_gpus=4)
    for sizes in (({"worker_gpus": 1}, {"worker_gpus": 4}), ({}, {})):
        world.in_force([], pools=[pool | size for pool, size in zip(pools, sizes, strict=True)])
        found = read_to_scale(world.database, world.live, settings, now_s=0.0).snapshot.pools
        assert found.gpus == {AT: 2, large: 8}
        assert found.occupancy.keys() == {
            EndpointGpu(model=model, region=AT.region, gpu_type=AT.gpu_type) for model in "ab"
        }


def test_a_rollback_to_a_plan_that_says_no_size_has_its_pools(world: World, settings: Settings) -> None:
    """What it restores says none either, and is of the size of its models, which the plan taken back gives up."""
    add_models(world, "a")
    pool = {"region": AT.region, "gpu_type": AT.gpu_type, "pooled": [{"model": "a", "occupancy": 0.3}]}
    world.in_force([], pools=[pool | {"after": 3}])
    taken_back = world.in_force([], pools=[pool | {"worker_gpus": 1, "after": 2}])
    with world.database.transaction() as session:
        roll_back(session, taken_back, window_start_s=0, by="ann", note="")
    assert read_to_scale(world.database, world.live, settings, now_s=0.0).snapshot.pools.gpus == {AT: 3}


def test_a_model_that_is_gone_does_not_size_a_pool(world: World, settings: Settings) -> None:
    add_models(world, "b")
    with world.database.transaction() as session:
        profile = Profile(model="b", gpu_type="H800", tokens_per_s=1000.0, gpus=4, load_time_s=30.0, latency=LATENCY)
        fleet.put_profile(session, profile)
    pooled = [{"model": model, "occupancy": 0.3} for model in ("gone", "b")]
    world.in_force([], pools=[{"region": AT.region, "gpu_type": AT.gpu_type, "after": 8, "pooled": pooled}])
    found = read_to_scale(world.database, world.live, settings, now_s=0.0).snapshot.pools
    assert found.gpus == {PoolKey(region=AT.region, gpu_type=AT.gpu_type, worker_gpus=4): 8}


def test_the_policy_has_the_defaults_of_the_service(settings: Settings) -> None:
    assert poolable_settings(settings) == PoolableSettings()


def _plan(world: World, settings: Settings, _folder: Path) -> None:
    draft_plan(world.database, settings, DraftOf(window_start_s=0, origin="api", created_by="ann"), now_s=0.0)


def _scale(world: World, settings: Settings, _folder: Path) -> None:
    found = read_to_scale(world.database, world.live, settings, now_s=0.0)
    assert [node.name for node in found.snapshot.nodes] == ["n1"]
    with world.database.transaction() as session:
        assert found.version < fleet.fleet_version(session), "so that what is decided of it is decided again"


def _simulate(world: World, settings: Settings, folder: Path) -> None:
    write_facts(folder, world.database, world.live, settings, WhatIfChanges(), hours=1)


@pytest.mark.parametrize("use", [_plan, _scale, _simulate])
def test_a_node_that_joins_while_the_fleet_is_read_is_seen_whole_or_not_at_all(
    world: World, settings: Settings, tmp_path: Path, use: Callable[[World, Settings, Path], None]
) -> None:
    """With its slots but without itself it would end the plan, or the run of scaling."""
    world.join("n1")
    world.report("late", "none", region="us-east", url="http://127.0.0.1:9")
    joined: list[str] = []

    def join_now(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if not joined and "ORDER BY nodes.name" in statement:
            joined.append("late")
            world.join("late")

    event.listen(world.database.engine, "after_cursor_execute", join_now)
    use(world, settings, tmp_path)
    assert joined
