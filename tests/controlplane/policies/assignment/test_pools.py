"""Pools become slots: sized by the plan, filled by occupancy, moved without a gap in service."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from controlplane.policies.assignment.facts import Donation, PlacedInstance, SlotRoom
from controlplane.policies.assignment.pools import PoolSlotDecision, PoolSlotFacts, choose_pool_slots
from controlplane.policies.facts import Endpoint, EndpointGpu, PoolKey
from controlplane.policies.fit import AdapterSize, ModelSize, WeightsMemory

POOL = PoolKey(region="east", gpu_type="H800")
STALE_S = 5.0


def endpoint(model: str) -> Endpoint:
    return Endpoint(model=model, region="east")


def key(model: str) -> EndpointGpu:
    return EndpointGpu(model=model, region="east", gpu_type="H800")


def room(node: str, *, gpus: int = 1, free: int | None = None, age_s: float = 0.5, accepting: bool = True) -> SlotRoom:
    """A slot whose workers have a GPU each."""
    return SlotRoom(
        node_id=node,
        slot=0,
        region="east",
        gpu_type="H800",
        gpus=gpus,
        gpus_free=gpus if free is None else free,
        age_s=age_s,
        accepting=accepting,
        workers=gpus,
    )


def pooled(model: str, node: str, *, draining: bool = False, ready: bool = True, stuck: bool = False) -> PlacedInstance:
    return PlacedInstance(
        instance_id=f"{model}@{node}",
        endpoint=endpoint(model),
        gpu_type="H800",
        node_id=node,
        slot=0,
        draining=draining,
        ready=ready and not stuck,
        stuck=stuck,
    )


def own(model: str, node: str, **changes: Any) -> PlacedInstance:
    """An instance with the GPU of its slot for itself."""
    values: dict[str, Any] = {"gpu_type": "H800", "node_id": node, "slot": 0} | changes
    return PlacedInstance(instance_id=f"own-{model}@{node}", endpoint=endpoint(model), **values)


def facts(
    gpus: int,
    occupancy: dict[str, float],
    slots: tuple[SlotRoom, ...],
    instances: tuple[PlacedInstance, ...] = (),
    served: tuple[str, ...] = (),
    dedicated: tuple[PlacedInstance, ...] = (),
    missing: tuple[str, ...] = (),
) -> PoolSlotFacts:
    return PoolSlotFacts(
        pool_gpus={POOL: gpus},
        occupancy={key(model): share for model, share in occupancy.items()},
        slots=slots,
        instances=instances,
        served=frozenset(endpoint(model) for model in served),
        dedicated=dedicated,
        missing={key(model): 1 for model in missing},
    )


def choose(given_facts: PoolSlotFacts) -> PoolSlotDecision:
    return choose_pool_slots(given_facts, 7.0, stale_s=STALE_S)


def added(decision: PoolSlotDecision) -> dict[str, str]:
    return {add.endpoint.model: add.node_id for add in decision.adds}


def test_a_new_pool_takes_free_slots_and_spreads_its_endpoints_by_occupancy() -> None:
    decision = choose(facts(2, {"a": 0.5, "b": 0.4, "c": 0.2}, (room("n1"), room("n2"), room("n3"))))
    assert added(decision) == {"a": "n1", "b": "n2", "c": "n2"}
    assert all(add.gpus == 0 for add in decision.adds)


def test_a_slot_with_dedicated_instances_never_joins_the_pool() -> None:
    decision = choose(facts(2, {"a": 0.5}, (room("n1", free=0), room("n2", gpus=2, free=1))))
    assert not decision.adds
    assert "no free slot of H800 in east" in decision.unplaced[0].reason


def test_a_slot_of_several_hosts_never_joins_the_pool() -> None:
    decision = choose(facts(1, {"a": 0.5}, (structs.replace(room("n1"), hosts=2),)))
    assert not decision.adds
    assert "no free slot of H800 in east" in decision.unplaced[0].reason


def test_what_stands_stays_and_the_new_goes_where_there_is_room() -> None:
    slots = (room("n1", free=0), room("n2"))
    decision = choose(facts(2, {"a": 0.7, "b": 0.6}, slots, (pooled("a", "n1"),)))
    assert added(decision) == {"b": "n2"}
    assert not decision.drains


def test_an_overfull_slot_gives_its_smallest_away_only_when_the_other_is_ready() -> None:
    occupancy = {"a": 0.7, "b": 0.6}
    slots = (room("n1", free=0), room("n2"))
    first = choose(facts(2, occupancy, slots, (pooled("a", "n1"), pooled("b", "n1"))))
    assert added(first) == {"b": "n2"}
    assert not first.drains
    slots = (room("n1", free=0), room("n2", free=0))
    starting = (pooled("a", "n1"), pooled("b", "n1"), pooled("b", "n2", ready=False))
    second = choose(facts(2, occupancy, slots, starting))
    assert not second.adds
    assert not second.drains
    third = choose(facts(2, occupancy, slots, (*starting[:2], pooled("b", "n2"))))
    assert [drain.instance_id for drain in third.drains] == ["b@n1"] or not third.drains


def test_a_pool_that_shrinks_empties_the_slot_with_fewer_endpoints() -> None:
    slots = (room("n1", free=0), room("n2", free=0))
    there = (pooled("a", "n1"), pooled("b", "n1"), pooled("c", "n2"))
    decision = choose(facts(1, {"a": 0.2, "b": 0.2, "c": 0.2}, slots, there))
    assert added(decision) == {"c": "n1"}
    after = choose(facts(1, {"a": 0.2, "b": 0.2, "c": 0.2}, slots, (*there, pooled("c", "n1"))))
    assert [drain.instance_id for drain in after.drains] == ["c@n2"]


def test_an_endpoint_leaves_the_pool_only_when_something_else_serves_it() -> None:
    slots = (room("n1", free=0),)
    there = (pooled("a", "n1"), pooled("b", "n1"))
    assert not choose(facts(1, {"a": 0.2}, slots, there)).drains
    drains = choose(facts(1, {"a": 0.2}, slots, there, served=("b",))).drains
    assert [drain.instance_id for drain in drains] == ["b@n1"]


def test_a_lost_or_draining_node_is_replaced_and_left_when_the_replacement_is_ready() -> None:
    for lost in (room("n1", free=0, age_s=60.0), room("n1", free=0, accepting=False)):
        decision = choose(facts(1, {"a": 0.2}, (lost, room("n2")), (pooled("a", "n1"),)))
        assert added(decision) == {"a": "n2"}
        assert not decision.drains
        there = (pooled("a", "n1"), pooled("a", "n2"))
        after = choose(facts(1, {"a": 0.2}, (lost, room("n2", free=0)), there))
        assert [drain.instance_id for drain in after.drains] == ["a@n1"]


def test_a_draining_one_is_taken_back() -> None:
    decision = choose(facts(1, {"a": 0.2}, (room("n1", free=0),), (pooled("a", "n1", draining=True),)))
    assert [revive.instance_id for revive in decision.revives] == ["a@n1"]
    assert not decision.adds


def test_a_full_fleet_pools_where_a_pooled_endpoint_stands() -> None:
    """No slot is free: one of those whose endpoint is to be pooled becomes the pool, and the endpoint serves on."""
    slots = (room("n1", free=0), room("n2", free=0), room("n3", free=0))
    dedicated = (own("x", "n1"), own("a", "n2"), own("b", "n3"))
    decision = choose(facts(1, {"a": 0.2, "b": 0.2}, slots, dedicated=dedicated))
    assert added(decision) == {"a": "n2", "b": "n2"}, "x keeps its slot"
    assert decision.slots == {("n2", 0)}
    assert not decision.ready, "nobody is let go yet"
    ready = choose(facts(1, {"a": 0.2, "b": 0.2}, slots, (pooled("a", "n2"), pooled("b", "n2")), dedicated=dedicated))
    assert ready.ready == {endpoint("a"), endpoint("b")}


def test_spot_makes_room_and_a_lessee_gets_notice_first() -> None:
    lent = own("x", "n1", donation=Donation(age_s=9.0))
    leased = own("x", "n2", donation=Donation(age_s=9.0, leased=True))
    slots = (room("n1", free=0), room("n2", free=0))
    decision = choose(facts(1, {"a": 0.2}, slots, dedicated=(lent, leased)))
    assert added(decision) == {"a": "n1"}
    assert decision.slots == {("n1", 0)}
    last = choose(facts(1, {"a": 0.2}, slots[1:], dedicated=(leased,)))
    assert not last.adds, "somebody still uses it"
    assert last.slots == {("n2", 0)}, "but it is the pool's, so that the lease ends"
    assert "leased" in last.unplaced[0].reason


def test_the_last_on_a_slot_that_leaves_the_pool_keeps_it() -> None:
    slots = (room("n1", free=0),)
    there = (pooled("a", "n1"), pooled("b", "n1"))
    waiting = choose(facts(0, {}, slots, there, served=("b",), missing=("a",)))
    assert [drain.instance_id for drain in waiting.drains] == ["b@n1"]
    assert not waiting.dedicates, "b still shares it"
    alone = (there[0], pooled("b", "n1", draining=True))
    decision = choose(facts(0, {}, slots, alone, served=("b",), missing=("a",)))
    assert [change.instance_id for change in decision.dedicates] == ["a@n1"]
    assert not decision.drains
    assert not choose(facts(0, {}, slots, alone)).dedicates, "it shall have no instance of its own here"


def test_what_does_not_come_up_is_tried_on_another_slot_and_stays() -> None:
    slots = (room("n1", free=0), room("n2", free=0))
    others = (pooled("b", "n1"), pooled("c", "n2"))
    shares = {"a": 0.2, "b": 0.2, "c": 0.2}
    first = choose(facts(2, shares, slots, (*others, pooled("a", "n1", stuck=True))))
    assert added(first) == {"a": "n2"}
    assert not first.drains
    both = (pooled("a", "n1", stuck=True), pooled("a", "n2", stuck=True))
    second = choose(facts(2, shares, slots, (*others, *both)))
    assert (second.adds, second.drains) == ((), ()), "no slot is left to try; their nodes try again"
    assert (first.stranded, second.stranded) == (frozenset(), {key("a")})
    third = choose(facts(2, shares, slots, (*others, both[0], pooled("a", "n2"))))
    assert [drain.instance_id for drain in third.drains] == ["a@n1"]


def test_what_comes_up_nowhere_is_tried_on_one_more_slot_and_no_more() -> None:
    """Of a pool of four, on another node first."""
    slots = (room("n1", free=0), structs.replace(room("n1", free=0), slot=1), room("n2", free=0), room("n3", free=0))
    others = (pooled("b", "n1"), pooled("c", "n2"), pooled("d", "n3"))
    shares = {"a": 0.2, "b": 0.1, "c": 0.3, "d": 0.3}
    once = pooled("a", "n1", stuck=True)
    assert added(choose(facts(4, shares, slots, (*others, once)))) == {"a": "n2"}
    twice = choose(facts(4, shares, slots, (*others, once, pooled("a", "n2", stuck=True))))
    assert (twice.adds, twice.drains) == ((), ())
    assert twice.stranded == {key("a")}


def test_a_pooled_model_stands_where_its_weights_fit() -> None:
    small, large = (
        structs.replace(room(node), weights=WeightsMemory(weights_bytes=memory, dtype="bfloat16"))
        for node, memory in (("n1", 100), ("n2", 200))
    )
    given_facts = replace(
        facts(2, {"a": 0.5, "b": 0.4}, (small, large)),
        sizes={"a": ModelSize(weights_bytes=400, parameters=100), "b": ModelSize(weights_bytes=50, parameters=50)},
    )
    assert added(choose(given_facts)) == {"a": "n2", "b": "n1"}
    there = replace(given_facts, slots=(small,), instances=(pooled("a", "n1", stuck=True),))
    decision = choose(there)
    assert added(decision) == {"b": "n1"}
    [unplaced] = decision.unplaced
    assert unplaced.reason.startswith("the weights of a fit on no slot in east")


SIZES = (room("n1"), room("n2"), room("n4", gpus=4), room("n8", gpus=8))


@pytest.mark.parametrize(
    ("gpus", "slots", "nodes"),
    [
        (1, SIZES, {"n1"}),
        (2, SIZES, {"n1", "n2"}),
        (3, SIZES, {"n4"}),  # the smallest that goes beyond, and no others then
        (4, SIZES, {"n4"}),  # they serve together: better than as many alone
        (5, SIZES, {"n4", "n1"}),
        (7, SIZES, {"n8"}),
        (11, SIZES, {"n8", "n4"}),
        (9, SIZES, {"n8", "n1"}),
        (2, SIZES[2:], {"n4"}),
        (99, SIZES, {"n1", "n2", "n4", "n8"}),
    ],
)
def test_a_pool_takes_whole_slots_and_no_more_than_it_needs(
    gpus: int, slots: tuple[SlotRoom, ...], nodes: set[str]
) -> None:
    assert choose(facts(gpus, {"a": 0.1}, slots)).slots == {(node, 0) for node in nodes}


def test_a_pool_would_rather_share_a_slot_for_a_while_than_be_larger_than_planned() -> None:
    """But no lessee goes for that, and it does not move to another slot."""
    own_a, larger = own("a", "n1"), room("n8", gpus=8)
    shared = choose(facts(1, {"a": 0.1}, (room("n1", free=0), larger), dedicated=(own_a,)))
    assert shared.slots == {("n1", 0)}
    leased = own("c", "n1", donation=Donation(age_s=60, leased=True))
    assert choose(facts(1, {"a": 0.1}, (room("n1", free=0), larger), dedicated=(leased,))).slots == {("n8", 0)}
    stays = choose(facts(1, {"a": 0.1}, (room("n1"), larger), (pooled("a", "n8"),)))
    assert (stays.slots, stays.adds) == ({("n8", 0)}, ())


def test_endpoints_go_where_their_share_of_the_slot_is_least() -> None:
    slots = (room("n1"), room("n4", gpus=4))
    assert added(choose(facts(5, {"a": 0.8, "b": 0.7, "c": 0.6}, slots))) == {"a": "n4", "b": "n4", "c": "n4"}
    five = dict.fromkeys("abcde", 0.8)
    assert sorted(added(choose(facts(5, five, slots))).values()) == ["n1", "n4", "n4", "n4", "n4"]


def test_an_endpoint_may_take_more_than_one_worker() -> None:
    """Its requests run on all of them."""
    slots = (room("n1", gpus=4), room("n2", gpus=4))
    assert added(choose(facts(8, {"a": 2.5, "b": 1.0, "c": 0.9}, slots))) == {"a": "n1", "b": "n2", "c": "n2"}


@given(st.data())
def test_it_comes_to_rest(data: st.DataObject) -> None:
    """Carried out and asked again, with everything ready, it wants nothing more; every endpoint stands once."""
    models = [f"m{n}" for n in range(data.draw(st.integers(1, 6)))]
    occupancy = {model: data.draw(st.floats(0.01, 1.5)) for model in models}
    nodes = [f"n{n}" for n in range(data.draw(st.integers(1, 4)))]
    there = {(data.draw(st.sampled_from([*models, "gone"])), data.draw(st.sampled_from(nodes))) for _ in range(5)}
    instances = tuple(pooled(model, node) for model, node in sorted(there))
    sizes = {node: data.draw(st.sampled_from([1, 1, 2, 4])) for node in nodes}
    gpus = data.draw(st.integers(0, 9))
    for _ in range(8):
        held = {each.node_id for each in instances}
        slots = tuple(room(node, gpus=sizes[node], free=0 if node in held else None) for node in nodes)
        decision = choose(facts(gpus, occupancy, slots, instances, served=("gone",)))
        if not (decision.adds or decision.drains or decision.revives):
            break
        gone = {drain.instance_id for drain in decision.drains}
        kept = [each for each in instances if each.instance_id not in gone]
        instances = (*kept, *(pooled(add.endpoint.model, add.node_id) for add in decision.adds))
    else:
        raise AssertionError("it never comes to rest")
    assert sorted(each.endpoint.model for each in instances) == models
    assert not choose(replace(facts(gpus, occupancy, slots, instances), served=frozenset())).unplaced


def reserve(
    gpus: int, held: str, slots: tuple[SlotRoom, ...], *instances: PlacedInstance, **more: Any
) -> PoolSlotFacts:
    """A pool that is the reserve of these models."""
    given = facts(gpus, {}, slots, instances, **more)
    return replace(given, held=frozenset(key(model) for model in held))


def places(decision: PoolSlotDecision) -> list[tuple[str, str]]:
    return sorted((add.endpoint.model, add.node_id) for add in decision.adds)


def test_a_reserve_has_each_model_on_each_of_its_slots() -> None:
    decision = choose(reserve(2, "ab", (room("n1"), room("n2"), room("n3"))))
    assert places(decision) == [("a", "n1"), ("a", "n2"), ("b", "n1"), ("b", "n2")]
    assert all(add.gpus == 0 for add in decision.adds)
    assert decision.slots == {("n1", 0), ("n2", 0)}


def test_a_reserve_keeps_what_stands_and_calls_back_what_drains() -> None:
    slots = (room("n1", free=0), room("n2", free=0), room("n3"))
    there = (pooled("a", "n1"), pooled("b", "n1", draining=True), pooled("a", "n2"))
    decision = choose(reserve(2, "ab", slots, *there))
    assert places(decision) == [("b", "n2")]
    assert [change.instance_id for change in decision.revives] == ["b@n1"]
    assert not decision.drains


def test_own_instances_of_a_held_model_stay() -> None:
    slots = (room("n1", free=0), room("n2", free=0))
    decision = choose(reserve(1, "a", slots, pooled("a", "n1"), dedicated=(own("a", "n2"),)))
    assert not decision.ready, "its own instances are not let go"
    assert not decision.stranded


def test_a_reserve_that_shrinks_leaves_a_slot_and_one_that_ends_waits_for_own_instances() -> None:
    slots = (room("n1", free=0), room("n2", free=0))
    there = (pooled("a", "n1"), pooled("b", "n1"), pooled("a", "n2"), pooled("b", "n2"))
    smaller = choose(reserve(1, "ab", slots, *there))
    assert [change.instance_id for change in smaller.drains] == ["b@n2"], "a has the slot's GPUs from now on"
    ended = choose(facts(0, {}, slots, there, served=("b",)))
    assert [change.instance_id for change in ended.drains] == ["b@n1", "b@n2"]


def test_a_slot_that_a_reserve_leaves_goes_to_the_model_with_the_fewest_instances_lent_out() -> None:
    slots = (room("n1", free=0), room("n2", free=0), room("n3", free=0))
    there = (pooled("a", "n1"), pooled("b", "n1"), pooled("a", "n2"), pooled("b", "n2"))
    lent = structs.replace(own("a", "n3"), donation=Donation(age_s=0.0))
    smaller = choose(reserve(1, "ab", slots, *there, dedicated=(lent,)))
    assert [change.instance_id for change in smaller.drains] == ["a@n2"]
    draining = (*there[:2], pooled("a", "n2", draining=True), there[3])
    waits = choose(reserve(1, "ab", slots, *draining, dedicated=(lent,)))
    assert (waits.dedicates, waits.drains) == ((), ()), "the slot is the pool's while a drains, and nothing is lent out"
    assert ("n2", 0) in waits.slots
    after = choose(reserve(1, "ab", slots, *there[:2], there[3], dedicated=(lent,)))
    assert [change.instance_id for change in after.dedicates] == ["b@n2"], "no start waits for its weights again"
    assert after.donates[0].instance_id == "b@n2", "the plan wants none of its own"
    assert not after.drains
    assert ("n2", 0) not in after.slots, "so that it can be lent out"


def test_what_the_plan_wants_is_not_lent_out() -> None:
    """Instances lent out count as missing where observed demand decides how much of a plan serves, and are not."""
    slots = (room("n1", free=0), room("n2", free=0), room("n3", free=0))
    alone = (pooled("a", "n1"), pooled("b", "n1"), pooled("b", "n2"))
    wanted = choose(reserve(1, "ab", slots, *alone, missing=("b",)))
    assert [change.instance_id for change in wanted.dedicates] == ["b@n2"]
    assert not wanted.donates
    lent = structs.replace(own("b", "n3"), donation=Donation(age_s=0.0))
    enough = choose(reserve(1, "ab", slots, *alone, missing=("b",), dedicated=(lent,)))
    assert [change.instance_id for change in enough.donates] == ["b@n2"]
    both = (*alone, pooled("a", "n2"))
    drained = choose(reserve(1, "ab", slots, *both, missing=("b",), dedicated=(lent,))).drains
    assert [change.instance_id for change in drained] == ["b@n2"], "a has none lent out"


def test_the_last_that_is_ready_is_not_lent_out() -> None:
    """The reserve's other instance starts, or the node tries again: this one serves meanwhile."""
    slots = (room("n1", free=0), room("n2", free=0), room("n3", free=0))
    there = (pooled("a", "n1", ready=False), pooled("b", "n1"), pooled("a", "n2"))
    waits = choose(reserve(1, "ab", slots, *there))
    assert (waits.dedicates, waits.donates, waits.drains) == ((), (), ())
    for dedicated in ((), (own("a", "n3"),)):
        serves = (pooled("a", "n1", ready=not dedicated), *there[1:])
        decision = choose(reserve(1, "ab", slots, *serves, dedicated=dedicated))
        assert [change.instance_id for change in decision.donates] == ["a@n2"]


