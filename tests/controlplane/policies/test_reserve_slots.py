"""Runs of scaling one after the other: what becomes of a slot that a reserve leaves."""

from collections import Counter
from dataclasses import replace

import pytest
from msgspec import structs

from controlplane.policies.assignment.facts import Donation, PlacedInstance, SlotAdd, SlotSettings
from controlplane.policies.facts import Endpoint, EndpointGpu, InstanceFacts, ModelGpu, NodeFacts, NodeSlot, PoolKey
from controlplane.policies.placement.facts import Profile
from controlplane.policies.scale import ScaleDecision, choose_scale
from controlplane.policies.scaling.facts import ScalingSettings
from controlplane.policies.snapshot import FleetSnapshot, PlanPools

A, B, C = (Endpoint(model=model, region="east") for model in "abc")
POOL = PoolKey(region="east", gpu_type="H")
EVERY_S = 15.0
Requests = dict[Endpoint, tuple[int, int]]
"""In flight on each instance, and those of them that wait."""


def placed(name: str, endpoint: Endpoint, node: str, **changes: object) -> PlacedInstance:
    made = PlacedInstance(instance_id=name, endpoint=endpoint, gpu_type="H", node_id=node, slot=0)
    return structs.replace(made, **changes)


def pooled(endpoint: Endpoint, node: str) -> PlacedInstance:
    return placed(f"{endpoint.model}@{node}", endpoint, node, gpus=0, pooled=True)


def fleet(own_c: int, own_a: int = 0, own_b: int = 0, reserve_gpus: int = 1) -> FleetSnapshot:
    """Four slots, all full: two of a reserve of `a` and `b` that is to have `reserve_gpus`, two of `c`. The plan has
    `own_a` of `a`, and so on.
    """
    nodes = [
        NodeFacts(name=f"n{n}", region="east", gpu_type="H", slots=(NodeSlot(number=0, gpus=1),)) for n in range(4)
    ]
    reserve = [pooled(endpoint, node) for node in ("n0", "n1") for endpoint in (A, B)]
    return FleetSnapshot(
        nodes=tuple(nodes),
        instances=(*reserve, placed("c0", C, "n2"), placed("c1", C, "n3")),
        profiles={ModelGpu(model=model, gpu_type="H"): Profile(tokens_per_s=100.0, gpus=1) for model in "abc"},
        sizes={},
        limits=dict.fromkeys((A, B, C), (0, 4)),
        planned={A: {"H": own_a}, B: {"H": own_b}, C: {"H": own_c}},
        pools=PlanPools(
            gpus={POOL: reserve_gpus},
            held=frozenset(EndpointGpu(model=model, region="east", gpu_type="H") for model in "ab"),
        ),
        window_start_s=0.0,
        observed={A: own_a * 90.0 + 10.0, B: own_b * 90.0, C: own_c * 90.0},
    )


def reported(snapshot: FleetSnapshot, requests: Requests) -> FleetSnapshot:
    def report(each: PlacedInstance) -> InstanceFacts:
        in_flight, waiting = requests.get(each.endpoint, (0, 0))
        return InstanceFacts(
            instance_id=each.instance_id,
            node_id=each.node_id,
            endpoint=each.endpoint,
            gpu_type=each.gpu_type,
            accepting=True,
            age_s=0.0,
            kv_used_bytes=10,
            kv_capacity_bytes=100,
            remaining_tokens=0,
            requests=in_flight,
            waiting=waiting,
            batch_max=10,
            prefill_wait_s=0.0,
            prefill_token_s=0.0,
        )

    return replace(snapshot, instances=tuple(structs.replace(one, report=report(one)) for one in snapshot.instances))


