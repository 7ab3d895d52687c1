"""The interactive gateway before nodes that answer well, as the official client sees it."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from controlplane.bodies import FAULTS_MAX
from controlplane.store.tables import Role
from tests.controlplane.api.gateway import Gateway, assert_error, running_gateway
from tests.controlplane.world import PATIENCE_S, FakeAgent, World, until


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent()


@pytest.fixture
def gateway(world: World, agent: FakeAgent) -> Iterator[Gateway]:
    with running_gateway(world, agent) as gateway:
        yield gateway


def test_chat_whole_and_streamed(gateway: Gateway, agent: FakeAgent) -> None:
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    whole = gateway.client.chat.completions.create(model="tide", messages=messages, stop="END", max_tokens=9, seed=5)
    assert whole.choices[0].message.content == "the tide turns"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (7, 3, 10)
    asked = agent.asked[0]
    assert [(m.role, m.content) for m in asked.messages or ()] == [("system", "be brief"), ("user", "hi")]
    assert (asked.sampling.stop, asked.sampling.max_tokens, asked.sampling.seed, asked.tier) == (("END",), 9, 5, "IW-N")
    chunks = list(
        gateway.client.chat.completions.create(
            model="tide", messages=messages, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "the tide turns"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 10
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_whole_and_streamed(gateway: Gateway, agent: FakeAgent) -> None:
    assert gateway.client.completions.create(model="tide", prompt="hi").choices[0].text == "the tide turns"
    assert (agent.asked[0].prompt, agent.asked[0].sampling.max_tokens) == ("hi", 16)
    gateway.client.completions.create(model="tide", prompt=[1, 2, 3])
    assert agent.asked[1].prompt_tokens == (1, 2, 3)
    chunks = list(gateway.client.completions.create(model="tide", prompt=["hi"], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "the tide turns"
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_ends_with_done_and_carries_no_usage_unasked(gateway: Gateway) -> None:
    answer = gateway.chat(stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-tidepool-region"] == "us-east"
    assert answer.text.endswith("data: [DONE]\n\n")
    assert '"usage"' not in answer.text


def test_service_tiers(gateway: Gateway, agent: FakeAgent) -> None:
    rows = [
        ("priority", "priority", "IW-F"),
        ("default", "default", "IW-N"),
        ("auto", "default", "IW-N"),
        ("flex", "flex", "NIW"),
        (None, "default", "IW-N"),
    ]
    for asked, served, tier in rows:
        assert gateway.chat(service_tier=asked).json()["service_tier"] == served
        assert agent.asked[-1].tier == tier


def test_flex_needs_spare_room_and_others_do_not(world: World) -> None:
    with running_gateway(world, FakeAgent(), used=0.65, flex_wait_s=0.2) as gateway:
        refused = gateway.chat(429, service_tier="flex").json()["error"]
        assert refused["code"] == "resource_unavailable"
        assert "Batch API" in refused["message"]
        gateway.chat(200, service_tier="default")


REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"n": 9}, "n"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "pirate", "content": "ahoy"}]}, "messages.0.role"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"logit_bias": {"tide": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"stream": "perhaps"}, "stream"),
    ({"surprise": 1}, "surprise"),
    ({"model": ""}, "model"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages.0"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages.0.tool_calls.0.function"),
    ({"messages": [{"role": "tool", "content": "4"}]}, "messages.0.tool_call_id"),
    ({"n": True}, "n"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"min_tokens": 2**64}, "min_tokens"),
]
PLAIN_WORDS: list[tuple[dict[str, Any], str, str]] = [
    (
        {"tools": [{"type": "web_search"}]},
        "unsupported_parameter",
        "tools.0: only tools of type 'function' are supported, not 'web_search'",
    ),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice: 'required' needs tools"),
    ({"functions": [{}]}, "unsupported_parameter", "functions: the older functions are not supported; tools are"),
    ({"stop": ["a"] * 5}, "invalid_value", "stop: at most 4 stop strings, not 5"),
    ({"stop": [1]}, "invalid_value", "stop: a string, or a list of at most 4 strings"),
    ({"logit_bias": {"a": 2}}, "invalid_value", "logit_bias: keys are token ids: whole numbers as strings"),
    ({"top_logprobs": 2}, "invalid_value", "top_logprobs: top_logprobs needs logprobs: true"),
    (
        {"response_format": {"type": "xml"}},
        "invalid_value",
        "response_format: an object whose type is 'text', 'json_object' or 'json_schema'",
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a+"}},
        "invalid_value",
        "structured_outputs: one of response_format, structured_outputs may be given, not several",
    ),
    ({"surprise": 1}, "unknown_parameter", "surprise: there is no such field"),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "unsupported_parameter",
        "messages.0.content: only text is supported yet, not parts of type 'input_audio'",
    ),
]
NEUTRAL: list[dict[str, Any]] = [
    {"stop": None}, {"stop": []}, {"stop": ""}, {"stop": [""]}, {"tools": None}, {"tools": []}, {"tool_choice": "none"},
    {"tool_choice": "auto"}, {"functions": []}, {"function_call": "none"}, {"parallel_tool_calls": True},
    {"response_format": None}, {"response_format": {"type": "text"}}, {"logit_bias": None}, {"logit_bias": {}},
    {"n": None}, {"n": 1}, {"user": None}, {"user": ""}, {"metadata": None}, {"metadata": {}}, {"store": False},
    {"reasoning_effort": None}, {"frequency_penalty": 0}, {"presence_penalty": 0.0}, {"repetition_penalty": 1.0},
    {"logprobs": False}, {"top_logprobs": None}, {"max_tokens": None}, {"temperature": None},
    {"max_completion_tokens": None}, {"top_p": None}, {"seed": None}, {"stream": None}, {"stream_options": None},
    {"stream_options": {}}, {"stream_options": {"include_usage": None}}, {"stream_options": {"include_usage": False}},
    {"service_tier": None}, {"modalities": ["text"]}, {"ignore_eos": None}, {"audio": None},
    {"top_k": -1}, {"min_p": 0}, {"min_tokens": 0}, {"min_tokens": 3, "max_tokens": 3, "ignore_eos": True},
    {"a_field_of_tomorrow": None}, {"messages": [{"role": "user", "content": "hi", "name": None, "tool_calls": []}]},
]  # fmt: skip
"""What official and other clients send though their user asked for nothing."""


@pytest.mark.parametrize("stream", [False, True])
def test_what_means_the_default_is_taken_as_absent(gateway: Gateway, agent: FakeAgent, stream: bool) -> None:
    gateway.chat(stream=stream)
    plain = agent.asked[-1].sampling
    for changes in NEUTRAL:
        gateway.chat(**{"stream": stream} | changes)
        asked = agent.asked[-1].sampling
        assert (asked.stop, asked.temperature, asked.top_p) == (plain.stop, plain.temperature, plain.top_p), changes


def test_null_is_absent_in_completions_too(gateway: Gateway, agent: FakeAgent) -> None:
    names = ("echo", "best_of", "logprobs", "suffix", "max_tokens", "stop", "n", "logit_bias", "seed", "user")
    body = {"model": "tide", "prompt": "hi"} | dict.fromkeys(names)
    answer = gateway.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert agent.asked[-1].sampling.max_tokens == 16
    refused = gateway.http.post("/v1/completions", json=body | {"prompt": ["a", 2]})
    assert refused.status_code == 400
    assert assert_error(refused)["message"] == "prompt: a string, token ids, or a list of either"


def test_refusals_are_said_in_plain_words(gateway: Gateway) -> None:
    for changes, code, message in PLAIN_WORDS:
        error = gateway.chat(400, **changes).json()["error"]
        assert (error["code"], error["message"]) == (code, message)


def test_very_many_faults_are_not_described(gateway: Gateway) -> None:
    many = {str(number): 0 for number in range(FAULTS_MAX)}
    assert gateway.chat(400, **many).json()["error"]["code"] == "unknown_parameter"
    error = gateway.chat(400, **many, surprise=1).json()["error"]
    assert (error["message"], error["param"]) == (f"the body has {FAULTS_MAX + 1} faults", None)


def test_unknown_stream_options_are_ignored_with_a_warning(gateway: Gateway) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "off": False, "a\r\nx-evil: 1": True}
    answer = gateway.chat(stream=True, stream_options=options)
    assert answer.headers["x-tidepool-warning"] == "ignored: stream_options.continuous_usage_stats"
    assert "x-evil" not in answer.headers
    assert '"usage"' in answer.text
    assert "x-tidepool-warning" not in gateway.chat(stream=True, stream_options={"include_usage": True}).headers


def test_what_cannot_be_done_is_refused_by_name(gateway: Gateway, agent: FakeAgent) -> None:
    for changes, param in REFUSED:
        error = gateway.chat(400, **changes).json()["error"]
        assert (error["param"] or "").startswith(param or ""), (changes, error)
        assert (error["param"] is None) == (param is None), (changes, error)
        assert error["type"] == "invalid_request_error"
    assert agent.asked == []


@pytest.mark.parametrize(
    ("metadata", "param"),
    [
        ({str(number): "x" for number in range(17)}, "metadata"),
        ({"k" * 65: "x"}, "metadata."),
        ({"": "x"}, "metadata."),
        ({"k": "x" * 513}, "metadata.k"),
    ],
)
def test_metadata_is_as_large_as_openais(gateway: Gateway, metadata: dict[str, str], param: str) -> None:
    gateway.chat(200, metadata={f"{number:064}": "x" * 512 for number in range(16)})
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for path, body in (("chat/completions", chat), ("responses", {"input": "hi"})):
        answer = gateway.http.post(f"/v1/{path}", json={"model": "tide", "metadata": metadata} | body)
        assert answer.status_code == 400, path
        assert assert_error(answer)["param"].startswith(param)


def test_the_context_is_a_limit(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.client.completions.create(model="tide", prompt="x", max_tokens=4096)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")


def test_who_may_not(gateway: Gateway) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.AuthenticationError) as unknown:
        gateway.client_of("tp-client-wrong").chat.completions.create(model="tide", messages=messages)
    assert unknown.value.code == "invalid_api_key"
    body = {"model": "tide", "messages": messages}
    nobody = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert (nobody.status_code, nobody.headers["www-authenticate"]) == (401, "Bearer")
    assert_error(nobody)
    for role in (Role.VIEWER, Role.NODE):
        with pytest.raises(openai.PermissionDeniedError):
            gateway.role(role).chat.completions.create(model="tide", messages=messages)
    gateway.role(Role.OPERATOR).chat.completions.create(model="tide", messages=messages)


def test_unknown_things(gateway: Gateway) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        gateway.client.completions.create(model="llama", prompt="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    answer = gateway.http.post(
        "/v1/completions", json={"model": "tide", "prompt": "x"}, headers={"x-tidepool-region": "mars"}
    )
    assert (answer.status_code, assert_error(answer)["param"]) == (400, "x-tidepool-region")
    assert assert_error(gateway.http.get("/v1/nothing"))["code"] == "not_found"
    assert assert_error(gateway.http.get("/v1/chat/completions"))["code"] == "request_error"


def test_the_origin_is_preferred(world: World) -> None:
    east, west = FakeAgent(), FakeAgent()
    with running_gateway(world, east, west) as gateway:
        body = {"model": "tide", "prompt": "x"}
        answer = gateway.http.post("/v1/completions", json=body, headers={"x-tidepool-region": "us-west"})
        assert answer.headers["x-tidepool-region"] == "us-west"
        assert (len(east.asked), len(west.asked)) == (0, 1)


def test_bodies_over_the_limit(gateway: Gateway, agent: FakeAgent) -> None:
    long = b'{"model": "tide", "prompt": "' + b"x" * 70_000 + b'"}'
    headers = {"content-type": "application/json"}
    declared = gateway.http.post("/v1/completions", content=long, headers=headers)
    chunked = gateway.http.post("/v1/completions", content=iter([long[:40_000], long[40_000:]]), headers=headers)
    for answer in (declared, chunked):
        assert answer.status_code == 413, answer.text
        assert assert_error(answer)["code"] == "request_too_large"
    assert agent.asked == []
    gateway.chat()


def test_request_ids(gateway: Gateway, agent: FakeAgent) -> None:
    body = {"model": "tide", "prompt": "x"}
    given = gateway.http.post("/v1/completions", json=body, headers={"x-request-id": "my-id_1"})
    assert given.headers["x-request-id"] == "my-id_1"
    odd = gateway.http.post("/v1/completions", json=body, headers={"x-request-id": "a b"})
    assert odd.headers["x-request-id"].startswith("req_")
    agent.then = "held"
    statuses: list[int] = []

    def ask() -> None:
        answer = httpx.post(
            f"{gateway.url}/v1/completions",
            json=body,
            headers={"x-request-id": "same", "Authorization": f"Bearer {gateway.secret}"},
            timeout=PATIENCE_S,
        )
        statuses.append(answer.status_code)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: len(agent.asked) == 4)
    agent.freed.set()
    for thread in threads:
        thread.join()
    assert statuses == [200, 200]
    assert len({asked.request_id for asked in agent.asked}) == len(agent.asked), "a node takes each id once"


def test_demand_is_counted_where_it_arose(gateway: Gateway, world: World, redis_client: Redis) -> None:
    gateway.http.post(
        "/v1/completions", json={"model": "tide", "prompt": "x" * 400}, headers={"x-tidepool-region": "us-west"}
    )

    def counted() -> float:
        total = 0.0
        for key in redis_client.scan_iter("tidepool:demand:*"):
            counts = world.live.read_demand(int(str(key).rsplit(":", 1)[1])) or []
            total += sum(c.tokens for c in counts if c.kind == "IW" and c.endpoint.region == "us-west")
        return total

    until(lambda: counted() == 101)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    ["messages", "temperature", "top_p", "n", "stop", "seed", "stream", "stream_options", "max_tokens", "service_tier",
     "user", "logit_bias", "response_format", "metadata", "modalities", "store", "ignore_eos", "other"]
)  # fmt: skip


def test_no_body_is_answered_by_a_500(gateway: Gateway) -> None:
    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(changes=st.dictionaries(FIELDS, JSON, max_size=3))
    def check(changes: dict[str, Any]) -> None:
        body = {"model": "tide", "messages": [{"role": "user", "content": "hi"}]} | changes
        answer = gateway.http.post("/v1/chat/completions", content=_dumps(body))
        assert answer.status_code in {200, 400}, (body, answer.text)
        if answer.status_code == 400:
            assert_error(answer)

    check()


def _dumps(value: Any) -> bytes:
    import json  # noqa: PLC0415 - msgspec refuses NaN and lone surrogates, which is what is sent here

    return json.dumps(value).encode()


ODD_BODIES = [
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"{",
    b"\xff\xfe",
    b"[" * 60_000,
    b'{"model": "tiny", "messages": [{"role": "user", "content": [{"type": "\\ud800"}]}]}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "tool_choice": {"type": "\\ud800"}}',
    b'{"model": ' + b"1" * 5000 + b"}",
    rb'{"\ud800": 1}',
    rb'{"model": "\ud800", "messages": [{"role": "user", "content": "\ud800"}]}',
    rb'{"model": "\u0000", "messages": [{"role": "user", "content": "\u0000"}]}',
]


def test_odd_bytes_are_refused(gateway: Gateway) -> None:
    for body in ODD_BODIES:
        answer = gateway.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code in {400, 404}, (body[:20], answer.text)
        assert_error(answer)
