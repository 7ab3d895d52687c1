"""Simulated fleets whose endpoints share a reserve."""

from typing import Any

import pytest

from controlplane.policies.assignment.facts import SlotAdd, SlotDecision
from controlplane.policies.hour import HourPlan, choose_hour
from controlplane.policies.placement.error_correlation import PeakErrors
from controlplane.policies.scale import ScaleDecision
from ops.bench.planner.strategies_cases import figures_of
from ops.simulator.run import build_world, simulate
from ops.simulator.scenario.scenario import Scenario
from ops.simulator.world import planning
from tests.ops.simulator.pooling import MODELS, pooled
from tests.ops.simulator.scaled import run_checked

THETAS = dict.fromkeys(MODELS, 3000.0)


def scenario(**planning: Any) -> Scenario:
    """Three models on nine nodes with a minimum of two each, learnt from for an hour, then served for one."""
    wanted = {"learn_s": 3600, "pools": False, "reserve": True} | planning
    return pooled(
        planning=wanted,
        traffic={"duration_s": 7200.0, "rate_per_s": 0.6},
        scaling={"instances_min": 2},
        fleet={
            "instances": [{"model": name, "region": "east", "count": 2} for name in MODELS],
            "nodes": [{"region": "east", "count": 9, "slots": 1, "host_bytes": 10**12}],
        },
    )


def test_a_quiet_hour_is_served_from_fewer_gpus_than_the_minimums_of_all() -> None:
    alone = simulate(scenario(reserve=False)).result
    shared = simulate(scenario()).result
    assert shared.requests == alone.requests
    assert shared.failures == alone.failures == {}
    hours = {
        name: figures_of(run, THETAS, 2, 0.0).instance_hours for name, run in (("alone", alone), ("shared", shared))
    }
    assert hours["alone"] == pytest.approx(6.0, rel=0.1), "two of each model for an hour"
    assert hours["shared"] < 0.75 * hours["alone"]
    gpu_hours = shared.totals.gpu_hours
    assert gpu_hours["pooled"] > 0
    assert hours["shared"] == pytest.approx(sum(gpu_hours.values()) - gpu_hours.get("spot", 0.0)), "its slots count"


def test_plans_learn_how_far_errors_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten hours are learnt from, and each series remembers what its forecasts missed; hours are the same for all."""
    given: list[PeakErrors] = []

    def spy(*args: Any, errors: PeakErrors) -> HourPlan:
        given.append(errors)
        return choose_hour(*args, errors=errors)

    monkeypatch.setattr(planning, "choose_hour", spy)
    long = scenario(learn_s=10 * 3600)
    traffic = long.traffic.model_copy(update={"duration_s": 11 * 3600.0})
    simulate(long.model_copy(update={"traffic": traffic}))
    first, *_ = given
    assert [at.model for at in first] == list(MODELS)
    hours = {frozenset(errors) for errors in first.values()}
    assert len(hours) == 1
    assert len(hours.pop()) >= 3
    assert all(-20 < error < 20 for errors in first.values() for error in errors.values())


def test_no_endpoint_is_ever_without_an_instance() -> None:
    """Own instances leave when those in the reserve serve."""
    world, fleet, _ = build_world(scenario(), 1)
    assert fleet is not None

    def check() -> None:
        serving = {one.endpoint.model for one in fleet.hosted.values() if one.server.accepting}
        assert serving == set(MODELS)

    run_checked(world, check)
    assert any(one.pooled for one in fleet.hosted.values())


def test_nodes_of_a_reserve_tell_their_memory_for_weights() -> None:
    """Plans know by it whether a reserve's models stay there; without a reserve they know as little as before."""
    for reserve in (True, False):
        wanted = scenario(reserve=reserve)
        _, fleet, _ = build_world(wanted, 1)
        assert fleet is not None
        told = {slot.weights.weights_bytes for node in fleet.node_facts() for slot in node.slots}
        assert told == {wanted.fleet.weights_bytes if reserve else None}


def test_an_instance_that_gets_its_slot_is_no_longer_reported_as_the_reserves() -> None:
    """Routing takes those of a reserve last."""
    _, fleet, _ = build_world(scenario(reserve=True), 1)
    assert fleet is not None
    used = {one.node.name for one in fleet.hosted.values()}
    name, node = next((name, node) for name, node in fleet.nodes.items() if name not in used)
    [(slot, gpus)] = node.slots.items()
    endpoint = next(iter(fleet.hosted.values())).endpoint
    fleet.begin_with([SlotAdd(endpoint=endpoint, gpu_type=node.gpu_type, node_id=name, slot=slot, gpus=0)])
    [(instance, hosted)] = [(each, one) for each, one in fleet.hosted.items() if one.pooled]
    assert [report.pooled for report in hosted.server.reports()] == [True]
    fleet.apply(ScaleDecision(slots=SlotDecision(), dedicated={instance: gpus}))
    assert [report.pooled for report in hosted.server.reports()] == [False]
