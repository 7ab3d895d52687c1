"""What policies take from a snapshot, and what changes in the whole fleet."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from controlplane.policies.assignment.facts import Donation, PlacedInstance, SlotSettings
from controlplane.policies.facts import (
    Backlog,
    Endpoint,
    EndpointGpu,
    InstanceFacts,
    ModelGpu,
    NodeFacts,
    NodeSlot,
    PoolKey,
    RegionGpu,
)
from controlplane.policies.fit import ModelSize
from controlplane.policies.placement.facts import Profile
from controlplane.policies.scale import ScaleDecision, choose_scale
from controlplane.policies.scaling.facts import EndpointScaleFacts, ScalingSettings, StrategyName
from controlplane.policies.snapshot import (
    FleetSnapshot,
    PlanPools,
    placement_facts,
    pool_slot_facts,
    poolable_facts,
    scaling_facts,
)
from dataplane.protocol.tiers import InstanceKind

A, B, C = (Endpoint(model=model, region="east") for model in "abc")
PLACE = RegionGpu(region="east", gpu_type="H800")
POOL = PoolKey(region="east", gpu_type="H800")
ON_H800 = {endpoint: EndpointGpu(model=endpoint.model, region="east", gpu_type="H800") for endpoint in (A, B, C)}
POOLS = PlanPools(gpus={POOL: 1}, occupancy={ON_H800[A]: 0.3})
STALE_S = 5.0


def own(endpoint: Endpoint, number: int = 0, **changes: Any) -> PlacedInstance:
    values: dict[str, Any] = {"gpu_type": "H800", "node_id": "n1", "slot": number} | changes
    return PlacedInstance(instance_id=f"{endpoint.model}{number}", endpoint=endpoint, **values)


def pooled(endpoint: Endpoint, slot: int, **changes: Any) -> PlacedInstance:
    values: dict[str, Any] = {"gpu_type": "H800", "node_id": "n1", "slot": slot} | changes
    return PlacedInstance(instance_id=f"pooled-{endpoint.model}", endpoint=endpoint, gpus=0, pooled=True, **values)


def fleet(planned: dict[Endpoint, int] | None, *instances: PlacedInstance, **changes: Any) -> FleetSnapshot:
    """Three models on a node of four slots; `a` is in the plan's pool."""
    values: dict[str, Any] = {
        "nodes": (
            NodeFacts(
                name="n1", region="east", gpu_type="H800", slots=tuple(NodeSlot(number=n, gpus=1) for n in range(4))
            ),
        ),
        "instances": instances,
        "profiles": {ModelGpu(model=model, gpu_type="H800"): Profile(tokens_per_s=100.0, gpus=1) for model in "abc"},
        "sizes": {model: ModelSize(weights_bytes=1) for model in "abc"},
        "limits": {A: (0, 4), B: (1, 4), C: (0, 1)},
        "planned": None if planned is None else {endpoint: {"H800": count} for endpoint, count in planned.items()},
        "pools": POOLS,
    }
    return FleetSnapshot(**values | changes)


def scaled(snapshot: FleetSnapshot, **named: Any) -> dict[Endpoint, EndpointScaleFacts]:
    return {each.endpoint: each for each in scaling_facts(snapshot, stale_s=STALE_S, **named).endpoints}


def choose(snapshot: FleetSnapshot, strategy: str = StrategyName.LT_I) -> ScaleDecision:
    return choose_scale(snapshot, 1000.0, ScalingSettings(strategy=strategy), SlotSettings(stale_s=STALE_S))


def test_who_is_served_has_what_he_shall_have_or_no_more_starts() -> None:
    """`a` shall have none; `b` its minimum; `c` its maximum, whatever the plan says."""

    def served(planned: dict[Endpoint, int], *instances: PlacedInstance) -> frozenset[Endpoint]:
        return pool_slot_facts(fleet(planned, *instances)).served

    assert served({C: 3}) == {A}
    assert served({C: 3}, own(B), own(C, 1)) == {A, B, C}
    assert served({B: 2}, own(B), own(B, 1, ready=False)) == {A, C}
    assert served({B: 2}, own(B)) == {A, B, C}, "nothing starts any more"
    for changes in ({"stuck": True}, {"draining": True}, {"donation": Donation(age_s=1.0)}, {"ready": False}):
        assert B not in served({}, own(B, **changes))


