"""The solver by prices against every possible placement, against the exact program, and on its own promises."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, PoolKey, RegionGpu
from controlplane.policies.placement.choose import choose_placement
from controlplane.policies.placement.cost import grid_cost, violations_of
from controlplane.policies.placement.facts import (
    PlacementFacts,
    PlacementModel,
    PlacementSettings,
    PoolFacts,
    Profile,
)
from controlplane.policies.placement.grid import Answer, Grid, grid_of
from controlplane.policies.placement.priced.choice import Chooser, Effort
from controlplane.policies.placement.priced.decomposition import PricedSolution, PriceSettings, solve_grid
from controlplane.policies.placement.priced.dual import Dual, climb, configurations_at
from controlplane.policies.placement.priced.models import whole_models
from controlplane.policies.placement.priced.regions import region_bound
from controlplane.policies.placement.priced.relax import Cells
from controlplane.policies.placement.priced.repair import pool_gpus
from controlplane.policies.placement.priced.search import search
from controlplane.policies.placement.priced.tables import Bools, Floats, Ints, Tables, build_tables
from ops.bench.planner.placement_problems import ProblemShape, make_problem
from tests.controlplane.policies.placement.priced.climbed import climbed
from tests.controlplane.policies.placement.problems import EXACT, small_facts, turned

AT_HOME = PlacementSettings(gap=0.0, epsilon=1.0)
"""All demand served at home: then nothing is shared between regions, and the bound is exact."""
QUICK = PriceSettings(climb_rounds=4, choices=((500, 1.0),))
SMALL = settings(max_examples=25)


def _solved(
    facts: PlacementFacts, how: PlacementSettings = EXACT, limits: PriceSettings | None = None
) -> PricedSolution:
    return solve_grid(grid_of(facts, how), how.gap, limits)


def _fits(facts: PlacementFacts, found: PricedSolution) -> None:
    grid = grid_of(facts, EXACT)
    assert violations_of(grid, found) == ()
    assert found.objective == pytest.approx(grid_cost(grid, found), rel=1e-9, abs=1e-9)
    assert found.bound <= found.objective
    assert found.gap >= 0


@pytest.mark.slow
@SMALL
@given(facts=small_facts(pools=None, wide=True))
def test_the_bound_is_below_the_best_and_the_best_below_the_answer(facts: PlacementFacts) -> None:
    found = _solved(facts)
    _fits(facts, found)
    exact = choose_placement(facts, 0.0, EXACT)
    assert exact.objective_per_hour is not None
    slack = 1e-6 * max(1.0, abs(exact.objective_per_hour))
    assert found.bound <= exact.objective_per_hour + slack
    assert exact.objective_per_hour <= found.objective + slack


@SMALL
@given(facts=small_facts(pools=None, wide=True), seed=st.integers(0, 9))
def test_whatever_limits_cut_it_off_the_answer_fits(facts: PlacementFacts, seed: int) -> None:
    stops = itertools.count()
    limits = PriceSettings(climb_rounds=1 + seed % 3, choices=((10, 1.0), (20, 0.5))[: seed % 3])
    _fits(facts, solve_grid(grid_of(facts, EXACT), EXACT.gap, limits, lambda: next(stops) >= seed))


@settings(max_examples=15)
@given(facts=small_facts(pools=None, wide=True), share=st.sampled_from([0.0, 0.4, 1.0]))
def test_the_bounds_of_regions_add_up_to_a_bound_at_any_price_of_demand(facts: PlacementFacts, share: float) -> None:
    grid = grid_of(facts, EXACT)
    if not grid.cells:
        return
    tables = build_tables(grid)
    dual = climb(tables, 4, 0.0, lambda: False)
    token = share * dual.rows.of_places(dual.prices)[2]
    bound = tables.constant + float(token @ tables.total)
    for region in range(len(tables.regions)):
        bound += region_bound(grid, region, token, gap_abs=0.0, nodes_max=1000, should_stop=lambda: False)
    exact = choose_placement(facts, 0.0, EXACT).objective_per_hour
    assert exact is not None
    assert bound <= exact + 1e-6 * max(1.0, abs(exact))
    if share == 1.0:
        assert bound >= dual.bound - 1e-6 * max(1.0, abs(dual.bound)), "whole instances cost no less than parts of them"


def _gains_of_regions(grid: Grid, tables: Tables, dual: Dual) -> Floats:
    """What each region costs above its part of the bound, [J]."""
    gpu, _host, token = dual.rows.of_places(dual.prices)
    least = configurations_at(tables, dual.rows, dual.prices).least
    low = np.bincount(tables.region_of, weights=least)
    low -= (gpu.reshape(tables.capacity.shape) * tables.capacity).sum(axis=1)
    bounds = [
        region_bound(grid, region, token, gap_abs=0.0, nodes_max=1000, should_stop=lambda: False)
        for region in range(len(tables.regions))
    ]
    return np.maximum(np.array(bounds) - low, 0.0)


@settings(max_examples=25)
@given(
    facts=small_facts(pools=None, wide=True),
    share=st.sampled_from([0.0, 0.4, 1.0]),
    spare=st.sampled_from([0.5, 5.0]),
)
def test_a_share_of_the_regions_gains_and_those_of_models_add_up_to_a_bound(
    facts: PlacementFacts, share: float, spare: float
) -> None:
    grid = grid_of(facts, EXACT)
    if not grid.cells:
        return
    tables, dual, near_at = climbed(grid, rounds=4, spare=spare, each_max=20)
    near = near_at(dual)
    regions, token = _gains_of_regions(grid, tables, dual), dual.rows.of_places(dual.prices)[2]
    models = whole_models(tables, near, token, (regions, np.full(len(regions), share)))[0]
    assert (models >= -1e-9).all()
    exact = choose_placement(facts, 0.0, EXACT).objective_per_hour
    assert exact is not None
    assert dual.bound + share * regions.sum() + models.sum() <= exact + 1e-6 * max(1.0, abs(exact))


@pytest.mark.parametrize(("spare", "gain"), [(5.0, 1.0), (0.25, 0.25)])
def test_a_model_that_needs_half_an_instance_pays_for_a_whole_one(spare: float, gain: float) -> None:
    """The price of demand buys 1.5 instances at 2 an hour; an enumeration that ends early proves as much as it saw."""
    facts = _one(demand={HERE: (1500.0,)}, present={KEY: 2}, capacity={RegionGpu(region="r", gpu_type="G"): 9})
    grid = grid_of(facts, PlacementSettings(epsilon=0.0))
    tables, dual, near_at = climbed(grid, rounds=24, spare=spare, each_max=50)
    none = np.zeros(1)
    gains, _chosen = whole_models(tables, near_at(dual), dual.rows.of_places(dual.prices)[2], (none, none))
    assert gains == pytest.approx([gain], rel=1e-2)


@settings(max_examples=15)
@given(facts=small_facts(pools=None, wide=True))
def test_a_choice_among_columns_fits_and_is_never_worse(facts: PlacementFacts) -> None:
    grid = grid_of(facts, EXACT)
    if not grid.cells:
        return
    tables, dual, near_at = climbed(grid, rounds=4, spare=5.0, each_max=50)
    near = near_at(dual)
    chooser = Chooser(tables=tables, rows=dual.rows, columns=near.columns)
    effort = Effort(target=-np.inf, gap_abs=0.0, nodes_max=1000, should_stop=lambda: False)
    choice = chooser.better(near.choice, np.ones(len(near.columns), bool), effort)
    assert chooser.cost(choice) <= chooser.cost(near.choice)
    found = near.columns.at(choice)
    answer = tables.answer(found.counts, found.pooled, pool_gpus(tables, found))
    assert violations_of(grid, answer) == ()
    if not any(facts.donated.values()):
        pools = [pool for row in grid.places for pool in row.pools]
        moves_of_pools = sum(abs(answer.pool_gpus.get(pool.key, 0) - pool.before) for pool in pools) * grid.move_price
        cost = grid_cost(grid, answer) - moves_of_pools
        assert chooser.cost(choice) == pytest.approx(cost, rel=1e-9, abs=1e-6)
    closed = chooser.better(choice, np.zeros(len(near.columns), bool), effort)
    assert np.array_equal(closed, choice), "with every other column closed all stays"


def test_after_the_fleet_each_region_chooses_and_then_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its columns alone, while the gap is not reached."""
    opened: list[tuple[int, int]] = []
    better = Chooser.better

    def watched(self: Chooser, choice: Ints, open_: Bools, effort: Effort) -> Ints:
        endpoints = self.columns.endpoint[open_]
        opened.append((len(set(self.tables.model_of[endpoints])), len(set(self.tables.region_of[endpoints]))))
        return better(self, choice, open_, effort)

    monkeypatch.setattr(Chooser, "better", watched)
    facts = make_problem(ProblemShape(models=4, regions=6, gpu_types=3, seed=1))
    _solved(facts, PlacementSettings(gap=0.005), PriceSettings(choices=((500, 1.0),)))
    assert opened == [(4, 6)] + 6 * [(4, 1)] + 4 * [(1, 6)]


