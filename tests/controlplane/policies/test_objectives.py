"""Objectives of tiers, and tokens in time."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.policies.objectives import choose_objective, tokens_in_time
from dataplane.protocol.tiers import Objective, Tier

GOAL = Objective(ttft_s=1.0, tbt_s=0.1)


def test_a_models_own_objective_is_before_the_default() -> None:
    defaults = {Tier.IW_F: GOAL}
    own = {"IW-F": {"ttft_s": 0.3, "tbt_s": 0.05}}
    assert choose_objective(Tier.IW_F, None, defaults) == GOAL
    assert choose_objective(Tier.IW_F, own, defaults) == Objective(ttft_s=0.3, tbt_s=0.05)
    assert choose_objective(Tier.IW_N, own, defaults) is None
    assert choose_objective(Tier.NIW, own, defaults) is None


def test_rows() -> None:
    rows = [  # first, count, elapsed, in time
        (0, 1, 0.9, 1),
        (0, 1, 1.0, 1),
        (0, 1, 1.01, 0),
        (1, 1, 1.1, 1),
        (10, 1, 2.05, 0),
        (0, 5, 1.2, 3),  # tokens 0 and 1 were due before
        (0, 3, 9.0, 0),
        (100, 2, 1.0, 2),
    ]
    for first, count, elapsed_s, expected in rows:
        assert tokens_in_time(GOAL, first=first, count=count, elapsed_s=elapsed_s) == expected, (first, elapsed_s)


@given(st.integers(0, 50), st.integers(0, 20), st.integers(0, 200))
def test_it_counts_each_token_by_its_due_time(first: int, count: int, tenths: int) -> None:
    elapsed_s = tenths / 20
    each = sum(GOAL.ttft_s + k * GOAL.tbt_s >= elapsed_s - 1e-9 for k in range(first, first + count))
    assert tokens_in_time(GOAL, first=first, count=count, elapsed_s=elapsed_s) == each
