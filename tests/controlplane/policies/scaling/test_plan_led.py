"""LT-I, LT-U and LT-UA as SageServe 6.4 tells them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policies.scaling.facts import EndpointScaleFacts, ScaleStep
from tests.controlplane.policies.scaling.endpoints import HERE, NOW, any_endpoint, decide, deltas, endpoint


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (endpoint({"H": 1}, planned={"H": 4}), {"H": 3}),  # at once, not by one
        (endpoint({"H": 5}, planned={"H": 2}), {"H": -3}),
        (endpoint({"H": 2}, planned={"H": 2}), {}),
        (endpoint({"H": 2}, planned=None), {}),  # no plan: keep
        (endpoint({"H": 2}, planned={}), {"H": -2}),  # a plan of nothing
        (endpoint({"H": 2}, planned={}, limits=(1, 9)), {"H": -1}),  # ... but the minimum stays
        (endpoint({"H": 1}, planned={"H": 9}, limits=(0, 4)), {"H": 3}),  # the maximum binds
        (endpoint({"H": 6}, planned=None, limits=(0, 4)), {"H": -2}),
        (endpoint({}, planned=None, limits=(2, 4)), {None: 2}),  # any GPU type
        (endpoint({"H": 1}, planned=None, limits=(3, 4)), {"H": 2}),
        (endpoint({"H": 5}, planned={"H": 2}, utilization=None), {}),  # unknown: no scale-in
        (endpoint({"H": 1}, planned={"H": 3}, utilization=None), {"H": 2}),  # ... but out
        (endpoint({"A": 2}, planned={"H": 2}), {"H": 2}),  # exchange: start first
        (endpoint({"A": 2, "H": 2}, starting={"H": 2}, planned={"H": 2}), {}),  # not ready: wait
        (endpoint({"A": 2, "H": 2}, starting={"H": 1}, planned={"H": 2}), {"A": -1}),
        (endpoint({"A": 2, "H": 2}, planned={"H": 2}), {"A": -2}),
        (endpoint({"A": 2}, planned={"H": 2}, limits=(1, 2)), {"A": -1}),  # at the maximum: one by one
        (endpoint({"A": 1}, planned={"H": 2}, limits=(1, 2)), {"H": 1}),
        (endpoint({"A": 2}, planned={"H": 2}, limits=(2, 2)), {}),  # no room to exchange
        (endpoint({"H": 3}, starting={"H": 1}, planned={"H": 2}), {"H": -1}),  # the one that starts
        (endpoint({"A": 2}, starting={"A": 1}, planned={"H": 1}, limits=(2, 3)), {"H": 1}),  # it may find no place
        (endpoint({"H": 3}, stuck={"H": 1}, planned={"H": 3}), {"H": 1}),  # one does not come up: another beside it
    ],
)
def test_lt_i_goes_to_the_plan(facts: EndpointScaleFacts, expected: dict[str | None, int]) -> None:
    assert deltas(decide("lt-i", facts)) == expected


HOT, WARM, COLD = 0.75, 0.5, 0.2


@pytest.mark.parametrize("strategy", ["lt-u", "lt-ua"])
@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (endpoint({"H": 1}, planned={"H": 4}, utilization=WARM), {}),  # the peak may be an hour away
        (endpoint({"H": 1}, planned={"H": 4}, utilization=HOT), {"H": 1}),  # one at a time
        (endpoint({"H": 4}, planned={"H": 4}, utilization=HOT), {}),  # not beyond the plan
        (endpoint({"H": 4}, planned={"H": 2}, utilization=WARM), {}),
        (endpoint({"H": 4}, planned={"H": 2}, utilization=COLD), {"H": -1}),
        (endpoint({"H": 2}, planned={"H": 2}, utilization=COLD), {}),  # not below the plan
        (endpoint({"H": 4}, planned={"H": 2}, utilization=HOT), {}),  # away from the plan: never
        (endpoint({"H": 1}, planned={"H": 4}, utilization=COLD), {}),
        (endpoint({"H": 2}, starting={"H": 1}, planned={"H": 4}, utilization=0.9), {}),  # 0.45 once it is there
        (endpoint({"H": 4}, starting={"H": 1}, planned={"H": 6}, utilization=0.99), {"H": 1}),  # 0.74 all the same
        (endpoint({"H": 4}, starting={"H": 1}, planned={"H": 2}, utilization=0.1), {}),  # nothing goes while one comes
        (endpoint({"H": 4}, planned={"H": 2}, utilization=None), {}),
        (endpoint({"H": 1}, planned={"H": 4}, utilization=HOT, last_scaled_s=NOW - 14), {}),
        (endpoint({"H": 1}, planned={"H": 4}, limits=(2, 9), utilization=None, last_scaled_s=NOW), {"H": 1}),
        (endpoint({"H": 5}, planned={"H": 9}, limits=(0, 4), utilization=HOT), {"H": -1}),
        (endpoint({}, planned={"H": 2}, utilization=None, observed_tokens_per_s=0.0), {}),  # nobody asks
        (endpoint({}, planned={"H": 2}, utilization=None, observed_tokens_per_s=9.0), {"H": 1}),
        (endpoint({"H": 2}, planned=None, utilization=HOT), {}),  # no plan: nothing to go to
        (endpoint({"A": 1, "H": 1}, planned={"A": 2, "H": 2}, utilization=HOT, donated_same={"H": 1}), {"H": 1}),
        (endpoint({"A": 1, "H": 1}, planned={"A": 2, "H": 2}, utilization=HOT, donated_other={"H": 1}), {"H": 1}),
        (endpoint({"A": 1, "H": 1}, planned={"A": 2, "H": 2}, utilization=HOT), {"A": 1}),
    ],
)
def test_lt_u_moves_towards_the_plan_only_when_it_must(
    strategy: str, facts: EndpointScaleFacts, expected: dict[str | None, int]
) -> None:
    assert deltas(decide(strategy, facts)) == expected


def late(present: int, ratio: float, *, utilization: float | None = WARM, **changes: object) -> EndpointScaleFacts:
    """At the plan's two instances (or near), with `ratio` times the forecast of 100 tokens/s arriving."""
    values = {"tokens_per_s": {"H": 100.0}, "observed_tokens_per_s": 100 * ratio, "forecast_tokens_per_s": 100.0}
    return endpoint({"H": present}, planned={"H": 2}, utilization=utilization, **(values | changes))  # type: ignore[arg-type]


