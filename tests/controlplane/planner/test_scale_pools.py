"""Pools in the scale loop: into the pool and out of it, with nodes that drain, donated instances and overrides."""

import time
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from sqlalchemy import func, text, update
from sqlalchemy.exc import IntegrityError

from controlplane.planner.scale import Scaled, scale
from controlplane.policies.facts import Endpoint
from controlplane.settings import Settings
from controlplane.store import fleet
from controlplane.store.instances import desired_of, observe
from controlplane.store.leases import lease_instance
from controlplane.store.overrides import add_override
from controlplane.store.tables import InstanceLease, Profile
from dataplane.protocol.messages import Heartbeat, InstanceReport, InstanceState
from tests.controlplane.planner.pool_fleet import add_models, join, live_rows
from tests.controlplane.world import World

EAST_A = Endpoint(model="a", region="us-east")
URL = "http://127.0.0.1:9"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"heartbeat_stale_s": 600.0})


@pytest.fixture
def world(world: World) -> World:
    add_models(world, "a", "b", "c")
    return world


def run(world: World, settings: Settings) -> Scaled:
    return scale(world.database, world.live, settings, now_s=time.time())


def follow(world: World, *, own: dict[str, int], pooled: tuple[str, ...] = (), gpus: int = 1) -> None:
    """A plan in force: instances of their own, and pooled endpoints on so many GPUs."""
    pools: list[Any] = [
        {
            "region": "us-east",
            "gpu_type": "H800",
            "before": 0,
            "after": gpus,
            "pooled": [{"model": model, "occupancy": 0.2, "before": False, "reason": ""} for model in pooled],
        }
    ]
    cells = [(model, "us-east", count) for model, count in own.items()]
    world.in_force(cells, pools=pools if pooled else [])


def follow_desired(world: World, *nodes: str, hold_back: tuple[str, ...] = ()) -> None:
    """The nodes follow their desired state: all is loaded, or drained and gone; models of `hold_back` still load."""
    loaded = {row.id for row in live_rows(world) if row.observed in {"ready", "spot"}}
    for name in nodes:
        with world.database.transaction() as session:
            desired = desired_of(session, name)
            kept = [i for i in desired.instances if not i.draining]
            reports = tuple(
                InstanceReport(
                    instance_id=i.instance_id,
                    model=i.model.name,
                    slot=i.slot,
                    state=_state(i.spot, held_back=i.model.name in hold_back and i.instance_id not in loaded),
                    kv_capacity_bytes=1 << 30,
                )
                for i in kept
            )
            heartbeat = Heartbeat(node=name, boot_id="b", generation=desired.generation, instances=reports)
            observe(session, heartbeat)
        world.live.write_heartbeat(heartbeat, region="us-east", gpu_type="H800", url=URL)


def _state(spot: bool, *, held_back: bool) -> InstanceState:
    return "spot" if spot else "loading" if held_back else "ready"


def wanted(world: World) -> set[str]:
    """What is wanted, in words: `model@node`, `+` before a pooled one, then what it is when it is not running."""
    return {
        f"{'+' if row.pooled else ''}{row.model}@{row.node}{'' if row.desired == 'running' else ' ' + row.desired}"
        for row in live_rows(world)
    }


def three_alone(world: World, settings: Settings) -> None:
    """Three nodes of one GPU, each with a ready instance of its own."""
    for name in ("n1", "n2", "n3"):
        join(world, name)
        follow_desired(world, name)
    follow(world, own={"a": 1, "b": 1, "c": 1})
    run(world, settings)
    follow_desired(world, "n1", "n2", "n3")
    assert {word.partition("@")[0] for word in wanted(world)} == {"a", "b", "c"}


