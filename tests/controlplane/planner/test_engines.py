"""Engines through the scale loop: new instances get theirs, and live ones move one after the other."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import select

from controlplane.planner import schedule
from controlplane.planner.engines import settle_engines
from controlplane.planner.scale import scale
from controlplane.planner.schedule import Parts
from controlplane.policies.lifecycle import InstanceState
from controlplane.settings import Settings
from controlplane.store import fleet
from controlplane.store.blobs.base import BlobStore
from controlplane.store.instances import add_instance, desired_of, observe
from controlplane.store.joining import join_node
from controlplane.store.tables import Desired, Instance, Model, Profile
from dataplane.protocol.joining import Join, SlotSpec
from dataplane.protocol.messages import EngineChoice, EngineKind, Heartbeat, InstanceReport
from tests.controlplane.world import PATIENCE_S, World, until

URL = "http://127.0.0.1:9"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"heartbeat_stale_s": 60.0, "spot_enabled": False})


def join(world: World, engine: EngineKind, *, workers: int = 1) -> None:
    slots = tuple(SlotSpec(gpus=workers, memory_bytes=80 << 30, workers=workers) for _ in range(2))
    join = Join(node="n1", region="us-east", gpu_type="H800", url=URL, slots=slots, engine=engine)
    with world.database.transaction() as session:
        join_node(session, join)
        fleet.touch_node(session, "n1")
        fleet.put_endpoint(session, model="tide", region="us-east", minimum=2, maximum=2)
    world.report("n1", "none", region="us-east", url=URL)


def settle(world: World, settings: Settings, *, late_s: float = 0.0) -> int:
    """Scale so much later; how many had to move. What is wanted is ready then."""
    moved = scale(world.database, world.live, settings, now_s=time.time() + late_s).moved
    with world.database.transaction() as session:
        for row in session.scalars(select(Instance)):
            row.observed = InstanceState.READY
        return moved


def desired(world: World) -> tuple[int, list[tuple[str, str]]]:
    """The generation of the node's desired state, and the engine of each instance with its reason."""
    with world.database.transaction() as session:
        desired = desired_of(session, "n1")
        reasons = {row.id: row.engine_reason or "" for row in session.scalars(select(Instance))}
    engines = [(each.model.engine, reasons[each.instance_id]) for each in desired.instances]
    return desired.generation, sorted(engines)


def choose(world: World, engine: EngineChoice) -> None:
    with world.database.transaction() as session:
        session.get_one(Model, "tide").engine = engine


def test_live_instances_move_one_after_the_other(world: World, settings: Settings) -> None:
    join(world, "torch")
    assert settle(world, settings) == 0
    first, engines = desired(world)
    assert engines == [("torch", "not measured on both engines: the one that its node prefers")] * 2
    choose(world, "vllm")
    assert [settle(world, settings, late_s=late_s) for late_s in (61, 30, 61, 61)] == [1, 0, 1, 0]
    assert desired(world) == (first + 2, [("vllm", "chosen for the model")] * 2)