def test_nothing_inherits_a_slot_that_cannot_be_its_own() -> None:
    """Where instances are not lent out, or one with GPUs of its own is there."""
    slots = (room("n1", free=0), room("n2", free=0))
    there = (pooled("a", "n1"), pooled("b", "n1"), pooled("a", "n2"), pooled("b", "n2"))
    given = reserve(1, "ab", slots, *there)
    for case in (replace(given, lends=False), replace(given, dedicated=(own("c", "n2"),))):
        decision = choose(case)
        assert [change.instance_id for change in decision.drains] == ["a@n2", "b@n2"]
        assert not decision.dedicates


def test_a_growing_pool_keeps_to_the_lease_that_has_notice() -> None:
    """However many instances of its model are lent out."""
    leases = (
        own("x", "n1", donation=Donation(age_s=9.0, leased=True, noticed=True)),
        own("y", "n2", donation=Donation(age_s=9.0, leased=True)),
        own("y", "n3", donation=Donation(age_s=9.0, leased=True)),
    )
    slots = (room("n1", free=0), room("n2", free=0), room("n3", free=0))
    for held in ({}, {"held": frozenset({key("a")})}):
        given = replace(facts(1, {} if held else {"a": 0.2}, slots, dedicated=leases), **held)
        assert choose(given).slots == {("n1", 0)}


