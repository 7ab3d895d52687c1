"""Heartbeats while a server is away: the live view is fed without Postgres, nodes are told without Redis."""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from fastapi.testclient import TestClient
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from controlplane.api.state import State
from controlplane.errors import UnavailableError
from controlplane.store.live import LiveStore
from controlplane.store.session import Database
from dataplane.messages import Heartbeat, InstanceReport, Join, SlotSpec
from tests.controlplane.api.conftest import Ask

JOIN = Join(
    node="node-1",
    region="us-east",
    gpu_type="H800",
    url="http://127.0.0.1:1",
    slots=(SlotSpec(gpus=1, memory_bytes=80),),
    engine="replay",
)


def _beat(ask: Ask, *, used_bytes: int, status: int = 200) -> None:
    report = InstanceReport(instance_id="i1", model="llama", slot=0, state="ready", kv_used_bytes=used_bytes)
    beat = Heartbeat(node="node-1", boot_id="b", generation=0, instances=(report,))
    ask("POST", "/node/heartbeat", role="node", status=status, content=msgspec.json.encode(beat))


def _used_bytes(state: State) -> int:
    return state.live.read_view().nodes["node-1"].heartbeat.instances[0].kv_used_bytes


@contextmanager
def _away(_: Database) -> Iterator[Session]:
    raise OperationalError("SELECT 1", {}, ConnectionError("gone"))
    yield


@pytest.fixture
def state(api: TestClient, ask: Ask, fleet: None) -> State:
    ask("POST", "/node/join", role="node", content=msgspec.json.encode(JOIN))
    _beat(ask, used_bytes=1)
    found = api.app.state.tidepool  # type: ignore[attr-defined]
    assert isinstance(found, State)
    return found


def test_without_postgres_the_view_stays_fresh(state: State, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    before = state.live.read_view().nodes["node-1"]
    monkeypatch.setattr(Database, "transaction", _away)
    _beat(ask, used_bytes=2, status=503)
    after = state.live.read_view().nodes["node-1"]
    assert _used_bytes(state) == 2
    assert after.received_s > before.received_s
    assert (after.region, after.url) == (before.region, before.url)


def test_without_redis_the_node_is_told_all_the_same(state: State, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object, **__: object) -> None:
        raise UnavailableError("Redis does not answer")

    with monkeypatch.context() as patched:
        for name in ("renew_heartbeat", "write_heartbeat"):
            patched.setattr(LiveStore, name, gone)
        _beat(ask, used_bytes=3)
    assert _used_bytes(state) == 1


def test_a_node_that_the_view_does_not_know_is_not_made_up(
    state: State, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.live._redis.delete("tidepool:view")
    monkeypatch.setattr(Database, "transaction", _away)
    _beat(ask, used_bytes=2, status=503)
    assert state.live.read_view().nodes == {}
