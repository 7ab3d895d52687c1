"""Evacuation of nodes: instances are replaced elsewhere before they drain; then the node's agent may end."""

import pytest
from sqlalchemy import select, text

from controlplane.policies.lifecycle import InstanceState
from controlplane.settings import Settings
from controlplane.store import fleet
from controlplane.store.instances import desired_of, observe
from controlplane.store.tables import Desired, Instance
from dataplane.protocol.messages import DesiredInstances, Heartbeat, InstanceReport
from tests.controlplane.planner.test_scale import endpoint, run
from tests.controlplane.world import MODEL, World

URL = "http://127.0.0.1:9"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"heartbeat_stale_s": 60.0})


def beat(world: World, name: str, *, leaving: bool = False, ready: bool = True) -> DesiredInstances:
    """A node follows its desired state and reports so; returns its next desired state."""
    with world.database.transaction() as session:
        fleet.touch_node(session, name, leaving=leaving)
        desired = desired_of(session, name)
        reports = tuple(
            InstanceReport(
                instance_id=each.instance_id, model=MODEL, slot=each.slot, state="ready" if ready else "loading"
            )
            for each in desired.instances
            if not each.draining
        )
        heartbeat = Heartbeat(node=name, boot_id="b", generation=desired.generation, instances=reports, leaving=leaving)
        observe(session, heartbeat)
        world.live.write_heartbeat(heartbeat, region="us-east", gpu_type="H800", url=URL)
        return desired_of(session, name)


def serving(world: World) -> dict[str, list[str]]:
    """Nodes of the instances that shall run, by what is observed."""
    with world.database.transaction() as session:
        rows = session.scalars(select(Instance).where(Instance.desired == Desired.RUNNING).order_by(Instance.node))
        found: dict[str, list[str]] = {}
        for row in rows:
            found.setdefault(row.observed, []).append(row.node)
    return found


@pytest.fixture
def two_on_n1(world: World, settings: Settings) -> World:
    """Two ready instances on n1, and n2 with room for them."""
    world.join("n1")
    beat(world, "n1")
    endpoint(world, 2, 4)
    run(world, settings)
    beat(world, "n1")
    world.join("n2")
    beat(world, "n2")
    assert serving(world) == {"ready": ["n1", "n1"]}
    return world


def drain(world: World, name: str, *, draining: bool = True) -> None:
    with world.database.transaction() as session:
        fleet.set_node_draining(session, name, draining=draining)


def test_a_drained_node_hands_over_before_it_lets_go(two_on_n1: World, settings: Settings) -> None:
    world = two_on_n1
    drain(world, "n1")
    assert run(world, settings).changes() == {"started": 2}
    assert run(world, settings).changes() == {}, "nothing drains, and no more starts, while the successors load"
    beat(world, "n2", ready=False)
    assert run(world, settings).changes() == {}
    beat(world, "n2")
    assert run(world, settings).changes() == {"drained": 2}
    assert serving(world) == {"ready": ["n2", "n2"]}
    beat(world, "n1")
    assert beat(world, "n1").instances == ()
    assert run(world, settings).changes() == {}, "the successors are what the endpoint wants"


def test_without_room_elsewhere_the_node_serves_on(world: World, settings: Settings) -> None:
    world.join("n1")
    beat(world, "n1")
    endpoint(world, 1, 4)
    run(world, settings)
    beat(world, "n1")
    drain(world, "n1")
    done = run(world, settings)
    assert done.changes() == {}
    assert "draining" in done.unplaced[0]
    assert serving(world) == {"ready": ["n1"]}


def test_undraining_keeps_one_of_each(two_on_n1: World, settings: Settings) -> None:
    """What was started elsewhere meanwhile is one too many, and goes first, since it is not ready yet."""
    world = two_on_n1
    drain(world, "n1")
    run(world, settings)
    drain(world, "n1", draining=False)
    beat(world, "n1")
    with world.database.transaction() as session:
        session.execute(text("UPDATE endpoints SET instances_max = 2"))
    run(world, settings)
    assert serving(world) == {"ready": ["n1", "n1"]}
    with world.database.transaction() as session:
        assert set(session.scalars(select(Instance.succeeds).where(Instance.desired == Desired.RUNNING))) == {None}


def test_an_agent_that_leaves_is_told_how_long_to_wait(two_on_n1: World, settings: Settings) -> None:
    world = two_on_n1
    assert not beat(world, "n1", leaving=True).handing_over, "nothing was decided yet"
    run(world, settings)
    assert beat(world, "n1", leaving=True).handing_over, "successors start"
    beat(world, "n2")
    run(world, settings)
    assert beat(world, "n1", leaving=True).instances == ()
    assert serving(world) == {"ready": ["n2", "n2"]}


def test_an_agent_that_joins_again_leaves_no_more(two_on_n1: World, settings: Settings) -> None:
    world = two_on_n1
    beat(world, "n1", leaving=True)
    world.join("n1")
    assert run(world, settings).changes() == {}


def test_a_silent_node_is_replaced_and_one_that_comes_back_costs_nothing(two_on_n1: World, settings: Settings) -> None:
    world = two_on_n1
    with world.database.transaction() as session:
        session.execute(text("UPDATE nodes SET last_seen_at = now() - interval '21 seconds' WHERE name = 'n1'"))
    assert run(world, settings).changes() == {"started": 2}
    with world.database.transaction() as session:
        observed = set(session.scalars(select(Instance.observed).where(Instance.node == "n1")))
    assert observed == {InstanceState.READY}, "it is not given up yet"
    beat(world, "n2")
    assert run(world, settings).changes() == {"drained": 2}
    beat(world, "n1")
    run(world, settings)
    beat(world, "n1")
    assert serving(world) == {"ready": ["n2", "n2"]}


def test_nodes_that_left_long_ago_and_were_never_deleted_do_not_stop_a_replacement(
    two_on_n1: World, settings: Settings
) -> None:
    world = two_on_n1
    for name in ("n3", "n4"):
        world.join(name)
        beat(world, name)
    with world.database.transaction() as session:
        session.execute(text("UPDATE nodes SET last_seen_at = now() - interval '21 seconds' WHERE name = 'n1'"))
        session.execute(text("UPDATE nodes SET last_seen_at = now() - interval '30 days' WHERE name IN ('n3', 'n4')"))
    assert run(world, settings).changes() == {"started": 2}
