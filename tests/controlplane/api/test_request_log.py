"""The request log: one record for each interactive request, however it ends, found by its id."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import httpx2 as httpx
import pytest
from structlog.testing import capture_logs

from controlplane.api.request_log import note_failure
from controlplane.errors import NodeError
from controlplane.store.request_log import RequestRecord
from controlplane.store.tables import Role
from tests.controlplane.api.gateway import Gateway, running_gateway
from tests.controlplane.world import FakeAgent, World, until

SECRET_WORDS = "correct horse battery staple"
ID = "req-of-a-test"


class Log:
    """What a gateway knows of the requests sent to it."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.admin = {"Authorization": f"Bearer {gateway.world.key(Role.ADMIN)}"}
        self.sent, self.ended = 0, 0
        add = gateway.state.requests.add

        def counted(record: RequestRecord) -> None:
            add(record)
            self.ended += 1

        gateway.state.requests.add = counted  # type: ignore[method-assign]

    def chat(self, status: int = 200, *, key: str | None = None, **changes: Any) -> httpx.Response:
        headers = {"x-request-id": ID} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        body = {"model": "tide", "messages": [{"role": "user", "content": SECRET_WORDS}]} | changes
        self.sent += 1
        answer = self.gateway.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == status, answer.text
        assert answer.headers["x-request-id"] == ID
        return answer

    def written(self) -> None:
        """All records are rows now: a request ends a little after its client has the answer."""
        until(lambda: self.ended == self.sent)
        self.gateway.state.requests.write()

    def rows(self, path: str = f"/{ID}", status: int = 200, **query: Any) -> list[dict[str, Any]]:
        self.written()
        answer = self.gateway.http.get(f"/admin/requests{path}", params=query, headers=self.admin)
        assert answer.status_code == status, answer.text
        return list(answer.json()["data"]) if status == 200 else []

    def last(self) -> dict[str, Any]:
        return self.rows()[0]


@pytest.fixture
def agents() -> tuple[FakeAgent, FakeAgent]:
    return FakeAgent(), FakeAgent()


@pytest.fixture
def log(world: World, agents: tuple[FakeAgent, FakeAgent]) -> Iterator[Log]:
    with running_gateway(world, *agents, circuit_open_max_s=0.0) as gateway:
        yield Log(gateway)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_found_by_its_id(log: Log, stream: bool) -> None:
    log.chat(stream=stream, service_tier="priority")
    [row] = log.rows()
    assert (row["request_id"], row["endpoint"], row["tenant"]) == (ID, "/v1/chat/completions", "acme")
    assert (row["model"], row["tier"], row["region"], row["nodes"]) == ("tide", "IW-F", "us-east", ["n0"])
    assert (row["outcome"], row["status"], row["error"], row["continuations"]) == ("ok", 200, None, 0)
    assert (row["prompt_tokens"], row["completion_tokens"]) == (7, 3)
    assert row["key_id"].startswith("key_")
    assert (row["gateway"], row["origin"]) == (f"{socket.gethostname()}:8080", "us-east")
    assert row["instance_id"].startswith("inst_")
    assert 0 <= row["utilization"] < 0.7
    assert (row["trace_id"], row["trace_url"]) == (None, None), "no span is exported"
    assert 0 < row["placed_s"] <= row["first_token_s"] <= row["duration_s"]


def test_attempts_and_continuations_are_told(log: Log, agents: tuple[FakeAgent, FakeAgent]) -> None:
    agents[0].script = ["worker lost"]
    log.chat()
    row = log.last()
    assert (row["outcome"], row["nodes"], row["region"], row["continuations"]) == ("ok", ["n0", "n1"], "us-west", 0)
    agents[0].script = ["fail later"]
    log.chat(stream=True)
    row = log.last()
    assert (row["outcome"], row["nodes"], row["continuations"]) == ("ok", ["n0", "n1"], 1)
    assert row["completion_tokens"] == 3


def test_a_refusal_before_the_body_is_recorded_as_it_is_answered(log: Log) -> None:
    headers = {"x-request-id": ID, "Authorization": "Bearer wrong"}
    log.sent += 1
    answer = log.gateway.http.post("/v1/responses", json={"model": "tide", "input": "hi"}, headers=headers)
    row = log.last()
    assert (answer.status_code, row["status"], row["outcome"]) == (401, 401, answer.json()["error"]["code"])


def test_refusals_are_records_too(log: Log) -> None:
    poisoned = "no\0such"
    for expected, status, changes in (
        ("invalid_value", 400, {"messages": [{"role": SECRET_WORDS, "content": "hi"}]}),
        ("invalid_value", 400, {"temperature": 9}),
        ("context_length_exceeded", 400, {"max_tokens": 4096}),
        ("model_not_found", 404, {"model": poisoned}),
        ("invalid_api_key", 401, {"key": "wrong"}),
        ("permission_denied", 403, {"key": log.gateway.world.key(Role.VIEWER)}),
        ("request_too_large", 413, {"user": "x" * 70_000}),
    ):
        log.chat(status, **changes)
        row = log.last()
        assert (row["outcome"], row["status"], row["nodes"]) == (expected, status, [])
        assert SECRET_WORDS not in str(row)
    assert len(log.rows()) == 7
    known = {row["outcome"]: row for row in log.rows()}
    assert (known["context_length_exceeded"]["model"], known["invalid_api_key"]["tenant"]) == ("tide", None)
    assert "leaves no room" in known["context_length_exceeded"]["error"]
    assert known["invalid_value"]["error"] is None, "it may repeat what was sent"
    assert known["model_not_found"]["model"] == "no\ufffdsuch"


