"""What nodes report moves instances; a drained one stops only when its node follows the newest state."""

import pytest
from sqlalchemy import text

from controlplane.policies.facts import Endpoint
from controlplane.policies.lifecycle import NodeState
from controlplane.store.demand import DemandRow, put_demand
from controlplane.store.fleet import (
    list_nodes,
    lost_nodes,
    node_pulses,
    node_states,
    set_node_draining,
    touch_node,
)
from controlplane.store.instances import desired_of, lose_silent_nodes, observe, set_desired, touch_generations
from controlplane.store.joining import join_node
from controlplane.store.system_facts import read_system_facts
from controlplane.store.tables import Desired, Instance, Node
from dataplane.protocol.joining import Join, SlotSpec
from dataplane.protocol.messages import Heartbeat, InstanceReport
from tests.controlplane.world import World

STATES = ("loading", "ready", "draining", "failed")


@pytest.fixture(autouse=True)
def node(world: World) -> None:
    world.join("n1")


def beat(world: World, *reports: tuple[str, str], generation: int | None = None, error: str | None = None) -> None:
    with world.database.transaction() as session:
        newest = session.get_one(Node, "n1").generation
        seen = tuple(
            InstanceReport(instance_id=i, model="tide", slot=0, state=state, error=error)  # type: ignore[arg-type]
            for i, state in reports
        )
        beat = Heartbeat(
            node="n1", boot_id="b", generation=newest if generation is None else generation, instances=seen
        )
        observe(session, beat)


def change(world: World, instance_id: str, desired: Desired) -> None:
    with world.database.transaction() as session:
        set_desired(session, [instance_id], desired)
        touch_generations(session, ["n1"])


def instance(world: World, instance_id: str) -> tuple[str, str]:
    with world.database.transaction() as session:
        row = session.get_one(Instance, instance_id)
        return row.desired, row.observed


def wire(world: World) -> tuple[int, list[tuple[str, bool]]]:
    with world.database.transaction() as session:
        desired = desired_of(session, "n1")
    return desired.generation, [(each.instance_id, each.draining) for each in desired.instances]


@pytest.mark.parametrize("after", STATES)
def test_any_report_may_follow_any(world: World, after: str) -> None:
    held = world.place("n1")
    for before in STATES:
        beat(world, (held, before))
        beat(world, (held, after))
        assert instance(world, held) == ("running", after)
    beat(world)
    assert instance(world, held) == ("running", "pending"), "a node that restarted holds nothing yet"
    assert wire(world)[0] == 0, "observing what is wanted tells the node nothing new"


def test_why_it_failed_is_kept_while_it_fails(world: World) -> None:
    held = world.place("n1")
    beat(world, (held, "failed"), error="no such file")
    with world.database.transaction() as session:
        assert session.get_one(Instance, held).error == "no such file"
    beat(world, (held, "ready"))
    with world.database.transaction() as session:
        assert session.get_one(Instance, held).error is None


def test_a_failed_load_that_is_tried_again_stays_one_failure(world: World) -> None:
    held = world.place("n1")
    beat(world, (held, "failed"), error="no such file")
    with world.database.transaction() as session:
        session.execute(text("UPDATE instances SET changed_at = to_timestamp(100)"))
    for state, error in (("loading", None), ("failed", "still no such file"), ("loading", None)):
        beat(world, (held, state), error=error)
        with world.database.transaction() as session:
            row = session.get_one(Instance, held)
            assert (row.observed, row.changed_at.timestamp()) == (state, 100.0)
            assert row.error == (error or row.error) is not None
    beat(world, (held, "ready"))
    with world.database.transaction() as session:
        row = session.get_one(Instance, held)
        assert row.error is None
        assert row.changed_at.timestamp() > 100


def test_draining_stops_only_at_the_newest_generation(world: World) -> None:
    held, other = world.place("n1"), world.place("n1")
    change(world, held, Desired.DRAINING)
    assert wire(world) == (1, [(held, True), (other, False)])
    beat(world, generation=0)
    assert instance(world, held)[0] == "draining", "the node has not heard of it yet"
    beat(world, (held, "draining"), generation=1)
    assert instance(world, held) == ("draining", "draining")
    beat(world, generation=1)
    assert instance(world, held) == ("stopped", "stopped")
    assert wire(world) == (2, [(other, False)])
    beat(world, (held, "ready"))
    assert instance(world, held) == ("stopped", "stopped"), "nothing wakes the dead"