def test_what_is_missing_of_the_plan() -> None:
    found = pool_slot_facts(fleet({B: 3, C: 1}, own(B), own(B, 1, stuck=True), own(C, 2))).missing
    assert found == {ON_H800[B]: 2}


def test_the_pooled_are_not_scaled_unless_their_pool_does_not_serve_them() -> None:
    snapshot = fleet({A: 0, B: 2})
    assert {at: each.planned for at, each in scaled(snapshot).items()} == {B: {"H800": 2}, C: None}
    stranded = scaled(snapshot, stranded=[ON_H800[A]])
    assert {at: each.planned for at, each in stranded.items()} == {A: {"H800": 1}, B: {"H800": 2}, C: None}
    unplanned = scaled(fleet(None, pools=PlanPools()))
    assert {at: each.planned for at, each in unplanned.items()} == {A: None, B: None, C: None}


def reported(**changes: Any) -> InstanceFacts:
    """The report of an idle instance of `b`."""
    report = InstanceFacts(
        instance_id="b3",
        node_id="n1",
        endpoint=B,
        gpu_type="H800",
        accepting=True,
        age_s=0.0,
        kv_used_bytes=1,
        kv_capacity_bytes=100,
        remaining_tokens=0,
    )
    return structs.replace(report, **changes)


@pytest.mark.parametrize(
    ("age_s", "accepting", "utilization"), [(0.0, True, 0.5), (6.0, True, None), (0.0, False, None)]
)
def test_an_endpoint_with_its_instances_by_state_and_kind(
    age_s: float, accepting: bool, utilization: float | None
) -> None:
    report = reported(instance_id="b0", accepting=accepting, age_s=age_s, kv_used_bytes=50)
    snapshot = fleet(
        None,
        own(B, report=report),
        own(B, 1, ready=False, kind=InstanceKind.NIW),
        own(B, 2, ready=False, stuck=True),
        own(B, 3, draining=True),
        own(C, 4, donation=Donation(age_s=1.0)),
        limits={B: (1, 4), Endpoint(model="b", region="west"): (0, 4)},
        overrides={B: 3},
        backlogs={"b": Backlog(tokens=80.0, due_s=9.0)},
        observed={B: 7.0},
    )
    facts = scaled(snapshot)[B]
    assert (facts.present, facts.starting, facts.stuck) == ({"H800": 3}, {"H800": 1}, {"H800": 1})
    assert facts.of_kind(InstanceKind.NIW).starting == {"H800": 1}
    assert facts.utilization == utilization
    assert (facts.min, facts.max) == (3, 3), "an override is both"
    assert (facts.backlog_tokens, facts.backlog_due_s) == (40.0, 9.0), "regions share a backlog"
    assert (facts.observed_tokens_per_s, facts.tokens_per_s) == (7.0, {"H800": 100.0})
    assert (facts.donated_same, facts.donated_other) == ({}, {"H800": 1})
    assert scaled(snapshot, succeeded={"b0"})[B].present == {"H800": 2}, "its successor counts in its place"


def test_once_the_pool_serves_instances_of_their_own_go() -> None:
    decision = choose(fleet({B: 1}, pooled(A, 0), own(A, 1), own(A, 2, draining=True), own(B, 3)))
    assert [change.instance_id for change in decision.slots.donates] == ["a1"]
    assert not decision.slots.drains
    assert decision.scaled == ()
    assert choose(fleet({B: 1}, pooled(A, 0, ready=False), own(A, 1), own(B, 3))).slots.donates == ()


def test_a_pool_starts_first_and_nothing_else_starts_on_its_slots() -> None:
    slots = choose(fleet({B: 4})).slots
    assert [(add.endpoint, add.gpus) for add in slots.adds] == [(A, 0), (B, 1), (B, 1), (B, 1)]
    assert len({add.slot for add in slots.adds}) == 4
    assert [(each.endpoint, each.count) for each in slots.unplaced] == [(B, 1)]


def test_the_last_pooled_instance_of_a_slot_gets_its_gpus_and_counts_for_its_endpoint() -> None:
    one = pooled(B, 0)
    decision = choose(fleet({B: 1}, one, pools=PlanPools()))
    assert decision.dedicated == {one.instance_id: 1}
    assert decision.slots.adds == ()
    assert decision.kinds == {one.instance_id: InstanceKind.MIXED}


