"""Large placement problems by prices: a good placement, and a proven bound on every other.

Capacity and a model's whole demand are all that endpoints share. Priced, the problem falls apart into one small exact
search per endpoint, whatever the size of the fleet; the prices that make those answers fit best also bound the cost
from below. Then one configuration is chosen for each endpoint so that all fit: by an integer program over the
configurations that cost least at those prices, for the whole fleet, and region by region. Where a region stays far
above its bound, its own integer program raises the bound.

    tables.py   the problem as arrays              master.py         best prices over known columns, by HiGHS
    search.py   one endpoint, exactly              repair.py         a first choice, made to fit
    relax.py    its relaxation                     neighbourhood.py  the columns nearest to the best
    columns.py  configurations, as columns         choice.py         one column for each endpoint, by HiGHS
    dual.py     prices, and what they prove        regions.py        a better bound for one region, by HiGHS
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from controlplane.policies.placement.cost import fleet_cost, gap_of, grid_cost
from controlplane.policies.placement.grid import Answer, Grid
from controlplane.policies.placement.priced.choice import Chooser, Effort
from controlplane.policies.placement.priced.columns import Columns
from controlplane.policies.placement.priced.dual import Dual, climb, first_dual, priced_out, soft_choice
from controlplane.policies.placement.priced.master import relax_master
from controlplane.policies.placement.priced.neighbourhood import Neighbourhood, neighbourhood_columns, neighbourhood_of
from controlplane.policies.placement.priced.regions import region_bound
from controlplane.policies.placement.priced.repair import Incumbent, incumbent_of, moved, pool_gpus, relieved, rounded
from controlplane.policies.placement.priced.tables import Floats, Tables, build_tables

SAFETY = 0.95
"""The share of the gap that is aimed at: the fleet that it is a share of is not known yet."""
LEAST_GAIN = 1e-6
LEAST_TAU = 1e-3
LEAST_PROMISE, NEARNESS = 0.05, 0.01
"""A region this share of the gap above its bound is worth an integer program for a better one, solved to this share of
what it is above: what is left open in each region adds up over all of them.
"""
SPARE, FEW = 0.08, 20
"""Columns are near that cost at most this share of what an endpoint costs on average above its best; less where fewer
than `FEW` of each endpoint are kept.
"""


@dataclass(frozen=True, kw_only=True)
class PriceSettings:
    """Limits of the search; none is a time, so that the same facts end the same way.

    Attributes:
        climb_rounds: of raising the bound by the smoothed dual; fewer where it rises no more.
        exact_rounds: of raising it by the linear program over the columns, while they are at most `exact_columns_max`.
        choices: columns that each choice for the whole fleet may take in addition to the incumbent's, and the share of
            the gap to which it is solved; one after the other, until the gap is reached.
        neighbourhood_max: near columns in all, about; `neighbourhood_each_most` and `neighbourhood_each_least` for each
        endpoint. region_cells_max: cells of a region whose bound may be raised by an integer program. nodes_max: of
        branch and bound in each choice; `region_nodes_max` where a region's bound is raised. moves_max: of single
        instances after a choice, per model and region at a time.
    """

    climb_rounds: int = 24
    exact_rounds: int = 8
    exact_columns_max: int = 60_000
    choices: tuple[tuple[int, float], ...] = ((2_500, 1.0), (5_000, 0.6), (10_000, 0.4))
    neighbourhood_max: int = 40_000
    neighbourhood_each_most: int = 100
    neighbourhood_each_least: int = 4
    region_cells_max: int = 400
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
        limits, tables = self._limits, self._tables
        dual = climb(tables, first_dual(tables), limits.climb_rounds, self._gap / 20, self._should_stop)
        dual, mix = self._exact(dual)
        incumbent = self._rounded(dual, mix)
        best = self._solution(dual.bound, incumbent, "rounded from the prices")
        if best.gap <= self._gap or self._should_stop():
            return best
        fleet = fleet_cost(self._grid, best)
        size = len(tables.home)
        each_max = min(
            max(limits.neighbourhood_max // size, limits.neighbourhood_each_least), limits.neighbourhood_each_most
        )
        spare = SPARE * fleet / size * min(1.0, each_max / FEW)
        neighbourhood = neighbourhood_columns(tables, dual, mix.columns, incumbent, spare=spare, each_max=each_max)
        choices = _Choices(tables, dual, neighbourhood, limits, SAFETY * self._gap * fleet, self._should_stop)
        for number, share in limits.choices:
            if best.gap <= self._gap or self._should_stop():
                break
            choices.improve(number, share)
            incumbent = moved(tables, choices.incumbent(), limits.moves_max)
            found = self._solution(choices.bound, incumbent, "chosen among configurations near the prices")
            best = min(found, self._bounded(best, choices.bound), key=lambda each: each.objective)
            choices.go_on_from(
                neighbourhood_of(tables, dual, neighbourhood.columns, incumbent, neighbourhood.least, spare=spare)
            )
        return best

    def _exact(self, dual: Dual) -> tuple[Dual, _Mix]:
        """The best prices over the columns, and the columns they ask for, until that raises the bound no more."""
        tables = self._tables
        tau = LEAST_TAU * float(tables.gpu_price.max(initial=0.0) or 1.0)
        mix = _Mix(columns=dual.columns, weights=soft_choice(dual.columns, dual.prices, tau)[1])
        for _ in range(self._limits.exact_rounds):
            if len(dual.columns) > self._limits.exact_columns_max or self._should_stop():
                break
            relaxed = relax_master(tables, dual.rows, dual.columns, self._should_stop)
            if relaxed is None:
                break
            mix = _Mix(columns=dual.columns, weights=relaxed.weights)
            dual = priced_out(tables, dual, relaxed.prices)
            if relaxed.objective - dual.bound <= max(LEAST_GAIN, self._gap / 20) * abs(dual.bound):
                break
        return dual, mix

    def _rounded(self, dual: Dual, mix: _Mix) -> Incumbent:
        """A column for each endpoint, made to fit."""
        choice = rounded(self._tables, dual.rows, mix.columns, mix.weights, dual.prices)
        choice = relieved(self._tables, mix.columns, choice, dual.prices)
        return moved(self._tables, incumbent_of(mix.columns, choice), self._limits.moves_max)

    def _solution(self, bound: float, incumbent: Incumbent, how: str) -> PricedSolution:
        tables = self._tables
        answer = Answer(
            counts=tables.counts_by_key(incumbent.counts),
            pooled=tables.pooled_keys(incumbent.pooled),
            pool_gpus=tables.pool_gpus_by_key(pool_gpus(tables, np.arange(len(tables.home)), incumbent.pooled)),
        )
        cost = grid_cost(self._grid, answer)
        found = PricedSolution(**vars(answer), objective=cost, bound=bound, gap=0.0, reason=how)
        return self._bounded(found, bound)

    def _bounded(self, found: PricedSolution, bound: float) -> PricedSolution:
        """The same placement with another bound."""
        bound = float(min(bound, found.objective))
        gap = gap_of(found.objective, bound, fleet_cost(self._grid, found))
        return replace(found, bound=bound, gap=gap)


class _Choices:
    """A choice among near columns, and a bound, while both get better. `slack`: cost per hour that may be between."""

    def __init__(
        self,
        tables: Tables,
        dual: Dual,
        neighbourhood: Neighbourhood,
        limits: PriceSettings,
        slack: float,
        should_stop: Callable[[], bool],
    ) -> None:
        self.bound = dual.bound
        self._tables, self._rows, self._limits = tables, dual.rows, limits
        self._slack, self._should_stop = slack, should_stop
        self.go_on_from(neighbourhood)
        gpu, _host, self._token = dual.rows.of_places(dual.prices)
        gpus = (gpu.reshape(tables.capacity.shape) * tables.capacity).sum(axis=1)
        self._low = np.bincount(tables.region_of, weights=neighbourhood.least) - gpus
        self._raised = np.zeros(len(tables.regions), bool)

    def go_on_from(self, neighbourhood: Neighbourhood) -> None:
        """Choose among these columns from now on, starting from their incumbent."""
        self._neighbourhood, self.choice = neighbourhood, neighbourhood.choice
        self._chooser = Chooser(tables=self._tables, rows=self._rows, columns=neighbourhood.columns)

    def incumbent(self) -> Incumbent:
        """The placement chosen."""
        return incumbent_of(self._neighbourhood.columns, self.choice)

    def improve(self, number: int, share: float) -> None:
        """For the whole fleet, with so many more columns open, to a share of the slack; then region by region; then
        the bound.
        """
        self.choice = self._chooser.better(
            self.choice, self._neighbourhood.nearest(number), self._effort(share * self._slack)
        )
        region = self._tables.region_of[self._neighbourhood.columns.endpoint]
        regions = len(self._tables.regions)
        for j in range(regions):
            if self._reached() or self._should_stop():
                return
            self.choice = self._chooser.better(self.choice, region == j, self._effort(self._slack / (5 * regions)))
        self._raise_bound()

    def _raise_bound(self) -> None:
        tables, limits = self._tables, self._limits
        excess = self._chooser.by_region(self.choice, self._token) - self._low
        cells = np.bincount(tables.region_of, weights=(tables.segment_max.sum(axis=2) > 0).sum(axis=1))
        worth_it = (excess > LEAST_PROMISE * self._slack) & (cells <= limits.region_cells_max) & ~self._raised
        for j in sorted(np.flatnonzero(worth_it).tolist(), key=lambda j: -excess[j]):
            if self._reached() or self._should_stop():
                break
            bound = region_bound(
                tables,
                j,
                self._token,
                gap_abs=NEARNESS * excess[j],
                nodes_max=limits.region_nodes_max,
                should_stop=self._should_stop,
            )
            gain = max(0.0, bound - float(self._low[j]))
            self._low[j], self.bound, self._raised[j] = self._low[j] + gain, self.bound + gain, True

    def _reached(self) -> bool:
        return self._chooser.cost(self.choice) - self.bound <= self._slack

    def _effort(self, gap_abs: float) -> Effort:
        return Effort(
            target=self.bound + self._slack,
            gap_abs=gap_abs,
            nodes_max=self._limits.nodes_max,
            should_stop=self._should_stop,
        )
