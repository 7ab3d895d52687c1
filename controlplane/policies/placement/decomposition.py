"""Large placement problems by prices: a good placement, and a proven bound on every other.

Capacity and a model's whole demand are all that endpoints share. Priced, the problem falls apart into one small exact
search per endpoint, whatever the size of the fleet; the prices that make those answers fit best also bound the cost
from below. Then one way of serving is chosen for each endpoint so that all fit.

    prices_tables.py   the problem as arrays          prices_dual.py    prices, and the bound they prove
    prices_search.py   one endpoint, exactly          prices_master.py  prices and choices by HiGHS, over known columns
    prices_relax.py    its relaxation                 prices_repair.py  what does not fit, made to fit
    prices_columns.py  ways of serving, as columns    prices_near.py    more columns near a fractional answer
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from controlplane.policies.facts import EndpointGpu, RegionGpu
from controlplane.policies.placement.cost import fleet_cost, gap_of, grid_cost
from controlplane.policies.placement.facts import PlacementFacts, PlacementSettings
from controlplane.policies.placement.grid import Grid, grid_of
from controlplane.policies.placement.prices_columns import Columns
from controlplane.policies.placement.prices_dual import Dual, climb, first_dual, priced_out, soft_choice
from controlplane.policies.placement.prices_master import relax_master
from controlplane.policies.placement.prices_repair import Standing, moved, pool_gpus, relieved, rounded, standing_of
from controlplane.policies.placement.prices_sweep import Sweeps
from controlplane.policies.placement.prices_tables import Bools, Floats, Tables, build_tables

LEAST_GAIN = 1e-6
LEAST_TAU = 1e-3


@dataclass(frozen=True, kw_only=True)
class PriceSettings:
    """Limits of the search; none is a time, so that the same facts end the same way.

    Attributes:
        climb_rounds: of raising the bound by the smoothed dual; `climb_rounds_large` where no linear program follows.
        exact_rounds: of raising it by the linear program over the columns, while they are at most `exact_columns_max`.
        region_cells_max: cells of one region that are solved as a whole; beyond that, those in doubt.
        parts_max: regions and models solved as a whole.
        nodes_max: of branch and bound in each part.
        moves_max: of single instances after repair, per model and region at a time.
    """

    climb_rounds: int = 8
    climb_rounds_large: int = 16
    exact_rounds: int = 8
    exact_columns_max: int = 60_000
    region_cells_max: int = 400
    parts_max: int = 200
    nodes_max: int = 1
    moves_max: int = 200


@dataclass(frozen=True, kw_only=True)
class PricedSolution:
    """A placement found by prices.

    Attributes:
        counts: instances; cells without any are left out.
        pooled: endpoints pooled, and where.
        pool_gpus: GPUs given to pools.
        objective: cost per hour, as `cost_of` says.
        bound: no placement costs less.
        gap: (objective - bound) as a share of the fleet's cost.
        iterations: rounds in which the bound was raised.
        reason: how it ended, in plain words.
    """

    counts: Mapping[EndpointGpu, int]
    pooled: frozenset[EndpointGpu]
    pool_gpus: Mapping[RegionGpu, int]
    objective: float
    bound: float
    gap: float
    iterations: int
    reason: str


def solve_by_prices(
    facts: PlacementFacts,
    settings: PlacementSettings,
    *,
    limits: PriceSettings | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> PricedSolution:
    """Place by prices.

    Args:
        facts: the fleet and the demand; their order does not matter.
        settings: epsilon, prices of falling short, and the gap that will do.
        limits: of the search.
        should_stop: asked between rounds and by HiGHS; True ends the search with what there is.

    Returns:
        A placement that fits, and its proven distance to the best.
    """
    return solve_grid(grid_of(facts, settings), settings.gap, limits or PriceSettings(), should_stop)


def solve_grid(grid: Grid, gap: float, limits: PriceSettings, should_stop: Callable[[], bool]) -> PricedSolution:
    """The same for a grid that is laid out already."""
    if not grid.cells and not grid.options:
        cost = grid_cost(grid, {}, frozenset(), {})
        return PricedSolution(
            counts={},
            pooled=frozenset(),
            pool_gpus={},
            objective=cost,
            bound=cost,
            gap=0.0,
            iterations=0,
            reason="nothing can stand anywhere",
        )
    return _Search(grid, build_tables(grid), gap, limits, should_stop).run()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Mix:
    """Columns, and how much of each a relaxation takes: 1 in all for each endpoint."""

    columns: Columns
    weights: Floats


class _Search:
    def __init__(
        self, grid: Grid, tables: Tables, gap: float, limits: PriceSettings, should_stop: Callable[[], bool]
    ) -> None:
        self._grid, self._tables, self._gap, self._limits, self._should_stop = grid, tables, gap, limits, should_stop

    def run(self) -> PricedSolution:
        tables, limits = self._tables, self._limits
        dual = first_dual(tables)
        large = len(dual.columns) > limits.exact_columns_max
        rounds = limits.climb_rounds_large if large else limits.climb_rounds
        dual, mix = self._exact(climb(tables, dual, rounds, self._should_stop))
        standing = self._rounded(dual, mix)
        best = self._solution(dual.rounds, dual.bound, standing, "rounded from the prices")
        sweeps = Sweeps(
            tables=tables,
            dual=dual,
            slack=0.9 * self._gap * fleet_cost(self._grid, best.counts, best.pool_gpus),
            nodes_max=limits.nodes_max,
            should_stop=self._should_stop,
        )
        if best.gap <= self._gap or self._should_stop():
            return best
        free = self._doubtful(mix)
        if free.all():
            standing = moved(tables, sweeps.first(mix.columns, mix.weights, standing), limits.moves_max)
        standing, bound = sweeps.improved(standing, free, parts_max=limits.parts_max, prove=bool(free.all()))
        standing = moved(tables, standing, limits.moves_max)
        found = self._solution(dual.rounds, bound, standing, "improved by region and by model")
        return min(best, found, key=lambda solution: solution.objective)

    def _doubtful(self, mix: _Mix) -> Bools:
        """Endpoints that may change in parts: all, or of each region those that the relaxation mixes most."""
        tables = self._tables
        doubt = 1.0 - np.maximum.reduceat(mix.weights, mix.columns.first)
        order = np.lexsort((-doubt, tables.region_of))
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order)) % len(tables.models)
        return np.asarray(rank * len(tables.gpu_types) < self._limits.region_cells_max)

    def _exact(self, dual: Dual) -> tuple[Dual, _Mix]:
        """The best prices over the columns, and the columns they ask for, until that raises the bound no more."""
        tau = LEAST_TAU * float(self._tables.gpu_price.max(initial=0.0) or 1.0)
        mix = _Mix(columns=dual.columns, weights=soft_choice(dual.columns, dual.prices, tau)[1])
        for _ in range(self._limits.exact_rounds):
            if len(dual.columns) > self._limits.exact_columns_max or self._should_stop():
                break
            relaxed = relax_master(self._tables, dual.rows, dual.columns)
            if relaxed is None:
                break
            mix = _Mix(columns=dual.columns, weights=relaxed.weights)
            dual = priced_out(self._tables, dual, relaxed.prices)
            if relaxed.objective - dual.bound <= max(LEAST_GAIN, self._gap / 20) * abs(dual.bound):
                break
        return dual, mix

    def _rounded(self, dual: Dual, mix: _Mix) -> Standing:
        """A column for each endpoint, made to fit."""
        choice = rounded(self._tables, dual.rows, mix.columns, mix.weights, dual.prices)
        choice = relieved(self._tables, mix.columns, choice, dual.prices)
        return moved(self._tables, standing_of(mix.columns, choice), self._limits.moves_max)

    def _solution(self, rounds: int, bound: float, standing: Standing, how: str) -> PricedSolution:
        tables = self._tables
        counts, pooled = tables.counts_by_key(standing.counts), tables.pooled_keys(standing.pooled)
        gpus = tables.pool_gpus_by_key(pool_gpus(tables, np.arange(len(tables.home)), standing.pooled))
        objective = grid_cost(self._grid, counts, pooled, gpus)
        bound = min(bound, objective)
        return PricedSolution(
            counts=counts,
            pooled=pooled,
            pool_gpus=gpus,
            objective=objective,
            bound=bound,
            gap=gap_of(objective, bound, fleet_cost(self._grid, counts, gpus)),
            iterations=rounds,
            reason=how,
        )
