"""A region as a whole, by HiGHS: what it costs at least at the prices of models' demand, with whole instances.

Regions share nothing but the demand of models. The prices of a place's GPUs may mix two configurations of an endpoint,
an integer program of the region may not, so its bound is higher where a few large instances fill a place. The sum over
regions is again a bound on the fleet (Lagrangian relaxation of the demand rows alone).

    min  sum (price_s - token speed) x_s + home_price lacks + few_price few + (extra - token served) z + sum gpu_price P
    sum speed x + home Z + lacks >= home            sum x + fewest Z + few >= fewest         sum x + most Z <= most
    Z = sum z <= 1, sum g x + sum P <= capacity     sum occupancy z <= fill P, P <= most     sum weights z <= P

x_s: instances in a segment of cost, z: pooled. In a demand row an instance counts for no more than the row asks.
"""

from collections.abc import Callable

import highspy
import numpy as np
from scipy import sparse

from controlplane.policies.placement.priced.highs import make_program, run_program
from controlplane.policies.placement.priced.tables import Floats, Ints, Tables


def region_bound(
    tables: Tables, region: int, token: Floats, *, gap_abs: float, nodes_max: int, should_stop: Callable[[], bool]
) -> float:
    """What the region costs per hour at least, less what it serves at these prices.

    Args:
        tables: the problem.
        region: its number.
        token: price per token/s of each model, [I].
        gap_abs: distance per hour to the region's best that ends the search.
        nodes_max: of branch and bound.
        should_stop: asked now and then; True ends the search.
    """
    lp = _Program(tables, region, token).lp()
    solver = run_program(lp, should_stop, mip_abs_gap=gap_abs, mip_max_nodes=nodes_max)
    return float(solver.getInfo().mip_dual_bound)


class _Program:
    """Rows are added block by block; each holds columns x, z, lacks, few and P of one region."""

    def __init__(self, tables: Tables, region: int, token: Floats) -> None:
        here = np.flatnonzero(tables.region_of == region)
        model = tables.model_of[here]
        self._rows: list[sparse.csr_matrix] = []
        self._limits: list[tuple[Floats, Floats]] = []
        owner, kind, segment = np.nonzero(tables.segment_max[here])
        speed, gpus = tables.speed[model[owner], kind], tables.gpus[model[owner], kind]
        self._instance = (owner, kind)
        self._pooled = self._poolable(tables, here)
        kinds = tables.pools.gpu_type if tables.pools else np.zeros(0, np.int64)
        self._sizes = (len(owner), len(self._pooled[0]), len(here), len(here), len(kinds))
        price = tables.price[here][owner, kind, segment] - token[model[owner]] * speed
        self._cost = [price, self._pool_price(tables, here, token), tables.home_price[here], tables.fewest_price[here]]
        self._step = tables.pools.step[region] if tables.pools else np.ones(self._sizes[4], np.int64)
        self._cost.append(tables.gpu_price[kinds] * self._step)
        self._upper = [tables.segment_max[here][owner, kind, segment].astype(float), np.ones(self._sizes[1])]
        self._upper += [tables.home[here], tables.fewest[here].astype(float)]
        most = tables.pools.most[region] if tables.pools else kinds
        self._upper.append((most // self._step).astype(float))
        self._add_endpoints(tables, here, speed)
        self._add_places(tables, here, region, gpus)

    def _poolable(self, tables: Tables, here: Ints) -> tuple[Ints, Ints]:
        if tables.pools is None:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        owner, kind = np.nonzero(np.isfinite(tables.pools.occupancy[here]))
        return owner, kind

    def _pool_price(self, tables: Tables, here: Ints, token: Floats) -> Floats:
        if tables.pools is None:
            return np.zeros(0)
        at, kind = here[self._pooled[0]], self._pooled[1]
        return np.asarray(tables.pools.extra[at, kind] - token[tables.model_of[at]] * tables.pools.served[at])

    def _add_endpoints(self, tables: Tables, here: Ints, speed: Floats) -> None:
        owner, pooled, none = self._instance[0], self._pooled[0], np.zeros(0)
        home, fewest, most = tables.home[here], tables.fewest[here].astype(float), tables.most[here].astype(float)
        every, beyond = np.ones(len(here)), np.full(len(here), np.inf)
        best = tables.speed[tables.model_of[here]].max(axis=1)
        unit = np.where(best > 0, best, np.maximum(home, 1.0))  # rows of about 1, whatever the demand
        counted = np.minimum(speed, home[owner]) / unit[owner]
        each = [owner, pooled, np.arange(len(here))]
        self._add(home / unit, beyond, each, [counted, (home / unit)[pooled], 1.0 / unit, none, none])
        few = [owner, pooled, each[2][:0], each[2]]
        ones = np.ones(len(owner))
        self._add(fewest, beyond, few, [ones, fewest[pooled], none, every, none])
        self._add(-beyond, most, each[:2], [ones, most[pooled], none, none, none])
        self._add(-beyond, every, [owner[:0], pooled], [none, np.ones(len(pooled)), none, none, none])

    def _add_places(self, tables: Tables, here: Ints, region: int, gpus: Ints) -> None:
        none, no = np.zeros(0), np.zeros(0, np.int64)
        kind, pooled = self._instance[1], self._pooled[1]
        kinds = tables.pools.gpu_type if tables.pools else no
        any_, capacity = np.full(len(tables.gpu_types), -np.inf), tables.capacity[region].astype(float)
        step = self._step.astype(float)
        self._add(any_, capacity, [kind, no, no, no, kinds], [gpus.astype(float), none, none, none, step])
        if tables.pools is None:
            return
        pools, beyond, full = np.arange(len(kinds)), np.full(len(kinds), -np.inf), np.zeros(len(kinds))
        at = here[self._pooled[0]]
        share = tables.pools.occupancy[at, pooled] / tables.pools.fill
        for taken in (share, tables.pools.weights[at, pooled]):
            self._add(beyond, full, [no, pooled, no, no, pools], [none, taken, none, none, -step])

    def _add(self, low: Floats, high: Floats, rows: list[Ints], values: list[Floats]) -> None:
        """A row for each limit; for each kind of column the row of each and its value, or nothing."""
        parts = []
        for number, size in enumerate(self._sizes):
            row = rows[number] if number < len(rows) and len(rows[number]) else np.zeros(0, np.int64)
            value = values[number][: len(row)]
            parts.append(sparse.csr_matrix((value, (row, np.arange(len(row)))), shape=(len(low), size)))
        self._rows.append(sparse.hstack(parts, format="csr"))
        self._limits.append((low, high))

    def lp(self) -> highspy.HighsLp:
        """The program for HiGHS."""
        matrix = sparse.csc_matrix(sparse.vstack(self._rows))
        matrix.eliminate_zeros()
        instances, pools, home, few, types = self._sizes
        whole = np.repeat([True, False, True], [instances + pools, home + few, types])
        low, high = (np.concatenate(side) for side in zip(*self._limits, strict=True))
        return make_program(matrix, np.concatenate(self._cost), np.concatenate(self._upper), (low, high), whole)
