"""Heartbeats: of a node's own instances alone; the live view is fed without Postgres, nodes are told without Redis."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from fastapi.testclient import TestClient
from redis import Redis
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from controlplane.api.state import State
from controlplane.errors import UnavailableError
from controlplane.store.instances import add_instance
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database
from dataplane.protocol.joining import Join, SlotSpec
from dataplane.protocol.messages import Heartbeat, InstanceReport
from tests.controlplane.api.conftest import Ask
from tests.controlplane.world import HANGS_S, until

JOIN = Join(
    node="node-1",
    region="us-east",
    gpu_type="H800",
    url="http://127.0.0.1:1",
    slots=(SlotSpec(gpus=1, memory_bytes=80),),
    engine="replay",
)


def hold(database: Database, instance_id: str, model: str = "llama", *, slot: int = 0) -> None:
    """Let the node of JOIN hold an instance."""
    with database.transaction() as session:
        made = add_instance(session, model=model, region="us-east", gpu_type="H800", node="node-1", slot=slot, gpus=0)
        made.id = instance_id


def _report(instance_id: str, model: str = "llama", *, used_bytes: int = 0) -> InstanceReport:
    return InstanceReport(instance_id=instance_id, model=model, slot=0, state="ready", kv_used_bytes=used_bytes)


def _beat(ask: Ask, *others: InstanceReport, used_bytes: int, node: str = "node-1", status: int = 200) -> None:
    reports = (_report("i1", used_bytes=used_bytes), *others)
    beat = Heartbeat(node=node, boot_id="b", generation=0, instances=reports)
    ask("POST", "/node/heartbeat", role="node", status=status, content=msgspec.json.encode(beat))


def _used_bytes(state: State) -> int:
    return state.live.read_view().nodes["node-1"].heartbeat.instances[0].kv_used_bytes


@contextmanager
def _away(_: Database, *, replicated: bool = True) -> Iterator[Session]:
    raise OperationalError("SELECT 1", {}, ConnectionError("gone"))
    yield


@pytest.fixture
def state(api: TestClient, ask: Ask, fleet: None, database: Database) -> State:
    ask("POST", "/node/join", role="node", content=msgspec.json.encode(JOIN))
    hold(database, "i1")
    _beat(ask, used_bytes=1)
    found = api.app.state.tidepool  # type: ignore[attr-defined]
    assert isinstance(found, State)
    return found


def test_what_a_node_has_no_place_for_is_lost_and_audited(state: State, ask: Ask, database: Database) -> None:
    two = msgspec.structs.replace(JOIN, slots=(SlotSpec(gpus=1, memory_bytes=80),) * 2)
    ask("POST", "/node/join", role="node", content=msgspec.json.encode(two))
    hold(database, "i2", slot=1)
    answer = ask("POST", "/node/join", role="node", content=msgspec.json.encode(JOIN))
    assert [instance["instance_id"] for instance in answer["instances"]] == ["i1"]
    events = ask("GET", "/admin/audit")["data"]
    [lost] = [event for event in events if event["action"] == "instance.lose"]
    assert (lost["subject"], lost["after"]) == ("i2", {"reason": "node node-1 came back with no place for it"})


def test_workers_that_cannot_share_a_slot_are_refused(ask: Ask, fleet: None) -> None:
    odd = msgspec.json.encode(JOIN).replace(b'"workers":1', b'"workers":2')
    answer = ask("POST", "/node/join", role="node", status=400, content=odd)
    assert "workers must be at least 1 and divide gpus, 1, not 2" in str(answer)


def test_without_postgres_the_view_stays_fresh(state: State, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    before = state.live.read_view().nodes["node-1"]
    monkeypatch.setattr(Database, "transaction", _away)
    _beat(ask, used_bytes=2, status=503)
    after = state.live.read_view().nodes["node-1"]
    assert _used_bytes(state) == 2
    assert after.received_s > before.received_s
    assert (after.region, after.url) == (before.region, before.url)


def test_a_newer_term_that_a_node_has_seen_is_shown_until_an_operator_goes_above_it(state: State, ask: Ask) -> None:
    def beat(*, status: int) -> Any:
        message = Heartbeat(node="node-1", boot_id="b", generation=0, instances=(_report("i1", used_bytes=9),), term=5)
        return ask("POST", "/node/heartbeat", role="node", status=status, content=msgspec.json.encode(message))

    def shown() -> tuple[int, int, str]:
        verdict = ask("GET", "/admin/status", role="viewer")["health"]
        return verdict["term"], verdict["reported_term"], verdict["status"]

    before = shown()
    assert before[:2] == (1, 0)
    assert "node 'node-1' has seen term 5" in beat(status=503)["detail"]
    assert shown() == (1, 5, "degraded")
    told = ask("GET", "/admin/term", role="viewer")
    assert (told["term"], told["reported"]) == (1, 5)
    ask("POST", "/admin/term/raise", role="operator", status=403)
    assert ask("POST", "/admin/term/raise", role="admin")["term"] == 6
    assert shown() == (6, 5, before[2])
    assert beat(status=200)["term"] == 6, "the node follows from now on"
    [event] = ask("GET", "/admin/events?kind=term")["data"]
    assert (event["what"], event["subject"]) == ("began", "6")
    assert ask("GET", "/admin/audit")["data"][0]["action"] == "term.raise"


def test_without_redis_the_node_is_told_all_the_same(state: State, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object, **__: object) -> None:
        raise UnavailableError("Redis does not answer")

    with monkeypatch.context() as patched:
        for name in ("renew_heartbeat", "write_heartbeat"):
            patched.setattr(LiveStore, name, gone)
        _beat(ask, used_bytes=3)
    assert _used_bytes(state) == 1


def test_the_view_is_written_once_a_beat(state: State, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    real = state.live._redis.hset

    def hset(key: str, node: str, view: bytes) -> object:
        written.append(node)
        return real(key, node, view)

    monkeypatch.setattr(state.live._redis, "hset", hset)
    _beat(ask, used_bytes=2)
    assert (written, _used_bytes(state)) == (["node-1"], 2)


def test_a_node_that_the_view_does_not_know_is_not_made_up(
    state: State, ask: Ask, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis_client.delete("tidepool:view")
    monkeypatch.setattr(Database, "transaction", _away)
    _beat(ask, used_bytes=2, status=503)
    assert state.live.read_view().nodes == {}


FORGED = (_report("i2"), _report("i1", "Qwen/Qwen3-8B"), _report("inst_of_another"))


def test_a_node_speaks_of_its_own_instances_alone(state: State, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def known() -> list[tuple[str, str]]:
        reports = state.live.read_view().nodes["node-1"].heartbeat.instances
        return [(report.instance_id, report.model) for report in reports]

    _beat(ask, *FORGED, used_bytes=2)
    assert known() == [("i1", "llama")]
    monkeypatch.setattr(Database, "transaction", _away)
    _beat(ask, *FORGED, used_bytes=3, status=503)
    assert known() == [("i1", "llama")]
    assert _used_bytes(state) == 3


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/x", "http://2852039166", "http://0xa9.254.43518:80", "http://[fe80::1]:9",
        "http://[::ffff:169.254.169.254]", "http://224.0.0.1", "http://[ff02::1]", "http://0.0.0.0:9", "http://[::]:9",
        "file:///etc/passwd", "gopher://n:1", "n:1", "http://", "http://n:port", "http://[n", "http://n:1/a?b=", "",
    ],
)  # fmt: skip
def test_a_node_is_at_an_address_of_its_own(ask: Ask, fleet: None, url: str) -> None:
    join = msgspec.json.encode(msgspec.structs.replace(JOIN, url=url))
    refused = ask("POST", "/node/join", role="node", status=400, content=join)
    assert refused["param"] == "url"
    assert refused["detail"].startswith("url: ")


@pytest.mark.parametrize("name", ["", ".", "..", "a\n", "a\0b", "a/b", "a\x1b[31m", "n" * 201])
def test_a_node_has_a_plain_name(ask: Ask, fleet: None, name: str) -> None:
    join = msgspec.json.encode(msgspec.structs.replace(JOIN, node=name))
    assert ask("POST", "/node/join", role="node", status=400, content=join)["param"] == "node"


@pytest.mark.parametrize(
    ("field", "value", "most"),
    [
        ("gpus", 2**31, 2**31 - 1),
        ("gpus", 2**64, 2**31 - 1),
        ("workers", 2**63, 2**31 - 1),
        ("memory_bytes", 2**63, 2**63 - 1),
        ("memory_bytes", 2**70, 2**63 - 1),
        ("weights_bytes", 2**63, 2**63 - 1),
    ],
)
def test_a_number_of_a_slot_that_cannot_be_stored_is_named(
    ask: Ask, fleet: None, field: str, value: int, most: int
) -> None:
    join = msgspec.to_builtins(JOIN)
    join["slots"][0][field] = value
    refused = ask("POST", "/node/join", role="node", status=400, json=join)
    assert f"Expected `int` <= {most} - at `$.slots[0].{field}`" in refused["detail"]


@pytest.mark.parametrize("value", [0, 2**63])
def test_a_nodes_host_memory_that_cannot_be_stored_is_named(ask: Ask, fleet: None, value: int) -> None:
    join = msgspec.to_builtins(JOIN) | {"host_bytes": value}
    assert "at `$.host_bytes`" in ask("POST", "/node/join", role="node", status=400, json=join)["detail"]


@pytest.mark.parametrize("url", ["http://10.0.0.7:9", "https://node.example/agent", "http://[fd00::7]:9", "http://n"])
def test_a_node_may_be_inside(ask: Ask, fleet: None, url: str) -> None:
    ask("POST", "/node/join", role="node", content=msgspec.json.encode(msgspec.structs.replace(JOIN, url=url)))


def test_a_postgres_that_hangs_keeps_few_threads(
    state: State, ask: Ask, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = state.live.read_view().nodes["node-1"]
    names = [f"n{number}" for number in range(15)]
    for name in names:
        beat = msgspec.structs.replace(view.heartbeat, node=name)
        state.live.write_heartbeat(beat, region=view.region, gpu_type=view.gpu_type, url=view.url)
    free = threading.Event()

    @contextmanager
    def hangs(_: Database, *, replicated: bool = True) -> Iterator[Session]:
        free.wait(HANGS_S)
        raise OperationalError("SELECT 1", {}, ConnectionError("gone"))
        yield

    def renewed() -> bool:
        nodes = state.live.read_view().nodes
        return all(nodes[name].heartbeat.instances[0].kv_used_bytes == 5 for name in names)

    monkeypatch.setattr(Database, "transaction", hangs)
    beating = [
        threading.Thread(target=_beat, args=(ask,), kwargs={"used_bytes": 5, "node": name, "status": 503})
        for name in names
    ]
    try:
        for thread in beating:
            thread.start()
        until(lambda: renewed() and state.beats.writing == set(names))
        assert state.beats.postgres.borrowed_tokens <= 10
        _beat(ask, used_bytes=6, node="n3", status=503)  # at once: its last one is still on its way
        assert not free.is_set()
    finally:
        free.set()
        for thread in beating:
            thread.join()
    assert state.beats.writing == set()


def test_what_a_node_says_of_an_error_is_kept_whatever_it_holds(state: State, ask: Ask) -> None:
    """U+0000 of a worker's last words must not end the heartbeats of its node."""
    said = InstanceReport(instance_id="i1", model="llama", slot=0, state="failed", error="it died: a\0b")
    beat = Heartbeat(node="node-1", boot_id="b", generation=0, instances=(said,))
    ask("POST", "/node/heartbeat", role="node", content=msgspec.json.encode(beat))
    [instance] = ask("GET", "/admin/instances")["data"]
    assert (instance["observed"], instance["error"]) == ("failed", "it died: a\ufffdb")
