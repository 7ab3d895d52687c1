import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.engines.core.adjustments import LogitAdjustments, adjust
from dataplane.engines.interface import EngineRequest

VOCABULARY = 12
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=20)
PENALTY = st.sampled_from([-2.0, -0.5, 0.0, 0.7, 2.0])
BIAS = st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([-100.0, -1.5, 0.5, 100.0]), max_size=4)


def request(**fields: object) -> EngineRequest:
    given = {"request_id": "r", "instance_id": "a", "tier": "IW-N", "prompt": (1,), "max_tokens": 50, **fields}
    return EngineRequest(**given)  # type: ignore[arg-type]


def adjustments(asked: EngineRequest, prompt: list[int]) -> LogitAdjustments | None:
    return LogitAdjustments.of(asked, prompt_tokens=len(prompt), tokens_max=len(prompt) + 50)


def by_hand(logits: list[float], asked: EngineRequest, prompt: list[int], made: list[int]) -> list[float]:
    """The formulas, token by token: OpenAI's for the penalties of counts, that of Keskar et al. for repetition."""
    expected = []
    for token, logit in enumerate(logits):
        x = logit + dict(asked.logit_bias).get(token, 0.0)
        if token in prompt or token in made:
            x = x / asked.repetition_penalty if x > 0 else x * asked.repetition_penalty
        count = made.count(token)
        expected.append(x - count * asked.frequency_penalty - (count > 0) * asked.presence_penalty)
    return expected


@given(
    prompt=TOKENS,
    made=TOKENS,
    frequency=PENALTY,
    presence=PENALTY,
    repetition=st.sampled_from([0.5, 1.0, 1.3]),
    bias=BIAS,
    at_once=st.integers(0, 20),
)
@settings(max_examples=200)
def test_the_logits_are_those_of_the_formulas_however_the_tokens_arrived(
    prompt: list[int],
    made: list[int],
    frequency: float,
    presence: float,
    repetition: float,
    bias: dict[int, float],
    at_once: int,
) -> None:
    asked = request(
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        logit_bias=tuple(bias.items()),
    )
    counted = adjustments(asked, prompt)
    logits = torch.linspace(-4, 4, VOCABULARY).repeat(3, 1)
    before = logits.clone()
    if counted is None:
        assert (frequency, presence, repetition, bias) == (0, 0, 1, {})
        return
    for length in range(min(at_once, len(made)), len(made) + 1):
        counted.follow([*prompt, *made[:length]])
    adjust(logits, [(1, counted)])
    assert logits[1].tolist() == pytest.approx(by_hand(before[1].tolist(), asked, prompt, made), abs=1e-4)
    assert logits[[0, 2]].equal(before[[0, 2]]), "other rows stay"


def test_rows_of_a_batch_have_their_own_adjustments() -> None:
    biased = adjustments(request(logit_bias=((3, 5.0),)), [])
    repeating = adjustments(request(frequency_penalty=1.0), [3])
    assert biased is not None
    assert repeating is not None
    repeating.follow([3, 4, 4])
    logits = torch.zeros(2, VOCABULARY)
    adjust(logits, [(0, repeating), (1, biased)])
    assert (logits[0, 4], logits[0, 3], logits[1, 3]) == (-2.0, 0.0, 5.0)
    assert logits.count_nonzero() == 2


def test_nothing_asked_needs_nothing() -> None:
    assert adjustments(request(), [1]) is None
