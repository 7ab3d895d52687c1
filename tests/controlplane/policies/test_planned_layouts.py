"""Layouts that plans choose: slots of the sizes that a placement takes, on nodes that may be regrouped."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from controlplane.policies.assignment.choose import choose_slots
from controlplane.policies.assignment.evacuation import leaving_larger_slots
from controlplane.policies.assignment.facts import Donation, PlacedInstance, SlotFacts, SlotSettings
from controlplane.policies.facts import Endpoint, ModelGpu, NodeFacts, NodeSlot, PoolKey, RegionGpu
from controlplane.policies.fit import ModelSize, WeightsMemory
from controlplane.policies.hour import HourPlan, HourSettings, choose_hour
from controlplane.policies.placement.choose import choose_placement
from controlplane.policies.placement.facts import PlacementSettings, Profile
from controlplane.policies.placement.poolable import PoolableSettings
from controlplane.policies.placement.reserve_candidates import CandidateFacts, reserve_facts
from controlplane.policies.placement.reserve_facts import ReserveSettings
from controlplane.policies.planned_layouts import PlacedHour, PlannedLayouts, PlannedLayoutSettings, plan_layouts
from controlplane.policies.scale import choose_scale
from controlplane.policies.scaling.facts import ScaleStep, ScalingSettings
from controlplane.policies.snapshot import FleetSnapshot, placement_facts, poolable_facts
from dataplane.protocol.layouts import Layout, slots_of
from tests.controlplane.policies.placement.test_poolable import LATENCY

PLACE = RegionGpu(region="east", gpu_type="H800")
SMALL, LARGE = (Endpoint(model=model, region="east") for model in ("small", "large"))
GPU_BYTES = 80 << 30


def node(name: str, layout: Layout, **changes: Any) -> NodeFacts:
    slots = tuple(
        NodeSlot(number=number, gpus=gpus, weights=WeightsMemory(weights_bytes=GPU_BYTES * gpus))
        for number, gpus in slots_of(layout).items()
    )
    values: dict[str, Any] = {"region": "east", "gpu_type": "H800", "slots": slots, "regroups": True}
    return NodeFacts(name=name, **(values | changes))


def instance(name: str, endpoint: Endpoint, node_id: str, slot: int, **changes: Any) -> PlacedInstance:
    gpus = 4 if endpoint == LARGE else 1
    return PlacedInstance(
        instance_id=name, endpoint=endpoint, gpu_type="H800", node_id=node_id, slot=slot, gpus=gpus, **changes
    )


def snapshot(*nodes: NodeFacts, instances: tuple[PlacedInstance, ...] = (), **changes: Any) -> FleetSnapshot:
    """A model of one GPU and one of four, each of 100 tokens/s an instance."""
    gpus = {"small": 1, "large": 4}
    values: dict[str, Any] = {
        "profiles": {
            ModelGpu(model=model, gpu_type="H800"): Profile(tokens_per_s=100.0, gpus=count)
            for model, count in gpus.items()
        },
        "sizes": {model: ModelSize(weights_bytes=count * (70 << 30)) for model, count in gpus.items()},
        "limits": {SMALL: (0, 16), LARGE: (0, 4)},
        "regions": ("east",),
        "gpu_cost_per_hour": {"H800": 1.0},
    }
    return FleetSnapshot(nodes=nodes, instances=instances, **(values | changes))


def plan(fleet: FleetSnapshot, small: float, large: float, **changes: Any) -> HourPlan:
    demand = {endpoint: (rate,) for endpoint, rate in ((SMALL, small), (LARGE, large)) if rate}
    layouts = PlannedLayoutSettings(**({"enabled": True} | changes))
    return choose_hour(fleet, demand, demand, 0.0, HourSettings(layouts=layouts))


def after(planned: PlannedLayouts) -> dict[str, Layout]:
    return {one.node: one.after for one in planned.decision.regroupings}


def test_day_and_night_each_have_their_slots() -> None:
    day = node("a", (1, 1, 1, 1)), node("b", (4,))
    assert after(plan(snapshot(*day), 150.0, 50.0).layouts) == {}, "there is one of each"
    night = plan(snapshot(*day, node("c", (1, 1, 1, 1))), 150.0, 150.0)
    assert after(night.layouts) == {"a": (4,)}
    morning = plan(snapshot(node("a", (4,)), node("b", (4,)), node("c", (1,) * 4)), 750.0, 50.0)
    assert after(morning.layouts) == {"a": (1, 1, 1, 1)}
    assert "slots of 1 GPUs for 8.00 GPUs of demand" in morning.layouts.decision.regroupings[0].reason


def test_a_model_without_a_slot_is_placed_where_plans_may_make_one() -> None:
    """Its weights fit on no slot that is there, either."""
    fleet = snapshot(node("a", (1, 1, 1, 1)), node("b", (1, 1, 1, 1)))
    hour = plan(fleet, 50.0, 50.0)
    assert {entry.endpoint: entry.after for entry in hour.placement.entries} == {SMALL: 1, LARGE: 1}
    assert after(hour.layouts) == {"a": (4,)}
    fixed = replace(fleet, nodes=tuple(replace(each, regroups=False) for each in fleet.nodes))
    hour = plan(fixed, 50.0, 50.0)
    assert {entry.endpoint: entry.after for entry in hour.placement.entries} == {SMALL: 1}
    [missing] = (one for one in hour.placement.unserved if one.region is None)
    assert missing.model == "large"
    assert "the weights of large fit on no slot in east" in missing.reason


def test_a_slot_that_is_too_small_is_said_where_memory_is_not_known() -> None:
    unknown = replace(node("a", (2, 2), regroups=False), slots=(NodeSlot(gpus=2), NodeSlot(gpus=2, number=2)))
    hour = plan(snapshot(unknown), 50.0, 50.0)
    reasons = [one.reason for one in hour.placement.unserved if one.model == "large"]
    assert any("large takes 4 GPUs together, the largest slot of H800 in east has 2" in reason for reason in reasons)


def test_slots_that_stay_are_filled_first_and_several_instances_share_one() -> None:
    """Nothing is said to be missing, and nothing regrouped, for what has room there."""
    stays = node("a", (8,), regroups=False)
    full = plan(snapshot(stays), 350.0, 50.0).layouts
    assert (after(full), full.summary()) == ({}, "")
    assert full.demand == {PLACE: {1: 4.0, 4: 4.0}}
    assert after(plan(snapshot(stays, node("b", (4,))), 350.0, 50.0).layouts) == {}
    assert after(plan(snapshot(stays, node("b", (4,))), 550.0, 50.0).layouts) == {"b": (1, 1, 1, 1)}


def test_a_model_of_three_gpus_gets_a_slot_of_four() -> None:
    """A slot of three could not be, and no plan could be put in force that wants one."""
    fleet = snapshot(node("a", (1,) * 4), node("b", (1,) * 4))
    three = {ModelGpu(model="large", gpu_type="H800"): Profile(tokens_per_s=100.0, gpus=3)}
    fleet = replace(fleet, profiles={**fleet.profiles, **three})
    planned = plan(fleet, 50.0, 50.0).layouts
    assert after(planned) == {"a": (4,)}
    assert planned.demand == {PLACE: {1: 1.0, 4: 4.0}}
    odd = NodeFacts(name="c", region="east", gpu_type="H800", slots=(NodeSlot(gpus=3),))
    assert after(plan(replace(fleet, nodes=(*fleet.nodes, odd)), 50.0, 50.0).layouts) == {}, "it is there already"


def test_nothing_is_chosen_unless_it_is_set() -> None:
    fleet = snapshot(node("a", (1, 1, 1, 1)), node("b", (1, 1, 1, 1)))
    assert plan(fleet, 50.0, 50.0, enabled=False).layouts == PlannedLayouts()


def test_a_node_that_was_regrouped_keeps_its_slots_for_a_while() -> None:
    young, old = node("a", (1, 1, 1, 1), layout_age_s=3600.0), node("b", (1, 1, 1, 1))
    assert after(plan(snapshot(young, old), 50.0, 50.0).layouts) == {"b": (4,)}
    both = young, replace(old, layout_age_s=3600.0)
    held = plan(snapshot(*both), 50.0, 50.0).layouts
    assert after(held) == {}
    assert held.summary() == "slots are missing that no node can be regrouped into: 1 of 4 GPUs on H800 in east"
    assert after(plan(snapshot(*both), 50.0, 50.0, hold_s=3000.0).layouts) == {"a": (4,)}


def test_nodes_that_drain_or_are_silent_neither_count_nor_change() -> None:
    away = node("a", (4,), accepting=False), node("b", (4,), age_s=1e6)
    assert after(plan(snapshot(*away, node("c", (1,) * 8)), 50.0, 50.0).layouts) == {"c": (4, 1, 1, 1, 1)}


def test_a_layout_that_a_node_is_on_its_way_to_counts() -> None:
    moving = replace(node("a", (1, 1, 1, 1)), layout=(4,), layout_age_s=60.0)
    assert after(plan(snapshot(moving, node("b", (1, 1, 1, 1))), 50.0, 50.0).layouts) == {}


def test_slots_that_cost_least_to_empty_are_taken() -> None:
    """Leased instances count as serving ones; who may go anyway, or drains, counts less."""
    nodes = node("a", (1, 1, 1, 1)), node("b", (1, 1, 1, 1))
    lent = Donation(age_s=60.0)
    cases: list[tuple[PlacedInstance, PlacedInstance, str]] = [
        (instance("1", SMALL, "a", 0), instance("2", SMALL, "b", 0, draining=True), "b"),
        (instance("1", SMALL, "a", 0, donation=replace(lent, leased=True)), instance("2", SMALL, "b", 0), "a"),
        (
            instance("1", SMALL, "a", 0, donation=replace(lent, leased=True)),
            instance("2", SMALL, "b", 0, donation=lent),
            "b",
        ),
    ]
    for first, second, regrouped in cases:
        fleet = snapshot(*nodes, instances=(first, second))
        assert set(after(plan(fleet, 50.0, 50.0).layouts)) == {regrouped}


def test_who_is_on_a_slot_for_larger_models_leaves_it_for_a_free_one_of_its_size() -> None:
    """Its successor starts first; where no slot of its size is free, or plans may not regroup, it stays."""
    guest, large = instance("1", SMALL, "b", 0), instance("2", LARGE, "c", 0)
    nodes = node("a", (1, 1)), node("b", (4,)), node("c", (4,))

    def leaving(*of: NodeFacts, more: tuple[PlacedInstance, ...] = ()) -> list[str]:
        fleet = snapshot(*of, instances=(guest, large, *more))
        left = leaving_larger_slots(fleet.instances, fleet.rooms, fleet.sizes, stale_s=60.0)
        return [each.instance_id for each in left if each.leaving is not None]

    assert leaving(*nodes) == ["1"]
    assert leaving(*(replace(each, regroups=False) for each in nodes)) == []
    full = instance("3", SMALL, "a", 0), instance("4", SMALL, "a", 1)
    assert leaving(*nodes, more=full) == []
    assert leaving(*nodes, more=(structs.replace(full[0], succeeds="1"), full[1])) == ["1"], "it goes on leaving"


def test_who_leaves_a_slot_for_larger_models_never_moves_to_another_such_slot() -> None:
    """Else it would move, and load its weights, every time that scaling decides."""
    nodes = node("a", (1,)), node("b", (4,)), node("c", (4,))
    fleet = snapshot(*nodes, instances=(instance("1", SMALL, "b", 0, ready=True),), window_start_s=0.0)

    def starts(of: FleetSnapshot, count: int) -> list[tuple[str, str | None]]:
        planned = replace(of, planned={SMALL: {"H800": count}})
        adds = choose_scale(planned, 60.0, ScalingSettings(), SlotSettings()).slots.adds
        return [(add.node_id, add.succeeds) for add in adds]

    assert starts(fleet, 1) == [("a", "1")]
    assert starts(fleet, 2) == [("a", None)], "the slot is taken by another instance"
    heavy = replace(fleet, sizes={**fleet.sizes, "small": ModelSize(weights_bytes=100 << 30)})
    assert starts(heavy, 1) == [], "the slot of one GPU is too small for its weights"


@pytest.mark.parametrize(
    "there",
    [
        instance("2", SMALL, "c", 0, draining=True),
        instance("2", SMALL, "c", 0, donation=Donation(age_s=9.0)),
        instance("2", LARGE, "c", 0, donation=Donation(age_s=9.0)),
    ],
)
def test_nor_does_it_take_an_instance_there_that_drains_or_is_lent(there: PlacedInstance) -> None:
    nodes = node("a", (1,)), node("b", (4,)), node("c", (4,))
    fleet = snapshot(*nodes, instances=(instance("1", SMALL, "b", 0), there), planned={SMALL: {"H800": 1}})
    slots = choose_scale(fleet, 60.0, ScalingSettings(), SlotSettings()).slots
    assert [(add.node_id, add.succeeds) for add in slots.adds] == [("a", "1")]
    assert (slots.revives, slots.reclaims, slots.redeploys) == ((), (), ())


def test_an_instance_takes_a_slot_of_its_size_before_it_spreads() -> None:
    nodes = node("a", (1, 1)), node("b", (4,))
    fleet = snapshot(*nodes, instances=(instance("1", SMALL, "a", 0),))
    step = ScaleStep(endpoint=SMALL, gpu_type="H800", delta=1, reason="of the test")

    def slot(of: FleetSnapshot) -> tuple[str, int]:
        facts = SlotFacts(steps=(step,), slots=of.rooms, instances=of.instances, gpus=of.gpus)
        [add] = choose_slots(facts, 0.0, SlotSettings()).adds
        return add.node_id, add.slot

    assert slot(fleet) == ("a", 1)
    fixed = replace(fleet, nodes=tuple(replace(each, regroups=False) for each in nodes))
    assert slot(fixed) == ("b", 0), "elsewhere instances spread over nodes"


def test_pools_take_slots_of_the_size_of_their_models() -> None:
    fleet = snapshot(node("a", (4,)), node("b", (4,)))
    pool = PoolKey(region="east", gpu_type="H800")
    placed = PlacedHour(placement=plan(fleet, 0.0, 50.0).placement, pool_gpus={pool: 2})
    settings = PlannedLayoutSettings(enabled=True)
    planned = plan_layouts(fleet, placed, 0.0, settings, stale_s=60.0)
    assert planned.demand == {PLACE: {1: 2.0, 4: 4.0}}
    assert after(planned) == {"a": (1, 1, 1, 1)}


def long_tail(*nodes: NodeFacts) -> FleetSnapshot:
    """Four models of one GPU and three of four, hardly asked for."""
    gpus = {f"small-{number}": 1 for number in range(4)} | {f"large-{number}": 4 for number in range(3)}
    pairs = {ModelGpu(model=model, gpu_type="H800"): count for model, count in gpus.items()}
    return snapshot(
        *(replace(each, host_bytes=2 << 40) for each in nodes),
        profiles={pair: Profile(tokens_per_s=100.0, gpus=count) for pair, count in pairs.items()},
        latencies=dict.fromkeys(pairs, LATENCY),
        sizes={model: ModelSize(weights_bytes=count * (30 << 30)) for model, count in gpus.items()},
        limits={Endpoint(model=model, region="east"): (0, 4) for model in gpus},
    )


def tail_hour(fleet: FleetSnapshot, exact_cells_max: int, tokens_per_s: float = 5.0) -> HourPlan:
    """The plan of an hour with a little of each model, by the integer program or by prices."""
    demand = dict.fromkeys(fleet.limits, (tokens_per_s,))
    settings = HourSettings(
        placement=PlacementSettings(exact_cells_max=exact_cells_max), layouts=PlannedLayoutSettings(enabled=True)
    )
    return choose_hour(fleet, demand, demand, 0.0, settings)


@pytest.mark.parametrize("exact_cells_max", [0, 500])
def test_small_and_large_models_are_pooled_apart_in_one_plan(exact_cells_max: int) -> None:
    hour = tail_hour(long_tail(node("a", (1, 1, 1, 1, 4), regroups=False)), exact_cells_max)
    assert {size.worker_gpus: size.after for size in hour.pool_sizes} == {1: 1, 4: 4}
    assert {one.endpoint.model: one.worker_gpus for one in hour.placement.pooled} == {
        endpoint.model: 4 if endpoint.model.startswith("large") else 1 for endpoint in hour.facts.demand
    }
    assert (hour.placement.entries, hour.placement.unserved) == ((), ())


@pytest.mark.parametrize("exact_cells_max", [0, 500])
def test_a_pool_is_no_larger_than_the_slots_of_its_size(exact_cells_max: int) -> None:
    """Three large models would need two slots of their pool; there is one of their size, and none may be made."""
    fleet = long_tail(node("a", (1, 1, 1, 1, 1, 1, 1, 1, 4), regroups=False))
    busy = {pair: LATENCY | {"decode_base_s": 0.09} for pair in fleet.latencies}
    hour = tail_hour(replace(fleet, latencies=busy), exact_cells_max, 9.0)
    assert [size.after for size in hour.pool_sizes if size.worker_gpus == 4] == [4]
    assert sum(one.worker_gpus == 4 for one in hour.placement.pooled) == 2


def test_layouts_are_made_for_the_pools_of_each_size() -> None:
    """The slots of both pools are counted, and the node that has none of them is regrouped."""
    hour = tail_hour(long_tail(node("a", (4,)), node("b", (4,))), 500)
    assert hour.layouts.demand == {PLACE: {1: 1.0, 4: 4.0}}
    assert after(hour.layouts) == {"a": (1, 1, 1, 1)}
    assert hour.placement.unserved == ()


def test_a_reserve_has_slots_of_one_size() -> None:
    """That of the models that take most GPUs; the others keep what they would have alone."""
    fleet = long_tail(node("a", (1, 1, 1, 1, 4, 4, 4), regroups=False))
    demand = dict.fromkeys(fleet.limits, (50.0,))
    placement = placement_facts(fleet, demand, pool=None, stale_s=60.0)
    given = CandidateFacts(
        placement=placement,
        poolable=poolable_facts(fleet, demand, stale_s=60.0),
        medians=demand,
        placed=choose_placement(placement, 0.0, PlacementSettings()),
    )
    found = reserve_facts(given, PoolableSettings())
    assert {one.gpus for one in found.endpoints} == {4}
    place = found.places[PLACE]
    assert (place.free_gpus, place.most_gpus) == (12, 12), "four GPUs are of small models that keep their own"
    small = Endpoint(model="small-0", region="east")
    assert found.left_out[small] == "reserves have workers of 4 GPUs, it takes 1"


def test_only_the_slots_of_a_reserve_are_of_its_size() -> None:
    """Its models' own instances may stand on larger slots, as they do without it."""
    pairs = [ModelGpu(model=f"small-{number}", gpu_type="H800") for number in range(10)]
    fleet = snapshot(
        replace(node("a", (1, 1, 4, 4, 4, 4), regroups=False), host_bytes=2 << 40),
        profiles=dict.fromkeys(pairs, Profile(tokens_per_s=100.0, gpus=1)),
        latencies=dict.fromkeys(pairs, LATENCY),
        sizes={pair.model: ModelSize(weights_bytes=30 << 30) for pair in pairs},
        limits={Endpoint(model=pair.model, region="east"): (0, 8) for pair in pairs},
    )
    medians, demand = (dict.fromkeys(fleet.limits, (tokens_per_s,)) for tokens_per_s in (120.0, 150.0))
    settings = HourSettings(pools=PoolableSettings(enabled=False), reserve=ReserveSettings(enabled=True))
    hour = choose_hour(fleet, demand, medians, 0.0, settings)
    assert {one.key.endpoint for one in hour.reserve.endpoints} == set(fleet.limits)
    assert [(size.gpus, size.missing_gpus) for size in hour.reserve.sizes] == [(2, 0)]
    assert all(entry.after for entry in hour.placement.entries)
