"""The way out that costs least, with the arithmetic in the row."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from dataplane.engines.core.remapping.relief import (
    WAYS,
    ReliefFacts,
    ReliefSettings,
    Victim,
    choose_relief,
    predicted_costs,
)

VICTIM = Victim(kv_bytes=10**9, recompute_s=0.1)
FACTS = ReliefFacts(
    remap_wait_s=None,
    victim=VICTIM,
    can_wait=False,
    running=16,
    step_s=0.025,
    room_s=2.0,
    out_bytes_per_s=20e9,
    in_bytes_per_s=25e9,
)


@pytest.mark.parametrize(
    ("changes", "way", "costs"),
    [
        # swap: who asks waits 0.05 out; the victim 0.05 + 2 + 0.04. Recompute: 16 x 0.1, and 2 until there is room.
        ({}, "swap", {"swap": 0.05 + 2.09, "recompute": 1.6 + 2.0}),
        ({"remap_wait_s": 0.0}, "remap", {"remap": 0.0, "swap": 2.14, "recompute": 3.6}),
        # 16 requests x 5 ms a step x 80 steps
        ({"remap_wait_s": 0.005}, "swap", {"remap": 6.4, "swap": 2.14, "recompute": 3.6}),
        ({"can_wait": True}, "refuse", {"refuse": 2.0, "swap": 2.14, "recompute": 3.6}),
        # a victim whose turn is far off loses nothing by leaving
        ({"victim": replace(VICTIM, idle_s=9.0)}, "swap", {"swap": 0.05, "recompute": 1.6}),
        # the wire is busy for a second: twice, for who asks and for the victim
        ({"wire_wait_s": 1.0}, "recompute", {"swap": 4.14, "recompute": 3.6}),
        ({"victim": replace(VICTIM, recompute_s=0.001)}, "recompute", {"swap": 2.14, "recompute": 2.016}),
        ({"victim": replace(VICTIM, host_room=False)}, "recompute", {"recompute": 3.6}),
        ({"victim": None, "can_wait": True}, "refuse", {"refuse": 2.0}),
        (
            {"room_s": inf, "remap_wait_s": 0.0, "can_wait": True},
            "remap",
            {"remap": 0.0, "swap": inf, "recompute": inf},
        ),
    ],
)
def test_the_cheapest_way(changes: dict[str, object], way: str, costs: dict[str, float]) -> None:
    relief = choose_relief(replace(FACTS, **changes), ReliefSettings())  # type: ignore[arg-type]
    assert relief is not None
    assert relief.way == way
    assert relief.costs == pytest.approx(costs)


def test_nobody_to_make_way_and_no_way_to_wait() -> None:
    assert choose_relief(replace(FACTS, victim=None), ReliefSettings()) is None


@examples(max_examples=50)
@given(
    wait_s=st.none() | st.floats(0.0, 0.1),
    victim=st.none() | st.builds(Victim, kv_bytes=st.integers(0, 10**10), recompute_s=st.floats(0.0, 5.0)),
    can_wait=st.booleans(),
    room_s=st.floats(0.0, 60.0),
    running=st.integers(0, 200),
)
def test_each_way_can_be_forced_where_it_is_open(
    wait_s: float | None, victim: Victim | None, can_wait: bool, room_s: float, running: int
) -> None:
    facts = replace(FACTS, remap_wait_s=wait_s, victim=victim, can_wait=can_wait, room_s=room_s, running=running)
    costs = predicted_costs(facts)
    cheapest = choose_relief(facts, ReliefSettings())
    assert (cheapest is None) == (not costs)
    assert all(cost >= 0 for cost in costs.values())
    for way in WAYS:
        forced = choose_relief(facts, ReliefSettings(forced=way))
        assert forced is None or forced.way == (way if way in costs else cheapest and cheapest.way)
        assert cheapest is None or cheapest.costs[cheapest.way] <= costs.get(way, inf)


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValueError, match="forced must be one of"):
        ReliefSettings(forced="hope")  # type: ignore[arg-type]
