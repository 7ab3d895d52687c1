"""Lists of the fleet that pages of the console show: what is filtered and counted by the API, and shared slots."""

import time
from collections.abc import Iterator
from urllib.parse import quote

import msgspec
import pytest
from fastapi.testclient import TestClient

from controlplane.api.app import make_app
from controlplane.settings import Settings
from controlplane.store.fleet import put_gpu_type, put_model
from controlplane.store.instances import add_instance
from controlplane.store.joining import join_node
from controlplane.store.objectives import BUCKET_S, Kept, ObjectiveKey, add_objectives
from controlplane.store.tables import Desired, Model
from dataplane.protocol.host_states import HostState
from dataplane.protocol.joining import Join, SlotSpec
from dataplane.protocol.messages import Heartbeat, InstanceReport
from dataplane.protocol.pool_reports import KvReport, PoolReport, RunReport, SwitchReport
from tests.controlplane.api.conftest import Ask
from tests.controlplane.world import HANGS_S, World


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"heartbeat_stale_s": HANGS_S})


@pytest.fixture
def api(world: World, settings: Settings) -> Iterator[TestClient]:
    with TestClient(make_app(settings), raise_server_exceptions=False) as client:
        yield client


def names(page: dict[str, list[dict[str, str]]], key: str = "name") -> list[str]:
    return [row[key] for row in page["data"]]


def test_models_are_found_and_counted_over_their_regions(ask: Ask, world: World) -> None:
    for name in ("tide-b", "ebb_c", "ebb-d"):
        world.add_model(name)
    world.join("east-1")
    world.join("west-1", region="us-west")
    for node in ("east-1", "east-1", "west-1"):
        world.place(node, model="ebb-d")
    world.place("west-1", desired=Desired.STOPPED)
    page = ask("GET", "/admin/model-summaries", role="viewer")
    assert {row["name"]: (row["endpoints"], row["instances"]) for row in page["data"]} == {
        "ebb-d": (2, {"pending": 3}),
        "ebb_c": (2, {}),
        "tide": (2, {}),
        "tide-b": (2, {}),
    }
    assert names(ask("GET", "/admin/model-summaries?words=EBB_")) == ["ebb_c"], "a letter, not a pattern"
    [west] = ask("GET", "/admin/model-summaries?words=ebb-d&region=us-west")["data"]
    assert (west["endpoints"], west["instances"]) == (1, {"pending": 1})
    assert "ebb-d" not in names(ask("GET", "/admin/model-summaries?state=none"))
    assert names(ask("GET", "/admin/model-summaries?state=failed")) == []
    first = ask("GET", "/admin/model-summaries?limit=3")
    assert first["has_more"]
    assert len(ask("GET", f"/admin/model-summaries?limit=3&after={first['next']}")["data"]) == 1
    ask("GET", "/admin/model-summaries?state=colour", status=400)


def test_the_adapters_of_a_model_are_found(ask: Ask, world: World) -> None:
    world.add_model("ebb")
    put = {"architecture": "Llama", "weights_bytes": 7, "kv_bytes_per_token": 512, "context_tokens": 4096}
    with world.database.transaction() as session:
        for name in ("of-ebb", "of-tide"):
            base = name.removeprefix("of-")
            put_model(session, Model(name=name, path=f"/{name}", task="generate", base=base, **put))
    found = ask("GET", "/admin/model-summaries")["data"]
    assert {row["name"]: row["base"] for row in found} == {
        "ebb": None,
        "of-ebb": "ebb",
        "of-tide": "tide",
        "tide": None,
    }
    assert names(ask("GET", "/admin/model-summaries?base=ebb")) == ["of-ebb"]
    assert names(ask("GET", "/admin/model-summaries?base=of-ebb")) == []


def test_endpoints_instances_and_profiles_of_one_model(ask: Ask, world: World) -> None:
    world.add_model("ebb")
    world.join("east-1")
    held = world.place("east-1", model="ebb")
    world.place("east-1")
    endpoints = ask("GET", "/admin/endpoints?model=ebb", role="viewer")["data"]
    assert [(row["region"], row["instances"]) for row in endpoints] == [("us-east", {"pending": 1}), ("us-west", {})]
    assert names(ask("GET", "/admin/endpoints?region=us-west"), "model") == ["ebb", "tide"]
    assert names(ask("GET", "/admin/instances?model=ebb"), "id") == [held]
    assert len(ask("GET", "/admin/instances?node=east-1")["data"]) == 2
    assert ask("GET", "/admin/instances?node=east-1&observed=ready")["data"] == []
    assert names(ask("GET", "/admin/profiles?model=ebb"), "model") == ["ebb"]


