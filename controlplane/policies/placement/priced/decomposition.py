"""Large placement problems by prices: a good placement, and a proven bound on every other.

Capacity and a model's whole demand are all that endpoints share. Priced, the problem falls apart into one small exact
search per endpoint, whatever the size of the fleet; the prices that make those answers fit best also bound the cost
from below. Whole regions and whole models, which mix no two configurations of an endpoint, raise that bound. Then one
configuration is chosen for each endpoint so that all fit: by an integer program over the configurations that cost least
at those prices, for the whole fleet, region by region, and model by model.

    tables.py   the problem as arrays              neighbourhood.py  the columns nearest to the best
    search.py   one endpoint, exactly              regions.py        a better bound for one region, by HiGHS
    relax.py    its relaxation                     models.py         a better bound for each model
    columns.py  configurations, as columns         ascent.py         prices at which models prove more
    dual.py     prices, and what they prove        repair.py         a first choice, made to fit
                                                   choice.py         one column for each endpoint, by HiGHS
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from controlplane.policies.placement.cost import fleet_cost, gap_of, grid_cost
from controlplane.policies.placement.grid import Answer, Grid
from controlplane.policies.placement.priced.ascent import ascend
from controlplane.policies.placement.priced.choice import Chooser, Effort
from controlplane.policies.placement.priced.columns import Configurations, Rows
from controlplane.policies.placement.priced.dual import Dual, climb, configurations_at, soft_choice
from controlplane.policies.placement.priced.models import whole_models
from controlplane.policies.placement.priced.neighbourhood import (
    Neighbourhood,
    neighbourhood_columns,
    neighbourhood_of,
)
from controlplane.policies.placement.priced.regions import region_bound
from controlplane.policies.placement.priced.repair import moved, pool_gpus, relieved, rounded
from controlplane.policies.placement.priced.tables import Ints, Tables, build_tables

SAFETY = 0.98
"""The share of the gap that is aimed at: the fleet that it is a share of is not known before it is chosen."""
TAU = 1e-3
"""Width of the soft minimum that the first choice is rounded from, in dearest prices of a GPU per hour."""
NEARNESS = 1e-3
"""Share of the gap to which a region's integer program is solved: what is left open adds up over the regions."""
MODELS_SHARE, LEAST_GAIN = 2e-5, 1e-9
"""A region that is above its bound by this share of the fleet's cost leaves half of its excess to the models."""
SPARE, FEW = 0.08, 20
"""Columns are near that cost at most this share of what an endpoint costs on average above its best; less where fewer
than `FEW` of each endpoint are kept.
"""


@dataclass(frozen=True, kw_only=True)
class PriceSettings:
    """Limits of the search; none is a time, so that the same facts end the same way.

    Attributes:
        climb_rounds: of raising the bound by better prices; fewer where it rises no more. `ascent_rounds`: of prices at
            which whole models prove more, where the first choice does not do.
        choices: columns that each choice for the whole fleet may take in addition to the incumbent's, and the share of
            the gap to which it is solved; one after the other, until the gap is reached.
        neighbourhood_max: near columns in all, about; `neighbourhood_each_most` and `neighbourhood_each_least` for each
            endpoint.
        part_cells_max: cells of a region or a model whose bound may be raised.
        nodes_max: of branch and bound in each choice; `region_nodes_max` where a region's bound is raised.
        moves_max: of single instances after a choice, per model and region at a time.
    """

    climb_rounds: int = 24
    ascent_rounds: int = 6
    choices: tuple[tuple[int, float], ...] = ((2_500, 1.0), (4_000, 0.6), (8_000, 0.4), (16_000, 0.4))
    neighbourhood_max: int = 40_000
    neighbourhood_each_most: int = 100
    neighbourhood_each_least: int = 4
    part_cells_max: int = 400
    nodes_max: int = 20
    region_nodes_max: int = 200
    moves_max: int = 50


@dataclass(frozen=True, kw_only=True)
class PricedSolution(Answer):
    """A placement found by prices.

    Attributes:
        objective: cost per hour, by `grid_cost`.
        bound: no placement costs less.
        gap: (objective - bound) as a share of the fleet's cost.
        reason: how it ended, in plain words.
    """

    objective: float
    bound: float
    gap: float
    reason: str


def solve_grid(
    grid: Grid, gap: float, limits: PriceSettings | None = None, should_stop: Callable[[], bool] = lambda: False
) -> PricedSolution:
    """Place by prices: a placement that fits, and its proven distance to the best.

    Args:
        grid: the problem.
        gap: proven distance to the optimum that will do, as a share of the fleet's cost.
        limits: of the search.
        should_stop: asked between rounds and by HiGHS; True ends the search with what there is.
    """
    if not grid.cells and not grid.options:
        cost, reason = grid_cost(grid, Answer(counts={})), "nothing can stand anywhere"
        return PricedSolution(counts={}, objective=cost, bound=cost, gap=0.0, reason=reason)
    return _Search(grid, build_tables(grid), gap, limits or PriceSettings(), should_stop).run()


