"""The demo's shared GPU pool: its time slices are drawn, and violated guarantees are reported."""

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from ops.local.demo.pool import TOKENS, Seen, check, follow, timeline
from ops.local.demo.stage import Answer, DemoError
from ops.local.sample_fleet import POOL_REGION

ANSWER = Answer(region=POOL_REGION.name, began_s=0.0, first_s=0.1, ended_s=1.0, tokens=TOKENS, text="so it is")


def turn(kind: str, model: str, started_age_s: float, ended_age_s: float) -> dict[str, Any]:
    return {"kind": kind, "model": model, "started_age_s": started_age_s, "ended_age_s": ended_age_s}


TURNS = [
    turn("decode", "ebb", 90.0, 8.0),  # before the first question
    turn("prefill", "ebb", 8.0, 7.999),  # too short for a column, and yet to be seen
    turn("decode", "ebb", 7.999, 4.0),
    turn("decode", "flood", 4.0, 0.0),
]
SEEN = Seen(
    answers={"ebb": ANSWER, "flood": ANSWER}, slot={"pool": {"turns": TURNS}}, age_s=9.0, switches=2, resident_most=2
)


def test_the_timeline_has_each_turn_in_its_place() -> None:
    console = Console(width=132)
    with console.capture() as captured:
        console.print(timeline(SEEN))
    head, ebb, flood = (line.split() for line in captured.get().splitlines())
    assert head[:4] == ["3", "turns", "8.0", "s"]
    assert ebb == ["ebb", "▒" + "█" * 47 + "·" * 48]
    assert flood == ["flood", "·" * 48 + "█" * 48]


def test_kept_promises_pass() -> None:
    check(SEEN)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (replace(SEEN, answers={"ebb": replace(ANSWER, tokens=TOKENS - 1)}), f"{TOKENS - 1} of {TOKENS} tokens"),
        (replace(SEEN, answers={"ebb": replace(ANSWER, region="elsewhere")}), "in elsewhere"),
        (replace(SEEN, switches=1), "switched 1 times for 2 models"),
        (replace(SEEN, resident_most=3), "held 3 models"),
    ],
)
def test_broken_promises_are_named(broken: Seen, words: str) -> None:
    with pytest.raises(DemoError, match=words):
        check(broken)


def slot_state(*resident: str, arriving: tuple[str, ...] = (), left: int = 0) -> dict[str, Any]:
    return {
        "pool": {"arriving_models": list(arriving), "turns": []},
        "resident_models": list(resident),
        "instances": [{"remaining_tokens": left}],
    }


BETWEEN_WORKERS: dict[str, Any] = {"pool": None, "resident_models": [], "instances": []}


def test_a_worker_that_is_replaced_meanwhile_is_waited_for() -> None:
    answer: Future[Answer] = Future()
    states = [slot_state("ebb", arriving=("flood",), left=9), BETWEEN_WORKERS, BETWEEN_WORKERS, slot_state(left=2)]
    states.append(slot_state("ebb"))
    looks: list[int] = []

    def look() -> dict[str, Any]:
        looks.append(len(looks))
        if len(looks) == 2:
            answer.set_result(ANSWER)
        return states[len(looks) - 1]

    last, resident_most = follow(look, [answer], lambda ended: None)
    assert (last, resident_most, len(looks)) == (states[-1], 2, 5)
    lines = Console(width=132)
    with lines.capture() as captured:
        lines.print(timeline(replace(SEEN, slot=last)))
    assert "the worker was replaced" in captured.get()


def test_a_worker_that_never_comes_back_ends_the_demo() -> None:
    with pytest.raises(DemoError, match=r"0 of 1 streams on .* ended within 0.1 s"):
        follow(lambda: BETWEEN_WORKERS, [Future()], lambda ended: None, patience_s=0.1)
