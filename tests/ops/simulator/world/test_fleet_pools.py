"""Fleets whose pools come and go: what must hold while endpoints move into pools and out of them, and nodes fail."""

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.simulator.run import simulate
from ops.simulator.scenario.formats import traffic_of
from ops.simulator.servers.pool_slot import PooledServer
from ops.simulator.world.fleet import Fleet
from tests.ops.simulator.pooling import MODELS, Operated, pooled
from tests.ops.simulator.scaled import run_checked

NODE = {"region": "east", "count": 3, "slots": 1, "host_bytes": 10**12}
FAILURES = [
    {"region": "east", "node": 0, "at_s": 200, "down_s": 60, "noticed_s": 20},
    {"region": "east", "rate_per_day": 400, "down_s": 50, "noticed_s": 20},
]


def random_plans(operated: Operated, random: Random, until_s: float) -> list[tuple[float, set[str]]]:
    """Every minute or so some models are pooled, some have an instance of their own; when, and who is served by it."""
    at_s, wanted = 1.0, []
    while at_s < until_s:
        mine = {model for model in MODELS if random.random() < 0.5}
        own = {model: int(random.random() < 0.8) for model in MODELS if model not in mine}
        operated.plan(at_s, own | dict.fromkeys(mine, 0), mine, gpus=random.choice((1, 1, 2)))
        wanted.append((at_s, mine | {model for model, count in own.items() if count}))
        at_s += random.choice((6.0, 30.0, 70.0, 150.0))
    return wanted


def check_slots(fleet: Fleet) -> None:
    """No GPU is held twice, and a slot counts as a pool's as long as a pooled instance is there."""
    held, pools = Counter[tuple[str, int]](), set()
    for one in fleet.hosted.values():
        held[one.ref] += one.gpus
        if one.pooled:
            assert not one.gpus
            pools.add(one.ref)
    assert all(count <= fleet.layouts.gpus_of(ref) for ref, count in held.items())
    assert all((place in fleet.pools) == (place in pools) for place in {*held, *pools})
    counted = Counter[Any]()
    for one in fleet.hosted.values():
        assert one.in_pool_slot == (one.ref in pools and not one.pooled)
        counted[one.ref] += one.use.gpus
    assert all(not counted[place] for place in pools), "a pool's GPUs are the pool's"


def is_served(fleet: Fleet, model: str) -> bool:
    held = (one for one in fleet.hosted.values() if one.endpoint.model == model)
    return any(one.server.accepting and one.node.name not in fleet.down for one in held)


def run_with_plans(operated: Operated, wanted: list[tuple[float, set[str]]]) -> None:
    """Run the world and look at it after each event. `wanted`: when plans give which models instances; these must be
    served from their first instance on. Empty: that is not checked.
    """
    world, fleet = operated.world, operated.fleet
    safe: set[str] = set()
    plans, now = list(wanted), set[str]()
    known = set(fleet.hosted)

    def check() -> None:
        nonlocal now, safe, known
        check_slots(fleet)
        new = [fleet.hosted[name] for name in fleet.hosted.keys() - known]
        assert not any(one.ref in fleet.pools and not one.pooled for one in new), "started in a pool on its own"
        known = set(fleet.hosted)
        while plans and plans[0][0] <= world.events.now_s:
            before, now = now, plans.pop(0)[1]
            safe &= before & now
        serving = {model for model in MODELS if is_served(fleet, model)}
        if wanted:
            assert safe <= serving, f"{safe - serving} lost its last at {world.events.now_s}"
        safe |= serving & now

    run_checked(world, check)


@pytest.mark.slow
@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), failing=st.booleans(), slots=st.sampled_from([1, 2]))
def test_whatever_plans_come_each_request_ends_once_and_nobody_wanted_loses_his_last(
    seed: int, failing: bool, slots: int
) -> None:
    scenario = pooled(
        failures=FAILURES if failing else [],
        fleet={"nodes": [NODE | {"slots": slots}]},
        traffic={"duration_s": 400.0, "rate_per_s": 0.5},
    )
    operated = Operated(scenario, seed)
    wanted = random_plans(operated, Random(seed), 400.0)
    run_with_plans(operated, [] if failing else wanted)
    world = operated.world
    expected = Counter((one.model, one.tier) for one in traffic_of(scenario, seed))
    assert {key: tally.requests for key, tally in world.tallies.items()} == expected
    assert world.in_flight == 0
    assert sum(tally.failed for tally in world.tallies.values()) == sum(world.failures.values())
    for one in operated.fleet.hosted.values():
        assert not one.server.remaining_tokens
    held_s = sum(use.gpus * total_s for use, total_s in world.usage.seconds(world.events.now_s).items())
    assert 0 < held_s <= 3 * slots * world.events.now_s * (1 + 1e-9)


