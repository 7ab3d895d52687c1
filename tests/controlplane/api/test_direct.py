"""The direct way of most requests, against the framework's, which a body takes whose type is not plain JSON."""

import json
from typing import Any

import httpx2 as httpx
import pytest

from controlplane.bodies import FAULTS_MAX
from controlplane.store.keys import KeyScope, make_key
from controlplane.store.tables import Role
from tests.controlplane.api.gateway import Gateway, running_gateway
from tests.controlplane.world import FakeAgent, World

DIRECT, FRAMEWORK = "application/json", "application/vnd.test+json"
USER = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/score", "/rerank"
VALID: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": USER}),
    (CHAT, {"messages": USER, "stream": True, "stream_options": {"include_usage": True, "odd": 1}}),
    (CHAT, {"messages": USER, "n": 2, "logprobs": True, "temperature": 0, "user": None, "logit_bias": {"5": 1}}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hé\u20ac"}]}], "stop": ["x"]}),
    (COMPLETIONS, {"prompt": "the tide", "max_tokens": 3}),
    (COMPLETIONS, {"prompt": [[1, 2], [3]], "stream": True}),
    (MESSAGES, {"messages": USER, "max_tokens": 5}),
    (MESSAGES, {"messages": USER, "max_tokens": 5, "stream": True, "system": "be kind"}),
]
INVALID: list[tuple[str, Any]] = [
    (CHAT, {"messages": []}),
    (CHAT, {"messages": USER, "temperature": 9}),
    (CHAT, {"messages": USER, "n": 1.5, "seed": "x"}),
    (CHAT, {"messages": USER, "stream_options": {"include_usage": True}}),
    (CHAT, {"messages": USER, "no_such_field": 1}),
    (CHAT, {"messages": USER, "model": "no-such-model"}),
    (CHAT, {"messages": USER, "max_tokens": 4096}),
    (CHAT, '{"model": "tide", "messages": [{"role": "user", "content": "\\ud800"}]}'),
    (CHAT, '{"model": "tide", "messages": '),
    (CHAT, "[" * 5000),
    (CHAT, ""),
    (CHAT, "[1]"),
    (COMPLETIONS, {"prompt": [], "best_of": 0}),
    (MESSAGES, {"messages": USER}),
    (EMBEDDINGS, {"input": "hi"}),
    (SCORE, {"text_1": "a"}),
    (RERANK, {"query": "a", "documents": []}),
]


def _ask(gateway: Gateway, kind: str, path: str, body: Any, **headers: str) -> httpx.Response:
    text = body if isinstance(body, str) else json.dumps({"model": "tide", "seed": 7} | body, ensure_ascii=False)
    if isinstance(body, dict) and path in (EMBEDDINGS, SCORE, RERANK, MESSAGES):
        text = json.dumps({"model": "tide"} | body)
    return gateway.http.post(path, content=text, headers={"content-type": kind, "x-request-id": "same"} | headers)


def _shown(answer: httpx.Response) -> Any:
    """An answer without what no two answers share: times, and ids that are made for each."""
    headers = {name: value for name, value in answer.headers.items() if name not in ("date", "content-length")}
    streams = "event-stream" in headers["content-type"]
    blocks = answer.text.removesuffix("\n\n").split("\n\n") if streams else [answer.text]
    data = [block.rpartition("data: ")[2] for block in blocks]
    bodies = [json.loads(line) if line.startswith("{") else line for line in data]
    for body in bodies:
        for part in (body, body.get("message")) if isinstance(body, dict) else ():
            for name in ("id", "created") if isinstance(part, dict) else ():
                part.pop(name, None)
    return answer.status_code, headers, bodies


def test_both_ways_answer_alike(world: World) -> None:
    with running_gateway(world, FakeAgent()) as gateway:
        for path, body in VALID:
            direct = _shown(_ask(gateway, DIRECT, path, body))
            assert direct[0] == 200, (path, body, direct)
            assert direct == _shown(_ask(gateway, FRAMEWORK, path, body)), (path, body)


def test_both_ways_refuse_alike(world: World) -> None:
    with running_gateway(world, FakeAgent()) as gateway:
        for path, body in INVALID:
            direct = _shown(_ask(gateway, DIRECT, path, body))
            assert 400 <= direct[0] < 500, (path, body, direct)
            assert direct == _shown(_ask(gateway, FRAMEWORK, path, body)), (path, body)


def test_a_body_with_very_many_faults_is_read_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"messages": USER} | {str(number): number for number in range(FAULTS_MAX + 1)}
    with running_gateway(world, FakeAgent(), request_body_bytes_max=2**20) as gateway:
        framework = _shown(_ask(gateway, FRAMEWORK, CHAT, body))
        monkeypatch.setattr("controlplane.api.direct._again", None)  # what hands a body on to the framework
        direct = _shown(_ask(gateway, DIRECT, CHAT, body))
        assert direct == framework
        assert direct[0] == 400
        assert direct[2][0]["error"]["message"] == f"the body has {FAULTS_MAX + 1} faults"


def test_keys_are_checked_on_both_ways(world: World) -> None:
    with world.database.transaction() as session:
        files = make_key(session, name="f", role=Role.CLIENT, tenant="acme", scopes=[KeyScope.FILES]).secret
        other = make_key(session, name="o", role=Role.CLIENT, tenant="acme", models=["another"]).secret
    refused = {"": 401, "Bearer": 401, "Basic abc": 401, "Bearer wrong": 401, f"Bearer {files}": 403}
    refused |= {f"Bearer {world.key(Role.VIEWER)}": 403, f"Bearer {other}": 404}
    with running_gateway(world, FakeAgent()) as gateway:
        for authorization, status in refused.items():
            direct = _ask(gateway, DIRECT, CHAT, {"messages": USER}, authorization=authorization)
            framework = _ask(gateway, FRAMEWORK, CHAT, {"messages": USER}, authorization=authorization)
            assert direct.status_code == status, (authorization, direct.text)
            assert _shown(direct) == _shown(framework)
        headers = {"authorization": "bearer  " + gateway.secret, "x-api-key": "unused"}
        assert _ask(gateway, DIRECT, CHAT, {"messages": USER}, **headers).status_code == 200
        headers = {"authorization": "Basic abc", "x-api-key": gateway.secret}
        assert _ask(gateway, DIRECT, CHAT, {"messages": USER}, **headers).status_code == 200


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_the_type_of_a_body_may_be_spelled_in_several_ways(world: World, kind: str) -> None:
    with running_gateway(world, FakeAgent()) as gateway:
        assert _ask(gateway, kind, CHAT, {"messages": USER}).status_code == 200
        assert _ask(gateway, "text/plain", CHAT, {"messages": USER}).status_code == 400


def test_a_body_that_arrives_in_pieces_is_read_whole_on_both_ways(world: World) -> None:
    text = json.dumps({"model": "tide", "messages": USER}).encode()
    with running_gateway(world, FakeAgent()) as gateway:
        for kind in (DIRECT, FRAMEWORK):
            pieces = (text[start : start + 10] for start in range(0, len(text), 10))
            assert gateway.http.post(CHAT, content=pieces, headers={"content-type": kind}).status_code == 200
