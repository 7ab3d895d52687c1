"""One way of serving for each endpoint, by HiGHS: the integer program over some of the columns, the others closed.

    one column per endpoint
    GPUs of the columns + beyond of its pools <= capacity left                                           each place
    weights pooled - their shares - beyond <= 0                                                          each pool
    shares pooled + beyond = P, GPUs of whole slots of the pool                                          each pool
    demand not served <= what is not served now                                                          each model

It starts from the choice that stands and never makes it worse. Endpoints without an open column stay as they are, and
what they take is taken off the limits: so the same program improves a fleet, a region, or the endpoints in doubt.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import highspy
import numpy as np
from scipy import sparse

from controlplane.policies.placement.highs import make_program, run_program
from controlplane.policies.placement.priced.columns import Columns, Rows
from controlplane.policies.placement.priced.repair import free_gpus, pool_gpus
from controlplane.policies.placement.priced.tables import Bools, Floats, Ints, Tables

LEAST_PART = 0.5


@dataclass(frozen=True, kw_only=True)
class Effort:
    """When to stop: at an objective, at a distance in cost per hour from the best of these columns, or after nodes."""

    target: float
    gap_abs: float
    nodes_max: int
    should_stop: Callable[[], bool]


@dataclass(frozen=True, kw_only=True, eq=False)
class Chooser:
    """The problem, and the columns to choose among. `shares`: GPUs that each column takes of each pool, [M, JP]."""

    tables: Tables
    rows: Rows
    columns: Columns
    shares: sparse.csr_matrix = field(init=False)

    def __post_init__(self) -> None:
        """Add up what pools give."""
        tables, columns = self.tables, self.columns
        at = np.flatnonzero(columns.pooled >= 0)
        endpoint, kind = columns.endpoint[at], columns.pooled[at]
        pool = tables.region_of[endpoint] * len(tables.pools.gpu_type) + kind
        taken, shape = tables.pools.share[endpoint, kind], (len(columns), self.rows.pools)
        object.__setattr__(self, "shares", sparse.csr_matrix((taken, (at, pool)), shape=shape))

    def cost(self, choice: Ints) -> float:
        """Cost per hour of a choice of one column per endpoint, [E], as if there were donated GPUs enough."""
        tables, rows = self.tables, self.rows
        use = np.asarray(self.columns.use[choice].sum(axis=0)).ravel()
        short = np.maximum(use[rows.models :] - rows.limit[rows.models :], 0.0) * rows.scale
        cost = self.columns.cost[choice].sum() + (short * tables.total_price).sum() + self._beyond(choice).sum()
        return float(cost + tables.constant)

    def _beyond(self, choice: Ints) -> Floats:
        """Price of the GPUs that pools have beyond the shares taken of them, [JP]."""
        whole, taken = pool_gpus(self.tables, self.columns.at(choice)).ravel(), self.shares[choice].sum(axis=0)
        return np.asarray(whole - taken).ravel() * self.rows.gpu_price[self.rows.places :]

    def better(self, choice: Ints, open_: Bools, effort: Effort) -> Ints:
        """A choice that fits and costs no more, from the columns that are open [M] and those chosen now."""
        current = np.zeros(len(self.columns), bool)
        current[choice] = True
        free = np.zeros(len(choice), bool)
        free[self.columns.endpoint[open_ & ~current]] = True
        at = np.flatnonzero((open_ | current) & free[self.columns.endpoint])
        if not len(at):
            return choice
        program = _Program(self, choice, free, at)
        picked = program.solved(current[at], effort, self.cost(choice))
        if picked is None:
            return choice
        changed = choice.copy()
        changed[free] = picked
        better = self._fits(changed) and self.cost(changed) <= self.cost(choice)
        return changed if better else choice

    def _fits(self, choice: Ints) -> bool:
        tables, placement = self.tables, self.columns.at(choice)
        within = (pool_gpus(tables, placement) <= tables.pools.most).all()
        return bool(within and (free_gpus(tables, placement) >= 0).all())


class _Program:
    """Variables: columns, demand not served by model, GPUs beyond the shares of each pool and its slots."""

    def __init__(self, chooser: Chooser, choice: Ints, free: Bools, at: Ints) -> None:
        tables, rows, columns = chooser.tables, chooser.rows, chooser.columns
        self._columns, self._at = columns, at
        fixed = choice[~free]
        left = rows.limit - np.asarray(columns.use[fixed].sum(axis=0)).ravel()
        taken = sparse.csr_matrix(columns.use[at].T)
        touched = np.flatnonzero(np.diff(taken.indptr))
        places = touched[touched < rows.places]
        pools, of_place = _pools_at(tables, places)
        models = touched[touched >= rows.models]
        shares = chooser.shares[:, pools]
        self._share = sparse.csr_matrix(shares[at].T)
        self._share_fixed = np.asarray(shares[fixed].sum(axis=0)).ravel()
        self._at_place = sparse.csr_matrix(
            (np.ones(len(pools)), (np.searchsorted(places, of_place), np.arange(len(pools)))),
            shape=(len(places), len(pools)),
        )
        self._blocks = [taken[places], taken[rows.places + pools], taken[models]]
        self._left = [left[places], left[rows.places + pools], left[models]]
        self._model_price = (tables.total_price * rows.scale)[models - rows.models]
        self._pool_price = tables.gpu_price[of_place % len(tables.gpu_types)]
        self._pool_now = pool_gpus(tables, columns.at(choice)).ravel()[pools].astype(float)
        self._step = tables.pools.step.ravel()[pools].astype(float)
        self._slots_most = tables.pools.most.ravel()[pools] // self._step

    def solved(self, current: Bools, effort: Effort, cost_now: float) -> Ints | None:
        """The columns chosen, one for each free endpoint in order; None if HiGHS has none. `cost_now`: of the whole
        incumbent, of which the program has a part.
        """
        start = self._start(current)
        solver = self._built(start)
        target = effort.target - cost_now + float(np.array(solver.getLp().col_cost_) @ start)
        options = {"mip_abs_gap": effort.gap_abs, "mip_max_nodes": effort.nodes_max, "objective_target": target}
        run_program(solver, effort.should_stop, start=start, **options)
        if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        picked = self._at[np.array(solver.getSolution().col_value)[: len(self._at)] > LEAST_PART]
        free = np.unique(self._columns.endpoint[self._at])
        return picked if np.array_equal(self._columns.endpoint[picked], free) else None

    def _start(self, current: Bools) -> Floats:
        chosen = current.astype(float)
        short = np.maximum(self._blocks[2] @ chosen - self._left[2], 0.0)
        beyond = self._pool_now - self._share_fixed - self._share @ chosen
        return np.concatenate([chosen, short, np.maximum(beyond, 0.0), self._pool_now / self._step])

    def _built(self, start: Floats) -> highspy.Highs:
        columns, at = self._columns, self._at
        endpoints, which = np.unique(columns.endpoint[at], return_inverse=True)
        size, shorts, pools = len(at), len(self._left[2]), len(self._pool_now)
        one = sparse.csr_matrix((np.ones(size), (which, np.arange(size))), shape=(len(endpoints), size))
        of_pool = sparse.identity(pools)
        blocks = [
            [one, None, None, None],
            [self._blocks[0], None, self._at_place, None],
            [self._blocks[1], None, -of_pool, None],
            [self._share, None, of_pool, -sparse.diags(self._step, shape=(pools, pools))],
            [self._blocks[2], -sparse.identity(shorts), None, None],
        ]
        ones, of_slots = np.ones(len(endpoints)), -self._share_fixed
        upper = np.concatenate([ones, self._left[0], self._left[1], of_slots, self._left[2]])
        below = np.full(len(self._left[0]) + pools, -np.inf)
        lower = np.concatenate([ones, below, of_slots, np.full(shorts, -np.inf)])
        return make_program(
            sparse.bmat(blocks),
            cost=np.concatenate([columns.cost[at], self._model_price, self._pool_price, np.zeros(pools)]),
            upper=np.concatenate(
                [np.ones(size), start[size : size + shorts], np.full(pools, np.inf), self._slots_most]
            ),
            rows=(lower, upper),
            whole=np.repeat([True, False, True], [size, shorts + pools, pools]),
        )


def _pools_at(tables: Tables, places: Ints) -> tuple[Ints, Ints]:
    """The pools of these places, numbered region by region, and the place of each."""
    regions, kinds = len(tables.regions), tables.pools.gpu_type
    place = (np.arange(regions)[:, None] * len(tables.gpu_types) + kinds).ravel()
    pools = np.flatnonzero(np.isin(place, places))
    return pools, place[pools]
