"""The link to the control plane: join, heartbeat, follow, join again, outlive an outage."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

import httpx2 as httpx
import msgspec
import pytest
from structlog.testing import capture_logs

from dataplane.agent.heartbeats import ControlLink, refusal, slot_specs
from dataplane.agent.node import Agent
from dataplane.agent.settings import WorkerSettings
from dataplane.protocol.errors import StaleTermError
from dataplane.protocol.joining import Join, SlotSpec
from dataplane.protocol.messages import DesiredInstances, Heartbeat
from tests.dataplane.replay_node import KEY, desired, instance, settings
from tests.event_loop import asynchronous, until

URL = "http://127.0.0.1:9999"


class FakeControl:
    """A control plane behind httpx's transport seam. `away`: every request fails to connect."""

    def __init__(self) -> None:
        self.joined = False
        self.away = False
        self.garbled = False
        self.refusal: httpx.Response | None = None
        self.desired: DesiredInstances = desired(1)
        self.joins: list[Join] = []
        self.heartbeats: list[Heartbeat] = []
        self.attempts = 0

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.attempts += 1
        assert request.headers["authorization"] == f"Bearer {KEY}"
        if self.away:
            raise httpx.ConnectError("refused", request=request)
        if self.refusal is not None:
            return self.refusal
        if request.url.path == "/node/join":
            self.joins.append(msgspec.json.decode(request.content, type=Join))
            self.joined = True
            return httpx.Response(200, json={})
        assert request.url.path == "/node/heartbeat"
        if not self.joined:
            return httpx.Response(404, json={"detail": "unknown node"})
        heartbeat = msgspec.json.decode(request.content, type=Heartbeat)
        self.heartbeats.append(heartbeat)
        return httpx.Response(200, content=b"{" if self.garbled else msgspec.json.encode(self.desired))


@asynccontextmanager
async def linked(refusal: httpx.Response | None = None, **changes: Any) -> AsyncIterator[tuple[FakeControl, Agent]]:
    """A link to a fake control plane, which begins with a refusal if there is one."""
    control = FakeControl()
    control.refusal = refusal
    values = {"heartbeat_every_s": 0.05, "heartbeat_gap_s": 0.01, "control_backoff_max_s": 0.1} | changes
    agent = Agent(settings(**values), boot_id="boot")
    link = asyncio.create_task(ControlLink(agent, URL, transport=httpx.MockTransport(control.handle)).run())
    try:
        yield control, agent
    finally:
        agent.changed.set()  # a change at the very moment of the end must not make the link miss it
        link.cancel()
        done, _ = await asyncio.wait({link}, timeout=30)
        assert done, "the link ends when it is cancelled"
        for group in agent.groups:
            group.follow(())


@asynchronous
async def test_joins_heartbeats_and_follows() -> None:
    async with linked() as (control, agent):
        control.desired = desired(3, instance())
        await until(lambda: len(control.heartbeats) >= 3)
        (join,) = control.joins
        assert (join.node, join.region, join.gpu_type, join.url, join.engine) == (
            "n1",
            "us-east",
            "H800",
            URL,
            "replay",
        )
        assert join.slots == (SlotSpec(gpus=1, memory_bytes=2 * 2**20, weights_bytes=2**20, hosts=1),)
        assert join.dtype is None, "a replay keeps weights as they are stored"
        assert (join.version, join.engine_version) == (version("tidepool"), None), "its engine is Tidepool's own"
        assert join.host_bytes == agent.host_bytes == 2**20
        assert control.heartbeats[0] == Heartbeat(node="n1", boot_id="boot", generation=0, instances=())
        last = control.heartbeats[-1]
        assert (last.generation, agent.generation) == (3, 3)
        assert [(report.instance_id, report.state) for report in last.instances] == [("i1", "loading")]


