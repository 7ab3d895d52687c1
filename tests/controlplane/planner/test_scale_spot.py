"""Spot in the scale loop: lent out after draining, taken back, leases with notice; and the facts of the strategies."""

import threading
from datetime import timedelta

import pytest
from sqlalchemy import select, text

from controlplane.errors import ConflictError
from controlplane.planner.scale import Scaled
from controlplane.planner.snapshot import read_to_scale
from controlplane.policies.facts import Endpoint
from controlplane.policies.lifecycle import InstanceState
from controlplane.settings import Settings
from controlplane.store import fleet
from controlplane.store.demand import DemandRow, Forecast, put_demand, put_forecasts
from controlplane.store.instances import desired_of, lose_silent_nodes, observe
from controlplane.store.keys import AuditEvent
from controlplane.store.leases import lease_instance
from controlplane.store.redis.live import LiveStore
from controlplane.store.tables import Desired, Instance, InstanceLease, Node
from dataplane.protocol.messages import DesiredInstance, Heartbeat, InstanceReport
from tests.controlplane.planner.test_scale import endpoint, follow, node, run, wanted
from tests.controlplane.world import MODEL, World

HERE = Endpoint(model=MODEL, region="us-east")


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"heartbeat_stale_s": 60.0})


def held(world: World, name: str = "n1") -> list[DesiredInstance]:
    """The instances of the node's desired state."""
    with world.database.transaction() as session:
        return list(desired_of(session, name).instances)


def heartbeat(world: World, *, used: float = 0.0, busy: frozenset[str] = frozenset()) -> None:
    """The node follows its desired state, as an agent does; `busy` instances have requests left."""
    with world.database.transaction() as session:
        desired = desired_of(session, "n1")
        reports = tuple(
            InstanceReport(
                instance_id=each.instance_id,
                model=each.model.name,
                slot=each.slot,
                state="ready"
                if not (each.spot or each.draining)
                else "draining"
                if each.instance_id in busy or each.draining
                else "spot",
                kv_used_bytes=int(used * 1000),
                kv_capacity_bytes=1000,
                kind=each.kind,
            )
            for each in desired.instances
            if each.instance_id in busy or not each.draining
        )
        beat = Heartbeat(node="n1", boot_id="b", generation=desired.generation, instances=reports)
        fleet.touch_node(session, "n1")
        observe(session, beat)
        row = session.get_one(Node, "n1")
        world.live.write_heartbeat(beat, region=row.region, gpu_type=row.gpu_type, url=row.url)


def spot_one(world: World, settings: Settings, count: int = 1, *, of: int = 3) -> list[str]:
    """A plan of `of`, then of fewer: `count` spot instances, ready to be leased; their ids. The node has four GPUs."""
    node(world)
    follow(world, of)
    run(world, settings)
    heartbeat(world, used=0.5)
    follow(world, of - count)
    assert run(world, settings).donated == count
    heartbeat(world, used=0.5)
    with world.database.transaction() as session:
        return list(session.scalars(select(Instance.id).where(Instance.desired == Desired.SPOT).order_by(Instance.id)))


def lease(world: World, instance_id: str, duration_s: float = 3600) -> InstanceLease:
    with world.database.transaction() as session:
        return lease_instance(session, instance_id, holder="lab", duration_s=duration_s, created_by="test")


def leases(world: World) -> list[InstanceLease]:
    with world.database.transaction() as session:
        return list(session.scalars(select(InstanceLease).order_by(InstanceLease.id)))


def let_pass(world: World, seconds: int) -> None:
    """Everything about leases happened so long ago."""
    with world.database.transaction() as session:
        for column in ("created_at", "expires_at", "reclaim_at"):
            session.execute(text(f"UPDATE spot_leases SET {column} = {column} - interval '{seconds} s'"))


def audited(world: World) -> list[str]:
    with world.database.transaction() as session:
        rows = session.scalars(select(AuditEvent).where(AuditEvent.action.like("spot.%")).order_by(AuditEvent.id))
        return [row.action for row in rows]


def test_what_is_scaled_in_drains_and_is_then_lent_out_with_its_model(world: World, settings: Settings) -> None:
    node(world)
    follow(world, 2)
    run(world, settings)
    heartbeat(world, used=0.5)
    follow(world, 1)
    assert run(world, settings).changes() == {"donated": 1}
    leaving = next(each for each in held(world) if each.spot)
    assert not leaving.draining, "the node shall not unload it"
    heartbeat(world, busy=frozenset({leaving.instance_id}))
    assert wanted(world) == {"running": 1, "draining": 1}, "requests are left: not lent out yet"
    heartbeat(world)
    assert wanted(world) == {"running": 1, "spot": 1}
    assert [each.spot for each in held(world)].count(True) == 1, "it stays loaded"
    assert run(world, settings).changes() == {}


