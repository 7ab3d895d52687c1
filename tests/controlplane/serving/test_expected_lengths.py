"""What a gateway expects of answers."""

import pytest

from controlplane.serving.expected_lengths import ExpectedLengths
from controlplane.serving.in_flight import InFlightRequest
from controlplane.serving.prompt_prefixes import prefix_of
from dataplane.protocol.messages import Finished, FinishReason, Generate, Sampling
from dataplane.protocol.tiers import Tier


def request(model: str = "m", *, max_tokens: int | None = None, pooling: bool = False) -> InFlightRequest:
    message = Generate(
        request_id="r",
        instance_id="",
        model=model,
        tier=Tier.IW_N,
        prompt="a",
        sampling=Sampling(max_tokens=max_tokens),
        pooling=pooling,
    )
    return InFlightRequest(
        message=message, input_tokens=1, context_tokens=4096, origin=None, preference=(), prefix=prefix_of(message)
    )


def ended(tokens: int, reason: FinishReason = "stop") -> Finished:
    return Finished(finish_reason=reason, prompt_tokens=1, completion_tokens=tokens)


def test_each_model_has_its_lengths() -> None:
    lengths = ExpectedLengths()
    assert lengths.to_come(request()) == 256
    for _ in range(200):
        lengths.note("m", ended(20))
    assert 20 <= lengths.to_come(request()) <= 26
    assert lengths.to_come(request(max_tokens=7)) == 7
    assert lengths.to_come(request("other")) == 256


def test_what_has_arrived_is_not_to_come() -> None:
    lengths = ExpectedLengths()
    begun = request(max_tokens=10)
    begun.token_ids += [1, 2, 3]
    assert lengths.to_come(begun) == 7


def test_pooled_answers_have_no_tokens_and_count_for_nothing() -> None:
    lengths = ExpectedLengths()
    assert lengths.to_come(request(pooling=True)) == 0
    for _ in range(100):
        lengths.note("m", ended(0))
    assert lengths.to_come(request()) == 256


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_cut_answers_would_have_been_longer(reason: FinishReason) -> None:
    lengths = ExpectedLengths()
    for _ in range(200):
        lengths.note("m", ended(16, reason))
    assert (lengths.to_come(request()) > 100) == (reason == "length")
