"""The action that costs least, with the arithmetic in the row."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from dataplane.engines.core.remapping.actions import (
    ACTIONS,
    PressureFacts,
    Victim,
    choose_action,
    predicted_costs,
)

VICTIM = Victim(kv_bytes=10**9, recompute_s=0.1)
FACTS = PressureFacts(
    remap_wait_s=None,
    victim=VICTIM,
    can_wait=False,
    running=16,
    step_s=0.025,
    frees_in_s=2.0,
    out_bytes_per_s=20e9,
    in_bytes_per_s=25e9,
)


@pytest.mark.parametrize(
    ("changes", "action", "costs"),
    [
        # swap: the requester waits 0.05 out; the victim 0.05 + 2 + 0.04. Recompute: 16 x 0.1, and 2 until memory frees.
        ({}, "swap", {"swap": 0.05 + 2.09, "recompute": 1.6 + 2.0}),
        ({"remap_wait_s": 0.0}, "remap", {"remap": 0.0, "swap": 2.14, "recompute": 3.6}),
        # 16 requests x 5 ms a step x 80 steps
        ({"remap_wait_s": 0.005}, "swap", {"remap": 6.4, "swap": 2.14, "recompute": 3.6}),
        ({"can_wait": True}, "refuse", {"refuse": 2.0, "swap": 2.14, "recompute": 3.6}),
        # a victim whose turn is far off loses nothing
        ({"victim": replace(VICTIM, idle_s=9.0)}, "swap", {"swap": 0.05, "recompute": 1.6}),
        # the link is busy for a second: counted for the requester and for the victim
        ({"link_wait_s": 1.0}, "recompute", {"swap": 4.14, "recompute": 3.6}),
        ({"victim": replace(VICTIM, recompute_s=0.001)}, "recompute", {"swap": 2.14, "recompute": 2.016}),
        ({"victim": replace(VICTIM, fits_host=False)}, "recompute", {"recompute": 3.6}),
        ({"victim": None, "can_wait": True}, "refuse", {"refuse": 2.0}),
        (
            {"frees_in_s": inf, "remap_wait_s": 0.0, "can_wait": True},
            "remap",
            {"remap": 0.0, "swap": inf, "recompute": inf},
        ),
    ],
)
def test_the_cheapest_action(changes: dict[str, object], action: str, costs: dict[str, float]) -> None:
    facts = replace(FACTS, **changes)  # type: ignore[arg-type]
    assert choose_action(facts) == action
    assert predicted_costs(facts) == pytest.approx(costs)


def test_without_a_victim_and_without_waiting_there_is_no_action() -> None:
    assert choose_action(replace(FACTS, victim=None)) is None


@examples(max_examples=50)
@given(
    wait_s=st.none() | st.floats(0.0, 0.1),
    victim=st.none() | st.builds(Victim, kv_bytes=st.integers(0, 10**10), recompute_s=st.floats(0.0, 5.0)),
    can_wait=st.booleans(),
    frees_in_s=st.floats(0.0, 60.0),
    running=st.integers(0, 200),
)
def test_each_possible_action_can_be_forced(
    wait_s: float | None, victim: Victim | None, can_wait: bool, frees_in_s: float, running: int
) -> None:
    facts = replace(
        FACTS, remap_wait_s=wait_s, victim=victim, can_wait=can_wait, frees_in_s=frees_in_s, running=running
    )
    costs = predicted_costs(facts)
    cheapest = choose_action(facts)
    assert (cheapest is None) == (not costs)
    assert all(cost >= 0 for cost in costs.values())
    for action in ACTIONS:
        assert choose_action(facts, action) == (action if action in costs else cheapest)
        assert cheapest is None or costs[cheapest] <= costs.get(action, inf)