def test_a_full_fleet_forms_a_pool_and_nobody_goes_before_the_pool_serves(world: World, settings: Settings) -> None:
    three_alone(world, settings)
    node_of = {row.model: row.node for row in live_rows(world)}
    follow(world, own={"a": 0, "b": 0, "c": 1}, pooled=("a", "b"))
    assert run(world, settings).changes() == {"started": 2}
    pool = next(row.node for row in live_rows(world) if row.pooled)
    assert pool in {node_of["a"], node_of["b"]}, "where one of the two runs"
    assert run(world, settings).changes() == {}, "both still load, so nothing else moves"
    follow_desired(world, "n1", "n2", "n3", hold_back=("b",))
    scaled = run(world, settings)
    on_pool, elsewhere = scaled.drained, scaled.donated
    assert on_pool + elsewhere == (0 if node_of["b"] == pool and pool == node_of["a"] else 1), "a may go, b not yet"
    follow_desired(world, "n1", "n2", "n3")
    run(world, settings)
    follow_desired(world, "n1", "n2", "n3")
    run(world, settings)
    follow_desired(world, "n1", "n2", "n3")
    other = ({node_of["a"], node_of["b"]} - {pool}).pop()
    lent = next(model for model in ("a", "b") if node_of[model] == other)
    assert wanted(world) == {f"+a@{pool}", f"+b@{pool}", f"c@{node_of['c']}", f"{lent}@{other} spot"}, (
        "what drained on the pool's own slot was stopped, not lent out"
    )


def test_a_plan_without_the_pool_brings_all_back_and_the_last_stays_where_it_is(
    world: World, settings: Settings
) -> None:
    for name in ("n1", "n2"):
        join(world, name)
        follow_desired(world, name)
    follow(world, own={}, pooled=("a", "b"))
    run(world, settings)
    follow_desired(world, "n1", "n2")
    assert wanted(world) == {"+a@n1", "+b@n1"}
    follow(world, own={"a": 1, "b": 1})
    before = {row.model: row.id for row in live_rows(world)}
    assert run(world, settings).started == 1, "one GPU is free, the other is the pool's"
    follow_desired(world, "n1", "n2")
    for _ in range(3):
        run(world, settings)
        follow_desired(world, "n1", "n2")
    rows = {row.model: row for row in live_rows(world)}
    assert {(row.node, row.pooled, row.gpus) for row in rows.values()} == {("n1", False, 1), ("n2", False, 1)}
    assert sum(rows[model].id == before[model] for model in rows) == 1, "one of them was never loaded anew"


def test_a_pooled_endpoint_is_not_scaled(world: World, settings: Settings) -> None:
    """Neither by its minimum nor by the plan's zero: the pool is its place."""
    join(world, "n1", slots=2)
    follow_desired(world, "n1")
    with world.database.transaction() as session:
        fleet.put_endpoint(session, model="a", region="us-east", minimum=2, maximum=4)
    follow(world, own={"a": 0}, pooled=("a",))
    assert run(world, settings).started == 1
    follow_desired(world, "n1")
    assert run(world, settings).changes() == {}
    assert wanted(world) == {"+a@n1"}


def test_nothing_of_its_own_starts_on_a_pool_slot(world: World, settings: Settings) -> None:
    join(world, "n1")
    follow_desired(world, "n1")
    follow(world, own={"b": 1}, pooled=("a",))
    scaled = run(world, settings)
    assert wanted(world) == {"+a@n1"}
    [words] = scaled.unplaced
    assert words == "1 x b in us-east: GPUs full in us-east: 0 of 1 H800 free, needs 1 in one slot"


def test_a_drained_node_hands_its_pool_over(world: World, settings: Settings) -> None:
    for name in ("n1", "n2"):
        join(world, name)
        follow_desired(world, name)
    follow(world, own={}, pooled=("a", "b"))
    run(world, settings)
    follow_desired(world, "n1", "n2")
    with world.database.transaction() as session:
        fleet.set_node_draining(session, "n1", draining=True)
    assert run(world, settings).changes() == {"started": 2}
    assert wanted(world) == {"+a@n1", "+b@n1", "+a@n2", "+b@n2"}, "until the others are ready"
    follow_desired(world, "n1", "n2")
    assert run(world, settings).drained == 2
    follow_desired(world, "n1", "n2")
    assert wanted(world) == {"+a@n2", "+b@n2"}


