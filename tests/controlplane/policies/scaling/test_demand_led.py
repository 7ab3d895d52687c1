"""LT-D: as many of the plan's instances as what arrives asks for."""

import pytest
from hypothesis import given, settings

from controlplane.policies.scaling.facts import EndpointScaleFacts
from controlplane.settings import Settings
from tests.controlplane.policies.scaling.endpoints import any_endpoint, decide, deltas, endpoint

PLAN = {"H": 8}


def arriving(present: int, arrives: float | None, **changes: object) -> EndpointScaleFacts:
    """Instances of 100 tokens/s each under a plan of eight; 110 % of what arrives is wanted, beyond 140 % let go."""
    values = {"tokens_per_s": {"H": 100.0}, "planned": PLAN, "observed_tokens_per_s": arrives}
    return endpoint({"H": present}, **(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (arriving(2, 350.0), {"H": 2}),  # 385 are wanted: four, at once
        (arriving(4, 350.0), {}),
        (arriving(5, 350.0), {}),  # up to 490: nothing goes
        (arriving(7, 350.0), {"H": -2}),
        (arriving(7, 350.0, starting={"H": 1}), {}),  # not while one starts
        (arriving(2, 350.0, starting={"H": 2}, utilization=None), {"H": 2}),
        (arriving(7, 350.0, utilization=None), {}),  # unknown: nothing goes
        (arriving(7, 350.0, utilization=0.69), {}),  # six would be above 70 %
        (arriving(4, 350.0, utilization=0.8), {"H": 1}),  # the memory of 3.2 at 70 %
        (arriving(4, 350.0, utilization=0.8, starting={"H": 1}), {}),  # 2.4 of 4: once it is there
        (arriving(7, 900.0, utilization=0.99), {"H": 1}),  # never past the plan
        (arriving(8, 900.0, utilization=0.99), {}),
        (arriving(9, 900.0), {"H": -1}),
        (arriving(4, 0.0), {"H": -1}),  # its memory is still in use
        (arriving(4, 0.0, utilization=0.0), {"H": -4}),
        (arriving(4, 0.0, utilization=0.0, limits=(3, 9)), {"H": -1}),
        (arriving(0, 350.0, utilization=None), {"H": 4}),
        (arriving(2, None), {"H": 6}),  # as LT-I
        (arriving(2, 350.0, tokens_per_s={}), {"H": 6}),
        (arriving(2, 350.0, planned=None), {}),
        (arriving(2, 350.0, planned={"A": 1, "H": 8}, tokens_per_s={"A": 300.0, "H": 100.0}), {"A": 1}),
    ],
)
def test_as_many_of_the_plan_serve_as_are_needed(facts: EndpointScaleFacts, expected: dict[str, int]) -> None:
    assert deltas(decide("lt-d", facts)) == expected


def test_a_step_says_why() -> None:
    step = decide("lt-d", arriving(2, 350.0)).steps[0]
    assert step.reason == "350 tokens/s and 1.0 instances' memory in use: 4 of the plan's 8"


@settings(max_examples=40)
@given(facts=any_endpoint())
def test_never_more_than_lt_i_would_have(facts: EndpointScaleFacts) -> None:
    """Nor fewer than the minimum; `keep_limits` holds for all strategies."""

    def outs(strategy: str) -> int:
        return sum(step.delta for step in decide(strategy, facts).steps if step.delta > 0)

    if facts.planned is not None and not any(facts.stuck.values()):
        assert outs("lt-d") <= outs("lt-i") + max(0, facts.min - sum(facts.planned.values()))


def test_settings_under_which_it_would_swing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scale_room_in must be above scale_room_out 1\.4"):
        Settings(scale_room_out=1.4)