def test_failures_of_the_fleet(log: Log, agents: tuple[FakeAgent, FakeAgent]) -> None:
    agents[0].then = agents[1].then = "worker lost"
    log.chat(503)
    row = log.last()
    assert (row["outcome"], row["status"], row["nodes"]) == ("worker_lost", 503, ["n0", "n1"])
    assert row["error"] == "the worker died"
    agents[0].script = ["too long"]
    log.chat(400)
    assert log.last()["outcome"] == "context_length_exceeded"


def test_a_stream_that_breaks_in_the_middle(world: World) -> None:
    agent = FakeAgent(then="fail later")
    with running_gateway(world, agent, stream_continue_wait_s=0.0) as gateway:
        log = Log(gateway)
        assert "worker died" in log.chat(stream=True).text
        row = log.last()
    assert (row["outcome"], row["status"], row["completion_tokens"]) == ("worker_lost", 503, 2)


@contextmanager
def sending(log: Log, body: str, *, path: str, length: int | None = None) -> Iterator[None]:
    """A client that has sent this much of its request, and reads no answer."""
    host, port = log.gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {log.gateway.secret}\r\nX-Request-Id: {ID}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length or len(body)}\r\n\r\n{body}".encode()
        )
        yield


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(log: Log, agents: tuple[FakeAgent, FakeAgent], stream: bool) -> None:
    agents[0].then = "hang later"
    body = {"model": "tide", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    log.sent += 1
    if stream:
        headers = {"x-request-id": ID}
        with log.gateway.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            next(answer.iter_lines())
    else:
        with sending(log, json.dumps(body), path="/v1/chat/completions"):
            until(lambda: agents[0].asked)
    row = log.last()
    assert (row["outcome"], row["status"], row["nodes"]) == ("cancelled", 499, ["n0"])


def test_a_client_that_leaves_before_its_request_is_whole(log: Log) -> None:
    log.sent += 1
    with sending(log, '{"model":', path="/v1/completions", length=100):
        pass
    assert (log.last()["outcome"], log.last()["status"]) == ("cancelled", 499)


def test_a_defect_is_a_record(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(log.gateway.state.fleet, "objective", broken)
    assert log.chat(500).headers["connection"] == "close", "the next request would meet a connection that is closed"
    row = log.last()
    assert (row["outcome"], row["status"], row["error"]) == ("internal_error", 500, None)


def test_a_tenant_finds_its_own_requests_alone(log: Log) -> None:
    log.chat()
    log.written()
    mine = log.gateway.http.get(f"/v1/requests/{ID}")
    assert (mine.status_code, mine.json()["data"][0]["outcome"]) == (200, "ok")
    assert not {"nodes", "tenant", "key_id"} & mine.json()["data"][0].keys()
    others = {"Authorization": f"Bearer {log.gateway.world.key(tenant='other')}"}
    assert log.gateway.http.get(f"/v1/requests/{ID}", headers=others).status_code == 404
    viewer = {"Authorization": f"Bearer {log.gateway.world.key(Role.VIEWER, tenant='ops')}"}
    assert log.gateway.http.get(f"/admin/requests/{ID}", headers=viewer).status_code == 403
    assert log.rows("/never-sent", status=404) == []


def test_lists_are_filtered_and_paged(log: Log, agents: tuple[FakeAgent, FakeAgent]) -> None:
    for _ in range(3):
        log.chat()
    log.chat(404, model="none")
    agents[0].then = agents[1].then = "worker lost"
    log.chat(503)
    outcomes = [row["outcome"] for row in log.rows("")]
    assert outcomes == ["worker_lost", "model_not_found", "ok", "ok", "ok"]
    assert len(log.rows("", outcome="failed")) == 2
    assert len(log.rows("", outcome="ok", model="tide", tenant="acme")) == 3
    assert len(log.rows("", region="us-east", tier="IW-N")) == len(log.rows("", outcome="ok"))
    assert [row["outcome"] for row in log.rows("", region="us-west")] == ["worker_lost"]
    assert log.rows("", tier="IW-F") == []
    assert log.rows("", tenant="other") == log.rows("", since_s=4e9) == []
    answer = log.gateway.http.get("/admin/requests", params={"limit": 2}, headers=log.admin).json()
    rest = log.rows("", after=answer["next"], limit=100)
    assert [row["outcome"] for row in (*answer["data"], *rest)] == outcomes
    log.rows("", status=400, after="x")
    log.rows("", status=400, tier="fast")


@pytest.mark.parametrize(
    ("which", "expected"),
    [("all", [("ok", "info"), ("worker_lost", "warning")]), ("errors", [("worker_lost", "warning")]), ("off", [])],
)
def test_lines_of_the_log_hold_no_words(world: World, which: str, expected: list[tuple[str, str]]) -> None:
    agent = FakeAgent()
    with running_gateway(world, agent, request_log_lines=which) as gateway, capture_logs() as lines:
        log = Log(gateway)
        log.chat()
        agent.then = "worker lost"
        log.chat(503)
        assert len(log.rows()) == 2
    said = [line for line in lines if line["event"] == "request"]
    assert [(line["outcome"], line["log_level"]) for line in said] == expected
    assert all(line["request_id"] == ID for line in said)
    assert SECRET_WORDS not in str(lines)


def test_nothing_is_logged_where_it_is_off(world: World) -> None:
    with running_gateway(world, FakeAgent(), request_log="off") as gateway:
        log = Log(gateway)
        log.chat()
        assert log.rows("") == []


def test_a_code_that_a_node_makes_up_can_be_stored() -> None:
    """One that cannot would keep the records beside it from being written."""
    record = RequestRecord(request_id="r", ended_at=datetime.now(UTC), endpoint="/v1/completions")
    note_failure(record, NodeError("no", code="a\0\ud800" + "b" * 100_000))
    assert "\0" not in record.outcome
    assert len(record.outcome.encode()) < 10_000
