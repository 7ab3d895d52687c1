"""What is guessed of a request before a node has tokenized it."""

from typing import Any

import pytest

from controlplane.serving.send import Outgoing
from controlplane.store.tables import Model
from dataplane.protocol.messages import ChatMessage, Sampling
from dataplane.protocol.tiers import Tier


def outgoing(**prompt: Any) -> Outgoing:
    model = Model(name="tide", context_tokens=4096)
    sampling = Sampling(max_tokens=100)
    return Outgoing(request_id="r", model=model, tier=Tier.IW_N, origin=None, sampling=sampling, **prompt)


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
    assert outgoing(**prompt).input_tokens_guess() == tokens
    assert outgoing(**prompt).tokens_guess() == tokens + 100
