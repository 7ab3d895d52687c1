"""Models as wholes: exactly the least of all combinations, and prices at which they prove more."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policies.placement.choose import choose_placement
from controlplane.policies.placement.facts import PlacementFacts, PlacementSettings
from controlplane.policies.placement.grid import grid_of
from controlplane.policies.placement.priced import models
from controlplane.policies.placement.priced.ascent import ascend
from ops.bench.planner.placement_problems import ProblemShape, make_problem
from tests.controlplane.policies.placement.priced.climbed import climbed
from tests.controlplane.policies.placement.problems import EXACT, small_facts

WAYS = st.lists(
    st.lists(st.tuples(st.floats(0.0, 900.0), st.floats(0.0, 3.0)), min_size=1, max_size=5), min_size=1, max_size=4
)


@settings(max_examples=200)
@given(
    ways=WAYS,
    total=st.floats(1.0, 2000.0),
    token=st.floats(0.0, 0.02),
    more=st.floats(0.0, 0.1),
    limit=st.floats(0.01, 20.0),
)
def test_the_least_of_all_combinations(
    ways: list[list[tuple[float, float]]], total: float, token: float, more: float, limit: float
) -> None:
    price = token + more

    def cost(combination: tuple[tuple[float, float], ...], most: float = np.inf) -> float:
        served = sum(each[0] for each in combination)
        excess = sum(each[1] for each in combination)
        return excess + token * min(max(served - total, 0.0), most) + more * max(total - served, 0.0)

    known = [(np.array([each[0] for each in way]), np.array([each[1] for each in way])) for way in ways]
    found, picked = models._least(known, total, (token, price), limit)
    lost = 2 * len(ways) * total / models.STEPS * price + 1e-9
    every = list(itertools.product(*ways))
    assert found <= min(limit, *map(cost, every)) + 1e-9, "a bound"
    assert found >= min(limit, *(cost(each, most=total) for each in every)) - lost
    if picked:
        chosen = cost(tuple(way[pick] for way, pick in zip(ways, picked, strict=True)), most=total)
        assert chosen == pytest.approx(found, abs=lost)
    else:
        assert found == limit


@settings(max_examples=25)
@given(facts=small_facts(pools=None, wide=True), spare=st.sampled_from([0.5, 5.0]))
def test_prices_for_whole_models_prove_no_more_than_the_best_placement_costs(
    facts: PlacementFacts, spare: float
) -> None:
    grid = grid_of(facts, EXACT)
    if not grid.cells:
        return
    tables, dual, near_at = climbed(grid, rounds=4, spare=spare, each_max=20)
    before, after = (ascend(tables, dual, near_at, rounds, lambda: False) for rounds in (0, 4))
    exact = choose_placement(facts, 0.0, EXACT).objective_per_hour
    assert exact is not None
    assert before <= after <= exact + 1e-6 * max(1.0, abs(exact))


@pytest.mark.slow
def test_prices_for_whole_models_prove_more_of_a_large_fleet() -> None:
    facts = make_problem(ProblemShape(models=20, regions=20, gpu_types=5, seed=10))
    grid = grid_of(facts, PlacementSettings())
    tables, dual, near_at = climbed(grid, rounds=24, spare=1.8, each_max=100, least_gain=5e-5)
    before, after = (ascend(tables, dual, near_at, rounds, lambda: False) for rounds in (0, 3))
    assert before > dual.bound
    assert after - dual.bound > 1.1 * (before - dual.bound)