def test_a_node_that_comes_back_with_fewer_slots_is_made_good_for(world: World, settings: Settings) -> None:
    """Its slots serve together now: what stood on the first is there still, what stood on the others is lost. It starts
    elsewhere at once, and who serves meanwhile goes on.
    """
    join(world, "n1", slots=3)
    for name in ("n2", "n3"):
        join(world, name)
    nodes = ("n1", "n2", "n3")
    for name in nodes:
        follow_desired(world, name)
    follow(world, own={"c": 2}, pooled=("a", "b"))
    run(world, settings)
    follow_desired(world, *nodes)
    assert wanted(world) == {"+a@n1", "+b@n1", "c@n1", "c@n2"}
    before = {row.id: row.observed for row in live_rows(world) if (row.model, row.node) != ("c", "n1")}
    join(world, "n1", gpus=3, workers=3)
    assert {row.id: row.observed for row in live_rows(world)} == before, "c goes on at n2, the pool on all of n1"
    assert run(world, settings).changes() == {"started": 1}
    follow_desired(world, *nodes)
    assert wanted(world) == {"+a@n1", "+b@n1", "c@n2", "c@n3"}
    assert run(world, settings).changes() == {}


def test_a_sole_instance_that_lost_its_slot_starts_elsewhere_at_once(world: World, settings: Settings) -> None:
    join(world, "n1", slots=2)
    follow_desired(world, "n1")
    follow(world, own={"b": 1, "c": 1})
    run(world, settings)
    follow_desired(world, "n1")
    [lost] = [row.model for row in live_rows(world) if row.slot == 1]
    join(world, "n1", gpus=2, workers=2)
    assert lost not in {row.model for row in live_rows(world)}
    assert run(world, settings).changes() == {"started": 1}
    assert {(row.model, row.slot) for row in live_rows(world)} == {("b", 0), ("c", 0)}, "both on what is one slot now"


def test_a_model_is_placed_where_it_fits_on_one_worker(world: World, settings: Settings) -> None:
    with world.database.transaction() as session:
        two_gpus = Profile(model="c", gpu_type="H800", tokens_per_s=1000.0, gpus=2, load_time_s=30.0)
        fleet.put_profile(session, two_gpus)
    join(world, "n1", gpus=4, workers=4)
    follow_desired(world, "n1")
    follow(world, own={"c": 1})
    [words] = run(world, settings).unplaced
    assert words.endswith("4 of 4 H800 free, needs 2 in one slot, whose workers have 1 at most")
    join(world, "n2", gpus=4, workers=2)
    follow_desired(world, "n2")
    run(world, settings)
    assert wanted(world) == {"c@n2"}


def test_spot_gives_way_to_the_pool(world: World, settings: Settings) -> None:
    join(world, "n1")
    follow_desired(world, "n1")
    follow(world, own={"c": 1})
    run(world, settings)
    follow_desired(world, "n1")
    follow(world, own={"c": 0})
    assert run(world, settings).donated == 1
    follow_desired(world, "n1")
    follow_desired(world, "n1")
    [spot] = live_rows(world)
    assert spot.desired == "spot"
    with world.database.transaction() as session:
        lease_instance(session, spot.id, holder="lab", duration_s=600.0, created_by="me")
    follow(world, own={"c": 0}, pooled=("a",))
    noticed = run(world, settings)
    assert noticed.changes() == {"leases_noticed": 1}
    assert "leased" in noticed.unplaced[0]
    with world.database.transaction() as session:
        session.execute(update(InstanceLease).values(reclaim_at=func.now()))
    ended = run(world, settings)
    assert (ended.leases_ended, ended.stopped, ended.started) == (1, 1, 1)
    assert wanted(world) == {"+a@n1"}