@settings(max_examples=10)
@given(facts=small_facts(pools=None, wide=True))
def test_the_same_facts_give_the_same_answer_in_any_order(facts: PlacementFacts) -> None:
    assert _solved(facts, limits=QUICK) == _solved(turned(facts), limits=QUICK)


def _one(**changes: object) -> PlacementFacts:
    """One model of 1,000 tokens/s on one GPU at 2 an hour, one region with 4 GPUs, weights there, one running."""
    here = Endpoint(model="a", region="r")
    facts = PlacementFacts(
        regions=("r",),
        models=(PlacementModel(name="a"),),
        capacity={RegionGpu(region="r", gpu_type="G"): 4},
        profiles={ModelGpu(model="a", gpu_type="G"): Profile(tokens_per_s=1000.0, gpus=1)},
        present={EndpointGpu(model="a", region="r", gpu_type="G"): 1},
        demand={here: (2500.0,)},
        limits={},
        gpu_cost_per_hour={"G": 2.0},
        weights_present=frozenset({here}),
    )
    return replace(facts, **changes)  # type: ignore[arg-type]


KEY = EndpointGpu(model="a", region="r", gpu_type="G")
HERE = Endpoint(model="a", region="r")


@pytest.mark.parametrize(
    ("changes", "count", "objective"),
    [
        ({}, 3, 3 * 2 + 2 * (2 / 6 + 0.002)),  # two started in 10 min at 2 an hour, two moves
        ({"demand": {HERE: (0.0,)}}, 0, 0.002),  # nothing wanted: stopped, one move
        ({"demand": {}, "limits": {HERE: (2, 4)}}, 2, 2 * 2 + 2 / 6 + 0.002),
        ({"overrides": {HERE: 4}}, 4, 4 * 2 + 3 * (2 / 6 + 0.002)),
        ({"limits": {HERE: (0, 0)}, "demand": {}}, 0, 0.002),
    ],
    ids=["demand", "no demand", "minimum", "pin", "maximum of none"],
)
def test_one_endpoint_to_the_last_cent(changes: dict[str, object], count: int, objective: float) -> None:
    found = _solved(_one(**changes), AT_HOME)
    assert found.counts.get(KEY, 0) == count
    assert found.objective == pytest.approx(objective)
    assert found.bound == pytest.approx(objective)