def test_kinds_follow_the_strategy() -> None:
    """Siloed has no mixed instances, but where there can be one instance only."""
    decision = choose(fleet(None, own(B), own(C, 1), pools=PlanPools()), StrategyName.SILOED)
    assert decision.kinds == {"b0": InstanceKind.IW, "c1": InstanceKind.MIXED}


def test_an_instance_that_serves_again_has_no_successor_any_more() -> None:
    """Its node was to go, then that of its successor, which it succeeds now. Else they would stand for each other, and
    both would drain once both nodes are to go.
    """
    there = NodeSlot(number=0, gpus=1)
    stays = NodeFacts(name="n1", region="east", gpu_type="H800", slots=(there,))
    goes = NodeFacts(name="n2", region="east", gpu_type="H800", slots=(there,), accepting=False)
    first, second = own(B, draining=True), own(B, node_id="n2", leaving="n2 goes", succeeds="b0")
    second = structs.replace(second, instance_id="b1")
    for of in (first, structs.replace(first, draining=False, ready=False, donation=Donation(age_s=1.0))):
        decision = choose(fleet({B: 1}, of, second, nodes=(stays, goes), pools=PlanPools()))
        again = (*decision.slots.revives, *decision.slots.reclaims)
        assert [(change.instance_id, change.succeeds) for change in again] == [("b0", "b1")]
        assert decision.successors == {"b0": "b1", "b1": None}


def test_a_slot_of_several_hosts_is_planned_for_models_of_its_size_alone() -> None:
    """`b` takes both GPUs of the slot, `a` one; the models of another GPU type are pooled there alone."""
    slots = (NodeSlot(gpus=2, hosts=2),)
    over_hosts = NodeFacts(name="n1", region="east", gpu_type="H800", slots=slots, host_bytes=8)
    profiles = {ModelGpu(model=model, gpu_type="H800"): Profile(tokens_per_s=1.0, gpus=gpus) for model, gpus in
                (("a", 1), ("b", 2))}  # fmt: skip
    priced: dict[str, Any] = {"regions": ("east",), "gpu_cost_per_hour": {"H800": 1.0}}
    snapshot = fleet(None, nodes=(over_hosts,), profiles=profiles, pools=PlanPools(), **priced)
    planned = placement_facts(snapshot, {}, pool=None, stale_s=STALE_S)
    reason = "a takes 1 GPUs, the slots of H800 in east are of several hosts: a model takes all 2 of one"
    assert planned.unfit == {ON_H800[A]: reason}
    assert planned.capacity == {RegionGpu(region="east", gpu_type="H800"): 2}
    both = replace(over_hosts, name="n2", gpu_type="H20", slots=(NodeSlot(gpus=1), *slots))
    pooled = poolable_facts(replace(snapshot, nodes=(over_hosts, both)), {}, stale_s=STALE_S).nodes
    assert [(node.name, node.slots) for node in pooled] == [("n2", (NodeSlot(gpus=1),))]
    assert [room.hosts for room in snapshot.rooms] == [2]


def test_an_instance_whose_successor_finds_no_slot_stays_wanted() -> None:
    """Without a plan its endpoint would be settled at one instance fewer, and it would go without a successor."""
    nodes = tuple(
        NodeFacts(
            name=name, region="east", gpu_type="H800", slots=(NodeSlot(number=0, gpus=1),), accepting=name != "n2"
        )
        for name in ("n1", "n2")
    )
    left = structs.replace(own(B, node_id="n2", leaving="n2 goes"), instance_id="b1")
    decision = choose(fleet(None, own(B), left, nodes=nodes, pools=PlanPools()))
    assert len(decision.slots.unplaced) == 1
    assert decision.settled[B] == {"H800": 2}


RESERVE = PlanPools(gpus={POOL: 2}, held=frozenset({ON_H800[A], ON_H800[B]}))


def test_an_instance_on_each_slot_of_the_reserve_counts_for_the_minimum() -> None:
    """`b` needs two at least, and has one in the reserve that serves and one that starts."""
    there = (pooled(B, 0), structs.replace(pooled(B, 1, ready=False), instance_id="second"))
    limits = {A: (0, 4), B: (2, 4), C: (0, 1)}
    found = scaled(fleet({B: 0}, *there, pools=RESERVE, limits=limits))[B]
    assert (found.min, found.planned, found.reserve) == (1, {"H800": 0}, "H800")
    pinned = scaled(fleet({B: 0}, *there, pools=RESERVE, limits=limits, overrides={B: 2}))[B]
    assert (pinned.min, pinned.reserve) == (2, None)


