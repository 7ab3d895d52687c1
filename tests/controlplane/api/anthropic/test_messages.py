"""The Messages API before nodes that answer as told."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from controlplane.store.request_log import find_requests
from controlplane.store.tenants import Tenant, put_tenant
from dataplane.protocol.messages import Finished, Token, ToolCallDelta
from tests.controlplane.api.gateway import Gateway, running_gateway
from tests.controlplane.world import PATIENCE_S, FakeAgent, World, until

ASK: dict[str, Any] = {"model": "tide", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "look", "input_schema": {"type": "object"}}


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent()


@pytest.fixture
def gateway(world: World, agent: FakeAgent) -> Iterator[Gateway]:
    with running_gateway(world, agent) as gateway:
        yield gateway


def create(gateway: Gateway, status: int = 200, **changes: Any) -> httpx.Response:
    answer = gateway.http.post("/v1/messages", json=ASK | changes)
    assert answer.status_code == status, answer.text
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    if status >= 400:
        assert set(answer.json()) == {"type", "error", "request_id"}
        assert answer.json()["request_id"] == answer.headers["request-id"]
    return answer


def test_whole_and_streamed(gateway: Gateway) -> None:
    whole = create(gateway, system="be brief").json()
    assert [block["text"] for block in whole["content"]] == ["the tide turns"]
    assert (whole["stop_reason"], whole["usage"]["output_tokens"]) == ("end_turn", 3)
    streamed = create(gateway, stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.headers["x-tidepool-region"] == "us-east"
    bodies = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert "".join(body["delta"].get("text", "") for body in bodies if "delta" in body) == "the tide turns"
    assert bodies[-1] == {"type": "message_stop"}


def test_tools(gateway: Gateway, agent: FakeAgent) -> None:
    agent.events = [
        Token(text="", token_ids=(1,), tool_calls=(ToolCallDelta(index=0, name="look", arguments='{"a": 1}'),)),
        Finished(finish_reason="tool_calls", prompt_tokens=7, completion_tokens=1),
    ]
    first = create(gateway, tools=[TOOL], tool_choice={"type": "any"}).json()
    [use] = first["content"]
    assert (first["stop_reason"], use["name"], use["input"]) == ("tool_use", "look", {"a": 1})
    agent.events = ()
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "a sail"}
    messages = [*ASK["messages"], {"role": "assistant", "content": first["content"]}]
    create(gateway, tools=[TOOL], messages=[*messages, {"role": "user", "content": [result]}])
    assert [each.role for each in agent.asked[-1].messages or ()] == ["user", "assistant", "tool"]


def test_tokens_are_counted(gateway: Gateway, agent: FakeAgent) -> None:
    body = {"model": "tide", "messages": ASK["messages"], "tools": [TOOL], "thinking": {"type": "disabled"}}
    counted = gateway.http.post("/v1/messages/count_tokens", json=body)
    assert counted.json() == {"input_tokens": 3}
    [question] = agent.questions
    assert [(each.role, each.content) for each in question.messages] == [("user", "hi")]
    assert [tool.name for tool in question.tools] == ["look"]
    assert (question.template, question.special_tokens, question.answer) == ({"enable_thinking": False}, False, True)
    for changes, status in (({"model": "nobody"}, 404), ({"max_tokens": 1}, 400)):
        refused = gateway.http.post("/v1/messages/count_tokens", json=body | changes)
        assert (refused.status_code, refused.json()["type"]) == (status, "error")


def test_keys_in_either_header(gateway: Gateway) -> None:
    for headers, status in (
        ({"x-api-key": gateway.secret, "anthropic-version": "2023-06-01"}, 200),
        ({"authorization": f"Bearer {gateway.secret}"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({}, 401),
    ):
        answer = httpx.post(
            f"{gateway.url}/v1/messages", json=ASK, headers=headers, timeout=PATIENCE_S, verify=False, trust_env=False
        )
        assert answer.status_code == status
        if status == 401:
            assert answer.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("body", "status", "kind", "words"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"surprise": 1}, 400, "invalid_request_error", "surprise"),
        ({"top_k": 2**64}, 400, "invalid_request_error", "top_k"),
        ({"model": "nobody"}, 404, "not_found_error", "nobody"),
        ({"max_tokens": 100_000}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": "x" * 70_000}, 413, "request_too_large", "65536"),
    ],
)
def test_refusals(gateway: Gateway, body: dict[str, Any], status: int, kind: str, words: str) -> None:
    error = create(gateway, status, **body).json()["error"]
    assert error["type"] == kind
    assert words in error["message"]


def test_limits_are_those_of_all_endpoints(gateway: Gateway, world: World) -> None:
    with world.database.transaction() as session:
        put_tenant(session, Tenant(name="small", requests_per_minute=1))
    headers = {"x-api-key": world.key(tenant="small"), "authorization": ""}
    first = gateway.http.post("/v1/messages", json=ASK, headers=headers)
    second = gateway.http.post("/v1/messages", json=ASK, headers=headers)
    assert (first.status_code, first.headers["x-ratelimit-remaining-requests"]) == (200, "0")
    assert (second.status_code, second.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(second.headers["retry-after"]) >= 1


def test_a_stream_that_breaks(world: World) -> None:
    with running_gateway(world, FakeAgent(then="fail later"), stream_continuations_max=0) as gateway:
        *_, last = create(gateway, stream=True).text.removesuffix("\n\n").split("\n\n")
        name, data = last.split("\n")
        assert name == "event: error"
        assert json.loads(data[6:])["error"]["message"] == "the worker died"
        create(gateway, 503)


def test_requests_are_logged_like_others(gateway: Gateway, world: World) -> None:
    gateway.http.post("/v1/messages", json=ASK, headers={"x-request-id": "mine"})

    def logged() -> Any:
        with world.database.transaction() as session:
            return find_requests(session, "mine")

    until(logged)
    [row] = logged()
    assert (row.endpoint, row.model, row.outcome, row.completion_tokens) == ("/v1/messages", "tide", "ok", 3)
