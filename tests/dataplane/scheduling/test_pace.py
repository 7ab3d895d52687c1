"""The pace of a slot's prefills."""

import random
from collections.abc import Sequence

import pytest

from dataplane.scheduling.pace import PrefillPace, SeenPrefills

Turn = tuple[int, int, float, bool]


def turn(tokens: int, seconds: float, *, switched: bool = False, prompts: int = 1) -> Turn:
    return prompts, tokens, seconds, switched


def pace_of(turns: list[Turn], forgotten: Sequence[Turn] = ()) -> PrefillPace:
    """`forgotten`: turns that were before, and count no more."""
    seen = SeenPrefills()
    for prompts, tokens, seconds, switched in (*forgotten, *turns):
        seen.take(prompts, tokens, seconds, switched=switched)
    for prompts, tokens, seconds, switched in forgotten:
        seen.forget(prompts, tokens, seconds, switched=switched)
    return seen.pace


def test_it_is_what_the_turns_took() -> None:
    assert pace_of([]) == pace_of([], [turn(9, 1.0)]) == PrefillPace()
    pace = pace_of([turn(100, 0.6), turn(8100, 40.6), turn(100, 2.6, switched=True)])
    assert pace.token_s == pytest.approx(0.005, rel=0.01)
    assert pace.base_s == pytest.approx(0.1, abs=0.05)
    assert pace.switch_s == pytest.approx(2.0, abs=0.05)


def test_a_turn_of_several_prompts_says_what_each_takes() -> None:
    pace = pace_of(
        [turn(200, 1.2, prompts=2), turn(24_300, 121.8, prompts=3), turn(200, 3.2, prompts=2, switched=True)]
    )
    assert pace.token_s == pytest.approx(0.005, rel=0.01)
    assert pace.base_s == pytest.approx(0.1, abs=0.05)
    assert pace.switch_s == pytest.approx(2.0, abs=0.1)


def test_short_prompts_say_nothing_of_long_ones() -> None:
    pace = pace_of([turn(8, 0.05), turn(8, 0.07)])
    assert pace.base_s + 8 * pace.token_s == pytest.approx(0.06)
    assert pace.base_s + 4000 * pace.token_s < 1.0, "in proportion it would be 30 s"
    short = pace_of([turn(100, 0.001)])
    assert short.base_s + 100 * short.token_s == pytest.approx(0.001), "quicker than the default"
    assert pace_of([turn(8, 9.0), turn(800, 0.1)]).token_s == 0.0, "no prompt is quicker for being longer"
    assert pace_of([turn(100, 0.5, switched=True)]).switch_s == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_hiccups_among_prompts_of_nearly_one_length_are_no_slope(seed: int) -> None:
    chance = random.Random(seed)
    turns = [turn(chance.randint(12, 20), chance.choice((0.01, 0.3))) for _ in range(32)]
    assert pace_of(turns).token_s < 5e-4, "a plain line is off by up to 0.02 s a token here"


@pytest.mark.parametrize("seed", range(5))
def test_what_is_forgotten_leaves_no_trace(seed: int) -> None:
    chance = random.Random(seed)

    def drawn(count: int) -> list[Turn]:
        return [
            turn(chance.randint(1, 9000), chance.expovariate(1.0), switched=chance.random() < 0.5) for _ in range(count)
        ]

    turns = drawn(40)
    pace, fresh = pace_of(turns, drawn(2000)), pace_of(turns)
    assert (pace.base_s, pace.token_s, pace.switch_s) == pytest.approx((fresh.base_s, fresh.token_s, fresh.switch_s))
