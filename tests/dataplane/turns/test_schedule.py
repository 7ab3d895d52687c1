"""Turns: the table of decisions, and that no model with work starves."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.turns.schedule import ModelQueueFacts, Turn, TurnFacts, TurnSettings, choose_turn

SETTINGS = TurnSettings(turn_time_s=0.25)


def queue(model: str, requests: int) -> ModelQueueFacts:
    return ModelQueueFacts(
        model=model, running=requests, waiting=0, oldest_waiting_age_s=0.0, resident=True, best_tier_rank=0
    )


def facts(work: dict[str, int], current: str | None, started_s: float = 10.0) -> TurnFacts:
    queues = tuple(queue(model, requests) for model, requests in work.items())
    return TurnFacts(queues=queues, current_model=current, turn_started_s=started_s)


@pytest.mark.parametrize(
    ("work", "current", "now_s", "model", "started_s"),
    [
        ({"a": 1, "b": 1}, "a", 10.24, "a", 10.0),  # its turn is not over
        ({"a": 1, "b": 1}, "a", 10.25, "b", 10.25),  # it is over
        ({"a": 1, "b": 1}, "b", 10.25, "a", 10.25),  # after the last comes the first
        ({"c": 1, "a": 1, "b": 0}, "a", 11.0, "c", 11.0),  # one without work is passed over
        ({"a": 1, "b": 0}, "a", 99.0, "a", 10.0),  # nobody else has work
        ({"a": 0, "b": 1, "c": 1}, "a", 10.1, "b", 10.1),  # it ran out of work before its time
        ({"a": 1, "c": 1}, "b", 10.1, "c", 10.1),  # the current model is gone
        ({"b": 1, "a": 1}, None, 0.0, "a", 0.0),  # the first turn of all
    ],
)
def test_choice(work: dict[str, int], current: str | None, now_s: float, model: str, started_s: float) -> None:
    turn = choose_turn(facts(work, current), now_s, SETTINGS)
    assert isinstance(turn, Turn)
    assert (turn.model, turn.started_s) == (model, started_s)
    assert turn.reason


@pytest.mark.parametrize("work", [{}, {"a": 0}, {"a": 0, "b": 0}])
def test_nobody_has_work(work: dict[str, int]) -> None:
    assert choose_turn(facts(work, "a"), 10.0, SETTINGS) is None


def test_waiting_requests_are_work() -> None:
    waiting = ModelQueueFacts(
        model="b", running=0, waiting=1, oldest_waiting_age_s=3.0, resident=False, best_tier_rank=2
    )
    turn = choose_turn(TurnFacts(queues=(waiting,), current_model="a", turn_started_s=0.0), 5.0, SETTINGS)
    assert turn is not None
    assert turn.model == "b"


@given(
    count=st.integers(1, 6),
    patient=st.integers(0, 5),
    step_s=st.floats(min_value=0.001, max_value=2.0),
    others=st.lists(st.integers(0, 63), min_size=40, max_size=60),
)
@settings(deadline=None)
def test_no_model_with_work_starves(count: int, patient: int, step_s: float, others: list[int]) -> None:
    """Others come and go as they like: a model that keeps having work runs within a turn and a step of each."""
    patient %= count
    names = [f"m{i}" for i in range(count)]
    bound_s = count * (SETTINGS.turn_time_s + step_s) + step_s
    current, started_s, now_s, last_run_s = None, 0.0, 0.0, 0.0
    for bits in others:
        work = {name: int(i == patient or bool(bits >> i & 1)) for i, name in enumerate(names)}
        turn = choose_turn(facts(work, current, started_s), now_s, SETTINGS)
        assert turn is not None
        assert work[turn.model]
        current, started_s = turn.model, turn.started_s
        now_s += step_s
        if current == names[patient]:
            last_run_s = now_s
        assert now_s - last_run_s <= bound_s + 1e-9