def test_a_model_that_the_reserve_no_longer_holds_leaves_when_it_is_served() -> None:
    slots = (room("n1", free=0),)
    there = (pooled("a", "n1"), pooled("b", "n1"))
    assert not choose(reserve(1, "a", slots, *there)).drains
    assert [change.instance_id for change in choose(reserve(1, "a", slots, *there, served=("b",))).drains] == ["b@n1"]


def test_a_model_too_large_for_a_slot_is_not_started_there() -> None:
    small, large = WeightsMemory(weights_bytes=5), WeightsMemory(weights_bytes=50)
    slots = (structs.replace(room("n1"), weights=small), structs.replace(room("n2"), weights=large))
    given = replace(reserve(2, "ab", slots), sizes={"a": ModelSize(weights_bytes=20), "b": ModelSize(weights_bytes=2)})
    assert places(choose(given)) == [("a", "n2"), ("b", "n1"), ("b", "n2")]


def test_a_reserve_begins_where_an_endpoint_leaves_that_is_to_have_no_instance_of_its_own() -> None:
    slots = (room("n1", free=0), room("n2", free=0))
    given = reserve(1, "ab", slots, dedicated=(own("a", "n1"), own("b", "n2")))
    assert not choose(given).adds
    assert places(choose(replace(given, leaving=frozenset({key("a")})))) == [("a", "n1"), ("b", "n1")]


