"""Endpoints of a reserve: by their plan while somebody begins in time, beyond it while nobody does."""

import math
from typing import Any

import pytest

from controlplane.policies.scaling.facts import EndpointScaleFacts
from tests.controlplane.policies.scaling.endpoints import NOW, decide, deltas, endpoint


def seen(tokens_per_s: float) -> dict[str, Any]:
    """Demand; an instance is for 100 tokens/s."""
    return {"tokens_per_s": {"H": 100.0}, "observed_tokens_per_s": tokens_per_s}


def held(present: int, in_flight: int, wait_s: float | None, **changes: Any) -> EndpointScaleFacts:
    """A plan of four, instances that run 10 requests at once; so each is for 7 below the upper threshold."""
    values: dict[str, Any] = {
        "planned": {"H": 4},
        "reserve": "H",
        "in_flight": in_flight,
        "waiting": max(0, in_flight - 10 * present),
        "batch_max": 10,
        "wait_s": wait_s,
        "reclaimable": 30,
    }
    return endpoint({"H": present}, limits=(0, 30), **values | changes)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (held(4, 20, 0.0), {}),
        (held(4, 200, 0.9), {}),  # somebody begins in time: the plan
        (held(4, 70, 1.1), {"H": 12}),  # 70 / 7 = 10, six lack, and six more are to come
        (held(4, 70, math.inf), {"H": 12}),
        (held(4, 20, 1.1), {}),  # late, and three would do: what is there stays
        (held(10, 84, 1.1, waiting=44, starting={"H": 6}), {"H": 4}),  # those that start count: 12 + 2
        (held(4, 250, 1.1, batch_max=64, waiting=5), {}),  # they wait for a long prompt
        (held(4, 250, 1.1, batch_max=64, waiting=6), {"H": 4}),  # 64 x 0.7 / 8 = 5.6; 250 / 44.8 is for six
        (held(4, 500, 1.1), {"H": 26}),  # never past the maximum
        (held(4, 200, None), {}),
        (held(4, 200, 1.1, batch_max=None), {}),  # not reported
        (held(4, 200, 1.1, reserve=None), {}),  # LT-I
        (held(20, 20, 0.0, last_scaled_s=NOW - 100), {}),  # not so soon after it was scaled
        (held(20, 20, 0.0, last_scaled_s=NOW - 130), {"H": -16}),
        (held(20, 90, 0.0, last_scaled_s=NOW - 130), {"H": -7}),  # those of 90 requests stay
        (held(20, 20, 0.0, starting={"H": 3}), {}),  # a start that was begun is not wasted
        (held(10, 90, 0.0, **seen(590.0)), {"H": -1}),  # 1.4 x 590 by 9
        (
            held(12, 95, 0.0, in_reserve=1, **seen(0.0)),
            {"H": -3},
        ),  # 9 and the reserve's hold 95, by 10, whatever they are
        (held(3, 70, 1.1, planned={}), {"H": 14}),
        (held(4, 70, 1.1, reclaimable=5), {"H": 6}),  # as many as 70 requests need, whatever a start takes
        (held(4, 70, 1.1, reclaimable=9), {"H": 9}),  # and beyond that those that come back in a minute
        (held(4, 70, 1.1, reclaimable=0, waiting=6, **seen(360.0)), {}),  # 1.1 x 360 is for four
        (held(4, 70, 1.1, reclaimable=0, waiting=6, **seen(390.0)), {"H": 1}),
        (held(4, 70, 1.1, reclaimable=0, waiting=6, donated_same={"L": 30}, **seen(390.0)), {"H": 1}),  # ten minutes
        (held(4, 70, 1.1, reclaimable=0, **seen(500.0)), {"H": 2}),
        (held(4, 500, math.inf, reclaimable=0, **seen(0.0)), {"H": 1}),  # a whole instance's wait
        (held(4, 500, math.inf, reclaimable=0, **seen(360.0)), {"H": 1}),
        (held(9, 63, 1.1, reclaimable=0, waiting=7, **seen(0.0)), {}),  # nine are enough
    ],
)
def test_it_leaves_the_plan_while_nobody_begins_in_time(facts: EndpointScaleFacts, expected: dict[str, int]) -> None:
    assert deltas(decide("lt-i", facts)) == expected


def test_so_does_lt_d() -> None:
    """The plan is its ceiling, but not while nobody begins in time."""
    facts = held(4, 200, 1.1, tokens_per_s={"H": 100.0}, observed_tokens_per_s=350.0)
    assert deltas(decide("lt-d", facts)) == {"H": 26}


def test_a_step_says_why() -> None:
    [step] = decide("lt-i", held(4, 200, 1.1)).steps
    assert step.reason == "200 requests in flight are more than the plan and the reserve begin in time"
