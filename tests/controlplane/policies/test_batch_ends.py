"""When batches end: in the order of their release, at the speed that was measured, and what is not known is said."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policies.batch_ends import (
    BatchEnd,
    GroupProgress,
    ModelSpeed,
    SpeedSample,
    SpeedSettings,
    choose_speed,
    predict_ends,
)

SETTINGS = SpeedSettings(follow_s=100.0, keep_s=1000.0)
TWO_A_SECOND = ModelSpeed(per_s=2.0, most_per_s=10.0, taking=1)


def group(batch: int, left: int, *, tenant: str = "a", model: str = "m", due_s: float = 3600.0) -> GroupProgress:
    return GroupProgress(batch=batch, tenant=tenant, model=model, left=left, due_s=due_s)


def end_of(speed: ModelSpeed, *groups: GroupProgress) -> BatchEnd:
    """The predicted end of the first group's batch."""
    return predict_ends(groups, {groups[0].model: speed})[groups[0].batch]


def test_a_batch_alone_ends_when_its_lines_have_run() -> None:
    end = end_of(TWO_A_SECOND, group(1, 100))
    assert (end.in_s, end.at_risk) == (50.0, False)
    assert end.reason == "100 lines of 'm' are left; 2 finish a second"


def test_the_batch_of_a_tenant_with_the_nearest_deadline_goes_first() -> None:
    ends = predict_ends([group(1, 100, due_s=900), group(2, 10, due_s=300)], {"m": TWO_A_SECOND})
    assert (ends[2].in_s, ends[1].in_s) == (5.0, 55.0)
    assert "wait behind 10 of other batches" in ends[1].reason
    assert "behind" not in ends[2].reason


def released(groups: Sequence[GroupProgress]) -> dict[int, int]:
    """After how many lines each batch ends, where tenants take turns line by line, their nearest deadline first."""
    left = {each.batch: each.left for each in groups}
    done: dict[int, int] = {}
    count, tenants = 0, sorted({each.tenant for each in groups})
    while any(left.values()):
        for tenant in tenants:
            mine = [each for each in groups if each.tenant == tenant and left[each.batch]]
            if mine:
                first = min(mine, key=lambda each: (each.due_s, each.batch)).batch
                left[first] -= 1
                count += 1
                if not left[first]:
                    done[first] = count
    return done


@given(st.lists(st.tuples(st.integers(1, 40), st.sampled_from("abc"), st.integers(1, 5)), min_size=1, max_size=8))
def test_tenants_take_turns(drawn: list[tuple[int, str, int]]) -> None:
    groups = [group(n, left, tenant=tenant, due_s=due) for n, (left, tenant, due) in enumerate(drawn)]
    ends = predict_ends(groups, {"m": ModelSpeed(per_s=1.0, taking=1)})
    tenants = len({each.tenant for each in groups})
    for batch, lines in released(groups).items():
        in_s = ends[batch].in_s
        assert in_s is not None
        assert abs(in_s - lines) < tenants, "within the round of turns in which it ends"


def test_what_cannot_end_in_time_is_at_risk_and_says_what_it_needs() -> None:
    alone = end_of(TWO_A_SECOND, group(1, 10_000, due_s=1800.0))
    assert (alone.in_s, alone.at_risk) == (5000.0, True)
    assert alone.reason == (
        "10000 lines of 'm' are left; 2 finish a second: that takes 83.3 min, and the window ends in 30 min"
    )
    behind = end_of(TWO_A_SECOND, group(1, 10, due_s=1800.0), group(2, 7200, due_s=900.0))
    assert behind.at_risk
    assert "10 lines of 'm' are left and wait behind 7200 of other batches" in behind.reason


def test_before_a_line_has_finished_it_says_what_the_instances_make_at_most() -> None:
    end = end_of(ModelSpeed(most_per_s=10.0, taking=2), group(1, 100))
    assert (end.in_s, end.at_risk) == (10.0, False)
    assert "none has finished recently, and its instances make at most 10 a second" in end.reason
    assert end_of(ModelSpeed(most_per_s=10.0, taking=2), group(1, 100, due_s=9.0)).at_risk


def test_what_is_not_known_is_not_made_up() -> None:
    unknown = end_of(ModelSpeed(taking=1), group(1, 100))
    assert (unknown.in_s, unknown.at_risk) == (None, False)
    assert "is not known" in unknown.reason
    starting = end_of(ModelSpeed(per_s=2.0, starting=1), group(1, 100))
    assert (starting.in_s, starting.at_risk) == (None, False)
    assert starting.reason == "an instance of 'm' is starting"
    nobody = end_of(ModelSpeed(per_s=2.0), group(1, 100))
    assert (nobody.in_s, nobody.at_risk) == (None, True)
    assert nobody.reason == "no instance of 'm' takes batch requests"


@pytest.mark.parametrize("swap", [False, True])
def test_a_batch_of_two_models_ends_with_its_worse_one(swap: bool) -> None:
    groups = [group(1, 10, model="m"), group(1, 10, model="n")]
    speeds = {"m": TWO_A_SECOND, "n": ModelSpeed(per_s=1.0, taking=1)}
    end = predict_ends(groups[::-1] if swap else groups, speeds)[1]
    assert (end.in_s, end.reason[:17]) == (10.0, "10 lines of 'n' a")
    end = predict_ends(groups, speeds | {"n": ModelSpeed(taking=1)})[1]
    assert end.in_s is None
    end = predict_ends(groups, {"m": ModelSpeed(per_s=0.001, taking=1), "n": ModelSpeed(taking=1)})[1]
    assert (end.in_s, end.at_risk) == (10_000.0, True)


def follow(*looks: tuple[float, int, bool], before: SpeedSample | None = None) -> SpeedSample | None:
    """The sample after these looks: when, completed lines since ever, and whether some are left."""
    for now_s, finished, busy in looks:
        before = choose_speed(before, finished=finished, busy=busy, now_s=now_s, settings=SETTINGS)
    return before


def per_s(*looks: tuple[float, int, bool]) -> Any:
    sample = follow(*looks)
    assert sample is not None
    return sample.per_s


def test_a_speed_is_known_when_lines_have_completed() -> None:
    assert per_s((0, 7, True)) is None
    assert per_s((0, 7, True), (15, 7, True)) is None
    assert per_s((0, 7, True), (15, 7, True), (25, 37, True)) == 3.0


def test_a_speed_follows_what_is_measured() -> None:
    steady = [(10.0 * n, 20 * n, True) for n in range(5)]
    assert per_s(*steady) == pytest.approx(2.0)
    stalled = per_s(*steady, (140.0, 80, True))
    assert stalled == pytest.approx(2.0 * math.exp(-1.0))
    stopped = per_s(*steady, (1e6, 80, True))
    assert stopped is not None
    end = end_of(ModelSpeed(per_s=max(stopped, 1e-300), taking=1), group(1, 100))
    assert (end.in_s, end.at_risk) == (366 * 86_400.0, True)


def test_time_without_lines_to_run_measures_nothing() -> None:
    idle = [(0.0, 0, True), (10.0, 20, False), (500.0, 20, True)]
    assert per_s(*idle) == 2.0
    assert per_s(*idle, (510.0, 40, True)) == pytest.approx(2.0)


def test_an_old_speed_is_forgotten() -> None:
    assert per_s((0, 0, True), (10, 20, False), (1020, 20, True)) is None


def test_a_second_look_at_once_changes_nothing() -> None:
    first = follow((0, 0, True), (10, 20, True))
    assert follow((10.01, 21, True), before=first) == first
