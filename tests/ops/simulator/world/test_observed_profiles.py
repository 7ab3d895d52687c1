"""Profiles in simulated time follow what the simulated instances do."""

from typing import Any

import pytest

from controlplane.policies import hour
from controlplane.policies.assignment.facts import PlacedInstance
from controlplane.policies.facts import Endpoint, InstanceFacts, ModelGpu
from controlplane.policies.placement.choose import choose_placement
from controlplane.policies.placement.decision import Placement
from controlplane.policies.placement.facts import PlacementFacts, Profile
from controlplane.policies.profile_correction import CorrectionSettings
from controlplane.policies.scale import ScaleDecision, choose_scale
from controlplane.policies.snapshot import FleetSnapshot
from ops.simulator.kernel.events import Kind
from ops.simulator.run import build_world, simulate
from ops.simulator.scenario.formats import traffic_of
from ops.simulator.world import loops
from ops.simulator.world.observed_profiles import ObservedProfiles
from tests.ops.simulator.scaled import scaled

PAIR = ModelGpu(model="a", gpu_type="H800")
PROFILES = {PAIR: Profile(tokens_per_s=1000.0, gpus=1)}
HOUR_S = 3600.0


def instance(rate: float, used: float) -> PlacedInstance:
    report = InstanceFacts(
        instance_id="i",
        node_id="n",
        endpoint=Endpoint(model="a", region="east"),
        gpu_type="H800",
        accepting=True,
        age_s=0.0,
        kv_used_bytes=round(used * 10**9),
        kv_capacity_bytes=10**9,
        remaining_tokens=0,
        input_tokens_per_s=rate,
    )
    return PlacedInstance(
        instance_id="i", endpoint=report.endpoint, gpu_type="H800", node_id="n", slot=0, report=report
    )


def observed(settings: CorrectionSettings | None) -> ObservedProfiles:
    """Six hours of an instance that has 70 % of its memory in use at 600 tokens/s."""
    profiles = ObservedProfiles(PROFILES, settings)
    for number in range(6 * 240):
        rate = 200.0 + 400.0 * (number // 20 % 6) / 5
        profiles.observe([instance(rate, 0.7 * rate / 600)], 1.0, 15.0 * number)
    return profiles


def test_a_wrong_profile_is_corrected_step_by_step() -> None:
    """Until what was observed is within the band of 5 %."""
    profiles = observed(CorrectionSettings())
    for number, factor in enumerate((0.85, 0.7225, 0.614, 0.614)):
        profiles.correct(6 * HOUR_S + HOUR_S * number)
        assert profiles.factors[PAIR] == pytest.approx(factor, rel=1e-3)


def test_without_the_setting_nothing_is_observed() -> None:
    profiles = observed(None)
    profiles.correct(6 * HOUR_S)
    assert profiles.factors == {}


def test_plans_and_scaling_count_with_the_corrected_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forecasts, plans and scaling run as they do; only what was observed is made up."""
    planned, scaled_with = set[float](), set[float]()

    def halve(profiles: ObservedProfiles, now_s: float) -> None:
        profiles.factors[PAIR] = 0.5

    def place(facts: PlacementFacts, *others: Any, **named: Any) -> Placement:
        planned.add(facts.profiles[PAIR].tokens_per_s)
        return choose_placement(facts, *others, **named)

    def scale(snapshot: FleetSnapshot, *others: Any) -> ScaleDecision:
        scaled_with.add(snapshot.profiles[PAIR].tokens_per_s)
        return choose_scale(snapshot, *others)

    monkeypatch.setattr(ObservedProfiles, "correct", halve)
    monkeypatch.setattr(hour, "choose_placement", place)
    monkeypatch.setattr(loops, "choose_scale", scale)
    simulate(scaled(planning={"correct_profiles": True}), seed=1)
    assert planned == scaled_with == {200.0}, "half of what the scenario says"


def test_a_simulated_instance_reports_the_rate_of_its_prompts() -> None:
    """Over its last minute, the sum over all instances is what came."""
    world, _, _ = build_world(scaled(), 1)
    rates = list[float]()

    def look() -> None:
        views = world.present.views().values()
        rates.append(sum(one.input_tokens_per_s or 0.0 for view in views for one in view.values()))

    world.events.at(600.0, Kind.TICK, look)
    for _ in world.run():
        pass
    tokens = sum(one.prompt_tokens for one in traffic_of(scaled(), 1) if 540 <= one.arrived_s < 600)
    assert rates == [pytest.approx(tokens / 60, rel=0.25)]
