"""When a plan waits for an operator: GPUs that hold something else, as a number and a share, and the cost."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policies.facts import RegionGpu
from controlplane.policies.plan_approval import (
    Approval,
    ApprovalFacts,
    ApprovalRule,
    ApprovalSettings,
    GpuChange,
    choose_approval,
    gpus_moved,
)

EAST, WEST = (RegionGpu(region=region, gpu_type="H800") for region in ("us-east", "us-west"))


def change(before: int, after: int, place: RegionGpu = EAST) -> GpuChange:
    return GpuChange(place=place, before=before, after=after)


def choose(
    changes: Sequence[GpuChange], *, fleet_gpus: int = 100, before: float = 10.0, after: float = 10.0, **limits: object
) -> Approval:
    facts = ApprovalFacts(
        changes=tuple(changes), fleet_gpus=fleet_gpus, cost_before_per_hour=before, cost_after_per_hour=after
    )
    values = {"gpus_moved_max": None, "share_moved_max": None, "cost_change_max": None} | limits
    rule = ApprovalRule.LIMITS if limits else ApprovalRule.AUTOMATIC
    return choose_approval(facts, 0.0, ApprovalSettings(rule=rule, **values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "moved"),
    [
        ([], 0),
        ([change(4, 4)], 0),
        ([change(0, 8)], 8),
        ([change(8, 0), change(0, 8)], 8),  # one gives what the other takes
        ([change(8, 0), change(0, 8, WEST)], 16),  # but not across regions
        ([change(8, 4), change(0, 1)], 4),
    ],
)
def test_gpus_that_hold_something_else(changes: list[GpuChange], moved: int) -> None:
    assert gpus_moved(changes) == moved


def test_automatic_and_always_ask_no_limit() -> None:
    huge = [change(0, 100)]
    assert choose(huge, after=1e9).automatic
    facts = ApprovalFacts(changes=(), fleet_gpus=1, cost_before_per_hour=0, cost_after_per_hour=0)
    asked = choose_approval(facts, 0.0, ApprovalSettings(rule=ApprovalRule.ALWAYS))
    assert not asked.automatic
    assert asked.reasons


@pytest.mark.parametrize(
    ("limit", "at", "over", "words"),
    [
        ({"gpus_moved_max": 8}, {"changes": [change(0, 8)]}, {"changes": [change(0, 9)]}, "moves 9 GPUs"),
        ({"share_moved_max": 0.2}, {"changes": [change(20, 0)]}, {"changes": [change(21, 0)]}, "moves 21.0% of the"),
        ({"cost_change_max": 5.0}, {"changes": [], "after": 15.0}, {"changes": [], "after": 15.5}, "raises .* 5.50"),
        ({"cost_change_max": 5.0}, {"changes": [], "after": 5.0}, {"changes": [], "after": 4.5}, "lowers .* 5.50"),
    ],
)
def test_a_limit_is_kept_at_it_and_exceeded_above(
    limit: dict[str, object], at: dict[str, object], over: dict[str, object], words: str
) -> None:
    assert choose(**at, **limit) == Approval(automatic=True, reasons=())  # type: ignore[arg-type]
    [reason] = choose(**over, **limit).reasons  # type: ignore[arg-type]
    assert re.match(words, reason)
    assert "limit is" in reason


def test_every_limit_that_is_exceeded_is_named() -> None:
    asked = choose([change(0, 50)], after=100.0, gpus_moved_max=1, share_moved_max=0.1, cost_change_max=1.0)
    assert [reason.split()[0] for reason in asked.reasons] == ["moves", "moves", "raises"]


def test_an_empty_fleet_moves_no_share() -> None:
    assert choose([change(4, 0)], fleet_gpus=0, share_moved_max=0.0).automatic


def test_settings_that_cannot_be_meant() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        ApprovalSettings(gpus_moved_max=-1)
    with pytest.raises(ValueError, match="needs at least one"):
        ApprovalSettings(rule=ApprovalRule.LIMITS, share_moved_max=None)


CHANGES = st.lists(
    st.builds(GpuChange, place=st.sampled_from([EAST, WEST]), before=st.integers(0, 9), after=st.integers(0, 9)),
    max_size=6,
)


@given(changes=CHANGES, limit=st.integers(0, 30), cost=st.floats(0, 100))
def test_looser_limits_never_ask_more(changes: list[GpuChange], limit: int, cost: float) -> None:
    tight = choose(changes, after=cost, gpus_moved_max=limit, cost_change_max=5.0)
    loose = choose(changes, after=cost, gpus_moved_max=limit + 1, cost_change_max=6.0)
    assert tight.automatic <= loose.automatic
    assert gpus_moved(changes) == gpus_moved(list(reversed(changes)))
    assert gpus_moved(changes) <= sum(abs(each.after - each.before) for each in changes)
