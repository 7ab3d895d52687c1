"""A roll-out's course: instances first, then shares, and back again where the candidate is worse."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import select, text, update

from controlplane.errors import ConflictError, InUseError, InvalidValueError, NotFoundError
from controlplane.planner.rollouts import move_rollouts
from controlplane.planner.scale import scale
from controlplane.planner.snapshot import read_to_plan
from controlplane.policies.facts import Endpoint
from controlplane.policies.lifecycle import InstanceState, RolloutState
from controlplane.settings import Settings
from controlplane.store import aliases, fleet, removal, rollouts
from controlplane.store.alias_tables import Alias, Rollout
from controlplane.store.events import Event
from controlplane.store.objectives import BUCKET_S, Kept, ObjectiveKey, add_objectives
from controlplane.store.tables import Desired, EndpointRow, Instance, Profile
from tests.controlplane.store.test_adapters import model, put
from tests.controlplane.store.test_aliases import add_model
from tests.controlplane.world import World, until

NEW = Endpoint(model="tide-2", region="us-east")


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"heartbeat_stale_s": 600.0})


@pytest.fixture
def fleet_of_two(world: World) -> World:
    """Two ready instances of tide in us-east, and tide-2, which is offered there and runs nowhere."""
    world.join("n1", slots=4)
    world.report("n1", "none", region="us-east", url="http://127.0.0.1:9")
    with world.database.transaction() as session:
        for row in session.scalars(select(EndpointRow)).all():
            row.instances_min = row.instances_max = 0
        fleet.put_endpoint(session, model="tide", region="us-east", minimum=2, maximum=2)
        add_model(session, "tide-2")
        [profile] = session.scalars(select(Profile).where(Profile.model == "tide")).all()
        fleet.put_profile(
            session,
            Profile(
                model="tide-2", gpu_type=profile.gpu_type, tokens_per_s=profile.tokens_per_s, gpus=1, load_time_s=1.0
            ),
        )
        fleet.put_endpoint(session, model="tide-2", region="us-east", minimum=0, maximum=4)
        session.execute(text("UPDATE nodes SET last_seen_at = now()"))
    return world


def begin(world: World, **changes: Any) -> str:
    body: dict[str, Any] = {
        "alias": "tide",
        "model": "tide-2",
        "steps": [50, 100],
        "hold_s": 0.0,
        "answers_min": 0,
        "worse_max": 0.02,
        "keep": True,
        "created_by": "ann",
        "alive_s": 600.0,
    }
    with world.database.transaction() as session:
        return rollouts.begin_rollout(session, **(body | changes)).id


def run_scale(world: World, settings: Settings) -> None:
    """Scaling runs, and what it starts is ready at once."""
    scale(world.database, world.live, settings, now_s=1000.0)
    with world.database.transaction() as session:
        running = update(Instance).where(Instance.desired == Desired.RUNNING)
        session.execute(running.values(observed=InstanceState.READY))
        session.execute(text("UPDATE nodes SET last_seen_at = now()"))


def instances(world: World) -> dict[str, int]:
    with world.database.transaction() as session:
        rows = list(session.scalars(select(Instance.model).where(Instance.desired == Desired.RUNNING)))
    return {model: rows.count(model) for model in set(rows)}


def weights(world: World) -> dict[str, int]:
    with world.database.transaction() as session:
        return aliases.weights_of(session, "tide")


def read(world: World, rollout_id: str) -> Rollout:
    with world.database.transaction() as session:
        return session.get_one(Rollout, rollout_id)


def answered(world: World, model: str, answers: int, *, failed: int = 0, late: int = 0) -> None:
    with world.database.transaction() as session:
        now_s = session.scalars(text("SELECT extract(epoch FROM now())::bigint")).one()
        key = ObjectiveKey(model, now_s // BUCKET_S * BUCKET_S, "us-east", "IW-F")
        kept = Kept(answers=answers, kept=answers - failed - late, failed=failed)
        add_objectives(session, {key: kept})


def test_instances_come_before_requests_and_the_old_ones_go_at_the_end(fleet_of_two: World, settings: Settings) -> None:
    world = fleet_of_two
    run_scale(world, settings)
    assert instances(world) == {"tide": 2}
    rollout_id = begin(world)
    assert weights(world) == {"tide": 1, "tide-2": 0}
    assert move_rollouts(world.database, settings) == {}
    assert read(world, rollout_id).reason == "waits for ready instances: us-east 0 of 1"
    run_scale(world, settings)
    assert instances(world) == {"tide": 2, "tide-2": 1}
    assert move_rollouts(world.database, settings) == {rollout_id: "50 % to tide-2"}
    assert weights(world) == {"tide": 1, "tide-2": 1}
    assert move_rollouts(world.database, settings) == {}, "one instance is not enough for all requests"
    run_scale(world, settings)
    assert instances(world) == {"tide": 2, "tide-2": 2}
    assert move_rollouts(world.database, settings) == {rollout_id: "100 % to tide-2"}
    assert weights(world) == {"tide": 0, "tide-2": 1}, "nobody may delete the model that it may go back to"
    assert move_rollouts(world.database, settings) == {rollout_id: "done: tide is tide-2"}
    assert weights(world) == {"tide-2": 1}
    assert move_rollouts(world.database, settings) == {}
    with world.database.transaction() as session:
        assert read_to_plan(session, settings, now_s=0, window_start_s=0).limits[NEW] == (2, 4), (
            "until plans have seen it"
        )
        session.execute(text("UPDATE rollouts SET ended_at = now() - interval '4 hours'"))
        assert read_to_plan(session, settings, now_s=0, window_start_s=0).limits[NEW] == (0, 4)
        told = list(session.scalars(select(Event.what).where(Event.kind == "rollout").order_by(Event.id)))
    assert told == ["started", "shifted", "shifted", "done"]


def test_a_step_waits_for_its_time_and_its_answers_unless_an_operator_ends_it(
    fleet_of_two: World, settings: Settings
) -> None:
    world = fleet_of_two
    run_scale(world, settings)
    answered(world, "tide-2", 1000)  # before the roll-out: they do not count
    rollout_id = begin(world, hold_s=5000.0, answers_min=20)
    run_scale(world, settings)
    move_rollouts(world.database, settings)
    run_scale(world, settings)
    answered(world, "tide-2", 19)
    move_rollouts(world.database, settings)
    assert re.fullmatch(r"\d{4} s of this step are left", read(world, rollout_id).reason)
    with world.database.transaction() as session:
        session.execute(text("UPDATE rollouts SET step_at = step_at - interval '6000 seconds'"))
    move_rollouts(world.database, settings)
    assert read(world, rollout_id).reason == "waits for answers: 19 of 20 in this step"
    answered(world, "tide-2", 1)
    assert move_rollouts(world.database, settings) == {rollout_id: "100 % to tide-2"}
    assert move_rollouts(world.database, settings) == {}
    with world.database.transaction() as session:
        rollouts.skip(rollouts.lock_rollout(session, rollout_id))
    assert move_rollouts(world.database, settings) == {rollout_id: "done: tide is tide-2"}
    with pytest.raises(ConflictError, match="is done"), world.database.transaction() as session:
        rollouts.skip(rollouts.lock_rollout(session, rollout_id))


@pytest.mark.parametrize("what", ["failed", "late"])
def test_a_candidate_that_is_worse_goes_back_by_itself(fleet_of_two: World, settings: Settings, what: str) -> None:
    world = fleet_of_two
    run_scale(world, settings)
    rollout_id = begin(world, hold_s=1000.0)
    run_scale(world, settings)
    move_rollouts(world.database, settings)
    answered(world, "tide", 500, **{what: 5})
    answered(world, "tide-2", 100, **{what: 1})
    assert move_rollouts(world.database, settings) == {}
    answered(world, "tide-2", 50, **{what: 40})
    [moved] = move_rollouts(world.database, settings).values()
    assert moved.startswith("rolled back: 27.3% of 150 answers ")
    assert weights(world) == {"tide": 1}
    assert read(world, rollout_id).state == RolloutState.ROLLED_BACK
    with world.database.transaction() as session:
        limits = read_to_plan(session, settings, now_s=0, window_start_s=0).limits
    assert limits[NEW] == (0, 4), "nothing is kept for it any more"


def test_the_candidate_follows_traffic_that_rises_meanwhile(fleet_of_two: World, settings: Settings) -> None:
    world = fleet_of_two
    run_scale(world, settings)
    rollout_id = begin(world)
    with world.database.transaction() as session:
        fleet.put_endpoint(session, model="tide", region="us-east", minimum=3, maximum=3)
    run_scale(world, settings)
    assert instances(world) == {"tide": 3, "tide-2": 1}
    assert move_rollouts(world.database, settings) == {}
    assert read(world, rollout_id).reason == "waits for ready instances: us-east 1 of 2"
    run_scale(world, settings)
    with world.database.transaction() as session:
        fleet.put_endpoint(session, model="tide", region="us-east", minimum=0, maximum=3)
    run_scale(world, settings)
    assert instances(world) == {"tide": 3, "tide-2": 2}, "they stay for the way back"
    assert move_rollouts(world.database, settings) == {rollout_id: "50 % to tide-2"}


def test_a_candidate_that_does_not_start_goes_back(fleet_of_two: World, settings: Settings) -> None:
    world = fleet_of_two
    run_scale(world, settings)
    begin(world)
    run_scale(world, settings)
    with world.database.transaction() as session:
        failed = update(Instance).where(Instance.model == "tide-2").values(observed="failed", error="no such file")
        session.execute(failed)
    assert move_rollouts(world.database, settings) == {}, "it is tried again first"
    with world.database.transaction() as session:
        session.execute(text("UPDATE instances SET changed_at = now() - interval '1 hour' WHERE model = 'tide-2'"))
    [moved] = move_rollouts(world.database, settings).values()
    assert moved == "rolled back: no instance of the candidate starts in us-east: no such file"


def test_an_operator_pauses_resumes_and_goes_back(fleet_of_two: World, settings: Settings) -> None:
    world = fleet_of_two
    run_scale(world, settings)
    rollout_id = begin(world)
    run_scale(world, settings)
    with world.database.transaction() as session:
        rollouts.move(session, rollouts.lock_rollout(session, rollout_id), RolloutState.PAUSED)
    with pytest.raises(ConflictError, match="is paused"), world.database.transaction() as session:
        rollouts.skip(rollouts.lock_rollout(session, rollout_id))
    assert move_rollouts(world.database, settings) == {}
    with world.database.transaction() as session:
        rollouts.move(session, rollouts.lock_rollout(session, rollout_id), RolloutState.IN_PROGRESS)
    assert move_rollouts(world.database, settings) == {rollout_id: "50 % to tide-2"}
    with world.database.transaction() as session:
        rollouts.go_back(session, rollouts.lock_rollout(session, rollout_id), "by ann")
    assert weights(world) == {"tide": 1}
    with pytest.raises(ConflictError, match="is rolled_back: by ann"), world.database.transaction() as session:
        rollouts.go_back(session, rollouts.lock_rollout(session, rollout_id), "by bob")


def test_what_no_roll_out_may_be(fleet_of_two: World, settings: Settings) -> None:
    world = fleet_of_two
    with pytest.raises(NotFoundError, match="'nobody' is not registered"):
        begin(world, model="nobody")
    with pytest.raises(NotFoundError, match="alias 'nobody'"):
        begin(world, alias="nobody")
    with pytest.raises(ConflictError, match="'tide' is 'tide' already"):
        begin(world, model="tide")
    with world.database.transaction() as session:
        fleet.put_endpoint(session, model="tide", region="us-west", minimum=0, maximum=1)
    with pytest.raises(ConflictError, match="'tide-2' is not offered in us-west, where tide is"):
        begin(world)
    with world.database.transaction() as session:
        fleet.put_endpoint(session, model="tide", region="us-west", minimum=0, maximum=0)
        add_model(session, "embedder", task="embed")
        fleet.put_endpoint(session, model="embedder", region="us-east", minimum=0, maximum=1)
    with pytest.raises(InvalidValueError, match="does not answer with what tide does"):
        begin(world, model="embedder")
    put(world, model("beside", with_base=True))
    with pytest.raises(ConflictError, match="'beside' is served by the instances of 'tide' and has none"):
        begin(world, model="beside")
    assert weights(world) == {}, "nothing was made"
    begin(world)
    with pytest.raises(ConflictError, match="is not over"):
        begin(world)
    for change in (lambda session: aliases.put_alias(session, "tide", {"tide": 1}), aliases.delete_alias):
        with pytest.raises(ConflictError, match="moves the weights"), world.database.transaction() as session:
            change(session) if change is not aliases.delete_alias else change(session, "tide")


def test_a_plan_made_before_a_roll_out_is_stale(fleet_of_two: World) -> None:
    with fleet_of_two.database.transaction() as session:
        index = fleet.fleet_index(session)
    begin(fleet_of_two)
    with fleet_of_two.database.transaction() as session:
        assert fleet.fleet_index(session) == index + 1


def test_a_roll_out_locks_nothing_before_the_fleet(fleet_of_two: World, settings: Settings) -> None:
    """Like all who change the fleet; else it and a deletion of its candidate could wait for each other."""
    world = fleet_of_two
    with ThreadPoolExecutor(1) as threads:
        with world.database.transaction() as session:
            fleet.fleet_version(session, lock=True)
            beginning = threads.submit(begin, world)
            until(world.is_waiting_for_a_lock)
            with pytest.raises(InUseError):
                removal.delete_model(session, "tide-2")
        rollout = beginning.result()
        with world.database.transaction() as session:
            fleet.fleet_version(session, lock=True)
            moving = threads.submit(move_rollouts, world.database, settings)
            until(world.is_waiting_for_a_lock)
            session.scalars(select(Rollout).with_for_update(nowait=True)).one()
            session.scalars(select(Alias).with_for_update(nowait=True)).one()
        moving.result()
    assert read(world, rollout).state == RolloutState.IN_PROGRESS
