"""The plan of an hour with a shared reserve: who it holds, what it leaves to the placement, and how both are joined."""

from dataclasses import replace
from typing import Any

import pytest

from controlplane.policies.assignment.facts import PlacedInstance
from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, NodeFacts, NodeSlot, PoolKey
from controlplane.policies.fit import ModelSize, WeightsMemory
from controlplane.policies.hour import HourPlan, HourSettings, choose_hour
from controlplane.policies.placement.choose import choose_placement
from controlplane.policies.placement.decision import Constraint, PoolSize
from controlplane.policies.placement.error_correlation import NO_ERRORS, PeakErrors
from controlplane.policies.placement.facts import PlacementSettings, Profile
from controlplane.policies.placement.poolable import PoolableSettings
from controlplane.policies.placement.reserve_candidates import CandidateFacts, reserve_facts
from controlplane.policies.placement.reserve_facts import ReserveSettings
from controlplane.policies.snapshot import FleetSnapshot, placement_facts, poolable_facts

MODELS = "abcd"
STALE_S = 5.0
AT = {name: Endpoint(model=name, region="east") for name in MODELS}
LATENCY = {
    "prefill_base_s": 0.0,
    "prefill_per_token_s": 1e-6,
    "prefill_per_token2_s": 0.0,
    "decode_base_s": 0.0,
    "decode_per_context_token_s": 0.0,
    "decode_per_sequence_s": 0.0,
    "switch_s": 0.0,
}
SETTINGS = HourSettings(
    pools=PoolableSettings(enabled=False),
    reserve=ReserveSettings(enabled=True, correlation=0.0, fill=1.0, epsilon=1.0),
)


def fleet(gpus: int = 20, host_bytes: int = 100, **changes: Any) -> FleetSnapshot:
    """Nodes of one GPU, and models of 1,000 tokens/s a GPU and 10 bytes of weights; each may have two to nine."""
    values: dict[str, Any] = {
        "nodes": tuple(
            NodeFacts(name=f"n{n}", region="east", gpu_type="H800", slots=(NodeSlot(gpus=1),), host_bytes=host_bytes)
            for n in range(gpus)
        ),
        "instances": (),
        "profiles": {ModelGpu(model=name, gpu_type="H800"): Profile(tokens_per_s=1000.0, gpus=1) for name in MODELS},
        "latencies": {ModelGpu(model=name, gpu_type="H800"): LATENCY for name in MODELS},
        "sizes": {name: ModelSize(weights_bytes=10) for name in MODELS},
        "limits": dict.fromkeys(AT.values(), (2, 9)),
        "regions": ("east",),
        "gpu_cost_per_hour": {"H800": 3.0},
        "weights_present": frozenset(AT.values()),
    }
    return FleetSnapshot(**values | changes)


def plan(
    snapshot: FleetSnapshot,
    medians: dict[str, float],
    more: float = 0.0,
    errors: PeakErrors = NO_ERRORS,
    **changes: Any,
) -> HourPlan:
    demand = {AT[name]: (value + more,) for name, value in medians.items()}
    at_median = {AT[name]: (value,) for name, value in medians.items()}
    return choose_hour(snapshot, demand, at_median, 7.0, replace(SETTINGS, **changes), errors=errors)


def after(hour: HourPlan) -> dict[str, int]:
    return {entry.endpoint.model: entry.after for entry in hour.placement.entries}


def test_a_night_is_served_from_two_slots() -> None:
    hour = plan(fleet(), dict.fromkeys(MODELS, 100.0), 30.0)
    assert hour.reserve.gpus == {PoolKey(region="east", gpu_type="H800"): 2}
    assert {key.model for key in hour.reserve.held} == set(MODELS)
    assert after(hour) == {}, "nothing before, nothing after"
    assert hour.placement.gpu_cost_per_hour == pytest.approx(6.0)
    assert hour.placement.unserved == ()
    assert hour.placement.below_minimum == ()


def test_a_reserve_knows_of_past_errors() -> None:
    errors = {at: {hour: 1.0 if hour % 2 else -1.0 for hour in range(100)} for at in AT.values()}
    hour = plan(fleet(), dict.fromkeys(MODELS, 2000.0), 384.0, errors)
    assert "correlation 0.68 from 100 hours" in hour.reserve.sizes[0].reason


@pytest.mark.parametrize(
    ("memory_bytes", "gpus"),
    [
        (40, 2),  # of each slot: all four models stay there, and no time goes to switches
        (39, 5),  # one has to leave: 8 s of a switch for a group of prompts, so each model keeps one of its own
        (None, 5),  # not reported
    ],
)
def test_models_that_stay_in_a_slots_memory_take_none_of_it_for_switches(memory_bytes: int | None, gpus: int) -> None:
    slot = NodeSlot(gpus=1, weights=WeightsMemory(weights_bytes=memory_bytes))
    nodes = (NodeFacts(name=f"n{n}", region="east", gpu_type="H800", slots=(slot,), host_bytes=100) for n in range(20))
    slow = {ModelGpu(model=name, gpu_type="H800"): {**LATENCY, "switch_s": 8.0} for name in MODELS}
    hour = plan(fleet(nodes=tuple(nodes), latencies=slow), dict.fromkeys(MODELS, 100.0), 30.0)
    assert sum(after(hour).values()) + sum(hour.reserve.gpus.values()) == gpus