def test_the_reclaim_is_of_the_same_model_and_starts_nothing(world: World, settings: Settings) -> None:
    (spot,) = spot_one(world, settings)
    follow(world, 3)
    assert run(world, settings).changes() == {"reclaimed": 1}
    assert run(world, settings).changes() == {}, "it counts as starting"
    assert wanted(world) == {"running": 3}
    assert [each.spot for each in held(world) if each.instance_id == spot] == [False]
    heartbeat(world)
    with world.database.transaction() as session:
        assert session.get_one(Instance, spot).observed == InstanceState.READY


def test_another_model_takes_the_place_of_spot_instances(world: World, settings: Settings) -> None:
    spot_one(world, settings)
    world.add_model("wave", minimum=0)
    with world.database.transaction() as session:
        fleet.put_endpoint(session, model="wave", region="us-east", minimum=2, maximum=2)
    scaled = run(world, settings)
    assert scaled.changes() == {"redeployed": 1, "started": 1}, "one in its place, one on the free GPU"
    assert wanted(world) == {"running": 4, "stopped": 1}
    names = sorted(each.model.name for each in held(world))
    assert names == ["tide", "tide", "wave", "wave"], "one desired state has both"


def test_a_lease_is_revoked_with_notice_and_once(world: World, settings: Settings) -> None:
    (spot,) = spot_one(world, settings, of=4)
    lease(world, spot)
    heartbeat(world)
    assert [each.lease_id for each in held(world) if each.spot] == [leases(world)[0].id]
    follow(world, 4)
    assert run(world, settings).changes() == {"leases_noticed": 1}
    with world.database.transaction() as session:
        notice = session.scalar(select(InstanceLease.reclaim_at - InstanceLease.created_at))
        assert notice is not None
        assert notice >= timedelta(seconds=settings.spot_notice_s)
    before = leases(world)[0].reclaim_at
    assert run(world, settings).changes() == {}, "the notice stands, and nothing else is started"
    assert leases(world)[0].reclaim_at == before
    let_pass(world, 31)
    assert run(world, settings).changes() == {"leases_ended": 1, "reclaimed": 1}
    assert [row.end_reason for row in leases(world)] == ["reclaimed"]
    assert audited(world) == ["spot.notice", "spot.reclaim"]
    assert [(each.spot, each.lease_id) for each in held(world) if each.instance_id == spot] == [(False, None)]


def test_a_lease_expires_also_while_redis_is_away(world: World, settings: Settings) -> None:
    (spot,) = spot_one(world, settings)
    lease(world, spot, 60)
    gone = LiveStore(settings.model_copy(update={"redis_url": type(settings.redis_url)("redis://127.0.0.1:1/0")}))
    assert run(world, settings, live=gone).changes() == {}
    let_pass(world, 61)
    generation = held_generation(world)
    assert run(world, settings, live=gone).changes() == {"leases_ended": 1}
    gone.close()
    assert [row.end_reason for row in leases(world)] == ["expired"]
    assert held_generation(world) == generation + 1, "the node shall take no more requests of it"
    assert [each.lease_id for each in held(world) if each.spot] == [None]
    assert wanted(world) == {"running": 2, "spot": 1}
    lease(world, spot)


def held_generation(world: World) -> int:
    with world.database.transaction() as session:
        return session.get_one(Node, "n1").generation


def test_an_instance_about_to_be_taken_back_is_leased_to_nobody(world: World, settings: Settings) -> None:
    (spot,) = spot_one(world, settings, of=4)
    lease(world, spot)
    follow(world, 4)
    run(world, settings)
    with world.database.transaction() as session:
        session.execute(text("UPDATE spot_leases SET ended_at = now(), end_reason = 'returned'"))
    with pytest.raises(ConflictError, match="is being taken back"):
        lease(world, spot)
    assert run(world, settings).changes() == {"reclaimed": 1}