@pytest.mark.parametrize(
    ("changes", "slots"),
    [
        ({}, ((1, 10, 1), (2, 20, 1), (1, 30, 1))),
        ({"together": True}, ((2, 40, 2), (2, 20, 1))),
        ({"split": True}, ((2, 40, 2), (2, 20, 1))),
    ],
)
def test_what_serves_together_joins_as_one_slot(changes: dict[str, Any], slots: Any) -> None:
    given = tuple(WorkerSettings(gpus=gpus, memory_bytes=units * 2**20) for gpus, units in ((1, 10), (2, 20), (1, 30)))
    specs = slot_specs(settings(slots=given, **changes))
    assert [(spec.gpus, spec.memory_bytes // 2**20, spec.workers) for spec in specs] == list(slots)


def test_a_slot_says_what_each_worker_has_for_weights() -> None:
    given = tuple(WorkerSettings(memory_bytes=units * 2**20) for units in (10, 20))
    alone = slot_specs(settings(slots=given, kv_share=0.25))
    assert [spec.weights_bytes for spec in alone] == [7.5 * 2**20, 15 * 2**20]
    [together] = slot_specs(settings(slots=given, kv_share=0.25, together=True))
    assert together.weights_bytes == 7.5 * 2**20, "a model stands on every worker"


def test_an_agent_from_before_has_slots_of_one_worker() -> None:
    reported = msgspec.json.decode(b'{"gpus": 8, "memory_bytes": 1}', type=SlotSpec)
    assert (reported.workers, reported.weights_bytes) == (1, None)


@pytest.mark.parametrize(
    "reported", [b'{"gpus": 8, "memory_bytes": 1, "workers": 3}', b'{"gpus": 0, "memory_bytes": 1}']
)
def test_workers_that_cannot_share_are_refused(reported: bytes) -> None:
    with pytest.raises(msgspec.ValidationError, match="workers must be at least 1 and divide gpus"):
        msgspec.json.decode(reported, type=SlotSpec)


@asynchronous
async def test_an_older_generation_is_refused() -> None:
    async with linked() as (control, agent):
        control.desired = desired(3, instance())
        await until(lambda: agent.generation == 3)
        control.desired = desired(2)
        seen = len(control.heartbeats)
        await until(lambda: len(control.heartbeats) >= seen + 3)
        assert agent.generation == 3
        assert len(agent.reports()) == 1


@asynchronous
async def test_an_unknown_node_joins_again_and_starts_its_count_anew() -> None:
    async with linked() as (control, agent):
        control.desired = desired(7)
        await until(lambda: agent.generation == 7)
        control.joined = False
        control.desired = desired(1, instance())
        await until(lambda: len(control.joins) == 2 and agent.generation == 1)
        assert len(agent.reports()) == 1


@asynchronous
async def test_an_outage_changes_nothing_and_is_logged_once() -> None:
    async with linked() as (control, agent):
        control.desired = desired(2, instance())
        await until(lambda: agent.generation == 2)
        control.away = True
        tried = control.attempts
        with capture_logs() as logs:
            await until(lambda: control.attempts >= tried + 4)
            assert len(agent.reports()) == 1
            control.away = False
            seen = len(control.heartbeats)
            await until(lambda: len(control.heartbeats) > seen)
        events = [entry["event"] for entry in logs]
        assert events.count("the control plane is away") == 1
        assert len(control.joins) == 1


@asynchronous
async def test_a_garbled_answer_is_an_outage_too() -> None:
    async with linked() as (control, agent):
        control.garbled = True
        await until(lambda: len(control.heartbeats) >= 2)
        control.garbled = False
        await until(lambda: agent.generation == 1)


@asynchronous
async def test_joining_is_tried_until_it_succeeds() -> None:
    async with linked() as (control, agent):
        control.away = True
        await until(lambda: control.attempts >= 3)
        assert not control.joins
        control.away = False
        await until(lambda: agent.generation == 1)


@asynchronous
async def test_a_change_of_state_is_told_before_the_next_heartbeat_is_due() -> None:
    async with linked(heartbeat_every_s=30.0, heartbeat_gap_s=0.05) as (control, agent):
        await until(lambda: agent.generation == 1)
        agent.apply(desired(2, instance()))
        await until(lambda: any(heartbeat.generation == 2 for heartbeat in control.heartbeats))
        control.desired = desired(2, instance())
        seen, loop = len(control.heartbeats), asyncio.get_running_loop()
        started_s = loop.time()
        for _ in range(20):
            agent.changed.set()
            await asyncio.sleep(0.01)
        most = (loop.time() - started_s) / 0.05 + 2
        assert 1 <= len(control.heartbeats) - seen <= most, "but not more often than the least gap"


def problem(status: int, detail: str, param: str | None = None) -> httpx.Response:
    return httpx.Response(status, json={"status": status, "detail": detail, "param": param})


@pytest.mark.parametrize(
    ("answer", "reason", "change"),
    [
        (
            problem(401, "Incorrect API key provided."),
            "Incorrect API key provided.",
            "set TIDEPOOL_AGENT_NODE_KEY to a key made by: tidepool key create NAME --role node --node n1",
        ),
        (
            problem(403, "the key is for node 'n2', not for 'n1'", "node"),
            "the key is for node 'n2', not for 'n1'",
            "set TIDEPOOL_AGENT_NODE_KEY to a key made by: tidepool key create NAME --role node --node n1",
        ),
        (
            problem(404, "region 'us-east' does not exist", "region"),
            "region 'us-east' does not exist",
            "run tidepool region add NAME, or change TIDEPOOL_AGENT_REGION",
        ),
        (problem(409, "node 'n1' holds 2", "region"), "node 'n1' holds 2", "change TIDEPOOL_AGENT_REGION"),
        (problem(400, "url: x", "url"), "url: x", "change TIDEPOOL_AGENT_ADVERTISE_URL"),
        (
            problem(422, "no such field"),
            "no such field",
            "the agent and the control plane may be of different versions",
        ),
        (
            httpx.Response(404, html="<h1>nginx</h1>"),
            "the answer is no answer of Tidepool: Not Found",
            "TIDEPOOL_AGENT_CONTROL_URL must be the address of a tidepool api; it is http://127.0.0.1:8080",
        ),
    ],
)
@asynchronous
async def test_a_refusal_says_what_the_server_said(answer: httpx.Response, reason: str, change: str) -> None:
    with capture_logs() as logs:
        async with linked(refusal=answer) as (control, agent):
            await until(lambda: control.attempts >= 3)
            control.refusal = None
            await until(lambda: agent.generation == 1)
    (refused,) = [entry for entry in logs if entry["event"] == "the control plane refuses this node"]
    assert (refused["reason"], refused["change"], refused["node"]) == (reason, change, "n1")
    assert refused["status"] == answer.status_code
    events = [entry["event"] for entry in logs]
    assert "the control plane is away" not in events
    assert "the control plane is back" in events


@asynchronous
async def test_a_key_that_is_revoked_while_the_node_serves_is_said_too() -> None:
    with capture_logs() as logs:
        async with linked() as (control, agent):
            control.desired = desired(2, instance())
            await until(lambda: agent.generation == 2)
            control.refusal = problem(401, "Incorrect API key provided.")
            tried = control.attempts
            await until(lambda: control.attempts >= tried + 3)
            control.refusal = problem(503, "the database does not answer")
            tried = control.attempts
            await until(lambda: control.attempts >= tried + 3)
            assert len(agent.reports()) == 1
    reported = [entry for entry in logs if entry["event"].startswith("the control plane")]
    assert [entry["event"] for entry in reported] == [
        "the control plane refuses this node",
        "the control plane is away",
    ]
    assert reported[1]["error"] == "503: the database does not answer"


def test_an_older_term_is_refused_whatever_its_generation() -> None:
    agent = Agent(settings(), "boot")
    agent.apply(DesiredInstances(generation=3, instances=(), term=2))
    with pytest.raises(StaleTermError, match="term 1 is older than 2"):
        agent.apply(DesiredInstances(generation=9, instances=(), term=1))
    agent.forget_generation()
    with pytest.raises(StaleTermError):
        agent.apply(DesiredInstances(generation=1, instances=(), term=1))
    agent.apply(DesiredInstances(generation=4, instances=(), term=3))
    agent.apply(DesiredInstances(generation=5, instances=()))  # from a control plane that knows no terms
    assert (agent.generation, agent.heartbeat().term) == (5, 3)


def test_what_may_be_tried_again_refuses_no_node() -> None:
    """Two transactions that collided, for example."""
    again, never = (
        httpx.Response(409, json={"detail": "no"}, headers={"x-should-retry": word}) for word in ("true", "false")
    )
    assert refusal(again, settings()) is None
    assert refusal(never, settings()) is not None
