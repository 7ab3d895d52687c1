"""Scaling: minimums, the plan, draining, and never in on what is not known."""

import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from sqlalchemy import delete, select, text

from controlplane.errors import StaleIndexError
from controlplane.planner.scale import Scaled, scale
from controlplane.planner.snapshot import read_to_plan
from controlplane.policies.assignment.facts import InstanceChange, SlotDecision
from controlplane.policies.lifecycle import InstanceState
from controlplane.policies.placement.choose import choose_placement
from controlplane.policies.placement.facts import PlacementSettings
from controlplane.policies.scale import ScaleDecision, choose_scale
from controlplane.policies.snapshot import placement_facts
from controlplane.settings import Settings
from controlplane.store import fleet
from controlplane.store.endpoint_summary import read_unplaced
from controlplane.store.instances import add_instance, desired_of
from controlplane.store.joining import join_node
from controlplane.store.redis.live import FleetView, LiveStore
from controlplane.store.tables import Desired, EndpointRow, Instance, Model, Profile
from dataplane.protocol.joining import Join, SlotSpec
from tests.controlplane.world import World

URL = "http://127.0.0.1:9"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"heartbeat_stale_s": 60.0})


def run(world: World, settings: Settings, *, live: LiveStore | None = None, now_s: float = 1000.0) -> Scaled:
    return scale(world.database, live or world.live, settings, now_s=now_s)


def ready(world: World, node: str, region: str = "us-east") -> None:
    """All that is wanted on a node is ready, and it says so."""
    with world.database.transaction() as session:
        for row in session.scalars(select(Instance).where(Instance.desired == Desired.RUNNING)):
            row.observed = InstanceState.READY
            world.report(node, row.id, region=region, url=URL)


def wanted(world: World) -> dict[str, int]:
    with world.database.transaction() as session:
        rows = session.scalars(select(Instance)).all()
    return {desired: sum(row.desired == desired for row in rows) for desired in {row.desired for row in rows}}


def endpoint(world: World, minimum: int, maximum: int) -> None:
    with world.database.transaction() as session:
        fleet.put_endpoint(session, model="tide", region="us-east", minimum=minimum, maximum=maximum)


def fleet_index_of(world: World) -> int:
    with world.database.transaction() as session:
        return fleet.fleet_index(session)


def follow(world: World, after: int) -> None:
    """A plan of so many instances in us-east, in force."""
    world.in_force([("tide", "us-east", after)])


def node(world: World) -> None:
    world.join("n1")
    world.report("n1", "none", region="us-east", url=URL)


def test_minimums_are_started_and_nodes_are_told(world: World, settings: Settings) -> None:
    node(world)
    endpoint(world, 2, 4)
    index = fleet_index_of(world)
    assert run(world, settings).started == 2
    assert run(world, settings).started == 0
    assert fleet_index_of(world) == index, "scaling makes no plan stale"
    with world.database.transaction() as session:
        desired = desired_of(session, "n1")
        row = session.get_one(EndpointRow, ("tide", "us-east"))
        assert row.last_scaled_at is not None
        assert row.last_scaled_at.timestamp() == 1000.0
    assert desired.generation == 1
    assert sorted(each.slot for each in desired.instances) == [0, 1], "they spread over the slots"


def test_two_runs_at_once_do_not_add_up(world: World, settings: Settings) -> None:
    node(world)
    endpoint(world, 2, 4)
    started: list[int] = []
    start = threading.Barrier(3)

    def work() -> None:
        start.wait()
        started.append(run(world, settings).started)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(started) == [0, 0, 2]
    assert wanted(world) == {"running": 2}


class Watched(LiveStore):
    """Calls `seen` while scaling reads Redis."""

    def __init__(self, settings: Settings, seen: Callable[[], None]) -> None:
        super().__init__(settings)
        self._seen = seen

    def read_view(self) -> FleetView:
        self._seen()
        return super().read_view()