def test_one_that_fails_in_the_pool_gets_an_instance_of_its_own(world: World, settings: Settings) -> None:
    for name in ("n1", "n2"):
        join(world, name)
        follow_desired(world, name)
    settings = settings.model_copy(update={"scale_failed_patience_s": 0.0})
    follow(world, own={"a": 0}, pooled=("a", "b"))
    run(world, settings)
    follow_desired(world, "n1", "n2")
    with world.database.transaction() as session:
        session.execute(text("UPDATE instances SET observed = 'failed', error = 'no room' WHERE model = 'a'"))
    assert run(world, settings).started == 1
    assert wanted(world) == {"+a@n1", "+b@n1", "a@n2"}
    follow_desired(world, "n2")
    assert run(world, settings).changes() == {}, "it serves, and the failed one is tried again by its node"
    follow_desired(world, "n1")
    scaled = run(world, settings)
    assert scaled.drained + scaled.donated == 1, "the pool serves it after all"


def test_a_pin_takes_its_endpoint_out_of_the_pool(world: World, settings: Settings) -> None:
    for name in ("n1", "n2"):
        join(world, name)
        follow_desired(world, name)
    follow(world, own={}, pooled=("a", "b"))
    run(world, settings)
    follow_desired(world, "n1", "n2")
    with world.database.transaction() as session:
        until = datetime.now(UTC) + timedelta(hours=1)
        add_override(session, endpoint=EAST_A, instances=1, until=until, note="", created_by="me")
    assert run(world, settings).started == 1
    follow_desired(world, "n1", "n2")
    assert run(world, settings).drained == 1
    follow_desired(world, "n1", "n2")
    assert wanted(world) == {"a@n2", "+b@n1"}


@pytest.mark.parametrize(
    "values", ["pooled = true", "gpus = 0", "gpus = 0, pooled = true, desired = 'spot', spot_at = now()"]
)
def test_the_database_keeps_the_promises(world: World, values: str) -> None:
    """A pooled instance has no GPUs, others have some, and nobody leases a share of a slot."""
    join(world, "n1")
    world.place("n1", model="a")
    with pytest.raises(IntegrityError, match="ck_instances_pooled"), world.database.transaction() as session:
        session.execute(text(f"UPDATE instances SET {values}"))


MODELS = ("a", "b", "c")


def a_random_plan(world: World, random: Random) -> set[str]:
    """Some models pooled, some with one instance of their own, as many GPUs as there are; the models that it serves."""
    pooled = tuple(model for model in MODELS if random.random() < 0.5)
    rest = [model for model in MODELS if model not in pooled]
    own = {model: int(random.random() < 0.8) for model in rest} | dict.fromkeys(pooled, 0)
    follow(world, own=own, pooled=pooled, gpus=random.choice((1, 1, 2)))
    return {*pooled, *(model for model, count in own.items() if count)}


@pytest.mark.parametrize("seed", range(3))
def test_whatever_plans_come_nobody_who_is_wanted_loses_his_last(world: World, settings: Settings, seed: int) -> None:
    """Full fleet or not, with loads that take their time: who is served, and wanted by the old plan and the new, has
    a ready instance at every moment; and in the end all that is wanted is there.
    """
    random, nodes = Random(seed), ("n1", "n2", "n3")
    for name in nodes:
        join(world, name)
        follow_desired(world, name)
    wanted_now = a_random_plan(world, random)
    safe: set[str] = set()
    for turn in range(24):
        if turn % 6 == 5:
            wanted_before, wanted_now = wanted_now, a_random_plan(world, random)
            safe &= wanted_before & wanted_now
        run(world, settings)
        follow_desired(world, *nodes, hold_back=tuple(model for model in MODELS if random.random() < 0.4))
        ready = {row.model for row in live_rows(world) if (row.desired, row.observed) == ("running", "ready")}
        assert safe <= ready, (turn, safe, wanted(world))
        safe |= ready & wanted_now
    for _ in range(8):
        run(world, settings)
        follow_desired(world, *nodes)
    rows = live_rows(world)
    assert {row.model for row in rows if (row.desired, row.observed) == ("running", "ready")} == wanted_now
    shared = {(row.node, row.slot) for row in rows if row.pooled}
    assert not [row for row in rows if not row.pooled and (row.node, row.slot) in shared], wanted(world)
