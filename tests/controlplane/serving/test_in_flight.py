"""What is estimated of a request before a node has tokenized it, and what is known of it afterwards."""

from typing import Any

import pytest

from controlplane.serving.in_flight import InFlightRequest
from controlplane.store.tables import Model
from dataplane.protocol.messages import ChatMessage, Finished, Generate, Sampling, Started, Token
from dataplane.protocol.tiers import Tier
from tests.controlplane.serving.test_continuation import Fleet


def in_flight(**prompt: Any) -> InFlightRequest:
    model = Model(name="tide", context_tokens=4096)
    sampling = Sampling(max_tokens=100)
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


def test_tokens_and_continuations_are_counted_as_events_arrive() -> None:
    request = in_flight(prompt="x")
    assert (request.begun, request.used_tokens) == (False, 0)
    request.note([Started(prompt_tokens=7), Token(text="a", token_ids=(1, 2))])
    assert (request.begun, request.used_tokens, request.continuations) == (True, 9, 0)
    request.note([Started(prompt_tokens=7), Token(text="b", token_ids=(3,))])
    request.note([Finished(finish_reason="stop", prompt_tokens=7, completion_tokens=4)])
    assert (request.position, request.used_tokens, request.continuations) == ((3, 2), 11, 1)