def test_slots_that_the_placement_gives_to_a_pool_are_not_the_reserves() -> None:
    """Of three slots with pooled instances two stay a pool's, so that a reserve that keeps its slots has one."""
    snapshot, demand = fleet(), dict.fromkeys(AT.values(), (100.0,))
    pool = PoolSize(region="east", gpu_type="H800", before=3, after=2)
    placement = placement_facts(snapshot, demand, pool=None, stale_s=STALE_S)
    given = CandidateFacts(
        placement=placement,
        placed=replace(choose_placement(placement, 7.0, PlacementSettings()), pools=(pool,)),
        poolable=replace(poolable_facts(snapshot, demand, stale_s=STALE_S), present={pool.key: 3}),
        medians=demand,
    )
    assert reserve_facts(given, PoolableSettings()).places[pool.place].present_gpus == 1


def test_own_instances_come_with_their_reason_and_cost() -> None:
    hour = plan(fleet(), dict.fromkeys(MODELS, 2000.0), 384.0)
    assert after(hour) == dict.fromkeys(MODELS, 2)
    entry = hour.placement.entries[0]
    assert (entry.constraint, entry.cost_if_not) == (Constraint.RESERVE, 0.0)
    assert entry.reason.startswith("median peak 2000 tokens/s, at most 2384 in 90 % of hours: 2 of its own")
    assert hour.placement.gpu_cost_per_hour == pytest.approx(9 * 3.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"overrides": {AT["d"]: 3}}, "an override says how many instances it has"),
        (
            {"latencies": {ModelGpu(model=name, gpu_type="H800"): LATENCY for name in "abc"}},
            "no latency in the profile on H800",
        ),
        (
            {"sizes": {name: ModelSize(weights_bytes=71 if name == "d" else 10) for name in MODELS}},
            "the host memory of a node does not hold it with the others of the reserve",
        ),
    ],
)
def test_who_cannot_be_held_keeps_its_own_quantile_and_minimum(changes: dict[str, Any], words: str) -> None:
    hour = plan(fleet(**changes), dict.fromkeys(MODELS, 100.0), 30.0)
    assert hour.reserve.left_out == {AT["d"]: words}
    assert {key.model for key in hour.reserve.held} == set("abc")
    assert after(hour) == {"d": changes.get("overrides", {AT["d"]: 2})[AT["d"]]}


def test_what_the_others_need_is_not_the_reserves() -> None:
    """Of ten GPUs `d`, which is not held, takes two; what the others share is on the eight that it leaves."""
    without_d = {ModelGpu(model=name, gpu_type="H800"): LATENCY for name in "abc"}
    hour = plan(fleet(gpus=10, latencies=without_d), {"a": 2000.0, "b": 2000.0, "c": 100.0, "d": 100.0}, 384.0)
    assert after(hour)["d"] == 2
    assert sum(after(hour).values()) + sum(hour.reserve.gpus.values()) <= 10
    assert [size.missing_gpus for size in hour.reserve.sizes] == [0]
    assert "the shared reserve spares" in hour.placement.reason
    assert (hour.placement.bound_per_hour, hour.placement.gap) == (None, None)


def test_instances_on_another_gpu_type_go() -> None:
    a_on_h20 = EndpointGpu(model="a", region="east", gpu_type="H20")
    nodes = (
        *fleet().nodes,
        NodeFacts(name="m", region="east", gpu_type="H20", slots=(NodeSlot(gpus=1),), host_bytes=9),
    )
    profiles = {**fleet().profiles, a_on_h20.pair: Profile(tokens_per_s=100.0, gpus=1)}
    snapshot = fleet(nodes=nodes, profiles=profiles, gpu_cost_per_hour={"H800": 3.0, "H20": 1.0})
    from_there = replace(snapshot, instances=(_instance(a_on_h20, "m"),))
    hour = plan(from_there, dict.fromkeys(MODELS, 2000.0), 384.0)
    counts = {(entry.endpoint.model, entry.gpu_type): (entry.before, entry.after) for entry in hour.placement.entries}
    assert counts["a", "H20"] == (1, 0)
    assert counts["a", "H800"] == (0, 2)


def _instance(key: EndpointGpu, node: str) -> PlacedInstance:
    return PlacedInstance(instance_id="a0", endpoint=key.endpoint, gpu_type=key.gpu_type, node_id=node, slot=0)


def test_without_the_setting_the_plan_is_as_before() -> None:
    hour = plan(fleet(), dict.fromkeys(MODELS, 100.0), 30.0, reserve=ReserveSettings())
    assert hour.reserve.sizes == ()
    assert after(hour) == dict.fromkeys(MODELS, 2)