def test_without_capacity_all_is_unserved_at_the_price_of_the_program() -> None:
    facts = _one(capacity={}, present={})
    found = _solved(facts)
    assert (found.counts, found.pooled, found.pool_gpus) == ({}, frozenset(), {})
    assert found.objective == pytest.approx(grid_cost(grid_of(facts, EXACT), Answer(counts={})))
    assert found.bound == pytest.approx(found.objective)
    assert found.objective > 1000


def test_too_little_capacity_serves_what_it_can() -> None:
    facts = _one(capacity={RegionGpu(region="r", gpu_type="G"): 2})
    found = _solved(facts, AT_HOME)
    assert found.counts == {KEY: 2}
    assert found.bound == pytest.approx(found.objective)


@pytest.mark.parametrize("slot_gpus", [1, 4])
def test_a_pool_is_shared_by_the_tail(slot_gpus: int) -> None:
    """Ten models of a twentieth of a GPU each: one pool GPU holds 0.8 / 0.05 = 16 of them, dedicated takes ten. Four in
    a slot are cheaper still.
    """
    models = [f"m{number}" for number in range(10)]
    keys = [EndpointGpu(model=model, region="r", gpu_type="G") for model in models]
    facts = _one(
        models=tuple(PlacementModel(name=model) for model in models),
        capacity={RegionGpu(region="r", gpu_type="G"): 12},
        profiles={ModelGpu(model=model, gpu_type="G"): Profile(tokens_per_s=1000.0, gpus=1) for model in models},
        present={},
        demand={Endpoint(model=model, region="r"): (20.0,) for model in models},
        weights_present=frozenset(),
        pool=PoolFacts(
            occupancy=dict.fromkeys(keys, 0.05),
            weights_bytes=dict.fromkeys(models, 10),
            host_bytes_per_gpu={"G": 100},
            slot_gpus={PoolKey(region="r", gpu_type="G"): slot_gpus},
        ),
    )
    found = _solved(facts)
    assert found.counts == {}
    assert found.pooled == frozenset(keys)
    assert found.pool_gpus == {PoolKey(region="r", gpu_type="G"): slot_gpus}