class _Search:
    def __init__(
        self, grid: Grid, tables: Tables, gap: float, limits: PriceSettings, should_stop: Callable[[], bool]
    ) -> None:
        self._grid, self._tables, self._gap, self._limits, self._should_stop = grid, tables, gap, limits, should_stop

    def run(self) -> PricedSolution:
        limits, tables = self._limits, self._tables
        dual = climb(tables, limits.climb_rounds, self._gap / 20, self._should_stop)
        incumbent = self._rounded(dual)
        best = self._solution(dual.bound, incumbent, "rounded from the prices")
        if self._ends_with(best):
            return best
        fleet, size = fleet_cost(self._grid, best), len(tables.home)
        each_max = min(
            max(limits.neighbourhood_max // size, limits.neighbourhood_each_least), limits.neighbourhood_each_most
        )
        spare = SPARE * fleet / size * min(1.0, each_max / FEW)
        near_at = partial(neighbourhood_columns, tables, incumbent=incumbent, spare=spare, each_max=each_max)
        near = near_at(dual)
        bound = dual.bound + self._gain(dual, near, fleet)
        best = self._bounded(best, bound)
        for turn, (number, share) in enumerate(limits.choices):
            if turn == 1 and not self._ends_with(best) and self._small_models():
                bound = max(bound, ascend(tables, dual, near_at, limits.ascent_rounds, self._should_stop))
                best = self._bounded(best, bound)
            if self._ends_with(best):
                break
            slack = SAFETY * self._gap * fleet_cost(self._grid, best)
            effort = Effort(
                target=bound + slack,
                gap_abs=share * slack,
                nodes_max=limits.nodes_max,
                should_stop=self._should_stop,
            )
            incumbent = moved(tables, self._chosen(dual.rows, near, number, effort), limits.moves_max)
            found = self._solution(bound, incumbent, "chosen among configurations near the prices")
            best = min(best, found, key=lambda each: each.objective)
            near = neighbourhood_of(tables, dual, incumbent, near.complete, spare, near.columns)
        return best

    def _ends_with(self, best: PricedSolution) -> bool:
        return best.gap <= self._gap or self._should_stop()

    def _rounded(self, dual: Dual) -> Configurations:
        """A column for each endpoint, made to fit."""
        tables, columns = self._tables, dual.columns
        weights = soft_choice(columns, dual.prices, TAU * float(tables.gpu_price.max(initial=0.0) or 1.0))[1]
        choice = relieved(tables, columns, rounded(tables, dual.rows, columns, weights, dual.prices), dual.prices)
        return moved(tables, columns.at(choice), self._limits.moves_max)

    def _gain(self, dual: Dual, near: Neighbourhood, fleet: float) -> float:
        """What whole regions and whole models raise the bound by. What endpoints cost above their least is divided
        between both: a region's gain falls no faster than its share.
        """
        tables, limits = self._tables, self._limits
        gpu, _host, token = dual.rows.of_places(dual.prices)
        gpu = gpu.reshape(tables.capacity.shape)
        here = self._cells()
        least = configurations_at(tables, dual.rows, dual.prices).least
        low = np.bincount(tables.region_of, weights=least) - (gpu * tables.capacity).sum(axis=1)
        small = (np.bincount(tables.region_of, weights=here) <= limits.part_cells_max) & (gpu > 0).any(axis=1)
        regions = np.zeros(len(low))
        for j in np.flatnonzero(small).tolist():
            if self._should_stop():
                break
            nodes, nearness = limits.region_nodes_max, NEARNESS * self._gap * fleet
            bound = region_bound(self._grid, j, token, gap_abs=nearness, nodes_max=nodes, should_stop=self._should_stop)
            regions[j] = max(0.0, bound - low[j])
        share = regions / np.maximum(regions + MODELS_SHARE * fleet, LEAST_GAIN)
        if not self._small_models():
            return float(regions.sum())
        models = whole_models(tables, near, token, (regions, share))[0]
        return float(max(regions.sum(), share @ regions + models.sum()))

    def _cells(self) -> Ints:
        """GPU types that each endpoint may have instances of, [E]."""
        return np.asarray((self._tables.segment_max.sum(axis=2) > 0).sum(axis=1))

    def _small_models(self) -> bool:
        return bool(np.bincount(self._tables.model_of, weights=self._cells()).max() <= self._limits.part_cells_max)

    def _chosen(self, rows: Rows, near: Neighbourhood, number: int, effort: Effort) -> Configurations:
        """Choose for the whole fleet, with so many more columns open; then for one region after the other, with all its
        columns open; then for one model after the other, where no more is missing than the first choice may leave.
        """
        chooser, endpoint = Chooser(tables=self._tables, rows=rows, columns=near.columns), near.columns.endpoint
        choice = chooser.better(near.choice, near.nearest(number), effort)
        for part, missing_most in ((self._tables.region_of, np.inf), (self._tables.model_of, effort.gap_abs)):
            parts = 1 + int(part.max())
            for at in range(parts):
                if not 0 < chooser.cost(choice) - effort.target <= missing_most or self._should_stop():
                    break
                within = replace(effort, gap_abs=effort.gap_abs / parts)
                choice = chooser.better(choice, part[endpoint] == at, within)
        return near.columns.at(choice)

    def _solution(self, bound: float, incumbent: Configurations, how: str) -> PricedSolution:
        tables = self._tables
        answer = tables.answer(incumbent.counts, incumbent.pooled, pool_gpus(tables, incumbent))
        cost = grid_cost(self._grid, answer)
        found = PricedSolution(**vars(answer), objective=cost, bound=bound, gap=0.0, reason=how)
        return self._bounded(found, bound)

    def _bounded(self, found: PricedSolution, bound: float) -> PricedSolution:
        """The same placement with another bound."""
        bound = float(min(bound, found.objective))
        gap = gap_of(found.objective, bound, fleet_cost(self._grid, found))
        return replace(found, bound=bound, gap=gap)