def applied(snapshot: FleetSnapshot, decision: ScaleDecision, lent: dict[str, bool], now_s: float) -> FleetSnapshot:
    """The fleet when the next run comes: what was started serves, and what drained before is empty. `lent`: whether
    each instance that drains is to be lent out then.
    """
    slots = decision.slots
    emptied = [each.instance_id for each in snapshot.instances if each.draining]
    replaced = {name for add in slots.redeploys for name in add.replaces}
    gone = {*replaced, *(each.instance_id for each in slots.stops), *(name for name in emptied if not lent.get(name))}
    lent |= {each.instance_id: False for each in slots.drains} | {each.instance_id: True for each in slots.donates}
    back = {change.instance_id for change in (*slots.revives, *slots.reclaims)}
    leaving = {change.instance_id for change in (*slots.drains, *slots.donates)}
    assert not leaving & back

    def changed(each: PlacedInstance) -> PlacedInstance:
        if (gpus := decision.dedicated.get(each.instance_id)) is not None:
            each = structs.replace(each, gpus=gpus, pooled=False)
        if each.instance_id in back:
            return structs.replace(each, donation=None, draining=False)
        if each.draining:
            return structs.replace(each, donation=Donation(age_s=0.0), draining=False)
        return structs.replace(each, draining=each.instance_id in leaving)

    def started(add: SlotAdd) -> PlacedInstance:
        name = f"{add.endpoint.model}@{add.node_id}, {now_s:.0f} s"
        return placed(name, add.endpoint, add.node_id, gpus=add.gpus, pooled=not add.gpus)

    kept = [changed(each) for each in snapshot.instances if each.instance_id not in gone - back]
    instances = (*kept, *(started(add) for add in (*slots.adds, *slots.redeploys)))
    held = Counter[str]()
    for each in instances:
        held[each.node_id] += each.gpus
    assert max(held.values()) == 1, "no GPU is held twice"
    scaled = {**snapshot.last_scaled_s, **dict.fromkeys(decision.scaled, now_s)}
    return replace(snapshot, instances=instances, last_scaled_s=scaled, settled=decision.settled)


def run(snapshot: FleetSnapshot, requests: Requests, runs: int, *, strategy: str, lends: bool = True) -> FleetSnapshot:
    lent: dict[str, bool] = {}
    for number in range(runs):
        now_s, placing = EVERY_S * (number + 1), SlotSettings(donation_enabled=lends)
        decision = choose_scale(reported(snapshot, requests), now_s, ScalingSettings(strategy=strategy), placing)
        assert lends or not decision.slots.donates
        snapshot = applied(snapshot, decision, lent, now_s)
    return snapshot


def counts(snapshot: FleetSnapshot) -> dict[str, int]:
    """Instances of their own that serve, those lent out, and pooled ones, by model."""
    found = Counter[str]()
    for each in snapshot.instances:
        found[("in reserve " if each.pooled else "lent " if each.donation else "") + each.endpoint.model] += 1
    return found


@pytest.mark.parametrize("lends", [True, False])
@pytest.mark.parametrize("strategy", ["lt-i", "lt-d"])
def test_a_slot_that_a_reserve_leaves_goes_to_the_model_that_the_plan_gives_it_to(strategy: str, lends: bool) -> None:
    """With a request of `a` in flight all the time, which is no reason for an instance of its own."""
    after = run(fleet(own_c=3), {A: (1, 0)}, 8, strategy=strategy, lends=lends)
    assert counts(after) == {"in reserve a": 1, "in reserve b": 1, "c": 3}


@pytest.mark.parametrize("strategy", ["lt-i", "lt-d"])
def test_it_becomes_the_own_instance_that_the_plan_wants(strategy: str) -> None:
    after = run(fleet(own_c=2, own_a=1), {A: (1, 0)}, 8, strategy=strategy)
    assert counts(after) == {"in reserve a": 1, "in reserve b": 1, "a": 1, "c": 2}
    assert "a@n1" in {each.instance_id for each in after.instances}, "without a start"


@pytest.mark.parametrize("strategy", ["lt-i", "lt-d"])
def test_a_slot_that_nobody_wants_is_lent_out_and_comes_back_for_a_model_that_is_late(strategy: str) -> None:
    calm = run(fleet(own_c=2), {A: (1, 0)}, 8, strategy=strategy)
    assert counts(calm) == {"in reserve a": 1, "in reserve b": 1, "lent a": 1, "c": 2}
    late = run(calm, {A: (30, 20)}, 1, strategy=strategy)
    assert counts(late) == {"in reserve a": 1, "in reserve b": 1, "a": 1, "c": 2}


@pytest.mark.parametrize("strategy", ["lt-i", "lt-d"])
def test_it_stays_where_its_model_is_late_already(strategy: str) -> None:
    after = run(fleet(own_c=2), {A: (30, 20)}, 8, strategy=strategy)
    assert counts(after) == {"in reserve a": 1, "in reserve b": 1, "a": 1, "c": 2}
    assert "a@n1" in {each.instance_id for each in after.instances}, "without a start"


