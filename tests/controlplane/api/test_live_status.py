"""GET /admin/status/live: endpoints with their load, the queue, and the objectives kept."""

import msgspec
import pytest
from fastapi.testclient import TestClient

from controlplane.api.state import State
from controlplane.policies.facts import Backlog
from controlplane.settings import Settings
from controlplane.store.session import Database
from dataplane.protocol.messages import Heartbeat, InstanceReport
from tests.controlplane.api.conftest import Ask
from tests.controlplane.api.test_heartbeats import JOIN, hold
from tests.controlplane.world import HANGS_S, until


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"heartbeat_stale_s": HANGS_S})


@pytest.fixture
def state(api: TestClient) -> State:
    found = api.app.state.tidepool  # type: ignore[attr-defined]
    assert isinstance(found, State)
    return found


def test_an_endpoint_without_instances_has_no_utilization(ask: Ask, fleet: None) -> None:
    live = ask("GET", "/admin/status/live", role="viewer")
    (endpoint,) = live["endpoints"]
    assert (endpoint["model"], endpoint["region"], endpoint["instances"]) == ("llama", "us-east", {})
    assert (endpoint["utilization"], endpoint["remaining_tokens"], endpoint["load"]) == (None, None, None)
    assert live["queues"] == []


def test_an_endpoint_is_as_busy_as_its_heartbeats_say(ask: Ask, fleet: None, database: Database) -> None:
    ask("POST", "/node/join", role="node", content=msgspec.json.encode(JOIN))
    hold(database, "i1")
    report = InstanceReport(
        instance_id="i1",
        model="llama",
        slot=0,
        state="ready",
        kv_used_bytes=30,
        kv_capacity_bytes=40,
        remaining_tokens=77,
    )
    beat = Heartbeat(node="node-1", boot_id="b", generation=0, instances=(report,), load=0.5)
    ask("POST", "/node/heartbeat", role="node", content=msgspec.json.encode(beat))

    def endpoint() -> dict[str, object]:
        (found,) = ask("GET", "/admin/status/live")["endpoints"]
        return dict(found)

    until(lambda: endpoint()["utilization"] is not None)
    assert (endpoint()["utilization"], endpoint()["remaining_tokens"], endpoint()["load"]) == (0.75, 77, 0.5)
    (instance,) = ask("GET", "/admin/nodes/node-1")["live"]["instances"]
    assert (instance["slot"], instance["kv_capacity_bytes"]) == (0, 40)


def test_of_a_long_queue_a_part_is_counted(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(_: object, *, count_max: int) -> dict[str, Backlog]:
        return {"tide": Backlog(tokens=7.0 * count_max, due_s=60.0, at_least=True)}

    monkeypatch.setattr("controlplane.api.admin.live_status.backlogs", counted)
    [queue] = ask("GET", "/admin/status/live")["queues"]
    assert queue == {"model": "tide", "tokens": 7000.0, "due_s": 60.0, "at_least": True}


def test_objectives_by_tier(state: State, ask: Ask) -> None:
    for model in ("tide", "ebb"):
        state.metrics.slo_requests.labels(model, "IW-F", "true").inc(3)
        state.metrics.slo_requests.labels(model, "IW-F", "false").inc()
        state.metrics.slo_tokens.labels(model, "IW-F", "true").inc(10)
    assert ask("GET", "/admin/status/live")["objectives"] == [
        {"tier": "IW-F", "answers": 8, "kept": 6, "tokens": 20, "tokens_in_time": 20}
    ]


def test_a_client_may_not_look(ask: Ask) -> None:
    ask("GET", "/admin/status/live", role="client", status=403)
