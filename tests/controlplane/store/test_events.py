"""Events: every change of an instance, a node or a plan has one, in its own transaction."""

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import select, update

from controlplane.planner.expire import expire, sweep
from controlplane.policies.lifecycle import InstanceState
from controlplane.settings import Settings
from controlplane.store import fleet
from controlplane.store.blobs.base import BlobStore
from controlplane.store.events import Event, list_events
from controlplane.store.instances import set_desired, set_engine
from controlplane.store.plans import add_plan, apply_plan, reject_plan
from controlplane.store.removal import delete_node
from controlplane.store.tables import Desired, Instance, Node
from tests.controlplane.world import MODEL, World, a_plan


def told(world: World, **which: Any) -> list[tuple[str, str | None]]:
    """Events, the oldest first."""
    with world.database.transaction() as session:
        page = list_events(session, which=which, since=None, after=None, limit=100)
        return [(event.what, event.message) for event in reversed(page.rows)]


def test_the_life_of_an_instance(world: World) -> None:
    world.join("n1")
    instance_id = world.place("n1")

    def observe(state: InstanceState, error: str | None = None) -> None:
        with world.database.transaction() as session:
            row = session.get_one(Instance, instance_id)
            row.observed, row.error = state, error

    observe(InstanceState.LOADING)
    observe(InstanceState.FAILED, "no room")
    for _ in range(3):
        observe(InstanceState.LOADING, "no room")
        observe(InstanceState.FAILED, "no room")
    with world.database.transaction() as session:
        set_engine(session.get_one(Instance, instance_id), "torch", moves=False)
    observe(InstanceState.READY)
    observe(InstanceState.READY)
    observe(InstanceState.PENDING)
    for desired in (Desired.DRAINING, Desired.RUNNING, Desired.STOPPED):
        with world.database.transaction() as session:
            set_desired(session, [instance_id], desired)
    assert told(world, subject=instance_id) == [
        ("placed", "on slot 0"),
        ("loading", None),
        ("failed", "no room"),
        ("engine", "auto -> torch"),
        ("pending", "anew"),
        ("ready", None),
        ("pending", "its node does not report it"),
        ("draining", "was running"),
        ("taken back", "was draining"),
        ("stopped", "was running"),
    ]
    with world.database.transaction() as session:
        event = session.scalars(select(Event).where(Event.what == "ready")).one()
        assert (event.kind, event.model, event.region, event.node) == ("instance", MODEL, "us-east", "n1")


def test_a_change_that_is_rolled_back_has_no_event(world: World) -> None:
    world.join("n1")
    instance_id = world.place("n1")
    with world.database.transaction() as session:
        set_desired(session, [instance_id], Desired.DRAINING)
        session.rollback()
    assert told(world, subject=instance_id) == [("placed", "on slot 0")]


def test_a_node_is_lost_once_for_each_silence_and_returns(world: World, blobs: BlobStore, settings: Settings) -> None:
    for name in ("n1", "n2"):
        world.join(name)

    def fall_silent() -> None:
        with world.database.transaction() as session:
            ago = datetime.now(UTC) - timedelta(seconds=90)
            session.execute(update(Node).where(Node.name == "n1").values(last_seen_at=ago))

    def heard() -> None:
        with world.database.transaction() as session:
            fleet.touch_node(session, "n1")

    expected = ["joined"]
    for _ in range(2):
        fall_silent()
        for _ in range(2):
            expire(world.database, blobs, settings)
        heard()
        heard()
        with world.database.transaction() as session:
            session.execute(update(Event).values(at=Event.at - timedelta(seconds=95)))
        expected += ["lost", "returned"]
    with world.database.transaction() as session:
        fleet.set_node_draining(session, "n1", draining=True)
    with world.database.transaction() as session:
        fleet.set_node_draining(session, "n1", draining=False)
        session.get_one(Node, "n1").leaving = True
    with world.database.transaction() as session:
        delete_node(session, "n1", alive_s=0.0)
    found = told(world, subject="n1")
    assert [what for what, _ in found] == [*expected, "draining", "in service", "leaving", "deleted"]
    assert str(dict(found)["lost"]).startswith("silent for 9")
    assert str(dict(found)["returned"]).startswith("after 9")
    assert told(world, subject="n2") == [("joined", "H800 at http://127.0.0.1:9")]


def test_plans(world: World) -> None:
    ids = []
    for hour in range(2):
        with world.database.transaction() as session:
            plan, cells = a_plan(fleet.fleet_index(session), window_start_s=3600 * hour)
            ids.append(plan.id)
            plan.approval_reason = "moves 9 GPUs" if hour else None
            assert add_plan(session, plan, cells)
    with world.database.transaction() as session:
        apply_plan(session, ids[0], index=fleet.fleet_index(session), now_s=0.0)
        reject_plan(session, ids[1], rejected_by="ann", note="no")
    assert [what for what, _ in told(world, subject=ids[0])] == ["draft", "applied"]
    first, second = told(world, subject=ids[1])
    assert first == ("draft", "waits for an operator: moves 9 GPUs")
    assert second[0] == "rejected"
    assert "rejected by ann: no" in str(second[1])


def test_old_events_are_forgotten(world: World, blobs: BlobStore, settings: Settings) -> None:
    for name in ("n1", "n2"):
        world.join(name)
    with world.database.transaction() as session:
        old = datetime.now(UTC) - timedelta(days=settings.event_keep_days, hours=1)
        session.execute(update(Event).where(Event.subject == "n1").values(at=old))
    sweep(world.database, blobs, settings, now_s=1000.0)
    assert told(world, kind="node") == [("joined", "H800 at http://127.0.0.1:9")]
