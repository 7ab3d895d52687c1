"""A better placement and a better bound, part by part: each part is solved as a whole, the others as they stand.

The prices say where it pays. What a region costs above its own bound is what its GPUs are ill used by; what a model
serves beyond its demand is worth its price. The part with most to gain is solved first, until the placement is close
enough to the bound. The bound rises by solving a region at exactly those prices: the sum over regions is again a bound
(Lagrangian relaxation of the demand rows alone).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from controlplane.policies.placement.prices_columns import Columns, make_columns
from controlplane.policies.placement.prices_dual import Dual, ways_at
from controlplane.policies.placement.prices_parts import PartAnswer, PartTask, solve_part
from controlplane.policies.placement.prices_repair import Standing, pool_gpus, served_by
from controlplane.policies.placement.prices_tables import Bools, Floats, Ints, Tables

LEAST_PROMISE = 1e-3
"""Less than this share of the slack is not worth solving a part for."""
STRAY = 0.05
"""Demand that a region leaves to later ones costs so much more than its price, demand it takes on earns less."""
TRIES = 2
"""How often a part is solved in one search; it may pay again once others have changed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sweeps:
    """What all sweeps share.

    Attributes:
        tables: the problem.
        dual: prices of what endpoints share.
        slack: cost per hour by which the whole placement may miss the best.
        nodes_max: of branch and bound in each region.
        should_stop: asked between regions and by HiGHS.
    """

    tables: Tables
    dual: Dual
    slack: float
    nodes_max: int
    should_stop: Callable[[], bool]

    def first(self, columns: Columns, weights: Floats, standing: Standing) -> Standing:
        """A placement near the relaxation: regions that are far from their bound are solved at about the prices.

        What one strays from its share of the relaxation, the next ones make up for, or none does.
        """
        tables, token, every = self.tables, self._token(), np.arange(len(self.tables.home))
        gap_abs = self.slack / (2 * len(tables.regions))
        far = np.flatnonzero(self._value(standing)[0] - self._low() > gap_abs)
        served = served_by(tables, every, standing.counts, standing.pooled)
        mixed = weights * served_by(tables, columns.endpoint, columns.counts, columns.pooled)
        mean = np.bincount(columns.endpoint, weights=mixed, minlength=len(every))
        served = np.where(np.isin(tables.region_of, far), mean, served)
        less = np.minimum(token * (1 + STRAY), tables.total_price)
        more = np.minimum(token * (1 - STRAY), less)
        for j in far:
            if self.should_stop():
                break
            here = np.flatnonzero(tables.region_of == j)
            served[here] = 0.0
            wanted = tables.total - np.bincount(tables.model_of, weights=served, minlength=len(tables.total))
            task = PartTask(endpoints=here, capacity=tables.capacity, wanted=wanted, less=less, more=more)
            standing = self._replaced(standing, task, gap_abs)
            served[here] = served_by(tables, here, standing.counts[here], standing.pooled[here])
        return standing

    def improved(self, standing: Standing, free: Bools, *, parts_max: int, prove: bool) -> tuple[Standing, float]:
        """A placement that costs no more, and a bound that is no worse.

        Args:
            standing: where to begin.
            free: endpoints that may change, [E].
            parts_max: regions and models to solve at most.
            prove: raise the bounds of regions too.
        """
        tables, low, bound = self.tables, self._low(), self.dual.bound
        regions = len(tables.regions)
        parts = [np.flatnonzero(free & (tables.region_of == j)) for j in range(regions)]
        parts += [np.flatnonzero(free & (tables.model_of == i)) for i in range(len(tables.models))]
        tries, tried_at = np.array([TRIES if len(part) else 0 for part in parts]), np.full(len(parts), np.inf)
        unproven = np.full(len(parts), prove) & (np.arange(len(parts)) < regions)
        tries[:regions] = np.minimum(tries[:regions], 1)
        for _ in range(parts_max):
            value, surplus, cost = self._value(standing)
            worth_it = ((tries > 0) & (cost < tried_at)) | unproven
            promise = np.where(worth_it, np.concatenate([value - low, surplus]), 0.0)
            best = int(promise.argmax())
            if cost - bound <= self.slack or promise[best] <= LEAST_PROMISE * self.slack or self.should_stop():
                break
            gap_abs = max(self.slack / (4 * len(parts)), promise[best] / 10)
            if unproven[best]:
                raised = max(0.0, self._proven(standing, parts[best], gap_abs) - low[best])
                low[best], bound, unproven[best] = low[best] + raised, bound + raised, False
                continue
            standing = self._solved(standing, parts[best], gap_abs)
            tries[best], tried_at[best] = tries[best] - 1, self._value(standing)[2] - LEAST_PROMISE * self.slack
        return standing, bound

    def _proven(self, standing: Standing, here: Ints, gap_abs: float) -> float:
        """What a region costs at least, less what it serves at its price."""
        token, none = self._token(), np.zeros(len(self.tables.total))
        task = PartTask(endpoints=here, capacity=self.tables.capacity, wanted=none, less=token, more=token)
        return self._asked(task, standing, gap_abs).bound

    def _asked(self, task: PartTask, standing: Standing, gap_abs: float) -> PartAnswer:
        return solve_part(
            self.tables,
            task,
            start=Standing(counts=standing.counts[task.endpoints], pooled=standing.pooled[task.endpoints]),
            gap_abs=gap_abs,
            nodes_max=self.nodes_max,
            should_stop=self.should_stop,
        )

    def _token(self) -> Floats:
        return self.dual.rows.of_places(self.dual.prices)[2]

    def _low(self) -> Floats:
        """What each region costs at least, less what it serves at its price, [J]."""
        tables, rows, prices = self.tables, self.dual.rows, self.dual.prices
        gpu = rows.of_places(prices)[0].reshape(tables.capacity.shape)
        least = ways_at(tables, rows, prices).least
        return np.asarray(np.bincount(tables.region_of, weights=least) - (gpu * tables.capacity).sum(axis=1))

    def _value(self, standing: Standing) -> tuple[Floats, Floats, float]:
        """What each region costs less what it serves at its price, [J]; what models' surplus is worth, [I]; both."""
        tables, every, token = self.tables, np.arange(len(self.tables.home)), self._token()
        columns = make_columns(tables, self.dual.rows, every, standing.counts, standing.pooled)
        served = served_by(tables, every, standing.counts, standing.pooled)
        cost = np.asarray(np.bincount(tables.region_of, weights=columns.cost), float)
        if tables.pools is not None:
            at = np.flatnonzero(standing.pooled >= 0)
            share = tables.pools.occupancy[at, standing.pooled[at]] / tables.pools.fill
            rest = pool_gpus(tables, every, standing.pooled).astype(float)
            np.subtract.at(rest, (tables.region_of[at], standing.pooled[at]), share)
            cost = cost + (rest * tables.gpu_price).sum(axis=1)
        over = np.bincount(tables.model_of, weights=served) - tables.total
        value = np.asarray(cost - np.bincount(tables.region_of, weights=token[tables.model_of] * served), float)
        short = tables.total_price * np.maximum(-over, 0.0)
        return value, np.where(over < 0, short, token * over), float(cost.sum() + short.sum()) + tables.constant

    def _solved(self, standing: Standing, here: Ints, gap_abs: float) -> Standing:
        """The placement with these endpoints solved anew, the others as they stand."""
        tables = self.tables
        rest = np.setdiff1d(np.arange(len(tables.home)), here)
        taken = pool_gpus(tables, rest, standing.pooled[rest])
        np.add.at(taken, tables.region_of[rest], standing.counts[rest] * tables.gpus[tables.model_of[rest]])
        served = served_by(tables, rest, standing.counts[rest], standing.pooled[rest])
        task = PartTask(
            endpoints=here,
            capacity=np.maximum(tables.capacity - taken, 0),
            wanted=tables.total - np.bincount(tables.model_of[rest], weights=served, minlength=len(tables.total)),
            less=tables.total_price,
            more=np.zeros(len(tables.total)),
            no_worse=True,
        )
        return self._replaced(standing, task, gap_abs)

    def _replaced(self, standing: Standing, task: PartTask, gap_abs: float) -> Standing:
        answer, here = self._asked(task, standing, gap_abs), task.endpoints
        counts, pooled = standing.counts.copy(), standing.pooled.copy()
        if answer.counts is not None and answer.pooled is not None:
            counts[here], pooled[here] = answer.counts, answer.pooled
        return Standing(counts=counts, pooled=pooled)
