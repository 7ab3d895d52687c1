"""What is expected of an answer, against the lengths that it learns from."""

import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.protocol.answer_lengths import AnswerLengths

LONG = 40_000


def learned(lengths: list[int]) -> AnswerLengths:
    found = AnswerLengths()
    for length in lengths:
        found.note(length)
    return found


@pytest.mark.parametrize("made", [0, 10, 50, 100, 300, 1000])
@pytest.mark.parametrize("most", [LONG, 400])
def test_the_rest_is_that_of_answers_which_got_so_far(made: int, most: int) -> None:
    chance = random.Random(1)
    lengths = [int(chance.lognormvariate(5, 1)) + 1 for _ in range(3000)]
    rests = [min(length, most) - made for length in lengths[-1000:] if length > made]
    expected = fmean(rests) if made < most else 0
    assert learned(lengths).rest(made, most) == pytest.approx(expected, rel=0.12, abs=2)


def test_nothing_is_known_at_first() -> None:
    unknown = AnswerLengths()
    assert [unknown.rest(0, most) for most in (1, 5, 19)] == [1, 5, 19]
    assert unknown.rest(0, LONG) == unknown.rest(5000, LONG) == 256


def test_an_answer_near_the_length_of_all_others_ends_soon() -> None:
    known = learned([100] * 300)
    assert 100 <= known.rest(0, LONG) <= 104
    assert known.rest(90, LONG) <= 25
    assert known.rest(200, LONG) > 200, "it is of a kind that was never seen"


def test_what_changes_is_learned_and_what_was_is_forgotten() -> None:
    known = learned([2000] * 1000)
    assert known.rest(0, LONG) > 1500
    for _ in range(2500):
        known.note(20)
    assert known.rest(0, LONG) < 60


def test_answers_that_were_cut_off_count_as_longer() -> None:
    cut = AnswerLengths()
    for _ in range(300):
        cut.note(64, cut=True)
    assert cut.rest(0, 64) == 64
    assert cut.rest(0, LONG) > 200


@given(st.lists(st.integers(0, 100_000), max_size=40), st.integers(0, 50_000), st.integers(0, 50_000), st.booleans())
def test_the_rest_is_within_what_is_allowed(lengths: list[int], made: int, most: int, cut: bool) -> None:
    known = AnswerLengths()
    for length in lengths:
        known.note(length, cut=cut)
    rest = known.rest(made, most)
    assert (1 <= rest <= most - made) if made < most else rest == 0


def test_many_answers_are_counted_without_an_overflow() -> None:
    known = AnswerLengths()
    for _ in range(30_000):
        known.note(7)
    assert known.rest(0, LONG) <= 10