def test_the_fleet_is_unlocked_while_redis_is_read_and_while_it_is_decided(
    world: World, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    free: list[str] = []

    def lock(what: str) -> None:
        with world.database.transaction() as session:
            session.execute(text("SET LOCAL lock_timeout = '2s'"))
            fleet.fleet_version(session, lock=True)
        free.append(what)

    def deciding(*given: Any) -> ScaleDecision:
        lock("decides")
        return choose_scale(*given)

    monkeypatch.setattr("controlplane.planner.scale.choose_scale", deciding)
    node(world)
    endpoint(world, 2, 4)
    with contextlib.closing(Watched(settings, lambda: lock("reads"))) as live:
        assert run(world, settings, live=live).started == 2
    assert free == ["reads", "decides"]


def test_what_changed_while_it_was_decided_is_decided_anew(
    world: World, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator wants one at most; without that, four would be started."""
    node(world)
    endpoint(world, 4, 4)
    decided: list[int] = []

    def decide_late(*given: Any) -> ScaleDecision:
        decision = choose_scale(*given)
        decided.append(len(decision.slots.adds))
        if len(decided) == 1:
            endpoint(world, 1, 1)
        return decision

    monkeypatch.setattr("controlplane.planner.scale.choose_scale", decide_late)
    assert run(world, settings).started == 1
    assert decided == [4, 1]
    assert wanted(world) == {"running": 1}


def test_a_fleet_that_never_rests_is_left_alone_and_that_is_told(
    world: World, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    node(world)
    endpoint(world, 1, 4)
    most = itertools.count(5)

    def decide_late(*given: Any) -> ScaleDecision:
        decision = choose_scale(*given)
        endpoint(world, 1, next(most))
        return decision

    monkeypatch.setattr("controlplane.planner.scale.choose_scale", decide_late)
    with pytest.raises(StaleIndexError, match="the fleet changed under 5 decisions"):
        run(world, settings)
    assert wanted(world) == {}
    monkeypatch.undo()
    assert run(world, settings).started == 1


def test_a_plan_makes_a_decision_stale_and_a_heartbeat_does_not(world: World, settings: Settings) -> None:
    def version() -> int:
        with world.database.transaction() as session:
            return fleet.fleet_version(session)

    node(world)
    endpoint(world, 1, 4)
    run(world, settings)
    before = version()
    ready(world, "n1")
    with world.database.transaction() as session:
        fleet.touch_node(session, "n1")
    assert version() == before
    follow(world, 2)
    assert version() > before


def test_the_plan_is_followed_out_and_in_and_back(world: World, settings: Settings) -> None:
    node(world)
    follow(world, 3)
    assert run(world, settings).started == 3
    ready(world, "n1")
    follow(world, 1)
    assert run(world, settings).donated == 2
    assert wanted(world) == {"running": 1, "draining": 2}
    follow(world, 2)
    again = run(world, settings)
    assert (again.revived, again.started) == (1, 0), "a draining one still has its weights"
    assert wanted(world) == {"running": 2, "draining": 1}


def test_a_pooled_instance_that_gets_gpus_of_its_own_may_be_lent_out_at_once(
    world: World, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    node(world)
    with world.database.transaction() as session:
        mine = add_instance(session, model="tide", region="us-east", gpu_type="H800", node="n1", slot=0, gpus=0).id
    lent = SlotDecision(donates=(InstanceChange(instance_id=mine, reason="the plan wants no more of its own"),))
    decision = ScaleDecision(slots=lent, dedicated={mine: 1})
    monkeypatch.setattr("controlplane.planner.scale.choose_scale", lambda *given: decision)
    scaled = run(world, settings)
    assert (scaled.dedicated, scaled.donated) == (1, 1)
    with world.database.transaction() as session:
        row = session.get_one(Instance, mine)
        assert (row.gpus, row.pooled, row.desired, row.donate) == (1, False, Desired.DRAINING, True)


def test_a_stale_view_scales_nothing_in(world: World, settings: Settings) -> None:
    node(world)
    follow(world, 3)
    run(world, settings)
    ready(world, "n1")
    follow(world, 1)
    gone = LiveStore(settings.model_copy(update={"redis_url": type(settings.redis_url)("redis://127.0.0.1:1/0")}))
    stale = settings.model_copy(update={"heartbeat_stale_s": -1.0})
    for other in (run(world, settings, live=gone), run(world, stale)):
        assert (other.drained, other.started) == (0, 0)
    assert wanted(world) == {"running": 3}
    gone.close()


def test_a_failed_instance_is_not_counted_on(world: World, settings: Settings) -> None:
    """Of two, one failed: going to one lets the failed one go."""
    node(world)
    follow(world, 2)
    run(world, settings)
    ready(world, "n1")
    with world.database.transaction() as session:
        failed = session.scalars(select(Instance).order_by(Instance.id)).first()
        assert failed is not None
        failed.observed = InstanceState.FAILED
        failed_id = failed.id
    follow(world, 1)
    assert run(world, settings).drained == 1
    with world.database.transaction() as session:
        assert session.get_one(Instance, failed_id).desired == Desired.DRAINING


def test_what_finds_no_place_is_said(world: World, settings: Settings) -> None:
    node(world)
    endpoint(world, 6, 6)
    scaled = run(world, settings)
    assert scaled.started == 4
    [words] = scaled.unplaced
    assert words.startswith("2 x tide in us-east:")
    run(world, settings, now_s=2000.0)
    with world.database.transaction() as session:
        row = session.get_one(EndpointRow, ("tide", "us-east"))
        assert row.last_scaled_at is not None
        assert row.last_scaled_at.timestamp() == 1000.0, "nothing was scaled the second time"
        [kept] = read_unplaced(session)
    assert (kept["model"], kept["region"], kept["gpu_type"], kept["count"]) == ("tide", "us-east", "H800", 2)
    assert kept["reason"].startswith("GPUs full in us-east: 0 of")
    endpoint(world, 4, 6)
    run(world, settings, now_s=3000.0)
    with world.database.transaction() as session:
        assert read_unplaced(session) == []


def test_a_model_without_a_profile_says_what_to_set(world: World, settings: Settings) -> None:
    node(world)
    endpoint(world, 1, 1)
    with world.database.transaction() as session:
        session.execute(delete(Profile))
    run(world, settings)
    with world.database.transaction() as session:
        [kept] = read_unplaced(session)
    assert kept["reason"] == "tide has no profile on any GPU type (`tidepool model profile` sets one)"


def test_a_node_that_drains_takes_nothing_new(world: World, settings: Settings) -> None:
    node(world)
    endpoint(world, 1, 1)
    with world.database.transaction() as session:
        fleet.set_node_draining(session, "n1", draining=True)
    assert run(world, settings).started == 0


def test_weights_that_fit_nowhere_are_not_placed_by_scaling_nor_by_a_plan(world: World, settings: Settings) -> None:
    """A checkpoint of 257 MiB in bfloat16, and a node of 256 MiB a slot that computes in float32."""
    slots = (SlotSpec(gpus=2, memory_bytes=512 * 2**20, weights_bytes=256 * 2**20),) * 2
    join = Join(
        node="n1",
        region="us-east",
        gpu_type="H800",
        url=URL,
        slots=slots,
        engine="torch",
        host_bytes=1,
        dtype="float32",
    )
    with world.database.transaction() as session:
        join_node(session, join)
        fleet.touch_node(session, "n1")
        model = session.get_one(Model, "tide")
        model.weights_bytes, model.parameters = 257 * 2**20, 257 * 2**19
    world.report("n1", "none", region="us-east", url=URL)
    endpoint(world, 1, 4)
    assert run(world, settings).started == 0
    expected = "the weights of tide fit on no slot in us-east: 514 MiB in float32, the largest slot of H800 has 256 MiB"
    with world.database.transaction() as session:
        [kept] = read_unplaced(session)
        snapshot = read_to_plan(session, settings, now_s=1000.0, window_start_s=3600.0)
    facts = placement_facts(snapshot, {}, pool=None, stale_s=60.0)
    assert kept["reason"].startswith(expected)
    placement = choose_placement(facts, 0.0, PlacementSettings())
    assert not any(entry.after for entry in placement.entries)
    [below] = placement.below_minimum
    assert below.reason.startswith(expected)
    with world.database.transaction() as session:
        join_node(session, msgspec.structs.replace(join, dtype="bfloat16"))
        session.get_one(Model, "tide").parameters = 256 * 2**19
    assert run(world, settings).started == 1