def test_nodes_are_filtered_and_say_how_many_instances_leave(ask: Ask, world: World) -> None:
    world.join("east-1")
    world.join("west-1", region="us-west")
    world.place("east-1")
    world.place("east-1", desired=Desired.DRAINING, slot=1)
    [east] = ask("GET", "/admin/nodes?region=us-east", role="viewer")["data"]
    assert (east["name"], east["instances_live"], east["instances_leaving"]) == ("east-1", 2, 1)
    assert names(ask("GET", "/admin/nodes?words=WEST")) == ["west-1"]
    assert names(ask("GET", "/admin/nodes?state=lost")) == []
    assert names(ask("GET", "/admin/nodes?state=draining")) == []
    ask("POST", "/admin/nodes/west-1/drain")
    assert names(ask("GET", "/admin/nodes?state=draining")) == ["west-1"]
    assert names(ask("GET", "/admin/nodes?state=alive&gpu_type=H800")) == ["east-1"], "each node is in one state"


def test_nodes_say_which_hosts_their_slots_are_of(
    ask: Ask, world: World, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.join("east-1")
    slots = (SlotSpec(gpus=4, memory_bytes=320 << 30, hosts=2),)
    with world.database.transaction() as session:
        put_gpu_type(session, name="H800x2", memory_bytes=80 << 30, cost_per_hour=2.5)
        join = Join(node="east-2", region="us-east", gpu_type="H800x2", url="http://n", slots=slots, engine="vllm")
        join_node(session, join)
    assert [row["other_hosts"] for row in ask("GET", "/admin/nodes")["data"]] == [[], None], "nothing was heard yet"
    other = HostState(slot=0, host=1, connected=False, hostname="second", silent_s=16.0)
    beat = Heartbeat(node="east-2", boot_id="b", generation=0, instances=(), hosts=(other,))
    world.live.write_heartbeat(beat, region="us-east", gpu_type="H800x2", url="http://127.0.0.1:9")
    one, two = ask("GET", "/admin/nodes", role="viewer")["data"]
    assert ([slot["hosts"] for slot in one["slots"]], one["other_hosts"]) == ([1, 1], [])
    assert ([slot["hosts"] for slot in two["slots"]], two["other_hosts"]) == ([2], [msgspec.to_builtins(other)])
    assert ask("GET", "/admin/nodes/east-2")["live"]["other_hosts"] == two["other_hosts"]
    monkeypatch.setitem(vars(settings), "heartbeat_stale_s", -1.0)
    assert ask("GET", "/admin/nodes")["data"][1]["other_hosts"] is None, "they were connected then"


def test_a_shared_slot_shows_who_has_it_when(ask: Ask, api: TestClient, world: World) -> None:
    world.add_model("ebb")
    world.join("east-1")
    world.join("east-2")
    world.place("east-2")
    with world.database.transaction() as session:
        held = [
            add_instance(session, model=model, region="us-east", gpu_type="H800", node="east-1", slot=1, gpus=0).id
            for model in ("ebb", "tide")
        ]
    [silent] = ask("GET", "/admin/pools")["data"][0]["slots"]
    assert (silent["workers"], silent["kept_attainment"]) == ([], None), "nothing was heard yet"
    pool = PoolReport(
        slot=1,
        worker=1,
        kind="both",
        running_model="ebb",
        resident_models=("ebb",),
        load=1.25,
        switches_total=7,
        switching=SwitchReport(window_s=30.0, switches=4, median_s=0.5, total_s=3.0),
        slabs={"weights": 3, "free": 1},
        kv=(KvReport("8x64", 10, 20),),
        offloaded_layers={"tide": 2},
        runs=(RunReport("tide", 3.0, 1.0, True), RunReport("ebb", 2.0, 2.0, True)),
    )
    reports = tuple(
        InstanceReport(instance_id=each, model=model, slot=1, state="ready", running=2)
        for each, model in zip(held, ("ebb", "tide"), strict=True)
    )
    now_s = int(time.time()) // BUCKET_S * BUCKET_S
    counts = {
        ObjectiveKey("ebb", now_s, "us-east", "IW-F"): Kept(answers=2, kept=1, tokens=60, tokens_in_time=30),
        ObjectiveKey("ebb", now_s, "us-east", "IW-N"): Kept(answers=1, kept=1, tokens=40, tokens_in_time=40),
        ObjectiveKey("ebb", now_s, "us-west", "IW-F"): Kept(answers=9, kept=0, tokens=900, tokens_in_time=0),
        ObjectiveKey("ebb", now_s - 10 * BUCKET_S, "us-east", "IW-F"): Kept(answers=9, tokens=900),
    }
    with world.database.transaction() as session:
        add_objectives(session, counts)
    beat = Heartbeat(node="east-1", boot_id="b", generation=0, instances=reports, pools=(pool,))
    world.live.write_heartbeat(beat, region="us-east", gpu_type="H800", url="http://127.0.0.1:9")
    api.app.state.tidepool.fleet.read_view()  # type: ignore[attr-defined]
    page = ask("GET", "/admin/pools", role="viewer")
    assert names(page, "node") == ["east-1"], "a node without shared slots is none of them"
    [slot] = page["data"][0]["slots"]
    assert (slot["slot"], slot["gpus"], [each["model"] for each in slot["instances"]]) == (1, 2, ["ebb", "tide"])
    assert [each["running"] for each in slot["instances"]] == [2, 2]
    assert slot["kept_attainment"] == pytest.approx(0.7), "of its region, lately, all tiers"
    assert [(each["tokens"], each["tokens_in_time"]) for each in slot["instances"]] == [(100, 70), (0, 0)]
    [worker] = slot["workers"]
    assert worker["switching"] == {"window_s": 30.0, "switches": 4, "median_s": 0.5, "total_s": 3.0}
    assert (worker["running_model"], worker["predicted_attainment"], worker["switches_total"]) == ("ebb", 0.8, 7)
    assert (worker["slabs"], worker["offloaded_layers"]) == ({"weights": 3, "free": 1}, {"tide": 2})
    assert worker["kv"] == [{"shape": "8x64", "used_bytes": 10, "held_bytes": 20}]
    tide, ebb = worker["runs"]
    assert (tide["model"], ebb["model"], ebb["began_s"] - tide["began_s"]) == ("tide", "ebb", pytest.approx(1.0))
    assert ask("GET", "/admin/pools?region=us-west")["data"] == []
    assert names(ask("GET", "/admin/pools?node=east-1"), "node") == ["east-1"]


def test_adapters_are_listed_by_the_instances_that_serve_them(ask: Ask, world: World, api: TestClient) -> None:
    world.join("east-1")
    reports = [InstanceReport(instance_id="i1", model="tide", slot=1, state="ready")]
    reports += [
        InstanceReport(instance_id=f"{host}+{name}", model=name, slot=1, state=state, host=host, error=error)
        for host in ("i1", "i2")
        for name, state, error in (("a", "ready", None), ("b", "failed", "r is 64"))
    ]
    beat = Heartbeat(node="east-1", boot_id="b", generation=0, instances=tuple(reports))
    world.live.write_heartbeat(beat, region="us-east", gpu_type="H800", url="http://127.0.0.1:9")
    api.app.state.tidepool.fleet.read_view()  # type: ignore[attr-defined]
    first = ask("GET", "/admin/adapter-instances?limit=3", role="viewer")
    assert (names(first, "instance_id"), first["has_more"]) == (["i1+a", "i1+b", "i2+a"], True)
    rest = ask("GET", f"/admin/adapter-instances?limit=3&after={quote(first['next'])}", role="viewer")
    assert (names(rest, "instance_id"), rest["has_more"], rest["next"]) == (["i2+b"], False, None)
    failed = ask("GET", "/admin/adapter-instances?model=b", role="viewer")["data"]
    assert [(row["host"], row["node"], row["region"], row["error"]) for row in failed] == [
        ("i1", "east-1", "us-east", "r is 64"),
        ("i2", "east-1", "us-east", "r is 64"),
    ]
