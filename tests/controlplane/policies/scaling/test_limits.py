"""What holds for every strategy, on whatever it is given."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policies.scaling.choose import STRATEGIES
from controlplane.policies.scaling.facts import EndpointScaleFacts, StrategyName
from dataplane.protocol.tiers import InstanceKind
from tests.controlplane.policies.scaling.endpoints import NOW, any_endpoint, decide, deltas, endpoint

ALL = sorted(STRATEGIES)
any_case = given(facts=any_endpoint(), strategy=st.sampled_from(ALL))


def test_every_name_has_its_strategy() -> None:
    assert set(STRATEGIES) == set(StrategyName)


@settings(max_examples=100)
@any_case
def test_no_step_leads_past_a_limit(facts: EndpointScaleFacts, strategy: str) -> None:
    steps = decide(strategy, facts).steps
    outs = sum(step.delta for step in steps if step.delta > 0)
    ins = -sum(step.delta for step in steps if step.delta < 0)
    assert facts.total + outs <= max(facts.max, facts.total), "never past the maximum, not even for a moment"
    stuck = sum(facts.stuck.values())
    assert facts.working - max(0, ins - stuck) >= min(facts.min, facts.working), "never below the minimum"
    assert all(step.delta and step.reason for step in steps)


@settings(max_examples=100)
@any_case
def test_unknown_utilization_lets_nothing_go_that_serves(facts: EndpointScaleFacts, strategy: str) -> None:
    if facts.utilization is None:
        gone = -sum(step.delta for step in decide(strategy, facts).steps if step.delta < 0)
        assert not gone or (facts.ready == 0 and gone <= sum(facts.stuck.values()))


@settings(max_examples=100)
@any_case
def test_somebody_serves_while_those_that_stay_start(facts: EndpointScaleFacts, strategy: str) -> None:
    """A step takes instances of its kind that do not serve before those that do. All are of kinds that the strategy
    knows, as scaling sees to.
    """
    if strategy == "siloed" and any(facts.of_kind(InstanceKind.MIXED).present.values()):
        return
    if strategy not in {"siloed", "chiron"}:
        facts = replace(facts, kinds={})
    gone, serving_gone = 0, 0
    for step in decide(strategy, facts).steps:
        part = facts.of_kind(step.kind)
        unready = [
            count
            for counts in (part.starting, part.stuck)
            for gpu_type, count in counts.items()
            if step.gpu_type in {None, gpu_type}
        ]
        gone += max(0, -step.delta)
        serving_gone += max(0, -step.delta - sum(unready))
    assert serving_gone < facts.ready or gone >= facts.working or not facts.ready


@settings(max_examples=100)
@any_case
def test_below_the_minimum_is_scaled_out_at_once(facts: EndpointScaleFacts, strategy: str) -> None:
    if facts.working < facts.min and not any(facts.stuck.values()):
        steps = decide(strategy, facts).steps
        assert facts.total + sum(step.delta for step in steps) >= facts.min


@settings(max_examples=100)
@any_case
def test_the_cooldown_holds(facts: EndpointScaleFacts, strategy: str) -> None:
    within = facts.min <= facts.working and facts.total <= facts.max and not any(facts.stuck.values())
    cooling = facts.last_scaled_s is not None and NOW - facts.last_scaled_s < 15
    if cooling and within and strategy in {"lt-u", "lt-ua", "reactive", "chiron"}:
        assert decide(strategy, facts).steps == ()


@settings(max_examples=50)
@any_case
def test_deciding_again_while_work_is_under_way_adds_nothing(facts: EndpointScaleFacts, strategy: str) -> None:
    """What was asked for is starting now; the load is the same. Whoever asks again asks for less, and soon for none."""
    if facts.kinds and strategy in {"siloed", "chiron"}:
        return  # their kinds are followed in their own tests
    present, starting, asked = dict(facts.present), dict(facts.starting), []
    for turn in range(12):
        now = endpoint(
            present,
            starting=starting,
            utilization=facts.utilization,
            limits=(facts.min, facts.max),
            planned=facts.planned,
            tokens_per_s=dict.fromkeys("AHX", 500.0),
            observed_tokens_per_s=facts.observed_tokens_per_s,
            forecast_tokens_per_s=facts.forecast_tokens_per_s,
        )
        outs = [step for step in decide(strategy, now, now_s=NOW + 15 * turn).steps if step.delta > 0]
        asked.append(sum(step.delta for step in outs))
        for step in outs:
            gpu_type = step.gpu_type or "H"
            present[gpu_type] = present.get(gpu_type, 0) + step.delta
            starting[gpu_type] = starting.get(gpu_type, 0) + step.delta
    assert sum(present.values()) <= max(facts.max, facts.total)
    assert asked[-1] == 0, asked


@pytest.mark.parametrize("strategy", ["lt-i", "lt-u", "lt-ua", "reactive"])
def test_what_does_not_come_up_freezes_nothing(strategy: str) -> None:
    """Three of the plan's four, one of them stuck and all hot: one is started beside it, and another one meanwhile."""
    facts = endpoint({"H": 3}, stuck={"H": 1}, utilization=0.95, planned={"H": 4})
    steps = decide(strategy, facts).steps
    assert sum(step.delta for step in steps) >= 1
    going_on = endpoint({"H": 4}, stuck={"H": 1}, starting={"H": 1}, utilization=1.0, planned={"H": 4}, limits=(0, 10))
    assert all(step.delta > 0 for step in decide("lt-i", going_on).steps)


