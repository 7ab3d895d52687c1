"""When a roll-out goes on, waits, ends and goes back."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policies.facts import Endpoint
from controlplane.policies.rollout import (
    AnswerCounts,
    Finish,
    GoBack,
    Hold,
    KeptCapacity,
    RolloutDecision,
    RolloutFacts,
    Shift,
    choose_rollout,
    instances_for,
    least_instances,
    shifted_weights,
)

FACTS = RolloutFacts(
    steps=(10, 50, 100),
    step=0,
    held_s=600.0,
    hold_s=600.0,
    answers_min=100,
    worse_max=0.02,
    instances={"east": 4, "west": 1},
    ready={"east": 2, "west": 1},
    candidate=AnswerCounts(answers=200),
    baseline=AnswerCounts(answers=2000),
)


@pytest.mark.parametrize(
    ("changes", "decision"),
    [
        ({}, Shift(step=1)),
        ({"held_s": 595.0}, Hold(reason="5 s of this step are left")),
        (
            {"candidate": AnswerCounts(answers=99)},
            Hold(reason="waits for answers: 99 of 100 in this step"),
        ),
        ({"held_s": 0.0, "candidate": AnswerCounts(), "skips": True}, Shift(step=1)),
        ({"ready": {"east": 1}}, Hold(reason="waits for ready instances: east 1 of 2, west 0 of 1")),
        ({"ready": {"east": 1}, "skips": True}, Hold(reason="waits for ready instances: east 1 of 2, west 0 of 1")),
        ({"step": -1, "held_s": 0.0, "candidate": AnswerCounts()}, Shift(step=0)),
        ({"step": -1, "ready": {"east": 1}}, Hold(reason="waits for ready instances: west 0 of 1")),
        ({"step": 2}, Finish()),
        ({"step": 2, "held_s": 1.0}, Hold(reason="599 s of this step are left")),
        ({"instances": {}, "ready": {}}, Shift(step=1)),
        ({"paused": True}, Hold(reason="paused")),
        ({"failing": {"west": "full"}}, GoBack(reason="no instance of the candidate starts in west: full")),
        ({"paused": True, "failing": {"west": "x"}}, GoBack(reason="no instance of the candidate starts in west: x")),
        (
            {"candidate": AnswerCounts(answers=200, failed=40, missed=40)},
            GoBack(reason="20.0% of 200 answers failed, of 2000 of the models before 0.0%"),
        ),
        (
            {"candidate": AnswerCounts(answers=200, missed=40), "held_s": 0.0},
            GoBack(reason="20.0% of 200 answers missed their objective, of 2000 of the models before 0.0%"),
        ),
    ],
)  # fmt: skip
def test_decisions(changes: dict[str, object], decision: RolloutDecision) -> None:
    assert choose_rollout(replace(FACTS, **changes)) == decision


@pytest.mark.parametrize(
    ("candidate", "baseline", "goes_back"),
    [
        (AnswerCounts(answers=9, failed=9), AnswerCounts(answers=1000), False),  # too few to judge
        (AnswerCounts(answers=10, failed=10), AnswerCounts(answers=1000), True),
        (AnswerCounts(answers=10, failed=10), AnswerCounts(), True),  # the others count as faultless
        (AnswerCounts(answers=10, failed=1), AnswerCounts(answers=1000), False),  # by chance
        (AnswerCounts(answers=1000, failed=30), AnswerCounts(answers=1000, failed=20), False),  # within the margin
        (AnswerCounts(answers=1000, missed=900), AnswerCounts(answers=1000, missed=900), False),  # all are late
        (AnswerCounts(answers=2000, missed=200), AnswerCounts(answers=2000, missed=100), True),
    ],
)
def test_it_goes_back_where_the_candidate_is_worse_beyond_chance(
    candidate: AnswerCounts, baseline: AnswerCounts, goes_back: bool
) -> None:
    facts = replace(FACTS, candidate=candidate, baseline=baseline, held_s=0.0)
    assert isinstance(choose_rollout(facts), GoBack) == goes_back


@given(st.integers(10, 5000), st.integers(0, 5000), st.floats(0, 1))
def test_a_candidate_that_is_as_good_stays(answers: int, their_answers: int, failing: float) -> None:
    facts = replace(
        FACTS,
        candidate=AnswerCounts(answers=answers, failed=int(answers * failing) if their_answers else 0),
        baseline=AnswerCounts(answers=their_answers, failed=round(their_answers * failing)),
    )
    assert not isinstance(choose_rollout(facts), GoBack)


@given(
    st.dictionaries(st.sampled_from(["a", "b", "new"]), st.integers(0, 1000), min_size=1).filter(
        lambda weights: any(weight for model, weight in weights.items() if model != "new")
    ),
    st.integers(1, 100),
)
def test_the_candidate_gets_its_share_and_the_others_keep_their_proportions(before: dict[str, int], share: int) -> None:
    after = shifted_weights(before, "new", share)
    assert after["new"] * 100 == share * sum(after.values())
    others = {model: weight for model, weight in before.items() if model != "new" and weight}
    if share < 100:
        assert after.keys() == {*others, "new"}
        assert all(after[a] * others[b] == after[b] * others[a] for a in others for b in others)


def test_instances_are_rounded_up() -> None:
    assert instances_for({"east": 4, "west": 1, "north": 0}, 26) == {"east": 2, "west": 1, "north": 0}


def at(model: str, region: str) -> Endpoint:
    return Endpoint(model=model, region=region)


def test_capacity_is_kept_before_a_share_rises_and_for_the_way_back() -> None:
    rollout = KeptCapacity(
        candidate="new",
        instances={"old": {"east": 4}, "older": {"east": 1, "west": 2}},
        share=25,
        next_share=50,
        keep=True,
    )
    kept = {at("old", "east"): 4, at("older", "east"): 1, at("older", "west"): 2}
    assert least_instances([rollout]) == kept | {at("new", "east"): 3, at("new", "west"): 1}
    shrinks = replace(rollout, keep=False)
    shrunk = {at("old", "east"): 3, at("older", "east"): 1, at("older", "west"): 2}
    assert least_instances([shrinks]) == shrunk | {at("new", "east"): 3, at("new", "west"): 1}
    gone_back = replace(rollout, share=0, next_share=0)
    assert least_instances([gone_back]) == kept
    both = replace(rollout, candidate="newer", share=100, next_share=100)
    assert least_instances([rollout, both])[at("new", "east")] == 3


def test_the_models_before_are_let_go_where_the_candidate_has_all() -> None:
    done = KeptCapacity(candidate="new", instances={"old": {"east": 4}}, share=100, next_share=100, keep=False)
    assert least_instances([done]) == {at("new", "east"): 4}