def test_a_full_fleet_forms_a_pool_where_one_of_its_endpoints_stands() -> None:
    """Three instances on three slots; two of them become a pool on the slot of one, without a gap, and a slot is free.
    One pooled instance starts from its node's host memory, where it ran already, the other from the region's weights.
    """
    operated = Operated(pooled())
    operated.plan(0.0, dict.fromkeys(MODELS, 1))
    assert operated.at(25.0) == {f"{model}@east-{place}" for place, model in enumerate("abc")}
    operated.plan(30.0, {"a": 0, "b": 0, "c": 1}, "ab")
    pool = operated.at(35.0)
    assert pool == {"a@east-0", "b@east-1", "c@east-2", "+a@east-0 warming", "+b@east-0 warming"}
    assert operated.at(39.0) == (pool - {"+a@east-0 warming"}) | {"+a@east-0"}, "b still loads, and a may go"
    assert operated.at(41.0) == {"b@east-1", "c@east-2", "+a@east-0", "+b@east-0 warming"}
    assert operated.at(60.0) == {"b@east-1 spot", "c@east-2", "+a@east-0", "+b@east-0"}
    assert operated.fleet.starts == {"present": 1, "local": 3, "host": 1}


def test_the_last_of_a_pool_keeps_its_slot() -> None:
    """The plan gives both an instance of its own. One starts on the slot that is free; then the other is handed the
    pool's slot, and nothing is loaded.
    """
    operated = Operated(pooled(scaling={"spot": False}, fleet={"nodes": [NODE | {"count": 2}]}))
    operated.plan(0.0, dict.fromkeys(MODELS, 0), "ab")
    assert operated.at(60.0) == {"+a@east-1", "+b@east-1"}
    before = {one.endpoint.model: name for name, one in operated.fleet.hosted.items()}
    operated.plan(61.0, {"a": 1, "b": 1, "c": 0})
    assert operated.at(70.0) == {"+a@east-1", "+b@east-1", "a@east-0 warming"}
    assert operated.at(95.0) == {"a@east-0", "b@east-1"}
    one = operated.fleet.hosted[before["b"]]
    assert (one.gpus, one.pooled, type(one.server)) == (1, False, PooledServer)
    assert is_served(operated.fleet, "b")
    assert operated.fleet.starts["local"] == 3, "b was loaded once"
    assert one.ref not in operated.fleet.pools


def test_gpus_of_a_pool_are_counted_once_and_as_the_pool_s() -> None:
    """On the only node. From 5 s on the slot is the pool's, though `a` has an instance of its own there for 9 s."""
    operated = Operated(pooled(fleet={"nodes": [NODE | {"count": 1}]}))
    operated.plan(1.0, dict.fromkeys(MODELS, 0), "ab")
    assert operated.at(8.0) == {"a@east-0", "+a@east-0 warming", "+b@east-0 warming"}
    assert operated.at(100.0) == {"+a@east-0", "+b@east-0"}
    held_s = Counter[str]()
    for use, total_s in operated.world.usage.seconds(operated.world.events.now_s).items():
        held_s[f"{type(use.endpoint).__name__} {use.state}"] += round(use.gpus * total_s)
    assert +held_s == {"Endpoint serving": 5, "PoolKey pooled": round(operated.world.events.now_s) - 5}


def test_what_was_on_a_lost_node_begins_anew_in_a_new_pool() -> None:
    scenario = pooled(
        failures=[{"region": "east", "node": 1, "at_s": 200, "down_s": 1000, "noticed_s": 20}],
        traffic={"rate_per_s": 2.0, "duration_s": 400.0},
        scaling={"spot": False},
    )
    operated = Operated(scenario)
    operated.plan(0.0, dict.fromkeys(MODELS, 0), MODELS)
    run_with_plans(operated, [])
    fleet, world = operated.fleet, operated.world
    assert fleet.interrupted > 0
    assert {(one.endpoint.model, one.node.name) for one in fleet.hosted.values()} == {
        (model, "east-0") for model in MODELS
    }
    assert world.in_flight == 0
    assert sum(tally.ended for tally in world.tallies.values()) > 0.5 * world.arrived


