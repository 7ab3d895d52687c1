import math

import pytest
import torch

from dataplane.engines.core.scores import LOGPROB_MIN, token_scores


def test_scores_are_log_probabilities_the_likeliest_first() -> None:
    logits = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.2, 0.7]]).log() + 3
    first, second = token_scores(logits, [0, 2], [2, 0])
    assert first.logprob == pytest.approx(math.log(0.2), abs=1e-5)
    assert [token for token, _ in first.top] == [1, 2]
    assert [math.exp(logprob) for _, logprob in first.top] == pytest.approx([0.5, 0.3], abs=1e-5)
    assert (second.logprob, second.top) == (pytest.approx(math.log(0.7), abs=1e-5), ())


def test_more_than_the_vocabulary_is_all_of_it_and_no_value_is_infinite() -> None:
    (score,) = token_scores(torch.tensor([[0.0, float("-inf")]]), [1], [20])
    assert score.logprob == LOGPROB_MIN
    assert score.top == ((0, 0.0), (1, LOGPROB_MIN))


def test_nothing_asked_is_nothing_done() -> None:
    assert token_scores(torch.zeros(0, 5), [], []) == []
