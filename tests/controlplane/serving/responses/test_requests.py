"""Bodies of `POST /v1/responses`: what they become for nodes, and what is refused by name."""

from typing import Any

import msgspec
import pytest
from openai.types.responses import Response, ResponseItem
from pydantic import TypeAdapter, ValidationError

from controlplane.errors import InvalidValueError
from controlplane.serving.openai_requests import first_fault
from controlplane.serving.responses.items import written
from controlplane.serving.responses.requests import ResponseRequest
from dataplane.protocol.messages import ChatMessage, Constraint, Generate, Tool, ToolCall
from dataplane.protocol.tiers import Tier

LOOK = {"type": "function", "name": "look", "description": "d", "parameters": {"type": "object"}, "strict": True}
HEAR = {"type": "function", "name": "hear"}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"a":1}'}
HI = {"role": "user", "content": "hi"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "seen"}


def request(**body: Any) -> ResponseRequest:
    return ResponseRequest.model_validate({"model": "tide", "input": "hi"} | body)


def message(**body: Any) -> Generate:
    return asked(request(**body))


def asked(body: ResponseRequest, earlier: Any = ()) -> Generate:
    [only] = body.query(tier=Tier.IW_N, earlier=earlier).prompts
    return only


def text(content: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": content}


def test_a_text() -> None:
    found = message(instructions="be brief", temperature=0.5, top_p=0.9, max_output_tokens=9)
    assert found.messages == (ChatMessage(role="system", content="be brief"), ChatMessage(role="user", content="hi"))
    sampling = found.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.logprobs) == (0.5, 0.9, 9, None)
    assert (found.tools, found.constraint, found.template) == (None, None, {})


def test_a_conversation_with_tools() -> None:
    found = message(
        input=[
            {"role": "developer", "content": "be brief"},
            {"type": "message", "role": "user", "content": [text("what "), text("now")]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "id": "m", "role": "assistant", "content": [text("I look", "output_text")]},
            CALL,
            CALL | {"call_id": "c2"},
            OUTPUT,
            OUTPUT | {"call_id": "c2", "output": [{"type": "input_text", "text": "seen too"}]},
            {"role": "assistant", "content": "first"},
            {"role": "assistant", "content": "second"},
        ]
    )  # fmt: skip
    assert found.messages == (
        ChatMessage(role="system", content="be brief"),
        ChatMessage(role="user", content="what now"),
        ChatMessage(
            role="assistant",
            content="I look",
            reasoning="hm",
            tool_calls=(
                ToolCall(id="c1", name="look", arguments='{"a":1}'),
                ToolCall(id="c2", name="look", arguments='{"a":1}'),
            ),
        ),
        ChatMessage(role="tool", content="seen", name="look", tool_call_id="c1"),
        ChatMessage(role="tool", content="seen too", name="look", tool_call_id="c2"),
        ChatMessage(role="assistant", content="first"),
        ChatMessage(role="assistant", content="second"),
    )


def test_an_input_has_so_many_items() -> None:
    with pytest.raises(ValidationError, match="at most 2048 items, not 2049"):
        request(input=[{"role": "user", "content": "hi"}] * 2049)


def test_instructions_that_follow_each_other_are_one_message() -> None:
    found = message(instructions="be brief", input=[{"role": "developer", "content": "be kind"}, HI])
    assert [(each.role, each.content) for each in found.messages or ()] == [
        ("system", "be brief\n\nbe kind"),
        ("user", "hi"),
    ]


def test_earlier_items_come_before_the_input() -> None:
    earlier = written(request(input=[CALL]).input, "resp_0")
    found = asked(request(input=[OUTPUT]), earlier)
    assert [each.role for each in found.messages or ()] == ["assistant", "tool"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", ("auto", None, ["look", "hear"])),
        ("none", ("none", None, ["look", "hear"])),
        ("required", ("required", None, ["look", "hear"])),
        ({"type": "function", "name": "hear"}, ("named", "hear", ["look", "hear"])),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "hear"}]},
            ("required", None, ["hear"]),
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, ("none", None, [])),
    ],
)
def test_tool_choices(choice: Any, expected: Any) -> None:
    body = request(tools=[LOOK, HEAR], tool_choice=choice, parallel_tool_calls=False)
    use = asked(body).tools
    assert use is not None
    assert (use.choice, use.name, [tool.name for tool in use.tools]) == expected
    assert not use.parallel
    head = body.head(Tier.IW_F) | {"id": "resp_1", "created_at": 1}
    assert head["tool_choice"] == choice
    Response.model_validate(head)


