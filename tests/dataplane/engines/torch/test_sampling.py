"""Greedy answers with bias, penalties and log probabilities equal transformers' with its logits processors."""

from typing import Any

import pytest
import torch

from dataplane.engines.interface import TokenScore
from dataplane.protocol.errors import BadRequestError
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.test_greedy import Checkpoint, engine_of, prompts
from tests.dataplane.engines.torch.tiny import ARCHITECTURES, VOCABULARY, adjusted_answer, greedy_tokens

MAX_TOKENS = 24
LOGPROBS = 4
VARIANTS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "counts": {"frequency_penalty": 0.8, "presence_penalty": -0.3},
    "bias": {"logit_bias": ((7, 2.5), (11, -100.0), (2, 1.0)), "min_tokens": 9},
    "all": {
        "repetition_penalty": 0.9,
        "frequency_penalty": 1.5,
        "presence_penalty": 0.7,
        "logit_bias": tuple((token, 0.01 * token) for token in range(3, 60)),
        "min_tokens": MAX_TOKENS,
    },
}


def check_scores(scores: tuple[TokenScore, ...], tokens: tuple[int, ...], expected: torch.Tensor) -> None:
    """That log probabilities are those of `[tokens, vocabulary]` within 1e-3, and the likeliest the likeliest."""
    assert len(scores) == len(tokens)
    for token, score, row in zip(tokens, scores, expected, strict=True):
        assert score.logprob == pytest.approx(row[token].item(), abs=1e-3)
        largest = row.topk(LOGPROBS).values.tolist()
        assert [value for _, value in score.top] == pytest.approx(largest, abs=1e-3)
        assert [value for _, value in score.top] == pytest.approx([row[one].item() for one, _ in score.top], abs=1e-3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_adjusted_answers_are_those_of_transformers(architecture: str, checkpoint: Checkpoint) -> None:
    folder = checkpoint(architecture)
    given = prompts(VOCABULARY, (33, 6))
    asked = [
        request(f"{name}-{variant}", prompt, max_tokens=MAX_TOKENS, logprobs=LOGPROBS, **fields)
        for name, prompt in given.items()
        for variant, fields in VARIANTS.items()
    ]
    plain = [request(name, prompt, max_tokens=MAX_TOKENS) for name, prompt in given.items()]
    engine = engine_of(folder)
    gathered = drain(engine, later={0: asked[:3], 2: plain, 5: asked[3:]})
    for one in asked:
        expected, logprobs = adjusted_answer(folder, one)
        assert gathered.tokens[one.request_id] == expected, one.request_id
        check_scores(gathered.scores[one.request_id], expected, logprobs)
    for one in plain:
        assert gathered.tokens[one.request_id] == greedy_tokens(folder, one.prompt, MAX_TOKENS)
        assert gathered.scores[one.request_id] == ()
    different = {gathered.tokens[one.request_id] for one in (*asked, *plain)}
    assert len(different) > len(asked) // 2, "or the parameters would have no effect"


def test_the_end_of_sequence_waits_for_min_tokens(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama")
    starts = ([start, start + 1, start + 2] for start in range(3, 90))
    stopping = next(prompt for prompt in starts if len(greedy_tokens(folder, prompt, 20)) < 4)
    engine = engine_of(folder)
    engine.add(request("early", stopping, max_tokens=20))
    engine.add(request("late", stopping, max_tokens=20, min_tokens=6))
    gathered = drain(engine)
    assert len(gathered.tokens["early"]) < 4
    assert 6 <= len(gathered.tokens["late"]) <= 20
    assert gathered.tokens["late"] == adjusted_answer(folder, request("r", stopping, max_tokens=20, min_tokens=6))[0]


def test_a_biased_token_beyond_the_vocabulary_is_refused(checkpoint: Checkpoint) -> None:

    engine = engine_of(checkpoint("llama"))
    for token in (-1, VOCABULARY):
        with pytest.raises(BadRequestError, match="outside of the vocabulary of 97") as refused:
            engine.add(request("r", [5], logit_bias=((token, 1.0),)))
        assert refused.value.param == "logit_bias"
    assert not engine.has_work()
