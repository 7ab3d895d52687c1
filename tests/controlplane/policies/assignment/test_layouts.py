"""Which nodes are regrouped: as the demand of each size asks, seldom, and at nobody's cost."""

from collections import Counter
from random import Random
from typing import Any

from controlplane.policies.assignment.layouts import GroupedNode, LayoutDecision, LayoutFacts, LayoutSettings
from controlplane.policies.assignment.layouts import choose_layouts as choose
from controlplane.policies.facts import RegionGpu
from dataplane.protocol.layouts import Layout, check_layout

PLACE = RegionGpu(region="us-east", gpu_type="H20")


def decide(nodes: dict[str, Layout], demand: dict[int, float], **changes: Any) -> LayoutDecision:
    """`changes`: `work` and `age_s` by node, and settings."""
    work, age_s = changes.pop("work", {}), changes.pop("age_s", {})
    grouped = tuple(
        GroupedNode(name=name, place=PLACE, layout=layout, work=work.get(name, {}), age_s=age_s.get(name, 1e6))
        for name, layout in nodes.items()
    )
    return choose(LayoutFacts(nodes=grouped, demand={PLACE: demand}), 0.0, LayoutSettings(**changes))


def after(nodes: dict[str, Layout], demand: dict[int, float], **changes: Any) -> dict[str, Layout]:
    return nodes | {one.node: one.after for one in decide(nodes, demand, **changes).regroupings}


def test_four_slots_serve_small_models_by_day_and_a_large_one_by_night() -> None:
    day: dict[str, Layout] = {"a": (1, 1, 1, 1), "b": (4,)}
    assert after(day, {1: 3.5, 4: 3.0}) == day, "all have what they take"
    assert after(day, {1: 0.0, 4: 6.0}) == day, "small models keep a slot"
    night = after({**day, "c": (1, 1, 1, 1)}, {1: 0.5, 4: 6.0})
    assert night == {"a": (4,), "b": (4,), "c": (1, 1, 1, 1)}
    assert after(night, {1: 6.0, 4: 3.0}) == {"a": (1, 1, 1, 1), "b": (4,), "c": (1, 1, 1, 1)}


def test_a_size_without_a_slot_gets_one_and_as_few_gpus_change_as_can() -> None:
    nodes: dict[str, Layout] = {"a": (4, 4), "b": (2, 2, 4)}
    decision = decide(nodes, {1: 0.0, 4: 4.0})
    assert [(one.node, one.after) for one in decision.regroupings] == [("b", (1, 1, 2, 4))]
    assert "slots of 1 GPUs for 0.00 GPUs" in decision.regroupings[0].reason


def test_slots_with_least_work_are_regrouped() -> None:
    nodes: dict[str, Layout] = {"a": (1,) * 8}
    work = {"a": {0: 5.0, 3: 9.0, 6: 1.0}}
    assert after(nodes, {1: 1.0, 4: 1.0}, work=work) == {"a": (1, 1, 1, 1, 4)}
    assert after(nodes, {1: 1.0, 2: 1.0}, work=work) == {"a": (1, 1, 1, 1, 2, 1, 1)}


def test_nobody_is_robbed_and_what_is_missing_is_said() -> None:
    nodes: dict[str, Layout] = {"a": (4,), "b": (1, 1, 1, 1)}
    decision = decide(nodes, {1: 6.5, 4: 7.0})
    assert decision.regroupings == ()
    assert decision.missing == {PLACE: {1: 3, 4: 1}}


def test_what_a_size_might_need_soon_it_keeps() -> None:
    nodes: dict[str, Layout] = {"a": (4, 4), "b": (1,) * 8}
    assert after(nodes, {1: 4.0, 4: 9.0}, margin=0.1) == nodes, "four slots would be none too many"
    assert after(nodes, {1: 4.0, 4: 9.0}, margin=0.0) != nodes


def test_a_node_keeps_its_layout_for_a_while() -> None:
    nodes: dict[str, Layout] = {"a": (1, 1, 1, 1), "b": (1, 1, 1, 1)}
    assert after(nodes, {1: 1.0, 4: 1.0}, age_s={"a": 10.0}, hold_s=60.0) == {"a": (1, 1, 1, 1), "b": (4,)}
    both = {"a": 10.0, "b": 59.0}
    assert decide(nodes, {1: 1.0, 4: 1.0}, age_s=both, hold_s=60.0).missing == {PLACE: {4: 1}}


def test_random_places_come_to_rest_with_gpus_unchanged() -> None:
    """Decided again at the same demand nothing changes, no size loses what it takes, and the order does not matter."""
    rng = Random(7)
    for _ in range(300):
        nodes = {
            f"n{n}": rng.choice([(8,), (4, 4), (4, 2, 1, 1), (1,) * 8, (2, 2, 4)]) for n in range(rng.randint(1, 4))
        }
        demand = {size: rng.random() * 10 for size in rng.sample([1, 2, 4, 8], rng.randint(1, 4))}
        first = after(nodes, demand)
        assert after(first, demand) == first
        assert after(dict(reversed(nodes.items())), demand) == first
        before, now = (Counter(size for layout in each.values() for size in layout) for each in (nodes, first))
        for layout in first.values():
            check_layout(layout, 8)
        for size, taken in demand.items():
            assert now[size] * size >= min(before[size] * size, taken)