def test_lease_and_reclaim_at_once_one_wins(world: World, settings: Settings) -> None:
    """Either the lease comes first, and the reclaim gives it notice, or it finds the instance gone."""
    for _ in range(3):
        (spot,) = spot_one(world, settings, of=4)
        follow(world, 4)
        start, refused, scaled = threading.Barrier(2), list[str](), list[Scaled]()

        def take(spot: str = spot, start: threading.Barrier = start, refused: list[str] = refused) -> None:
            start.wait()
            try:
                lease(world, spot)
            except ConflictError as error:
                refused.append(error.message)

        def reclaim(start: threading.Barrier = start, scaled: list[Scaled] = scaled) -> None:
            start.wait()
            scaled.append(run(world, settings))

        threads = [threading.Thread(target=work) for work in (take, reclaim)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if refused:
            assert refused == [f"instance '{spot}' is running, not spot"]
            assert scaled[0].changes() == {"reclaimed": 1}
        else:
            assert scaled[0].changes() == {"leases_noticed": 1}
        with world.database.transaction() as session:
            session.execute(text("DELETE FROM instances"))


def test_old_spot_is_stopped_and_disabled_spot_too(world: World, settings: Settings) -> None:
    first, second = spot_one(world, settings, count=2)
    with world.database.transaction() as session:
        session.execute(text(f"UPDATE instances SET spot_at = to_timestamp(900) WHERE id = '{first}'"))
        session.execute(text(f"UPDATE instances SET spot_at = to_timestamp(990) WHERE id = '{second}'"))
    aged = settings.model_copy(update={"spot_max_age_s": 60.0})
    assert run(world, aged).changes() == {"stopped": 1}
    disabled = settings.model_copy(update={"spot_enabled": False})
    assert run(world, disabled).changes() == {"stopped": 1}
    assert wanted(world) == {"running": 1, "stopped": 2}
    follow(world, 0)
    heartbeat(world)
    assert run(world, disabled).changes() == {"drained": 1}, "nothing is lent out any more"
    assert [(each.draining, each.spot) for each in held(world)] == [(True, False)]


def test_a_silent_node_takes_its_spot_instances_and_their_leases_along(world: World, settings: Settings) -> None:
    (spot,) = spot_one(world, settings)
    lease(world, spot)
    world.join("n2")
    for lost in ([], ["n1"]):
        with world.database.transaction() as session:
            session.execute(text("UPDATE nodes SET last_seen_at = now() - interval '61 s' WHERE name = 'n1'"))
            assert lose_silent_nodes(session, silent_s=60, heard_s=5, grace_s=0) == lost
    assert wanted(world) == {"stopped": 3}
    assert [row.end_reason for row in leases(world)] == ["lost"]


def test_one_that_fails_while_it_drains_is_not_lent_out(world: World, settings: Settings) -> None:
    node(world)
    follow(world, 1)
    run(world, settings)
    heartbeat(world, used=0.5)
    follow(world, 0)
    assert run(world, settings).donated == 1
    (leaving,) = held(world)
    with world.database.transaction() as session:
        report = InstanceReport(instance_id=leaving.instance_id, model=MODEL, slot=leaving.slot, state="failed")
        newest = session.get_one(Node, "n1").generation
        observe(session, Heartbeat(node="n1", boot_id="b", generation=newest, instances=(report,)))
    assert [(each.draining, each.spot) for each in held(world)] == [(True, False)]


def plan_of(world: World, after: int) -> None:
    """A plan of the hour from 0 s on, a forecast of 100 tokens/s for it, and five times as much in the last minutes."""
    follow(world, after)
    forecast = Forecast(
        model=MODEL,
        region="us-east",
        origin_s=0,
        forecaster="none",
        peak_q50=100.0,
        peak_upper=150.0,
        quantile=0.9,
        path=[150.0] * 12,
        candidates={},
        reason="",
    )
    with world.database.transaction() as session:
        session.execute(text("UPDATE plans SET window_start_s = 0"))
        put_forecasts(session, [forecast])
        put_demand(
            session,
            [DemandRow(endpoint=HERE, kind="IW", start_s=minute, tokens_per_s=1200.0) for minute in (2880, 2940)],
        )


@pytest.mark.parametrize(
    ("strategy", "now_s", "used", "started"),
    [
        ("lt-i", 3000.0, 0.5, 0),
        ("lt-u", 3000.0, 0.5, 0),
        ("lt-u", 3000.0, 0.8, 0),  # the plan is reached
        ("lt-ua", 3000.0, 0.5, 1),  # twelve times the forecast
        ("lt-ua", 2000.0, 0.5, 0),  # half an hour is left
        ("lt-d", 3000.0, 0.8, 0),  # never past the plan
        ("reactive", 3000.0, 0.8, 1),
        ("chiron", 3000.0, 0.5, 3),  # 2 busy of theta 0.6: four
        ("siloed", 3000.0, 0.8, 1),  # nothing deferred waits: one interactive one
    ],
)
def test_every_strategy_runs_live(
    world: World, settings: Settings, strategy: str, now_s: float, used: float, started: int
) -> None:
    node(world)
    plan_of(world, 1)
    run(world, settings, now_s=1.0)
    heartbeat(world, used=used)
    chosen = settings.model_copy(update={"scale_strategy": strategy})
    scaled = run(world, chosen, now_s=now_s)
    assert scaled.started == started
    assert run(world, chosen, now_s=now_s + 1).started == 0, "what starts is counted"


@pytest.mark.parametrize(("strategy", "known"), [("lt-i", {}), ("lt-ua", {HERE: 100.0})])
def test_forecasts_are_read_for_the_strategy_that_asks_for_them(
    world: World, settings: Settings, strategy: str, known: dict[Endpoint, float]
) -> None:
    plan_of(world, 1)
    chosen = settings.model_copy(update={"scale_strategy": strategy})
    assert read_to_scale(world.database, world.live, chosen, now_s=60.0).snapshot.forecast == known


def test_kinds_follow_the_strategy(world: World, settings: Settings) -> None:
    node(world)
    endpoint(world, 1, 4)
    silos = settings.model_copy(update={"scale_strategy": "siloed"})
    run(world, silos)
    heartbeat(world, used=0.5)
    assert sorted(each.kind for each in held(world)) == ["IW", "NIW"]
    run(world, settings)
    assert sorted(each.kind for each in held(world)) == ["mixed", "mixed"], "shared again, also in the desired state"
