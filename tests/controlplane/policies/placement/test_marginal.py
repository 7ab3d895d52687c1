"""What it costs not to make a change, by hand, and against the cost function with the change taken back."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from controlplane.policies.facts import RegionGpu
from controlplane.policies.placement.cost import grid_cost, violations_of
from controlplane.policies.placement.decision import Constraint, PlacementEntry
from controlplane.policies.placement.facts import PlacementFacts
from controlplane.policies.placement.grid import grid_of
from tests.controlplane.policies.placement.problems import EAST, EXACT, WEST, answer_of, cell, fleet, place, small_facts

TOKEN = (2 + 2 / 6) / 1900
"""The dearest token of `fleet`: an instance and its start, by its tokens/s."""


def only(facts: PlacementFacts, region: str = "us-west") -> PlacementEntry:
    (entry,) = [each for each in place(facts).entries if each.endpoint.region == region]
    return entry


def test_an_instance_for_the_home_row() -> None:
    """Without the third of 5,700 tokens/s: 368 of 4,168 are not served at home, and 1,410 of 5,210 nowhere."""
    entry = only(fleet(demand={WEST: (5210.0,)}, present={cell("a", "us-west"): 2}))
    assert (entry.before, entry.after, entry.constraint) == (2, 3, Constraint.HOME)
    saved = 2 + 2 / 6 + 0.002
    assert entry.cost_if_not == pytest.approx(1000 * TOKEN * (368 / 2 + 1410) - saved)


def test_an_instance_for_the_global_row() -> None:
    entry = only(fleet(demand={WEST: (2300.0,)}, present={cell("a", "us-west"): 1}, limits={EAST: (0, 0)}))
    assert (entry.after, entry.constraint) == (2, Constraint.GLOBAL)
    assert entry.cost_if_not == pytest.approx(1000 * TOKEN * 400 - (2 + 2 / 6 + 0.002))


def test_an_instance_for_the_minimum() -> None:
    entry = only(fleet(limits={WEST: (2, 4)}, present={cell("a", "us-west"): 1}))
    assert (entry.after, entry.constraint) == (2, Constraint.MINIMUM)
    assert entry.cost_if_not == pytest.approx(49 * (2 + 2 / 6) - 0.002)


def test_instances_that_nothing_needs() -> None:
    """Two kept for nothing cost 4 an hour, and save two stops."""
    entry = only(fleet(demand={WEST: (1800.0,)}, present={cell("a", "us-west"): 3}))
    assert (entry.after, entry.constraint) == (1, Constraint.COST)
    assert entry.cost_if_not == pytest.approx(4 - 2 * 0.002)


def test_unchanged_costs_nothing() -> None:
    entry = only(fleet(demand={WEST: (1800.0,)}, present={cell("a", "us-west"): 1}))
    assert (entry.after, entry.constraint, entry.cost_if_not) == (1, Constraint.HOME, 0.0)


def test_what_cannot_be_otherwise_costs_nothing() -> None:
    """The GPUs are gone, a maximum fell, or a pin says so."""
    gone = fleet(capacity={RegionGpu(region="us-west", gpu_type="H800"): 2}, present={cell("a", "us-west"): 4})
    gone = replace(gone, demand={WEST: (9000.0,)})
    fell = fleet(limits={WEST: (0, 2)}, present={cell("a", "us-west"): 4}, demand={WEST: (9000.0,)})
    overridden = fleet(overrides={WEST: 2}, present={cell("a", "us-west"): 4}, demand={WEST: (9000.0,)})
    for facts, constraint in (
        (gone, Constraint.CAPACITY),
        (fell, Constraint.MAXIMUM),
        (overridden, Constraint.OVERRIDE),
    ):
        entry = only(facts)
        assert (entry.after, entry.constraint, entry.cost_if_not) == (2, constraint, 0.0)


def test_a_pin_that_is_not_kept_costs_more_than_its_demand() -> None:
    entry = only(fleet(overrides={WEST: 2}, demand={EAST: (100.0,)}))
    assert (entry.after, entry.constraint) == (2, Constraint.OVERRIDE)
    assert entry.cost_if_not > 2 * 1000 * TOKEN * 1900


@settings(max_examples=40)
@given(facts=small_facts(pools=True))
def test_it_is_the_rise_of_the_objective(facts: PlacementFacts) -> None:
    """Where the count of before fits, everything else as planned: the cost function says the same."""
    placement, grid = place(facts), grid_of(facts, EXACT)
    answer = answer_of(placement)
    for entry in placement.entries:
        if any(each.endpoint == entry.endpoint for each in placement.pooled):
            continue
        key = cell(entry.endpoint.model, entry.endpoint.region, entry.gpu_type)
        without = replace(answer, counts={**answer.counts, key: entry.before})
        if not violations_of(grid, without):
            rise = grid_cost(grid, without) - grid_cost(grid, answer)
            assert entry.cost_if_not == pytest.approx(rise, rel=1e-6, abs=1e-6)