def test_a_tool() -> None:
    use = message(tools=[LOOK]).tools
    assert use is not None
    assert use.tools == (Tool(name="look", description="d", parameters={"type": "object"}, strict=True),)


def test_formats_and_effort() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = request(
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}, "verbosity": "medium"},
        reasoning={"effort": "low", "summary": "auto"},
    )
    found = asked(body)
    assert found.constraint == Constraint(kind="json_schema", definition=msgspec.json.encode(schema).decode())
    assert found.template == {"reasoning_effort": "low"}
    head = body.head(Tier.IW_F) | {"id": "resp_1", "created_at": 1}
    assert head["text"]["format"]["schema"] == schema
    assert head["service_tier"] == "priority"
    assert message(text={"format": {"type": "json_object"}}).constraint == Constraint(kind="json_object")
    assert message(text={"format": {"type": "text"}}, reasoning={"effort": "none"}).template["enable_thinking"] is False


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"top_logprobs": 3}, 3),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["reasoning.encrypted_content"]}, None),
    ],
)
def test_log_probabilities(body: Any, expected: Any) -> None:
    assert message(**body).sampling.logprobs == expected


def test_what_means_nothing_here_is_accepted() -> None:
    message(
        background=False, truncation="disabled", conversation=None, prompt=None, max_tool_calls=3, metadata={"a": "b"},
        user="u", safety_identifier="s", prompt_cache_key="k", prompt_cache_retention="in_memory", service_tier="fast",
        stream_options={"include_obfuscation": False}, stream=True,
    )  # fmt: skip
    assert request(service_tier="fast").tier() == Tier.IW_F


@pytest.mark.parametrize(
    ("param", "body", "words"),
    [
        ("tools.1", {"tools": [LOOK, {"type": "web_search"}]}, "'web_search'"),
        ("tools.0", {"tools": [{"type": "mcp", "server_label": "x"}]}, "'mcp'"),
        ("tool_choice", {"tools": [LOOK], "tool_choice": {"type": "file_search"}}, "'file_search'"),
        ("tool_choice", {"tools": [LOOK], "tool_choice": {"type": "function", "name": "no"}}, "no tool 'no'"),
        ("tool_choice", {"tool_choice": "required"}, "needs tools"),
        ("tools", {"tools": [LOOK, LOOK]}, "'look'"),
        ("input.0.content", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image'"),
        ("input", {"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference'"),
        ("input", {"input": [OUTPUT]}, "call_id 'c1'"),
        ("input", {"input": []}, "at least 1"),
        ("input.0", {"input": ["hi"]}, "an item is an object"),
        ("input.0.content", {"input": [{"role": "user"}]}, "required"),
        ("input.0.arguments", {"input": [{k: v for k, v in CALL.items() if k != "arguments"}]}, "required"),
        ("conversation", {"conversation": "conv_1"}, "conversation"),
        ("prompt", {"prompt": {"id": "pmpt_1"}}, "prompts by id"),
        ("background", {"background": True, "store": False}, "needs store"),
        ("truncation", {"truncation": "auto"}, "never cut"),
        ("include.0", {"include": ["file_search_call.results"]}, "include"),
        ("reasoning.summary", {"reasoning": {"summary": "detailed"}}, "summarized"),
        ("text.verbosity", {"text": {"verbosity": "low"}}, "verbosity"),
        ("text.format", {"text": {"format": {"type": "json_schema", "name": "n"}}}, "schema"),
        ("temperature", {"temperature": 3}, "2"),
        ("top_logprobs", {"top_logprobs": 21}, "20"),
        ("metadata", {"metadata": {str(n): "v" for n in range(17)}}, "16"),
        ("frequency_penalty", {"frequency_penalty": 1}, "no such field"),
        ("instructions", {"instructions": "\ud800"}, "surrogate"),
        ("tools.0", {"tools": [{"type": "\ud800"}]}, "not '?'"),
        ("input", {"input": [{"type": "\ud800"}]}, "items"),
    ],
)
def test_refusals_name_their_field(param: str, body: Any, words: str) -> None:
    try:
        message(**body)
    except ValidationError as fault:
        error: InvalidValueError = first_fault(fault.errors()[0])
    except InvalidValueError as refused:
        error = refused
    else:
        pytest.fail("it was accepted")
    assert error.param == param
    assert words in error.message


def test_items_are_listed_as_clients_read_them() -> None:
    items: Any = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        CALL,
        OUTPUT,
    ]
    listed = written(request(input=items).input, "resp_1")
    for each in listed:
        assert TypeAdapter(ResponseItem).validate_python(each).type == each["type"]
    assert len({each["id"] for each in listed}) == len(items)
    again = request(input=listed)
    assert written(again.input, "resp_1") == listed