def test_one_that_scaling_takes_back_in_that_moment_is_not_stopped(world: World) -> None:
    held = world.place("n1", desired=Desired.DRAINING)
    with world.database.transaction() as session:
        session.get_one(Instance, held)  # the heartbeat has read its rows; then scaling commits
        with world.database.transaction() as scaling:
            set_desired(scaling, [held], Desired.RUNNING)
        observe(session, Heartbeat(node="n1", boot_id="b", generation=0, instances=()))
    assert instance(world, held)[0] == "running"


def test_stopped_ones_stay_stopped(world: World) -> None:
    held = world.place("n1", desired=Desired.STOPPED)
    change(world, held, Desired.RUNNING)
    assert instance(world, held)[0] == "stopped"


def silence(world: World, node: str, age_s: int, *, grace_s: float = 3600) -> list[str]:
    with world.database.transaction() as session:
        session.execute(text(f"UPDATE nodes SET last_seen_at = now() - interval '{age_s} s' WHERE name = '{node}'"))
        return lose_silent_nodes(session, silent_s=60, heard_s=5, grace_s=grace_s)


def test_silent_nodes_lose_what_they_had(world: World) -> None:
    world.join("n2")
    world.join("n2")
    running, draining, elsewhere = world.place("n1"), world.place("n1", desired=Desired.DRAINING), world.place("n2")
    beat(world, (running, "ready"), (draining, "draining"))
    with world.database.transaction() as session:
        session.execute(text("UPDATE instances SET changed_at = now() - interval '1 day'"))
    assert silence(world, "n1", 30) == []
    assert instance(world, running) == ("running", "ready")
    for _ in range(2):
        assert silence(world, "n1", 61) == []
        assert instance(world, running) == ("running", "pending"), "its node has the grace to come back"
        assert instance(world, draining) == ("draining", "pending")
    assert wire(world)[0] == 0
    assert silence(world, "n1", 61, grace_s=0) == ["n1"]
    assert instance(world, running) == ("stopped", "stopped"), "scaling may start it elsewhere"
    assert instance(world, draining) == ("stopped", "stopped")
    assert wire(world) == (1, []), "told once, not for each"
    assert instance(world, elsewhere) == ("running", "pending")


def test_after_an_outage_the_nodes_that_are_not_heard_first_keep_what_they_have(world: World) -> None:
    """Nobody could write a heartbeat meanwhile; also what waits to be loaded, since long before, is kept."""
    world.join("n2")
    states = {"ready": Desired.RUNNING, "draining": Desired.DRAINING, "spot": Desired.SPOT}
    held = {state: world.place("n1", desired=desired) for state, desired in states.items()}
    waits = world.place("n1")
    reported = [(held[state], state) for state in states]
    beat(world, *reported)
    before = {each: instance(world, each) for each in (*held.values(), waits)}
    with world.database.transaction() as session:
        session.execute(text("UPDATE instances SET changed_at = now() - interval '1 day'"))
    assert silence(world, "n1", 90, grace_s=0) == []
    beat(world, *reported)
    assert {each: instance(world, each) for each in before} == before


def test_a_node_stays_lost_when_its_instances_are_elsewhere(world: World) -> None:
    """Until it is heard of, drained, shut down in order or deleted: an operator must see it."""

    def lost() -> tuple[str, ...]:
        with world.database.transaction() as session:
            found = lost_nodes(session, alive_s=5.0)
            missed = {each.name for each in node_pulses(session) if each.missed and (each.silent_s or 0.0) > 5.0}
            counted = read_system_facts(session, alive_s=5.0, quantile=0.9).nodes.get(("us-east", "lost"), 0)
            states = node_states(session, ["n1", "n2"], alive_s=5.0)
            page = list_nodes(session, words="", which={}, state=NodeState.LOST, alive_s=5.0, after=None, limit=9)
        assert (missed, counted) == (set(found), len(found)), "all who look agree"
        assert {name for name, state in states.items() if state == NodeState.LOST} == set(found)
        assert [node.name for node in page.rows] == list(found)
        return found

    world.join("n2")
    running = world.place("n1")
    assert silence(world, "n1", 61, grace_s=0) == ["n1"]
    assert instance(world, running)[0] == "stopped"
    assert lost() == ("n1",)
    for drained in (True, False):
        with world.database.transaction() as session:
            set_node_draining(session, "n1", draining=drained)
        assert lost() == (() if drained else ("n1",))
    with world.database.transaction() as session:
        session.execute(text("UPDATE nodes SET last_seen_at = now() - interval '25 h' WHERE name = 'n1'"))
    assert lost() == (), "it does not come back under this name"
    with world.database.transaction() as session:
        touch_node(session, "n1", leaving=True)
    assert silence(world, "n1", 61) == ["n1"]
    assert lost() == ()


