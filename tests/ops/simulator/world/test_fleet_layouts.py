"""Simulated nodes that plans regroup: the slots follow the demand, and nothing is lost or held twice meanwhile."""

from collections import Counter
from typing import Any

import pytest

from dataplane.protocol.layouts import Layout
from ops.simulator.run import build_world
from ops.simulator.scenario.formats import traffic_of
from ops.simulator.scenario.scenario import Scenario
from ops.simulator.world.fleet import Fleet
from ops.simulator.world.fleet_layouts import FleetLayouts
from ops.simulator.world.hosted import FleetNode
from tests.ops.simulator.scaled import changed_scenario, run_checked, scaled

HOUR_S = 3600


def part(model: str, factor: float, *bursts_s: int) -> dict[str, Any]:
    """Traffic for a model, so many times as much in the hours that begin then."""
    return {
        "kind": "generated",
        "models": [model],
        "rate_per_s": 0.2,
        "duration_s": 4.0 * HOUR_S,
        "origins": {"east": 1},
        "tiers": {"IW-F": 1},
        "prompt_tokens": {"median": 600, "most": 2000},
        "output_tokens": {"median": 50, "most": 100},
        "bursts": [{"start_s": at_s, "duration_s": HOUR_S, "factor": factor} for at_s in bursts_s],
    }


def alternating(**planning: Any) -> Scenario:
    """A model of one GPU that is busy in the second and the fourth hour, one of four GPUs in the third."""
    a, b = (
        {"name": name, "weights_bytes": 15 * 10**9, "kv_bytes_per_token": 800_000, "tokens_per_s": 300.0, "gpus": gpus}
        for name, gpus in (("a", 1), ("b", 4))
    )
    parts = [part("a", 9.0, HOUR_S, 3 * HOUR_S), part("b", 2.5, 2 * HOUR_S)]
    document = scaled("oracle").model_dump() | {
        "regions": ["east"],
        "latencies_ms": {},
        "models": [a, b],
        "traffic": {"kind": "mixed", "parts": parts},
    }
    changes: dict[str, Any] = {
        "fleet": {
            "kv_bytes": 8 * 10**9,
            "instances": [{"model": model, "region": "east"} for model in ("a", "b")],
            "nodes": [{"region": "east", "count": 2, "layout": [1] * 4}, {"region": "east", "layout": [4]}],
        },
        "scaling": {"instances_max": 8, "spot": False},
        "planning": {"learn_s": 0, "layouts": True, "layout_hold_s": 0} | planning,
    }
    return changed_scenario(document, changes)


def test_slots_follow_the_demand() -> None:
    scenario = alternating()
    world, fleet, _ = build_world(scenario, 1)
    assert fleet is not None
    seen: list[Layout] = []

    def check() -> None:
        held = Counter[tuple[str, int]]()
        for one in fleet.hosted.values():
            held[one.ref] += one.gpus
        assert all(count <= fleet.layouts.gpus_of(ref) for ref, count in held.items())
        sizes = sizes_of(fleet)
        assert sum(sizes) == 12
        if not seen or seen[-1] != sizes:
            seen.append(sizes)

    run_checked(world, check)
    day, night = (1,) * 8 + (4,), (1,) * 4 + (4, 4)
    assert seen == [day, night, day]
    served = Counter((one.model, one.tier) for one in traffic_of(scenario, 1))
    assert {key: tally.requests for key, tally in world.tallies.items()} == served
    assert not world.failures


def sizes_of(fleet: Fleet) -> Layout:
    """The sizes of all slots."""
    facts = fleet.node_facts()
    return tuple(sorted(slot.gpus for node in facts for slot in node.slots))


def test_nothing_is_regrouped_where_plans_may_not() -> None:
    world, fleet, _ = build_world(alternating(layouts=False), 1)
    assert fleet is not None
    assert list(world.run())
    assert (sizes_of(fleet), fleet.layouts.regrouped) == ((1,) * 8 + (4,), 0)


def test_a_block_waits_until_it_is_empty() -> None:
    node = FleetNode(name="n", region="east", gpu_type="H800", layout=(1, 1, 2), regroups=True)
    layouts = FleetLayouts([node], 120.0)
    layouts.want("n", (2, 2), 1000.0)
    assert layouts.going("n") == {0, 1}
    layouts.regroup([("n", 1)])
    facts = layouts.facts(node, 1060.0, age_s=0.0)
    assert [(slot.number, slot.gpus, slot.going) for slot in facts.slots] == [(0, 1, True), (1, 1, True), (2, 2, False)]
    assert (facts.layout, facts.layout_age_s, layouts.is_overdue("n", 1060.0)) == ((2, 2), 60.0, False)
    assert layouts.is_overdue("n", 1121.0)
    layouts.regroup([("n", 2)])
    assert (layouts.gpus_of(("n", 0)), layouts.gpus_of(("n", 1)), layouts.going("n")) == (2, 0, frozenset())
    assert layouts.facts(node, 1121.0, age_s=0.0).layout is None


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ({"layout": [1, 2, 1]}, "a slot of 2 GPUs begins at a multiple of 2"),
        ({"layout": [4], "slots": 2}, "must be left out"),
        ({"slots": 2}, "planning.layouts: needs a layout in fleet.nodes"),
    ],
)
def test_what_cannot_be_is_refused(node: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        scaled(fleet={"nodes": [{"region": "east", **node}]}, planning={"layouts": True})
