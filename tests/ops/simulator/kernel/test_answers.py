"""What answers still have to come, expected or true."""

import random

import pytest

from dataplane.protocol.answer_lengths import AnswerLengths
from dataplane.protocol.tiers import Tier
from dataplane.scheduling.costs import LatencyModel
from dataplane.scheduling.tiers import TIER_OBJECTIVES
from ops.simulator.kernel.answers import Answers, ExpectedAnswers, TrueAnswers, answers_by_model
from ops.simulator.kernel.requests import Request, Sequence, Served
from ops.simulator.servers.batch import Batch

NO_LIMIT = 2**30


def ended(number: int, at_s: float, tokens: int) -> Served:
    request = Request(number, 0.0, "m", "r", Tier.IW_N, 1, tokens)
    return Served(request, TIER_OBJECTIVES[Tier.IW_N], made=tokens, last_s=at_s)


def lengths(count: int, seed: int = 1) -> list[int]:
    drawn = random.Random(seed)
    return [max(1, round(drawn.lognormvariate(4.5, 0.8))) for _ in range(count)]


def learnt(tokens: list[int]) -> ExpectedAnswers:
    answers = ExpectedAnswers()
    for number, one in enumerate(tokens):
        answers.ended(ended(number, float(number), one))
        answers.learn()
    return answers


def test_the_table_is_the_live_function_and_exact_where_its_classes_begin() -> None:
    seen = lengths(512)  # the table is renewed at 1, 3, 7, ... 511 answers
    live = AnswerLengths()
    for tokens in seen[:511]:
        live.note(tokens)
    table = learnt(seen)
    for edge in (0, 1, 7, 16, 18, 20, 33, 37):  # of classes
        assert table.rest(edge, 0) == live.rest(edge, NO_LIMIT)
    for between in (19, 35, 50, 90, 120, 150):
        assert table.rest(between, 0) == pytest.approx(live.rest(between, NO_LIMIT), rel=0.05)


def test_without_any_answer_it_is_the_live_guess_and_beyond_all_answers_again() -> None:
    assert ExpectedAnswers().rest(0, 5) == AnswerLengths().rest(0, NO_LIMIT)
    assert learnt([10] * 40).rest(5_000, 1) == pytest.approx(256, abs=30)


def test_a_sum_is_that_of_its_answers() -> None:
    """Of a batch that decodes, within the table and beyond."""
    latency = LatencyModel(
        prefill_base_s=0.0,
        prefill_per_token_s=1e-4,
        prefill_per_token2_s=0.0,
        decode_base_s=0.01,
        decode_per_context_token_s=0.0,
        decode_per_sequence_s=0.0,
    )
    for longest in (40, 9_000):
        batch, lefts, progress = Batch(latency, 10**9), {1: 30, 2: longest - 8, 3: longest}, {}
        for number, left in lefts.items():
            request = Request(number, 0.0, "m", "r", Tier.IW_N, 1, left + number)
            batch.join(Sequence(Served(request, TIER_OBJECTIVES[Tier.IW_N], made=number), number, cached=1))
        forward = batch.fast_forward(0.0, 25, 0)
        assert forward is not None
        batch.advance(forward, 1.0)
        for number, left in lefts.items():
            progress[number] = number + 25, left - 25
        assert batch.made == {number: made for number, (made, _) in progress.items()}
        for answers in (learnt(lengths(100)), TrueAnswers(), learnt([3, 4])):
            assert answers.rests(batch) == sum(answers.rest(made, left) for made, left in progress.values())


def test_it_does_not_matter_who_is_told_first() -> None:
    told = [ended(number, 100.0 - number, tokens) for number, tokens in enumerate(lengths(64))]
    one, other = ExpectedAnswers(), ExpectedAnswers()
    for served in told:
        one.ended(served)
    for served in reversed(told):
        other.ended(served)
    one.learn()
    other.learn()
    assert [one.rest(made, 0) for made in range(300)] == [other.rest(made, 0) for made in range(300)]


def test_each_model_has_its_own() -> None:
    expected = answers_by_model(clairvoyant=False)
    for number in range(9):
        expected["short"].ended(ended(number, 1.0, 3))
    expected["short"].learn()
    assert expected["short"].rest(0, 77) < expected["other"].rest(0, 77)
    true: Answers = answers_by_model(clairvoyant=True)["m"]
    assert true.rest(0, 77) == 77