def test_the_state_of_a_node_is_one_word(world: World) -> None:
    def state() -> str:
        with world.database.transaction() as session:
            return node_states(session, ["n1"], alive_s=5.0)["n1"]

    def heard(*, leaving: bool) -> None:
        with world.database.transaction() as session:
            touch_node(session, "n1", leaving=leaving)

    assert state() == "alive"
    with world.database.transaction() as session:
        set_node_draining(session, "n1", draining=True)
    assert state() == "draining"
    heard(leaving=True)
    assert state() == "leaving"
    silence(world, "n1", 61)
    assert state() == "silent"
    with world.database.transaction() as session:
        set_node_draining(session, "n1", draining=False)
    assert state() == "silent"
    heard(leaving=False)
    silence(world, "n1", 61)
    assert state() == "lost"


@pytest.mark.parametrize("slots", [2, 3])
def test_a_node_that_joins_again_is_alive_before_its_first_heartbeat(world: World, slots: int) -> None:
    """Also where it comes back with other slots."""
    world.place("n1")
    with world.database.transaction() as session:
        touch_node(session, "n1", leaving=True)
    silence(world, "n1", 61)
    spec = tuple(SlotSpec(gpus=2, memory_bytes=160 << 30) for _ in range(slots))
    back = Join(node="n1", region="us-east", gpu_type="H800", url="http://127.0.0.1:9", slots=spec, engine="replay")
    with world.database.transaction() as session:
        join_node(session, back)
    with world.database.transaction() as session:
        assert node_states(session, ["n1"], alive_s=5.0) == {"n1": "alive"}
        assert lost_nodes(session, alive_s=5.0) == ()


def test_when_every_node_is_silent_it_is_our_fault(world: World) -> None:
    running = world.place("n1")
    beat(world, (running, "ready"))
    assert silence(world, "n1", 90, grace_s=0) == []
    assert instance(world, running) == ("running", "ready")


def test_a_node_never_heard_of_is_not_silent(world: World) -> None:
    world.join("n2")
    with world.database.transaction() as session:
        session.execute(text("UPDATE nodes SET last_seen_at = NULL WHERE name = 'n1'"))
        assert lose_silent_nodes(session, silent_s=60, heard_s=5, grace_s=0) == []


def test_a_node_that_starts_loads_first_what_has_most_demand(world: World) -> None:
    """By the hour before; nodes that follow a generation already are told in the order of ids."""
    ids = {}
    for model, tokens_per_s in (("quiet", 1.0), ("busy", 900.0), ("unknown", None)):
        world.add_model(model)
        ids[model] = world.place("n1", model=model)
        if tokens_per_s is not None:
            row = DemandRow(
                endpoint=Endpoint(model=model, region="us-east"), kind="IW", start_s=3600, tokens_per_s=tokens_per_s
            )
            with world.database.transaction() as session:
                put_demand(session, [row])
    with world.database.transaction() as session:
        first = [each.instance_id for each in desired_of(session, "n1", starts_s=7200).instances]
        later = [each.instance_id for each in desired_of(session, "n1").instances]
    assert first == [ids["busy"], ids["quiet"], ids["unknown"]]
    assert later == sorted(ids.values())


def test_what_an_instance_waits_for_is_kept_while_it_does(world: World) -> None:
    made = world.place("n1")
    for state, words in (("loading", "its weights are loaded"), ("ready", None)):
        report = InstanceReport(instance_id=made, model="tide", slot=0, state=state, waits_for=words)
        with world.database.transaction() as session:
            observe(session, Heartbeat(node="n1", boot_id="b", generation=0, instances=(report,)))
            assert session.get_one(Instance, made).waits_for == words


def test_a_node_that_follows_a_generation_from_before_a_restore_is_led_on(world: World) -> None:
    """Its desired state would be refused as stale for ever; what a node may not claim changes nothing."""
    for claimed, told in ((57, 58), (2**63 - 1, 58), (40, 58)):
        beat(world, generation=claimed)
        with world.database.transaction() as session:
            assert desired_of(session, "n1").generation == told
