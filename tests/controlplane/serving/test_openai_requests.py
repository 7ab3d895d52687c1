"""Bodies of chat completions and completions: what they become, and what is refused by name."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from controlplane.errors import InvalidValueError
from controlplane.serving.anthropic.requests import MESSAGES
from controlplane.serving.endpoints import BATCH_ENDPOINTS, ENDPOINTS, parse_json, queued_query, stored_query
from controlplane.serving.openai_fields import PARTS_MAX
from controlplane.serving.openai_requests import CHAT, COMPLETIONS
from controlplane.serving.pooling_requests import RERANK, SCORE
from controlplane.serving.query import Query
from controlplane.serving.responses.requests import RESPONSES
from dataplane.protocol.messages import Generate, Sampling
from dataplane.protocol.tiers import Tier

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    COMPLETIONS: {"model": "m", "prompt": "x"},
}
FUNCTION = {"type": "function", "function": {"name": "f"}}
CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
USER = {"role": "user", "content": "x"}


def query(endpoint: str, **fields: Any) -> Query:
    return parse_json(endpoint, msgspec.json.encode(BODIES[endpoint] | fields)).query(tier=Tier.IW_N)


@pytest.mark.parametrize(
    ("endpoint", "fields", "param", "words"),
    [
        (CHAT, {"n": 9}, "n", "less than or equal to 8"),
        (CHAT, {"tools": [{"type": "custom"}]}, "tools.0", "'custom'"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools.0.function", "required"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
        (CHAT, {"tools": [FUNCTION, FUNCTION]}, "tools", "name of its own"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]}, "tools", "128"),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": "y" * 70_000}}}]},
            "tools.0.function.parameters",
            "at most 65536 bytes",
        ),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "needs tools"),
        (CHAT, {"tools": [FUNCTION], "tool_choice": "perhaps"}, "tool_choice", "'none', 'auto', 'required'"),
        (
            CHAT,
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "no tool 'g'",
        ),
        (CHAT, {"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format", "'json_schema'"),
        (CHAT, {"response_format": "json"}, "response_format", "an object"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "required",
        ),
        (CHAT, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex, choice"),
        (CHAT, {"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
        (CHAT, {"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not valid JSON"),
        (CHAT, {"structured_outputs": {"xml": "{"}}, "structured_outputs.xml", "no such field"),
        (CHAT, {"guided_regex": "a", "guided_json": {}}, "guided_regex", "guided_json, guided_regex"),
        (CHAT, {"messages": [USER, CALL, {"role": "tool", "content": "1"}]}, "messages.2.tool_call_id", "is missing"),
        (
            CHAT,
            {"messages": [USER, CALL, {"role": "tool", "tool_call_id": "c2", "content": "1"}]},
            "messages.2.tool_call_id",
            "'c2' is unknown",
        ),
        (CHAT, {"messages": [USER | {"tool_calls": CALL["tool_calls"]}]}, "messages.0.tool_calls", "'assistant'"),
        (CHAT, {"chat_template_kwargs": {"a-b": 1}}, "chat_template_kwargs", "'a-b'"),
        (CHAT, {"reasoning_effort": "more"}, "reasoning_effort", "'high'"),
        (COMPLETIONS, {"prompt": []}, "prompt", "a string, token ids"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt", "a string, token ids"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt", "a string, token ids"),
        (COMPLETIONS, {"prompt": ["a"] * 33}, "prompt", "at most 32 prompts"),
        (COMPLETIONS, {"prompt": ["a"] * 32, "n": 3}, "n", "at most 64 answers"),
        (COMPLETIONS, {"prompt": ["a"] * 16, "best_of": 5}, "best_of", "at most 64 answers"),
        (COMPLETIONS, {"n": 2, "best_of": 1}, "best_of", "under n"),
        (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of", "stream"),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo", "log probabilities of prompts"),
        (COMPLETIONS, {"echo": True, "prompt": [1]}, "echo", "prompts of text"),
        (COMPLETIONS, {"suffix": "x"}, "suffix", "not supported"),
    ],
)
def test_refusals_name_their_field(endpoint: str, fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidValueError) as refused:
        query(endpoint, **fields)
    assert refused.value.param == param
    assert words in refused.value.message
    assert refused.value.message.startswith(f"{param}: ")


PART, TURN = {"type": "text", "text": ""}, {"role": "user", "content": "x"}
FAULTY_LISTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": [{}] * 20}] * 20}),
    (CHAT, {"messages": [{"role": "user", "content": [1] * 20}] * 20}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}] * 20}] * 20}),
    (CHAT, {"messages": [TURN], "tools": [{}] * 20}),
    (MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": [{}] * 20}] * 20}),
    (MESSAGES, {"max_tokens": 1, "messages": [TURN], "system": [{}] * 20, "tools": [{}] * 20}),
    (RESPONSES, {"input": [{"role": "user", "content": [{}] * 20}] * 20}),
    (RESPONSES, {"input": "x", "include": ["y"] * 16, "tools": [{}] * 20}),
    (RERANK, {"query": "q", "documents": [{}] * 20}),
    (SCORE, {"text_1": [1] * 20, "text_2": [1] * 20}),
]


@pytest.mark.parametrize(("endpoint", "fields"), FAULTY_LISTS)
def test_lists_are_read_up_to_their_first_fault(endpoint: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        ENDPOINTS[endpoint].request.model_validate_json(json.dumps({"model": "m"} | fields))
    assert refused.value.error_count() <= 6, refused.value.errors()[:10]


@pytest.mark.parametrize(
    ("endpoint", "fields", "field"),
    [
        (CHAT, lambda parts: {"messages": [TURN, {"role": "user", "content": parts}]}, "messages.1.content"),
        (MESSAGES, lambda parts: {"max_tokens": 1, "messages": [{"role": "user", "content": parts}]},
         "messages.0.content"),
        (RESPONSES, lambda parts: {"input": [{"role": "user", "content": parts}]}, "input.0.content"),
    ],
)  # fmt: skip
def test_a_message_has_so_many_parts(endpoint: str, fields: Callable[[list[Any]], dict[str, Any]], field: str) -> None:
    part = PART | ({"type": "input_text"} if endpoint == RESPONSES else {})
    read = ENDPOINTS[endpoint].request.model_validate_json
    read(json.dumps({"model": "m"} | fields([part] * PARTS_MAX)))
    too_many: list[list[Any]] = [[part] * (PARTS_MAX + 1), [{}] * 100_000]
    for more in too_many:
        with pytest.raises(InvalidValueError) as refused:
            parse_json(endpoint, json.dumps({"model": "m"} | fields(more)).encode())
        assert refused.value.message == f"{field}: at most {PARTS_MAX} parts, not {len(more)}"
        assert refused.value.param == field


@pytest.mark.parametrize("number", ["1e400", "NaN", "-Infinity"])
@pytest.mark.parametrize(
    ("param", "fields"),
    [
        (
            "response_format.json_schema.schema",
            '{"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"minimum": %s}}}}',
        ),
        ("structured_outputs.json", '{"structured_outputs": {"json": {"enum": [1, {"a": [%s]}]}}}'),
        (
            "tools.0.function.parameters",
            '{"tools": [{"type": "function", "function": {"name": "f", "parameters": {"maximum": %s}}}]}',
        ),
        ("chat_template_kwargs", '{"chat_template_kwargs": {"a": %s}}'),
    ],
)
def test_a_number_that_is_not_finite_is_refused_and_not_passed_on_as_null(param: str, fields: str, number: str) -> None:
    body = json.dumps(BODIES[CHAT] | json.loads(fields % '"here"')).replace('"here"', number)
    with pytest.raises(InvalidValueError, match="not finite") as refused:
        parse_json(CHAT, body.encode())
    assert refused.value.param == param


@pytest.mark.parametrize("endpoint", list(BODIES))
def test_a_plain_request_is_stored_as_its_message(endpoint: str) -> None:
    asked = query(endpoint)
    stored = stored_query(asked).decode()
    assert msgspec.json.decode(stored, type=Generate) == asked.prompts[0], "which older versions read"
    assert queued_query(endpoint, stored) == asked
    assert asked.prompts[0].sampling in (Sampling(), Sampling(max_tokens=16))


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        (CHAT, {"n": 2}),
        (CHAT, {"tools": [FUNCTION], "logprobs": True, "response_format": {"type": "json_object"}}),
        (CHAT, {"messages": [USER, CALL, {"role": "tool", "tool_call_id": "c1", "content": "1"}]}),
        (COMPLETIONS, {"prompt": ["a", "b"], "best_of": 2}),
        (COMPLETIONS, {"echo": True}),
        (COMPLETIONS, {"prompt": [[1], [2]]}),
    ],
)
def test_what_is_stored_is_read_back(endpoint: str, fields: dict[str, Any]) -> None:
    asked = query(endpoint, **fields)
    assert queued_query(endpoint, stored_query(asked).decode()) == asked


def test_a_body_that_an_older_version_stored_is_read() -> None:
    body = msgspec.json.encode(BODIES[COMPLETIONS]).decode()
    assert queued_query(COMPLETIONS, body).prompts[0].prompt == "x"


def test_only_what_is_given_goes_to_nodes() -> None:
    assert msgspec.json.encode(query(CHAT).prompts[0].sampling) == b"{}"
    assert msgspec.json.encode(query(CHAT, temperature=0.5).prompts[0].sampling) == b'{"temperature":0.5}'


def test_batch_endpoints_are_those_of_the_table() -> None:
    assert {CHAT, COMPLETIONS} <= set(BATCH_ENDPOINTS) <= set(ENDPOINTS)
