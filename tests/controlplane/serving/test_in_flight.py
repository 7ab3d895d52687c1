"""What is estimated of a request before a node has tokenized it, and what is known of it afterwards."""

from typing import Any

import pytest

from controlplane.serving.in_flight import InFlightRequest
from controlplane.store.tables import Model
from dataplane.protocol.messages import (
    ChatMessage,
    Finished,
    Generate,
    Sampling,
    Started,
    Token,
    Tool,
    ToolCall,
    ToolUse,
)
from dataplane.protocol.tiers import Tier
from tests.controlplane.serving.test_continuation import Fleet


def in_flight(max_tokens: int | None = 100, **prompt: Any) -> InFlightRequest:
    model = Model(name="tide", context_tokens=4096)
    sampling = Sampling(max_tokens=max_tokens)
    message = Generate(request_id="r", instance_id="", model="tide", tier=Tier.IW_N, sampling=sampling, **prompt)
    return InFlightRequest.of(Fleet(), model, message, tenant="t", origin=None)


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ({"prompt": "x" * 400}, 101),
        ({"messages": (ChatMessage(role="user", content="é" * 200), ChatMessage(role="user", content=""))}, 102),
        ({"prompt_tokens": (1, 2, 3)}, 3),
        ({"prompt": "x" * 4_000_000}, 4096),
        ({"prompt_tokens": (1,) * 10_000}, 4096),
    ],
)
def test_no_prompt_counts_for_more_than_the_context(prompt: dict[str, Any], tokens: int) -> None:
    assert in_flight(**prompt).input_tokens == tokens
    assert in_flight(**prompt).tokens == tokens + 100


LONG = "x" * 400
LONG_PARTS: dict[str, dict[str, Any]] = {
    "content": {"messages": (ChatMessage(role="user", content=LONG),)},
    "reasoning": {"messages": (ChatMessage(role="assistant", reasoning=LONG),)},
    "name": {"messages": (ChatMessage(role="user", name=LONG),)},
    "id": {"messages": (ChatMessage(role="tool", tool_call_id=LONG),)},
    "call": {"messages": (ChatMessage(role="assistant", tool_calls=(ToolCall(id="1", name="a", arguments=LONG),)),)},
    "tool": {"messages": (ChatMessage(role="user"),), "tools": ToolUse(tools=(Tool(name="a", description=LONG),))},
    "variable": {"messages": (ChatMessage(role="user"),), "template": {"documents_text": LONG}},
}


@pytest.mark.parametrize("part", LONG_PARTS)
def test_all_that_a_template_may_write_counts(part: str) -> None:
    request = in_flight(10, **LONG_PARTS[part])
    assert 100 <= request.input_tokens <= 130
    assert 400 <= request.tokens_max <= 850


def test_tokens_and_continuations_are_counted_as_events_arrive() -> None:
    request = in_flight(prompt="x")
    assert (request.begun, request.used_tokens) == (False, 0)
    request.note([Started(prompt_tokens=7), Token(text="a", token_ids=(1, 2))])
    assert (request.begun, request.used_tokens, request.continuations) == (True, 9, 0)
    request.note([Started(prompt_tokens=7), Token(text="b", token_ids=(3,))])
    request.note([Finished(finish_reason="stop", prompt_tokens=7, completion_tokens=4)])
    assert (request.position, request.used_tokens, request.continuations) == ((3, 2), 11, 1)


def test_the_most_that_a_request_may_take_is_bounded_by_its_bytes_and_by_the_context() -> None:
    assert in_flight(None, prompt="x").tokens_max == 4096, "without max_tokens its answer may fill the context"
    assert 300 <= in_flight(prompt="ä" * 100).tokens_max <= 600
    assert in_flight(10, prompt_tokens=(1, 2, 3)).tokens_max == 13
    assert in_flight(4000, prompt="x" * 4000).tokens_max == 4096
    assert [in_flight(most, prompt="x").output_tokens_max for most in (None, 10)] == [0, 10]
    begun = in_flight(None, prompt="x")
    begun.note([Started(prompt_tokens=1), Token(text="ab", token_ids=(1, 2))])
    assert begun.output_tokens_max == 3, "it has two, and is to go on"
