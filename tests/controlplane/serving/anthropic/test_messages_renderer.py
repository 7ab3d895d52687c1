"""Messages, whole and as events, in Anthropic's order."""

import json
from typing import Any

import pytest

from controlplane.errors import NodeError
from controlplane.serving.answers import ChoiceAnswer
from controlplane.serving.anthropic.renderer import MessagesRenderer
from controlplane.serving.fan_out import TokenUsage
from controlplane.serving.query import Query
from dataplane.protocol.messages import Finished, Generate, Started, StreamEvent, Token, ToolCallDelta
from dataplane.protocol.tiers import Tier

STARTED = Started(prompt_tokens=7)
USAGE = TokenUsage(prompt_tokens=7, completion_tokens=5, cached_tokens=4, reasoning_tokens=2)
CALLS = (
    Token(text="", reasoning="h"),
    Token(text="", reasoning="m"),
    Token(text="so"),
    Token(text="", tool_calls=(ToolCallDelta(index=0, name="look"),)),
    Token(text="", tool_calls=(ToolCallDelta(index=0, arguments='{"a"'),)),
    Token(text="", tool_calls=(ToolCallDelta(index=0, arguments=":1}"), ToolCallDelta(index=1, name="hear"))),
)


def a_renderer() -> MessagesRenderer:
    message = Generate(request_id="", instance_id="", model="tide", tier=Tier.IW_N)
    return MessagesRenderer(Query(prompts=(message,)), answer_id="1")


def finished(reason: Any = "stop") -> Finished:
    return Finished(finish_reason=reason, prompt_tokens=7, completion_tokens=5, cached_tokens=4)


def parsed(written: bytes) -> list[dict[str, Any]]:
    events = []
    for event in written.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        events.append(body)
    return events


def streamed(*events: StreamEvent) -> list[dict[str, Any]]:
    renderer = a_renderer()
    written = renderer.begin() + renderer.events(0, [STARTED])
    for event in events:
        written += renderer.events(0, [event])
    return parsed(written + renderer.end(USAGE))


def whole(*events: StreamEvent) -> dict[str, Any]:
    answer = ChoiceAnswer()
    for event in events:
        answer.note(event)
    return a_renderer().whole([answer], USAGE)


def test_text() -> None:
    told = streamed(Token(text="the "), Token(text=""), STARTED, Token(text="tide"), finished())
    assert [each["type"] for each in told] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert told[0]["message"]["usage"]["input_tokens"] == 7
    assert told[0]["message"]["content"] == []
    assert told[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    usage = {"input_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 0, "output_tokens": 5}
    assert told[-2]["usage"] == usage
    message = whole(Token(text="the "), Token(text="tide"), finished())
    assert message["content"] == [{"type": "text", "text": "the tide", "citations": None}]
    assert message["usage"] == usage | {"service_tier": "standard"}
    assert message["id"] == told[0]["message"]["id"]


def test_thinking_text_and_tools_are_blocks() -> None:
    told = streamed(*CALLS, finished("tool_calls"))
    starts = [each for each in told if each["type"] == "content_block_start"]
    assert [each["content_block"]["type"] for each in starts] == ["thinking", "text", "tool_use", "tool_use"]
    assert [each["index"] for each in starts] == [0, 1, 2, 3]
    stops = [each["index"] for each in told if each["type"] == "content_block_stop"]
    assert stops == [0, 1, 2, 3]
    json_text = "".join(each["delta"].get("partial_json", "") for each in told if each["type"] == "content_block_delta")
    assert json_text == '{"a":1}'
    message = whole(*CALLS, finished("tool_calls"))
    thinking, text, look, hear = message["content"]
    assert (thinking["thinking"], text["text"]) == ("hm", "so")
    assert (look["name"], look["input"], hear["name"], hear["input"]) == ("look", {"a": 1}, "hear", {})
    assert [look["id"], hear["id"]] == [each["content_block"]["id"] for each in starts[2:]]
    assert message["stop_reason"] == told[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(("reason", "told"), [("length", "max_tokens"), ("stop", "end_turn")])
def test_an_answer_whose_call_was_cut_asks_for_no_use_of_a_tool(reason: str, told: str) -> None:
    cut = CALLS[:5]
    assert streamed(*cut, finished(reason))[-2]["delta"]["stop_reason"] == told
    message = whole(*cut, finished(reason))
    assert (message["stop_reason"], message["content"][-1]["input"]) == (told, {})


def test_an_empty_answer_has_no_blocks() -> None:
    assert [each["type"] for each in streamed(finished())] == ["message_start", "ping", "message_delta", "message_stop"]
    assert whole(finished())["content"] == []


def test_a_failure() -> None:
    [told] = parsed(a_renderer().failure(NodeError("the node is gone", status=502)))
    assert told["error"] == {"type": "api_error", "message": "the node is gone"}
