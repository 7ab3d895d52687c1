"""Events and objects of a response, each valid by the types of the official package."""

from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from controlplane.errors import NodeError
from controlplane.serving.responses.requests import ResponseRequest
from controlplane.serving.responses.writer import ResponseWriter
from dataplane.protocol.messages import (
    Finished,
    Started,
    StreamEvent,
    Token,
    TokenLogprob,
    ToolCallDelta,
    TopLogprob,
)
from dataplane.protocol.tiers import Tier

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
STARTED = Started(prompt_tokens=7)
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
ITEM_BEGINS, ITEM_ENDS = "response.output_item.added", "response.output_item.done"
PART_BEGINS, PART_ENDS = "response.content_part.added", "response.content_part.done"


def finished(reason: Any = "stop") -> Finished:
    return Finished(finish_reason=reason, prompt_tokens=7, completion_tokens=5, cached_tokens=4, reasoning_tokens=2)


def a_writer(**changes: Any) -> ResponseWriter:
    request = ResponseRequest.model_validate({"model": "tide", "input": "hi", "tools": [TOOL]} | changes)
    return ResponseWriter({"id": "resp_1", "created_at": 100, **request.head(Tier.IW_N)}, clock=lambda: 104.5)


def events_of(writer: ResponseWriter, *events: StreamEvent) -> list[dict[str, Any]]:
    """Every event to the end, valid and numbered from 0."""
    told = writer.begin()
    for event in (STARTED, *events):
        told += writer.write(event)
    told.append(writer.ended())
    check(told)
    return told


def check(told: list[dict[str, Any]]) -> None:
    assert [each["sequence_number"] for each in told] == list(range(len(told)))
    for each in told:
        read = EVENTS.validate_python(each)
        assert read.type == each["type"]
        if "response" in each:
            Response.model_validate(each["response"])


def kinds(told: list[dict[str, Any]]) -> list[str]:
    return [each["type"] for each in told]


def test_text() -> None:
    writer = a_writer()
    told = events_of(writer, Token(text="the "), Token(text=""), Token(text="tide"), finished())
    assert kinds(told) == [
        "response.created",
        "response.in_progress",
        ITEM_BEGINS,
        PART_BEGINS,
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        PART_ENDS,
        ITEM_ENDS,
        "response.completed",
    ]
    response = Response.model_validate(writer.response())
    assert told[-1]["response"] == writer.response()
    assert (response.status, response.output_text, response.completed_at) == ("completed", "the tide", 104)
    assert told[0]["response"]["output"] == []
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (7, 5, 12)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (4, 2)
    assert {each["item_id"] for each in told if "item_id" in each} == {response.output[0].id}


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    writer = a_writer()
    told = events_of(
        writer,
        Token(text="", reasoning="hm"),
        Token(text="so", reasoning="m"),
        Token(text="", tool_calls=(ToolCallDelta(index=0, name="look"),)),
        Token(text="", tool_calls=(ToolCallDelta(index=0, arguments='{"a"'), ToolCallDelta(index=0, arguments=":1}"))),
        Token(text="", tool_calls=(ToolCallDelta(index=1, name="look", arguments="{}"),)),
        finished("tool_calls"),
    )
    assert kinds(told)[2:] == [
        ITEM_BEGINS,
        PART_BEGINS,
        *["response.reasoning_text.delta"] * 2,
        "response.reasoning_text.done",
        PART_ENDS,
        ITEM_ENDS,
        ITEM_BEGINS,
        PART_BEGINS,
        "response.output_text.delta",
        "response.output_text.done",
        PART_ENDS,
        ITEM_ENDS,
        ITEM_BEGINS,
        *["response.function_call_arguments.delta"] * 2,
        "response.function_call_arguments.done",
        ITEM_ENDS,
        ITEM_BEGINS,
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        ITEM_ENDS,
        "response.completed",
    ]
    output = writer.response()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[0]["content"][0]["text"] == "hmm"
    assert (output[2]["name"], output[2]["arguments"]) == ("look", '{"a":1}')
    assert output[2]["call_id"] != output[3]["call_id"]
    assert len({item["id"] for item in output}) == 4
    added = [each for each in told if each["type"] == ITEM_BEGINS]
    assert [each["output_index"] for each in added] == [0, 1, 2, 3]
    assert [each["item"]["id"] for each in added] == [item["id"] for item in output]


def test_an_answer_that_is_cut_is_incomplete() -> None:
    writer = a_writer()
    told = events_of(writer, Token(text="the"), finished("length"))
    response = told[-1]["response"]
    assert told[-1]["type"] == "response.incomplete"
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"


def test_a_call_that_a_stop_cut_is_incomplete() -> None:
    writer = a_writer()
    call = Token(text="", tool_calls=(ToolCallDelta(index=0, name="look", arguments='{"a"'),))
    told = events_of(writer, call, finished("stop"))
    assert told[-1]["response"]["status"] == "completed"
    [item] = told[-1]["response"]["output"]
    assert (item["type"], item["status"]) == ("function_call", "incomplete")


def test_an_empty_answer_is_an_empty_message() -> None:
    writer = a_writer()
    events_of(writer, finished())
    [item] = writer.response()["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")


@pytest.mark.parametrize(
    ("status", "code"), [(502, "server_error"), (400, "invalid_prompt"), (429, "rate_limit_exceeded")]
)
def test_a_failure(status: int, code: str) -> None:
    writer = a_writer()
    told = writer.begin() + writer.write(STARTED) + writer.write(Token(text="the"))
    told += writer.failed(NodeError("the node is gone", status=status, code="node_lost"))
    check(told)
    failed, error = told[-2:]
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": code, "message": "the node is gone"}
    assert (error["type"], error["code"], error["message"]) == ("error", "node_lost", "the node is gone")
    assert error["error"]["message"] == "the node is gone"


def logprob(text: str) -> TokenLogprob:
    one = TopLogprob(token_id=1, text=text, utf8=tuple(text.encode()), logprob=-0.5)
    return TokenLogprob(token=one, top=(one,))


def test_log_probabilities_are_those_of_the_text() -> None:
    writer = a_writer(top_logprobs=1)
    told = events_of(
        writer,
        Token(text="", reasoning="hm", logprobs=(logprob("hm"),)),
        Token(text="", logprobs=(logprob("\u00e4"),)),
        Token(text="\u00e4b", logprobs=(logprob("b"),)),
        finished(),
    )
    deltas = [each for each in told if each["type"] == "response.output_text.delta"]
    assert [[one["token"] for one in each["logprobs"]] for each in deltas] == [["\u00e4", "b"]]
    part = writer.response()["output"][1]["content"][0]
    assert part["logprobs"][0] == {
        "token": "\u00e4",
        "bytes": [195, 164],
        "logprob": -0.5,
        "top_logprobs": [{"token": "\u00e4", "bytes": [195, 164], "logprob": -0.5}],
    }