@pytest.mark.parametrize("pools", [False, True])
def test_a_fleet_of_some_size_is_placed_within_the_gap_asked_for(pools: bool) -> None:
    facts = make_problem(ProblemShape(models=12, regions=6, gpu_types=3, seed=5, skew=3.6, pools=pools))
    how = PlacementSettings(gap=0.02)
    found = _solved(facts, how)
    assert violations_of(grid_of(facts, how), found) == ()
    assert found.gap <= how.gap
    assert bool(found.pooled) is pools


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.7]), st.sampled_from([2, 4000]))
def test_the_search_of_endpoints_is_exact_and_lists_the_best(seed: int, spare: float, labels_max: int) -> None:
    cells = _random_cells(np.random.default_rng(seed), size=6, types=3)
    found = search(cells, spare=spare, keep=5, labels_max=labels_max)
    for at in range(6):
        values = _all_values(cells, at)
        best = min(values.values())
        listed = [tuple(counts) for counts in found.counts[found.endpoint == at].tolist()]
        limit = min(best + spare, max(values[each] for each in listed) if len(listed) == 5 else np.inf)
        within = {counts for counts, value in values.items() if value < limit - 1e-7}
        assert found.bound[at] <= best + 1e-7
        assert {counts for counts, value in values.items() if value < found.known[at] - 1e-7} <= set(listed)
        if labels_max > 2:
            assert values[listed[0]] == pytest.approx(best, abs=1e-7)
            assert found.bound[at] == pytest.approx(best, abs=1e-7)
            assert within <= set(listed)


def _random_cells(random: np.random.Generator, *, size: int, types: int) -> Cells:
    fewest = random.integers(0, 3, size=size)
    return Cells(
        speed=random.choice([0.5, 1.0, 1.3, 2.1, 3.7], size=(size, types)),
        segment_max=random.integers(0, 3, size=(size, types, 3)),
        price=np.sort(random.uniform(-0.2, 2.5, size=(size, types, 3)), axis=2),
        most=np.maximum(fewest, random.integers(0, 9, size=size)),
        fewest=fewest,
        fewest_price=random.choice([0.5, 5.0, 50.0], size=size),
        home=random.uniform(0, 9, size=size) * random.integers(0, 2, size=size),
        home_price=random.choice([0.2, 1.0, 50.0], size=size),
    )


def _all_values(cells: Cells, at: int) -> dict[tuple[int, ...], float]:
    """What every answer of an endpoint costs, straight from the definition."""
    values = {}
    for counts in itertools.product(*(range(total + 1) for total in cells.segment_max[at].sum(axis=1).tolist())):
        if sum(counts) > cells.most[at]:
            continue
        served = float(np.dot(counts, cells.speed[at]))
        value = cells.home_price[at] * max(0.0, cells.home[at] - served)
        value += cells.fewest_price[at] * max(0, cells.fewest[at] - sum(counts))
        for kind, count in enumerate(counts):
            each = np.repeat(cells.price[at, kind], cells.segment_max[at, kind])
            value += each[:count].sum()
        values[counts] = float(value)
    return values
