"""Bodies of `POST /v1/messages`: what they become for nodes, and what is refused by name."""

from typing import Any

import pytest
from pydantic import ValidationError

from controlplane.errors import InvalidValueError
from controlplane.serving.anthropic.requests import MessagesRequest
from controlplane.serving.openai_requests import first_fault
from dataplane.protocol.messages import ChatMessage, Constraint, Generate, Tool, ToolCall
from dataplane.protocol.tiers import Tier

LOOK = {"name": "look", "description": "d", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
HEAR = {"type": "custom", "name": "hear", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "seen"}
HI = {"role": "user", "content": "hi"}


def request(**body: Any) -> MessagesRequest:
    return MessagesRequest.model_validate({"model": "tide", "max_tokens": 9, "messages": [HI]} | body)


def asked(**body: Any) -> Generate:
    [only] = request(**body).query(tier=Tier.IW_N).prompts
    return only


def test_a_text() -> None:
    found = asked(system="be brief", temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["END"])
    assert found.messages == (ChatMessage(role="system", content="be brief"), ChatMessage(role="user", content="hi"))
    sampling = found.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 3, 9)
    assert sampling.stop == ("END",)
    assert (found.tools, found.constraint, found.template) == (None, None, {})


def test_a_conversation_with_tools() -> None:
    found = asked(
        system=[{"type": "text", "text": "one", "cache_control": {}}, {"type": "text", "text": "two"}],
        tools=[LOOK, HEAR],
        messages=[
            HI,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look"},
                    USE,
                    USE | {"id": "t2"},
                ],
            },
            {
                "role": "user",
                "content": [
                    RESULT,
                    RESULT | {"tool_use_id": "t2", "content": [{"type": "text", "text": "too"}], "is_error": True},
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
    )  # fmt: skip
    calls = tuple(ToolCall(id=name, name="look", arguments='{"a":1}') for name in ("t1", "t2"))
    assert found.messages == (
        ChatMessage(role="system", content="one\ntwo"),
        ChatMessage(role="user", content="hi"),
        ChatMessage(role="assistant", content="I look", reasoning="hm", tool_calls=calls),
        ChatMessage(role="tool", content="seen", name="look", tool_call_id="t1"),
        ChatMessage(role="tool", content="too", name="look", tool_call_id="t2"),
        ChatMessage(role="user", content="and?"),
    )
    assert found.tools is not None
    assert found.tools.tools[0] == Tool(name="look", description="d", parameters={"type": "object"})


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", None, True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", None, False)),
        ({"type": "any"}, ("required", None, True)),
        ({"type": "tool", "name": "hear"}, ("named", "hear", True)),
        ({"type": "none"}, ("none", None, True)),
    ],
)
def test_tool_choices(choice: Any, expected: Any) -> None:
    use = asked(tools=[LOOK, HEAR], tool_choice=choice).tools
    assert use is not None
    assert (use.choice, use.name, use.parallel) == expected


def test_thinking_effort_and_format() -> None:
    schema = {"type": "object"}
    found = asked(
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": schema}},
    )
    assert found.template == {"enable_thinking": True, "reasoning_effort": "high"}
    assert found.constraint == Constraint(kind="json_schema", definition='{"type":"object"}')
    assert asked(thinking={"type": "disabled"}).template == {"enable_thinking": False}


def test_tiers() -> None:
    tiers = {"auto": Tier.IW_N, "standard_only": Tier.IW_N, "priority": Tier.IW_F, "flex": Tier.NIW, None: Tier.IW_N}
    assert {name: request(service_tier=name).tier() for name in tiers} == tiers


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("param", "body", "words"),
    [
        ("messages.0.content", said({"type": "image", "source": {}}), "'image'"),
        ("messages.0.content", said({"type": "document", "source": {}}), "'document'"),
        ("messages.0.content.0", said({"text": "no type"}), "an object with a type"),
        ("messages.0.content.0.content", said(RESULT | {"content": [{"type": "image"}]}), "'image'"),
        ("messages.0.content", said(RESULT), "no tool_use 't1'"),
        ("messages.0.content", said(USE), "assistant"),
        ("messages", said({"type": "text", "text": "The"}, role="assistant"), "cannot be continued"),
        ("messages", {"messages": []}, "at least 1"),
        ("messages.0.role", {"messages": [{"role": "system", "content": "x"}]}, "'user' or 'assistant'"),
        ("tools.0", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
        ("tools", {"tools": [LOOK, LOOK]}, "'look'"),
        ("tool_choice", {"tools": [LOOK], "tool_choice": {"type": "tool", "name": "no"}}, "no tool 'no'"),
        ("tool_choice", {"tool_choice": {"type": "any"}}, "needs tools"),
        ("tool_choice", {"tool_choice": {"type": "tool"}}, "name"),
        ("max_tokens", {"max_tokens": None}, "required"),
        ("temperature", {"temperature": 1.1}, "1"),
        ("stop_sequences", {"stop_sequences": ["x"] * 17}, "16"),
        ("container", {"container": "c"}, "not supported"),
        ("mcp_servers", {"mcp_servers": [{}]}, "not supported"),
        ("thinking.display", {"thinking": {"type": "adaptive", "display": "omitted"}}, "in full"),
        ("seed", {"seed": 1}, "no such field"),
    ],
)
def test_refusals_name_their_field(param: str, body: Any, words: str) -> None:
    try:
        asked(**body)
    except ValidationError as fault:
        error: InvalidValueError = first_fault(fault.errors()[0])
    except InvalidValueError as refused:
        error = refused
    else:
        pytest.fail("it was accepted")
    assert error.param == param
    assert words in error.message