LAST_MINUTES = 2400.0


@pytest.mark.parametrize(
    ("facts", "now_s", "expected"),
    [
        (late(2, 5.0), LAST_MINUTES, {"H": 1}),  # five times the forecast: beyond the plan
        (late(2, 4.99), LAST_MINUTES, {}),
        (late(2, 5.0), LAST_MINUTES - 1, {}),  # 21 minutes are left: the plan stands
        (late(2, 5.0), 3599.0, {"H": 1}),
        (late(2, 5.0), 3600.0, {}),  # the window is over
        (late(1, 5.0), LAST_MINUTES, {}),  # not at the plan yet, and not hot: as LT-U
        (late(4, 5.0), LAST_MINUTES, {"H": 1}),  # on and on ...
        (late(5, 5.0), LAST_MINUTES, {}),  # ... until what arrives is served
        (late(4, 5.0, starting={"H": 1}), LAST_MINUTES, {"H": 1}),
        (late(2, 5.0, tokens_per_s={}), LAST_MINUTES, {"H": 1}),
        (late(3, 5.0, tokens_per_s={}, starting={"H": 1}), LAST_MINUTES, {}),  # without a profile one at a time
        (late(2, 9.0, limits=(0, 2)), LAST_MINUTES, {}),
        (late(2, 0.5, utilization=0.31), LAST_MINUTES, {"H": -1}),  # half the forecast: below the plan
        (late(2, 0.51, utilization=0.31), LAST_MINUTES, {}),
        (late(2, 0.5, utilization=0.31), LAST_MINUTES - 1, {}),
        (late(2, 0.5, utilization=0.31, limits=(2, 9)), LAST_MINUTES, {}),
        (late(2, 0.5, utilization=0.36), LAST_MINUTES, {}),  # the other one would be above 70 %
        (late(2, 0.5, utilization=None), LAST_MINUTES, {}),
        (late(2, 0.5, utilization=0.31, tokens_per_s={"H": 40.0}), LAST_MINUTES, {}),  # one could not carry 50
        (late(1, 0.1, utilization=0.01), LAST_MINUTES, {}),  # the last one stays
        (late(2, 5.0, last_scaled_s=LAST_MINUTES - 1), LAST_MINUTES, {}),
        (late(2, 5.0, forecast_tokens_per_s=None), LAST_MINUTES, {}),
        (late(2, 5.0, observed_tokens_per_s=None), LAST_MINUTES, {}),
    ],
)
def test_lt_ua_leaves_a_plan_that_was_wrong(
    facts: EndpointScaleFacts, now_s: float, expected: dict[str | None, int]
) -> None:
    assert deltas(decide("lt-ua", facts, now_s=now_s, window_start_s=0.0)) == expected
    calm = facts.utilization is None or 0.3 <= facts.utilization <= 0.7
    if calm:
        assert decide("lt-u", facts, now_s=now_s, window_start_s=0.0).steps == ()


