"""Loads that fail, tick after tick, under every strategy, planned or not."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policies.scaling.choose import STRATEGIES, choose_scaling, kind_for
from controlplane.policies.scaling.facts import (
    Counts,
    EndpointScaleFacts,
    KindFacts,
    ScaleStep,
    ScalingFacts,
    ScalingSettings,
)
from dataplane.protocol.tiers import InstanceKind
from tests.controlplane.policies.scaling.endpoints import HERE, NOW

ALL = sorted(STRATEGIES)
TICK_S = 15
RETRY_S = ScalingSettings().retry_s
FREE = 30
"""GPUs of the region: more than any endpoint here may have."""


@dataclass
class One:
    """An instance. What starts has an outcome at the next tick. `broken`: it never comes up, whatever others do."""

    kind: InstanceKind = InstanceKind.MIXED
    state: str = "starting"
    broken: bool = False


@dataclass
class Ticks:
    """An endpoint that is scaled every 15 s. `loads`: whether a load succeeds at a tick, for each new instance."""

    strategy: str
    limits: tuple[int, int]
    planned: Counts | None
    observed: float | None
    loads: Callable[[int], bool]
    instances: list[One] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    failing_since: int | None = None
    last_scaled_s: float | None = None
    settled: Counts | None = None

    def run(self, ticks: int) -> "Ticks":
        for _ in range(ticks):
            tick = len(self.totals)
            for one in self.instances:
                if one.state != "ready" and not one.broken:
                    one.state = "ready" if self.loads(tick) else "stuck"
            if self.failing_since is None and any(one.state == "stuck" for one in self.instances):
                self.failing_since = tick
            self._scale(tick)
        return self

    @property
    def working(self) -> int:
        return sum(one.state != "stuck" for one in self.instances)

    def _scale(self, tick: int) -> None:
        now_s = NOW + TICK_S * tick
        facts = ScalingFacts(endpoints=(self._facts(),), window_start_s=0.0)
        decision = choose_scaling(facts, now_s, ScalingSettings(strategy=self.strategy))
        self.settled = decision.settled.get(HERE)
        self.starts.append(0)
        for change in decision.kinds:
            self._change(change.before, change.after, change.count)
        for step in decision.steps:
            self._take(step)
        if decision.steps:
            self.last_scaled_s = now_s
        self.totals.append(len(self.instances))

    def _change(self, before: InstanceKind, after: InstanceKind, count: int) -> None:
        for one in [one for one in self.instances if one.kind == before][:count]:
            one.kind = after

    def _take(self, step: ScaleStep) -> None:
        if step.delta > 0:
            self.starts[-1] += step.delta
            self.instances += [One(kind=step.kind) for _ in range(step.delta)]
            assert len(self.instances) <= FREE
            return
        going = sorted(
            (one for one in self.instances if one.kind == step.kind),
            key=lambda one: ("stuck", "starting", "ready").index(one.state),
        )
        for one in going[: -step.delta]:
            self.instances.remove(one)

    def _facts(self) -> EndpointScaleFacts:
        for one in self.instances:
            one.kind = kind_for(self.strategy, one.kind, instances_max=self.limits[1])
        kinds = {kind: self._of([one for one in self.instances if one.kind == kind]) for kind in InstanceKind}
        whole = self._of(self.instances)
        return EndpointScaleFacts(
            endpoint=HERE,
            present=whole.present,
            starting=whole.starting,
            stuck=whole.stuck,
            utilization=whole.utilization,
            kinds=kinds,
            min=self.limits[0],
            max=self.limits[1],
            planned=self.planned,
            last_scaled_s=self.last_scaled_s,
            settled=self.settled,
            tokens_per_s={"H": 100.0},
            observed_tokens_per_s=self.observed,
        )

    @staticmethod
    def _of(instances: list[One]) -> KindFacts:
        count = {state: sum(one.state == state for one in instances) for state in ("starting", "stuck", "ready")}
        return KindFacts(
            present={"H": len(instances)} if instances else {},
            starting={"H": count["starting"]} if count["starting"] else {},
            stuck={"H": count["stuck"]} if count["stuck"] else {},
            utilization=0.5 if count["ready"] else None,
        )


@st.composite
def any_case(draw: st.DrawFn) -> dict[str, Any]:
    fewest = draw(st.integers(0, 3))
    return {
        "strategy": draw(st.sampled_from(ALL)),
        "limits": (fewest, draw(st.integers(max(1, fewest), 8))),
        "planned": draw(st.none() | st.builds(lambda count: {"H": count}, st.integers(0, 6))),
        "observed": draw(st.none() | st.floats(0, 600)),
    }


def most_starts(starts: list[int], since: int) -> int:
    """The most in any time of `retry_s` from a tick on."""
    span = int(RETRY_S / TICK_S)
    return max((sum(starts[at : at + span]) for at in range(since, len(starts))), default=0)


@settings(max_examples=200)
@given(case=any_case(), before=st.integers(0, 5))
def test_loads_that_fail_take_one_more_than_is_wanted_and_try_again_seldom(case: dict[str, Any], before: int) -> None:
    """`before` instances were there when every load began to fail, one of them lost."""
    goal = max(before, *Ticks(**case, loads=lambda _: True, instances=_ready(before)).run(20).totals)
    broken = Ticks(**case, loads=lambda _: False, instances=_ready(before)).run(2)
    for one in broken.instances[:1]:
        one.state = "stuck"
    broken.run(200)
    assert max(broken.totals) <= goal + 1, broken.totals
    if broken.failing_since is not None:
        assert most_starts(broken.starts, broken.failing_since + 2) <= 1, broken.starts


@settings(max_examples=200)
@given(case=any_case(), before=st.integers(0, 5), failing=st.integers(1, 100))
def test_when_loads_succeed_again_all_that_was_wanted_is_there(case: dict[str, Any], before: int, failing: int) -> None:
    until = failing + 2
    kept = before if case["strategy"] == "lt-i" and case["planned"] is None else 0
    well = Ticks(**case, loads=lambda _: True, instances=_ready(kept)).run(until + 100)
    healed = Ticks(**case, loads=lambda tick: tick >= until, instances=_ready(before)).run(2)
    for one in healed.instances[:1]:
        one.state = "stuck"
    healed.run(until + 98)
    assert healed.working == len(healed.instances), "those that came up late are let go"
    assert healed.totals[-1] >= well.totals[-1]


@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("planned", [None, {"H": 3}])
def test_one_bad_node_costs_one_gpu(strategy: str, planned: Counts | None) -> None:
    """What it held fails for ever and what is started elsewhere serves: one stands in for it, and it is let go."""
    ticks = Ticks(strategy=strategy, limits=(3, 8), planned=planned, observed=250.0, loads=lambda _: True).run(20)
    goal, started = ticks.totals[-1], sum(ticks.starts)
    ticks.instances[0].state, ticks.instances[0].broken = "stuck", True
    ticks.run(100)
    assert max(ticks.totals) <= goal + 1
    assert sum(ticks.starts) - started == 1
    assert [one.state for one in ticks.instances] == ["ready"] * goal


def _ready(count: int) -> list[One]:
    return [One(state="ready") for _ in range(count)]