def test_the_plan_may_give_a_held_endpoint_no_instance_of_its_own() -> None:
    found = scaled(fleet({}, own(A), pools=RESERVE))
    assert found[A].planned == {}
    assert found[C].planned is None


def test_what_is_in_flight_and_waits_is_that_of_own_instances_and_of_the_reserves() -> None:
    report = reported(requests=5, waiting=2)
    there = (own(B, 3, report=report), structs.replace(pooled(B, 0), report=structs.replace(report, waiting=1)))
    found = scaled(fleet({B: 1}, *there, pools=RESERVE))[B]
    assert (found.in_flight, found.waiting) == (10, 3)


def test_what_comes_back_in_a_minute_drains_or_is_lent_out_on_the_reserves_gpu_type_and_not_leased() -> None:
    lent = Donation(age_s=1.0)
    there = (
        own(B, 0, donation=lent),
        own(B, 1, donation=Donation(age_s=1.0, leased=True)),
        own(B, 2, donation=lent, gpu_type="H200"),
        own(B, 3, donation=lent, stuck=True, ready=False),
        own(C, 3, donation=lent),
        own(B, 0, draining=True),
        own(B, 1),
    )
    known = fleet({B: 1}, *there, pools=RESERVE)
    assert scaled(known)[B].reclaimable == 2
    silent = replace(known, nodes=tuple(replace(node, age_s=1e6) for node in known.nodes))
    assert scaled(silent)[B].reclaimable == 0, "nobody knows whether they are there"
    leaving = replace(known, nodes=tuple(replace(node, accepting=False) for node in known.nodes))
    assert scaled(leaving)[B].reclaimable == 0, "nothing starts there"


@pytest.mark.parametrize("fewest", [0, 1])
def test_an_own_instance_leaves_when_the_reserve_serves_its_endpoint(fewest: int) -> None:
    """Its own instance stays until the reserve's is ready, also where the minimum of `b` is none."""
    limits = {A: (0, 4), B: (fewest, 4), C: (0, 1)}
    report = reported()
    mine = own(B, 3, report=report)
    waits = choose(fleet({B: 0}, mine, pools=RESERVE, limits=limits)).slots
    assert (waits.drains, waits.donates) == ((), ())
    assert {(add.endpoint.model, add.gpus) for add in waits.adds} == {("a", 0), ("b", 0)}
    goes = choose(fleet({B: 0}, mine, pooled(B, 0), pools=RESERVE, limits=limits)).slots
    assert [change.instance_id for change in (*goes.drains, *goes.donates)] == ["b3"]


@pytest.mark.parametrize("gpu_type", ["H200", "H800"])
@pytest.mark.parametrize("fewest", [0, 1])
def test_a_pooled_instance_leaves_for_a_reserve_that_serves_its_endpoint(gpu_type: str, fewest: int) -> None:
    """`a` shall have none of its own, and is in a pool of another GPU type, or in the reserve on a node that goes. The
    instance of the reserve counts for the minimum.
    """
    limits = {A: (fewest, 4), B: (0, 4), C: (0, 1)}
    before = pooled(A, 0, node_id="n2", gpu_type=gpu_type, leaving="n2 goes")
    slot = (NodeSlot(number=0, gpus=1),)
    nodes = (
        NodeFacts(name="n1", region="east", gpu_type="H800", slots=slot),
        NodeFacts(name="n2", region="east", gpu_type=gpu_type, slots=slot, accepting=False),
    )
    reserve = PlanPools(gpus={POOL: 1}, held=frozenset({ON_H800[A]}))
    waits = choose(fleet({}, before, nodes=nodes, pools=reserve, limits=limits)).slots
    assert ([add.node_id for add in waits.adds], waits.drains) == (["n1"], ())
    after = structs.replace(pooled(A, 0), instance_id="after")
    goes = choose(fleet({}, before, after, nodes=nodes, pools=reserve, limits=limits)).slots
    assert [change.instance_id for change in goes.drains] == [before.instance_id]
