"""The pace of a slot's prefills."""

import random
from typing import Any

import pytest

from dataplane.engine import TurnRecord
from dataplane.turns.pace import PrefillPace, prefill_pace


def turn(tokens: int, seconds: float, *, switched: bool = False, kind: Any = "prefill", prompts: int = 1) -> TurnRecord:
    return TurnRecord(
        kind=kind,
        model="tide",
        started_s=1.0,
        ended_s=1.0 + seconds,
        tokens=prompts,
        prompt_tokens=tokens,
        switched=switched,
    )


def test_it_is_what_the_turns_took() -> None:
    assert prefill_pace(()) == prefill_pace([turn(9, 1.0, kind="decode")]) == PrefillPace()
    pace = prefill_pace([turn(100, 0.6), turn(8100, 40.6), turn(100, 2.6, switched=True)])
    assert pace.token_s == pytest.approx(0.005, rel=0.01)
    assert pace.base_s == pytest.approx(0.1, abs=0.05)
    assert pace.switch_s == pytest.approx(2.0, abs=0.05)


def test_a_turn_of_several_prompts_says_what_each_takes() -> None:
    pace = prefill_pace(
        [turn(200, 1.2, prompts=2), turn(24_300, 121.8, prompts=3), turn(200, 3.2, prompts=2, switched=True)]
    )
    assert pace.token_s == pytest.approx(0.005, rel=0.01)
    assert pace.base_s == pytest.approx(0.1, abs=0.05)
    assert pace.switch_s == pytest.approx(2.0, abs=0.1)


def test_short_prompts_say_nothing_of_long_ones() -> None:
    pace = prefill_pace([turn(8, 0.05), turn(8, 0.07)])
    assert pace.of(8) == pytest.approx(0.06)
    assert pace.of(4000) < 1.0, "in proportion it would be 30 s"
    assert prefill_pace([turn(100, 0.001)]).of(100) == pytest.approx(0.001), "quicker than the default"
    assert prefill_pace([turn(8, 9.0), turn(800, 0.1)]).token_s == 0.0, "no prompt is quicker for being longer"
    assert prefill_pace([turn(100, 0.5, switched=True)]).switch_s == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_hiccups_among_prompts_of_nearly_one_length_are_no_slope(seed: int) -> None:
    chance = random.Random(seed)
    turns = [turn(chance.randint(12, 20), chance.choice((0.01, 0.3))) for _ in range(32)]
    assert prefill_pace(turns).token_s < 5e-4, "a plain line is off by up to 0.02 s a token here"