def test_as_many_slots_become_own_as_are_missing() -> None:
    """A reserve of one model that ends: of two slots that leave, one becomes the instance that the plan wants."""
    slots = (room("n1", free=0), room("n2", free=0))
    decision = choose(facts(0, {}, slots, (pooled("a", "n1"), pooled("a", "n2")), missing=("a",)))
    assert [change.instance_id for change in decision.dedicates] == ["a@n1"]


def test_adapters_are_placed_beside_their_base_while_its_slot_has_capacity() -> None:
    adapter = ModelSize(weights_bytes=1, adapter=AdapterSize(base="base", weights_bytes=1))
    sizes = dict.fromkeys(("a", "b", "c"), adapter)
    shares = {"base": 0.4, "other": 0.1, "a": 0.3, "b": 0.2, "c": 0.25}
    slots = (room("n1"), room("n2"))
    decision = choose_pool_slots(replace(facts(2, shares, slots), sizes=sizes), 0.0, stale_s=STALE_S)
    found = {add.endpoint.model: add.node_id for add in decision.adds}
    assert {found[name] for name in ("base", "a", "c")} == {"n1"}
    assert {found[name] for name in ("other", "b")} == {"n2"}, "with b the slot would be over-full"
    apart = choose_pool_slots(facts(2, shares, slots), 0.0, stale_s=STALE_S)
    assert len({add.node_id for add in apart.adds if add.endpoint.model in ("base", "a", "c")}) == 2


def test_pools_of_two_sizes_each_keep_to_slots_of_their_size() -> None:
    """Neither takes the other's slot, be it free or half empty."""
    large = PoolKey(region="east", gpu_type="H800", worker_gpus=4)
    four = structs.replace(room("n2", gpus=4), workers=1)
    both = replace(
        facts(2, {"a": 0.5, "b": 0.4, "big": 0.5}, (room("n1"), four)),
        pool_gpus={POOL: 2, large: 4},
        gpus={key("big").pair: 4},
    )
    decision = choose(both)
    assert added(decision) == {"a": "n1", "b": "n1", "big": "n2"}
    assert decision.unplaced == ()
    alone = choose(replace(both, slots=(room("n1"), room("n3"))))
    assert added(alone) == {"a": "n1", "b": "n3"}
    assert alone.unplaced[0].reason == "no free slot of H800 with 4 GPUs in east for the pool"