def test_a_pooled_instance_tells_what_its_node_does() -> None:
    """KV is that of all the slot, so all its instances show how full it is; the work that is left is each one's own."""
    operated = Operated(pooled(traffic={"rate_per_s": 2.0, "duration_s": 200.0}))
    operated.plan(0.0, dict.fromkeys(MODELS, 0), MODELS)
    world = operated.world
    looks: list[dict[str, Any]] = []

    def look() -> None:
        world.present.tick()
        looks.append({model: next(iter(world.present.view(model).values())) for model in MODELS})

    for at_s in range(50, 200, 7):
        world.events.at(float(at_s), 2, look)  # type: ignore[arg-type]
    list(world.run())
    names = {one.instance_id for views in looks for one in views.values()}
    assert names == {name for name, one in operated.fleet.hosted.items() if one.pooled}
    for views in looks:
        assert len({(one.kv_used_bytes, one.kv_capacity_bytes, one.node_id, one.slot) for one in views.values()}) == 1
        assert all(one.accepting and one.prefill_wait_s is not None for one in views.values())
    assert any(len({one.remaining_tokens for one in views.values()}) > 1 for views in looks)
    assert any(views["a"].kv_used_bytes for views in looks)
    assert any(views["a"].load for views in looks)


def test_a_planner_pools_who_shares_a_gpu_cheaply_and_says_so() -> None:
    """Real plans, hour by hour: three quiet models take one GPU instead of three."""
    changes: dict[str, Any] = {
        "traffic": {"duration_s": 5000.0, "rate_per_s": 0.2},
        "scaling": {"instances_min": 1, "spot": False},
    }
    with_pools, without = (
        simulate(pooled(planning={"learn_s": 1200, "pools": pools}, **changes)).result for pools in (True, False)
    )
    assert with_pools.totals.cost < 0.5 * without.totals.cost
    assert with_pools.totals.switches > 0
    assert not without.series.pools
    assert "pooled" not in without.totals.gpu_hours
    [pool] = with_pools.series.pools
    assert (pool.region, pool.gpu_type, pool.planned[-1], pool.gpus[-1]) == ("east", "H800", 1, 1.0)
    assert sum(one.pooled[-1] for one in with_pools.series.endpoints) == 3
    assert with_pools.totals.gpu_hours["pooled"] > with_pools.totals.gpu_hours["serving"]
    step_h = with_pools.series.step_s / 3600
    hours_of = {state: sum(column) * step_h for state, column in with_pools.series.gpus.items()}
    for state, hours in with_pools.totals.gpu_hours.items():
        assert hours_of.get(state, 0.0) == pytest.approx(hours, abs=1.5 * step_h)  # the last step is not over
    assert sum(row.failed for row in with_pools.tiers) <= sum(row.failed for row in without.tiers) + 5


def test_the_same_seed_gives_the_same_log() -> None:
    one, same, other = (simulate(pooled(failures=FAILURES), seed=seed).result for seed in (1, 1, 2))
    volatile = {"seconds", "requests_per_s"}
    assert one.model_dump(exclude=volatile) == same.model_dump(exclude=volatile)
    assert one.event_log_hash != other.event_log_hash


def test_a_model_too_large_for_a_pool_s_slot_is_not_pooled() -> None:
    models = [
        {"name": name, "weights_bytes": size, "kv_bytes_per_token": 800_000, "tokens_per_s": 3000.0}
        for name, size in (("a", 40 * 2**30), ("b", 13 * 2**30), ("c", 13 * 2**30))
    ]
    scenario = pooled(
        models=models, traffic={"rate_per_s": 0.3}, scaling={"instances_min": 1}, planning={"learn_s": 300}
    )
    result = simulate(scenario).result
    shares = {one.model: max(one.pooled) for one in result.series.endpoints}
    assert shares["a"] == 0.0
    assert min(shares["b"], shares["c"]) == 1.0


def test_a_base_and_its_adapter_share_the_engine_of_a_pools_slot() -> None:
    """b is an adapter of a: as a whole model it makes the slot switch for it, as an adapter never."""
    whole = pooled(traffic={"duration_s": 200.0})
    a, b, _ = whole.models
    adapted = whole.model_copy(update={"models": [a, b.model_copy(update={"base": "a", "weights_bytes": 10**8})]})
    switches = {}
    for name, scenario in (("whole", whole.model_copy(update={"models": [a, b]})), ("adapted", adapted)):
        operated = Operated(scenario)
        operated.plan(1.0, {"a": 0, "b": 0}, "ab")
        assert operated.at(100.0) >= {"+a@east-1", "+b@east-1"}
        assert list(operated.world.run())
        assert not operated.world.failures
        switches[name] = sum(server.switches for server in operated.world.present.servers)
    assert switches["adapted"] == 1 < switches["whole"]