def test_stuck_ones_are_replaced_one_at_a_time_and_then_let_go() -> None:
    broken = endpoint({"H": 2}, stuck={"H": 2}, utilization=None, planned={"H": 2})
    assert deltas(decide("lt-i", broken)) == {"H": 1}, "not two beside two: the model itself may be broken"
    replaced = endpoint({"H": 3}, stuck={"H": 1}, utilization=0.5, planned={"H": 2})
    assert deltas(decide("lt-i", replaced)) == {"H": -1}
    assert decide("lt-i", replaced).steps[0].reason == "1 do not come up"
    coming = endpoint({"H": 3}, stuck={"H": 1}, starting={"H": 1}, utilization=0.5, planned={"H": 2})
    assert deltas(decide("lt-i", coming)) == {}, "its replacement may fail too"
    full = endpoint({"H": 2}, stuck={"H": 1}, utilization=0.5, planned={"H": 2}, limits=(1, 2))
    assert deltas(decide("lt-i", full)) == {"H": -1}, "no room beside it"
    unknown = endpoint({"H": 3}, stuck={"H": 1}, utilization=None, planned={"H": 2})
    assert deltas(decide("lt-i", unknown)) == {}


@pytest.mark.parametrize(
    ("present", "limits"),
    [
        ({"H": 2}, (0, 4)),  # the one planned, and its replacement
        ({"H": 1}, (1, 1)),  # no room for one
    ],
)
def test_a_replacement_that_fails_is_not_replaced_until_later(present: dict[str, int], limits: tuple[int, int]) -> None:
    for waited_s, expected in ((599, {}), (600, {"H": -1})):
        facts = endpoint(
            present,
            stuck=present,
            utilization=None,
            planned={"H": 1},
            limits=limits,
            last_scaled_s=NOW - waited_s,
        )
        assert deltas(decide("lt-i", facts)) == expected


@pytest.mark.parametrize("strategy", ["lt-i", "lt-u", "lt-ua", "reactive"])
def test_a_model_that_never_comes_up_is_started_again_seldom(strategy: str) -> None:
    """An hour of rounds in which whatever is started fails before the next."""
    present, last_scaled_s, started = 0, None, 0
    for turn in range(240):
        facts = endpoint(
            {"H": present},
            stuck={"H": present},
            utilization=None,
            planned={"H": 1},
            limits=(1, 4),
            last_scaled_s=last_scaled_s,
        )
        now_s = NOW + 15 * turn
        decision = decide(strategy, facts, now_s=now_s)
        last_scaled_s = now_s if decision.steps else last_scaled_s
        started += sum(step.delta for step in decision.steps if step.delta > 0)
        present += sum(step.delta for step in decision.steps)
        assert present <= 2
    assert started == 7, "two, and another one every ten minutes"
