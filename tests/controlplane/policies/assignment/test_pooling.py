"""Pools among all that is scaled: who is served, who is scaled, who lets his own go, and both decisions as one."""

from typing import Any

from controlplane.policies.assignment.facts import (
    InstanceChange,
    PlacedInstance,
    SlotAdd,
    SlotDecision,
    SlotRoom,
    SpotFacts,
)
from controlplane.policies.assignment.pooling import (
    PlanPools,
    joined,
    planned_beside,
    pool_slot_facts,
    release_steps,
    rooms_beside,
)
from controlplane.policies.assignment.pools import PooledInstance, PoolSlotDecision, PoolSlotFacts
from controlplane.policies.facts import Endpoint, EndpointGpu, RegionGpu
from dataplane.protocol.tiers import InstanceKind

A, B, C = (Endpoint(model=model, region="east") for model in "abc")
POOLS = PlanPools(
    gpus={RegionGpu(region="east", gpu_type="H800"): 1},
    occupancy={EndpointGpu(model="a", region="east", gpu_type="H800"): 0.3},
)


def own(endpoint: Endpoint, number: int = 0, **changes: Any) -> PlacedInstance:
    values: dict[str, Any] = {"gpu_type": "H800", "node_id": "n1", "slot": number} | changes
    return PlacedInstance(instance_id=f"{endpoint.model}{number}", endpoint=endpoint, **values)


def facts(planned: dict[Endpoint, int], *placed: PlacedInstance) -> PoolSlotFacts:
    return pool_slot_facts(
        POOLS,
        planned={endpoint: {"H800": count} for endpoint, count in planned.items()},
        limits={A: (0, 4), B: (1, 4), C: (0, 1)},
        rooms=(),
        placed=placed,
        pooled=(),
    )


def test_who_is_served_has_what_he_shall_have_or_no_more_starts() -> None:
    """`a` shall have none; `b` its minimum; `c` its maximum, whatever the plan says."""
    assert facts({C: 3}).served == {A}
    assert facts({C: 3}, own(B), own(C)).served == {A, B, C}
    assert facts({B: 2}, own(B), own(B, 1, ready=False)).served == {A, C}
    assert facts({B: 2}, own(B)).served == {A, B, C}, "nothing starts any more"
    for changes in ({"stuck": True}, {"draining": True}, {"spot": SpotFacts(age_s=1.0)}, {"ready": False}):
        assert B not in facts({}, own(B, **changes)).served


def test_what_is_missing_of_the_plan() -> None:
    found = facts({B: 3, C: 1}, own(B), own(B, 1, stuck=True), own(C)).missing
    assert found == {EndpointGpu(model="b", region="east", gpu_type="H800"): 2}


def test_the_pooled_are_not_scaled_unless_their_pool_does_not_serve_them() -> None:
    planned = {A: {"H800": 0}, B: {"H800": 2}}
    assert planned_beside(planned, (A, B, C), POOLS, ()) == {B: {"H800": 2}, C: None}
    assert planned_beside(planned, (A, B), POOLS, POOLS.occupancy) == {A: {"H800": 1}, B: {"H800": 2}}
    assert planned_beside(None, (A, B), PlanPools(), ()) == {A: None, B: None}


def test_once_the_pool_serves_own_instances_go_by_kind() -> None:
    pooling = PoolSlotDecision(ready=frozenset({A}))
    placed = (own(A), own(A, 1, kind=InstanceKind.NIW), own(A, 2, draining=True), own(B))
    steps = release_steps(pooling, placed)
    assert [(step.endpoint, step.kind, step.delta) for step in steps] == [
        (A, InstanceKind.NIW, -1),
        (A, InstanceKind.MIXED, -1),
    ]
    assert release_steps(PoolSlotDecision(), placed) == ()


def test_slots_of_the_pool_are_full() -> None:
    rooms = [
        SlotRoom(node_id="n1", slot=slot, region="east", gpu_type="H800", gpus=2, gpus_free=1, age_s=0.0)
        for slot in range(2)
    ]
    of_pool, other = rooms_beside(PoolSlotDecision(slots=frozenset({("n1", 0)})), rooms)
    assert (of_pool.gpus_free, of_pool.pooled) == (0, True)
    assert other is rooms[1]


def test_both_decisions_as_one() -> None:
    def add(model: str) -> SlotAdd:
        endpoint = Endpoint(model=model, region="east")
        return SlotAdd(endpoint=endpoint, gpu_type="H800", node_id="n1", slot=0, gpus=0, reason="")

    def change(name: str) -> InstanceChange:
        return InstanceChange(instance_id=name, reason="")

    pooling = PoolSlotDecision(adds=(add("a"),), revives=(change("x"),), drains=(change("y"),))
    decision = SlotDecision(adds=(add("b"),), drains=(change("z"),), stops=(change("s"),))
    both = joined(decision, pooling)
    assert [each.endpoint.model for each in both.adds] == ["a", "b"]
    assert [each.instance_id for each in both.drains] == ["y", "z"]
    assert (both.revives, both.stops) == (pooling.revives, decision.stops)


def test_pooled_instances_are_passed_on() -> None:
    one = PooledInstance(instance_id="p", endpoint=A, gpu_type="H800", node_id="n1", slot=0, draining=False, ready=True)
    told = pool_slot_facts(POOLS, planned={}, limits={}, rooms=(), placed=(), pooled=(one,))
    assert (told.instances, told.pool_gpus, told.occupancy) == ((one,), POOLS.gpus, POOLS.occupancy)