@pytest.mark.usefixtures("an_hour_ahead")
def test_a_worker_whose_clock_is_ahead_moves_none_early(
    world: World, settings: Settings, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(settings=settings, database=world.database, live=world.live, blobs=blobs)
    monkeypatch.setattr(schedule, "parts", lambda: parts)
    join(world, "torch")
    settle(world, settings)  # it is ready now
    choose(world, "vllm")
    schedule.run_scale()
    assert [engine for engine, _ in desired(world)[1]] == ["torch"] * 2


def test_slots_of_several_workers_stay_on_the_torch_engine(world: World, settings: Settings) -> None:
    join(world, "vllm", workers=2)
    choose(world, "vllm")
    assert settle(world, settings) == 0
    assert desired(world)[1] == [("torch", "2 workers of its slot serve together: only the torch engine does that")] * 2


def test_the_faster_engine_is_taken_where_both_were_measured(world: World, settings: Settings) -> None:
    join(world, "vllm")
    settle(world, settings)
    assert [engine for engine, _ in desired(world)[1]] == ["vllm", "vllm"]
    with world.database.transaction() as session:
        session.get_one(Profile, ("tide", "H800")).engine_rates = {"torch": 415.0, "vllm": 124.0}
    assert [settle(world, settings, late_s=61) for _ in range(3)] == [1, 1, 0]
    assert desired(world)[1] == [("torch", "measured: torch 415, vLLM 124 tokens/s")] * 2


def test_a_model_that_embeds_is_given_torch_where_its_node_prefers_vllm(world: World, settings: Settings) -> None:
    world.add_model("tide", task="embed")
    join(world, "vllm")
    settle(world, settings)
    assert {engine for engine, _ in desired(world)[1]} == {"torch"}


def test_a_slot_of_one_family_runs_on_vllm_where_that_is_chosen_for_all_of_it(world: World, settings: Settings) -> None:
    """A base and two adapters share a slot; a stranger joins it, and leaves."""
    for name in ("base", "stranger"):
        world.add_model(name)
    with world.database.transaction() as session:
        for name in ("one", "two"):
            put = {"architecture": "Llama", "weights_bytes": 1, "kv_bytes_per_token": 512, "context_tokens": 4096}
            fleet.put_model(session, Model(name=name, path=f"/{name}", task="generate", base="base", **put))
            fleet.put_endpoint(session, model=name, region="us-east", minimum=0, maximum=1)
    join(world, "torch")

    def pooled(name: str) -> str:
        with world.database.transaction() as session:
            made = add_instance(session, model=name, region="us-east", gpu_type="H800", node="n1", slot=0, gpus=0)
            made.observed = InstanceState.READY
            return made.id

    def engines(later_s: float) -> dict[str, str]:
        now_s = time.time() + later_s
        with world.database.transaction() as session:
            inventory = fleet.read_inventory(session, silent_s=60.0)
            settle_engines(session, inventory, settings, actor="test", now_s=now_s)
            return {row.model: row.engine for row in session.scalars(select(Instance)) if row.desired == "running"}

    def choose_vllm(*names: str) -> None:
        with world.database.transaction() as session:
            for name in names:
                session.get_one(Model, name).engine = "vllm"

    for name in ("base", "one", "two"):
        pooled(name)
    choose_vllm("base", "one")
    assert set(engines(61).values()) == {"torch"}, "not chosen for all"
    choose_vllm("two", "stranger")
    sibling = pooled("two")
    with world.database.transaction() as session:
        session.get_one(Instance, sibling).desired = Desired.DRAINING
    assert set(engines(122).values()) == {"torch"}, "one that drains keeps the slot on its engine"
    with world.database.transaction() as session:
        session.get_one(Instance, sibling).desired = Desired.STOPPED
    assert set(engines(122).values()) == {"vllm"}
    stranger = pooled("stranger")
    assert set(engines(183).values()) == {"torch"}
    with world.database.transaction() as session:
        session.get_one(Instance, stranger).desired = Desired.DRAINING
    assert set(engines(244).values()) == {"torch"}, "it still has requests"
    with world.database.transaction() as session:
        session.get_one(Instance, stranger).desired = Desired.STOPPED
    assert engines(305) == dict.fromkeys(("base", "one", "two"), "vllm")


def test_an_engine_changes_while_the_node_reports(world: World, settings: Settings) -> None:
    """Scaling locks a node before its instances, as heartbeats do: neither waits for the other in a ring."""
    join(world, "torch")
    settle(world, settings)
    with world.database.transaction() as session:
        first, second = session.scalars(select(Instance).order_by(Instance.id))
        first.succeeds = second.id  # it is an ordinary one from the next scaling on
        held = first.id
    choose(world, "vllm")
    report = InstanceReport(instance_id=held, model="tide", slot=0, state="loading")
    with ThreadPoolExecutor() as pool:
        with world.database.transaction() as session:
            fleet.touch_node(session, "n1")
            scaled = pool.submit(scale, world.database, world.live, settings, now_s=time.time() + 61)
            until(world.is_waiting_for_a_lock)
            observe(session, Heartbeat(node="n1", boot_id="b", generation=0, instances=(report,)))
        assert scaled.result(PATIENCE_S).moved == 1
