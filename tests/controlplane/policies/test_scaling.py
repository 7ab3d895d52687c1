from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policies.facts import Endpoint
from controlplane.policies.scaling import (
    EndpointScaleFacts,
    ScaleStep,
    ScalingDecision,
    ScalingFacts,
    ScalingSettings,
    choose_scaling,
)

HERE = Endpoint(model="m", region="west")
NOW = 1000.0


def endpoint(
    present: Mapping[str, int],
    *,
    starting: Mapping[str, int] | None = None,
    utilization: float | None = 0.5,
    limits: tuple[int, int] = (0, 10),
    planned: Mapping[str, int] | None = None,
    last_scaled_s: float | None = None,
) -> EndpointScaleFacts:
    return EndpointScaleFacts(
        endpoint=HERE,
        present=present,
        starting=starting or {},
        utilization=utilization,
        min=limits[0],
        max=limits[1],
        planned=planned,
        last_scaled_s=last_scaled_s,
    )


def decide(strategy: str, *endpoints: EndpointScaleFacts, now_s: float = NOW) -> ScalingDecision:
    return choose_scaling(ScalingFacts(endpoints=endpoints), now_s, ScalingSettings(strategy=strategy))


def deltas(decision: ScalingDecision) -> dict[str | None, int]:
    return {step.gpu_type: step.delta for step in decision.steps}


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
    ],
)
def test_lt_i_goes_to_the_plan(facts: EndpointScaleFacts, expected: dict[str | None, int]) -> None:
    assert deltas(decide("lt-i", facts)) == expected


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (endpoint({"H": 2}, utilization=0.71), {None: 1}),
        (endpoint({"H": 2}, utilization=0.70), {}),  # above, not at
        (endpoint({"H": 2}, utilization=0.29), {None: -1}),
        (endpoint({"H": 2}, utilization=0.30), {}),
        (endpoint({"H": 2}, utilization=0.99, last_scaled_s=NOW - 14.9), {}),  # cooling down
        (endpoint({"H": 2}, utilization=0.99, last_scaled_s=NOW - 15), {None: 1}),
        (endpoint({"H": 2}, utilization=0.99, starting={"H": 1}), {}),  # nothing stacked
        (endpoint({"H": 2}, utilization=0.01, starting={"H": 1}), {}),
        (endpoint({"H": 2}, utilization=0.99, limits=(0, 2)), {}),
        (endpoint({"H": 2}, utilization=0.01, limits=(2, 4)), {}),
        (endpoint({"H": 2}, utilization=None), {}),
        (endpoint({"H": 0}, utilization=None, limits=(2, 4), last_scaled_s=NOW - 1), {None: 2}),  # below min: always
        (endpoint({"H": 6}, limits=(2, 4)), {None: -2}),
        (endpoint({"H": 6}, limits=(2, 4), utilization=None), {}),
    ],
)
def test_reactive_follows_utilization(facts: EndpointScaleFacts, expected: dict[str | None, int]) -> None:
    assert deltas(decide("reactive", facts)) == expected


def test_the_state_remembers_when_an_endpoint_was_scaled() -> None:
    hot = endpoint({"H": 2}, utilization=0.9, last_scaled_s=10.0)
    calm = endpoint({"H": 2}, last_scaled_s=20.0)
    assert decide("reactive", hot).last_scaled_s == {HERE: NOW}
    assert decide("reactive", calm).last_scaled_s == {HERE: 20.0}
    assert decide("reactive", endpoint({"H": 2})).last_scaled_s == {}


def test_a_step_says_why() -> None:
    assert decide("lt-i", endpoint({"H": 1}, planned={"H": 9}, limits=(0, 4))).steps == (
        ScaleStep(endpoint=HERE, gpu_type="H", delta=3, reason="plan says 9, 1 present; limits 0 to 4 make it 4"),
    )
    assert decide("reactive", endpoint({"H": 2}, utilization=0.85)).steps[0].reason == "utilization 85 % is above 70 %"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limits": (3, 2)}, "min 3, max 2"),
        ({"starting": {"H": 3}}, r"starting\[H\] is 3 of 2"),
        ({"planned": {"H": -1}}, "not be negative"),
    ],
)
def test_bad_facts_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        endpoint({"H": 2}, **change)  # type: ignore[arg-type]


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="lt-i, reactive"):
        ScalingSettings(strategy="lt-x")
    with pytest.raises(ValueError, match="in_below < out_above"):
        ScalingSettings(in_below=0.8)


@st.composite
def any_endpoint(draw: st.DrawFn) -> EndpointScaleFacts:
    present = draw(st.dictionaries(st.sampled_from("AHX"), st.integers(0, 6)))
    starting = {gpu_type: draw(st.integers(0, count)) for gpu_type, count in present.items()}
    fewest = draw(st.integers(0, 5))
    return endpoint(
        present,
        starting=starting,
        utilization=draw(st.none() | st.floats(0, 1)),
        limits=(fewest, draw(st.integers(fewest, 9))),
        planned=draw(st.none() | st.dictionaries(st.sampled_from("AHX"), st.integers(0, 8))),
        last_scaled_s=draw(st.none() | st.floats(NOW - 30, NOW)),
    )


@settings(deadline=None)
@given(facts=any_endpoint(), strategy=st.sampled_from(["lt-i", "reactive"]))
def test_no_step_leads_past_a_limit(facts: EndpointScaleFacts, strategy: str) -> None:
    steps = decide(strategy, facts).steps
    after = facts.total + sum(step.delta for step in steps)
    assert after <= max(facts.max, facts.total)
    assert after >= min(facts.min, facts.total)
    assert all(step.delta and step.reason for step in steps)
    if facts.utilization is None:
        assert all(step.delta > 0 for step in steps)
    if facts.total < facts.min:
        assert after >= facts.min
    for step in steps:
        if step.gpu_type is not None:
            assert facts.present.get(step.gpu_type, 0) + step.delta >= 0


@settings(deadline=None)
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