@pytest.mark.parametrize("lends", [True, False])
@pytest.mark.parametrize("strategy", ["lt-i", "lt-d"])
def test_where_a_reserve_ends_and_its_models_are_to_have_none_the_plan_gets_all(strategy: str, lends: bool) -> None:
    after = run(fleet(own_c=4, reserve_gpus=0), {}, 8, strategy=strategy, lends=lends)
    assert counts(after) == {"c": 4}


@pytest.mark.parametrize("lends", [True, False])
@pytest.mark.parametrize("strategy", ["lt-i", "lt-d"])
def test_where_it_ends_in_a_full_region_its_instances_become_those_of_the_plan(strategy: str, lends: bool) -> None:
    after = run(
        fleet(own_c=2, own_a=1, own_b=1, reserve_gpus=0), {A: (1, 0), B: (1, 0)}, 8, strategy=strategy, lends=lends
    )
    assert counts(after) == {"a": 1, "b": 1, "c": 2}
    assert {each.instance_id for each in after.instances} & {"a@n0", "a@n1"}, "without a start"


@pytest.mark.parametrize("strategy", ["lt-i", "lt-d"])
def test_an_instance_that_the_plan_wants_gets_its_gpus_before_another_starts(strategy: str) -> None:
    there = fleet(own_c=1, own_a=1)
    there = replace(there, instances=tuple(each for each in there.instances if each.instance_id != "c1"))
    decision = choose_scale(reported(there, {}), EVERY_S, ScalingSettings(strategy=strategy), SlotSettings())
    assert decision.dedicated == {"a@n1": 1}
    assert (decision.slots.adds, decision.slots.redeploys) == ((), ()), "though a slot is empty"


@pytest.mark.parametrize("lends", [True, False])
def test_the_only_instance_that_serves_stays_on_a_slot_that_a_reserve_leaves(lends: bool) -> None:
    there = fleet(own_c=3)
    other = placed("a@n0", A, "n0", gpus=0, pooled=True, ready=False, stuck=True)
    instances = (other, *(each for each in there.instances if each.instance_id != "a@n0"))
    after = run(replace(there, instances=instances), {A: (1, 0)}, 8, strategy="lt-i", lends=lends)
    assert "a@n1" in {each.instance_id for each in after.instances}


@pytest.mark.parametrize("lends", [True, False])
def test_a_reserve_that_grows_again_leaves_a_slot_to_the_instance_that_got_it(lends: bool) -> None:
    """While another instance there still drains."""
    there = run(fleet(own_c=2, own_a=1), {A: (1, 0)}, 1, strategy="lt-i", lends=lends)
    assert {each.instance_id: each.gpus for each in there.instances if each.node_id == "n1"} == {"a@n1": 1, "b@n1": 0}
    grown = replace(there, planned={A: {"H": 1}, B: {}, C: {"H": 1}}, pools=replace(there.pools, gpus={POOL: 2}))
    after = run(grown, {A: (1, 0)}, 8, strategy="lt-i", lends=lends)
    assert counts(after) == {"in reserve a": 2, "in reserve b": 2, "a": 1, "c": 1}


def test_one_instance_is_missing_and_one_gets_its_slot() -> None:
    """Of two slots that a reserve leaves, where none is lent out."""
    there = fleet(own_c=2, own_a=1, reserve_gpus=0)
    there = replace(there, instances=tuple(each for each in there.instances if each.instance_id != "b@n1"))
    placing = SlotSettings(donation_enabled=False)
    decision = choose_scale(reported(there, {}), EVERY_S, ScalingSettings(strategy="lt-i"), placing)
    assert decision.dedicated == {"a@n0": 1}


@pytest.mark.parametrize("why", ["leased", "stuck", "silent"])
def test_what_is_lent_out_and_cannot_come_back_is_missing(why: str) -> None:
    there = fleet(own_c=1, own_a=1)
    donation = Donation(age_s=1.0, leased=why == "leased")
    lent = placed("lent", A, "n3", donation=donation, stuck=why == "stuck", ready=why != "stuck")
    nodes = tuple(replace(node, age_s=1e6 if node.name == "n3" and why == "silent" else 0.0) for node in there.nodes)
    instances = (lent, *(each for each in there.instances if each.instance_id != "c1"))
    known = reported(replace(there, nodes=nodes, instances=instances), {})
    decision = choose_scale(known, EVERY_S, ScalingSettings(strategy="lt-i"), SlotSettings())
    assert decision.dedicated == {"a@n1": 1}