def test_without_a_plan_there_is_no_late() -> None:
    assert decide("lt-ua", late(2, 9.0), now_s=LAST_MINUTES, window_start_s=None).steps == ()


def test_a_step_says_why() -> None:
    assert decide("lt-i", endpoint({"H": 1}, planned={"H": 9}, limits=(0, 4))).steps == (
        ScaleStep(endpoint=HERE, gpu_type="H", delta=3, reason="plan says 9, 1 present; limits 0 to 4 make it 4"),
    )
    hot = decide("lt-u", endpoint({"H": 2}, planned={"H": 4}, utilization=0.85)).steps[0].reason
    assert hot == "utilization 85 % is above 70 %; plan says 4, 2 present"
    beyond = decide("lt-ua", late(2, 6.0), now_s=LAST_MINUTES).steps[0].reason
    assert beyond == "6.0 times the forecast arrives, beyond the plan"


@given(facts=any_endpoint())
def test_lt_i_arrives_at_the_plan_and_stays(facts: EndpointScaleFacts) -> None:
    """Each round everything asked for becomes ready; the count reaches the plan's within the limits and rests there."""
    if facts.min == facts.max or facts.planned is None or not any(facts.planned.values()):
        return
    present = dict(facts.present)
    for _ in range(40):
        now = endpoint(present, limits=(facts.min, facts.max), planned=facts.planned)
        steps = decide("lt-i", now).steps
        if not steps:
            break
        for step in steps:
            assert step.gpu_type is not None
            present[step.gpu_type] = present.get(step.gpu_type, 0) + step.delta
    else:
        pytest.fail(f"still moving: {present}")
    planned = sum(facts.planned.values())
    assert sum(present.values()) == min(max(planned, facts.min), facts.max)
    if facts.min <= planned <= facts.max:
        assert {key: count for key, count in present.items() if count} == {
            key: count for key, count in facts.planned.items() if count
        }


@settings(max_examples=40)
@given(facts=any_endpoint(), utilization=st.sampled_from([HOT, 1.0, COLD, 0.0]))
def test_lt_u_under_steady_pressure_ends_between_here_and_the_plan(
    facts: EndpointScaleFacts, utilization: float
) -> None:
    planned = facts.planned or {}
    most = max(sum(planned.values()), facts.total)
    present = dict(facts.present)
    for turn in range(40):
        now = endpoint(present, limits=(0, most), planned=planned, utilization=utilization)
        steps = decide("lt-u", now, now_s=NOW + 15 * turn).steps
        if not steps:
            break
        for step in steps:
            assert step.gpu_type is not None
            present[step.gpu_type] = present.get(step.gpu_type, 0) + step.delta
    else:
        pytest.fail("still moving")
    for gpu_type, count in present.items():
        wanted, was = planned.get(gpu_type, 0), facts.present.get(gpu_type, 0)
        assert min(was, wanted) <= count <= max(was, wanted)
