"""A part of the fleet as a whole, by HiGHS: a region with all its models, or a model with all its regions.

Regions share nothing but the demand of models. Given what a token/s of each model is worth, a region's best answer is
an integer program small enough to solve exactly. It proves more than prices of its GPUs do: those may mix two ways of
serving an endpoint, an integer program may not. Given what the rest of the fleet serves, the same program improves a
placement.

    x instances = segments of cost            sum_k x <= most (1 - pooled), sum_k pooled <= 1
    sum_k speed x + home pooled + lacks >= home                   sum_k x + fewest pooled + few >= fewest
    sum g x + P <= capacity,  sum occupancy pooled <= fill P,  sum weights pooled <= P
    sum_k speed x + served pooled + less - more = wanted          (less costs, more is worth something)

In a demand row an instance counts for no more than the row asks, where more is worth nothing: whole answers stay the
same, and the relaxation cannot serve a small model with a sliver of an instance.
"""

from collections.abc import Callable
from dataclasses import dataclass

import highspy
import numpy as np
from scipy import sparse

from controlplane.policies.placement.prices_repair import Standing, pool_gpus
from controlplane.policies.placement.prices_tables import SEGMENTS, Bools, Floats, Ints, Tables

SEED = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class PartTask:
    """What to ask of some endpoints.

    Attributes:
        endpoints: the rows of the tables that are free, [N].
        capacity: GPUs left for them, [J, K].
        wanted: tokens/s to serve of each model, [I].
        less: price per token/s below that, [I]. `more`: what one above it is worth, [I], at most `less`.
        no_worse: nothing may fall shorter than it does in the answer to begin with; prices of falling short are so
            high that they slow HiGHS down.
    """

    endpoints: Ints
    capacity: Ints
    wanted: Floats
    less: Floats
    more: Floats
    no_worse: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class PartAnswer:
    """Counts [N, K] and pooled [N]; None where HiGHS found none. `bound`: no answer of the task costs less."""

    counts: Ints | None
    pooled: Ints | None
    bound: float


def solve_part(
    tables: Tables,
    task: PartTask,
    *,
    start: Standing,
    gap_abs: float,
    nodes_max: int,
    should_stop: Callable[[], bool],
) -> PartAnswer:
    """The best answer of a part.

    Args:
        tables: the problem.
        task: what is asked.
        start: an answer for these endpoints to begin with.
        gap_abs: proven distance to the best, per hour, that will do.
        nodes_max: of branch and bound.
        should_stop: asked now and then; True ends the search.
    """
    program = _Program(tables, task)
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    options = {"output_flag": False, "threads": 1, "random_seed": SEED, "mip_rel_gap": 0.0, "mip_abs_gap": gap_abs}
    for name, value in {**options, "mip_max_nodes": nodes_max}.items():
        solver.setOptionValue(name, value)
    solver.passModel(program.lp(start))
    first = highspy.HighsSolution()
    first.col_value = program.values_of(start).tolist()
    solver.setSolution(first)
    solver.cbMipInterrupt.subscribe(lambda event: event.interrupt() if should_stop() else None)
    solver.run()
    info = solver.getInfo()
    bound = float(info.mip_dual_bound)
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return PartAnswer(counts=None, pooled=None, bound=bound)
    return program.answer_of(np.array(solver.getSolution().col_value), bound)


class _Program:
    """Variables in blocks: by endpoint and GPU type, by endpoint, by model, by place. Rows are added block by block."""

    def __init__(self, tables: Tables, task: PartTask) -> None:
        at = task.endpoints
        self._tables, self._task = tables, task
        self._models, self._model = np.unique(tables.model_of[at], return_inverse=True)
        self._regions, self._region = np.unique(tables.region_of[at], return_inverse=True)
        self._speed, self._gpus = tables.speed[tables.model_of[at]], tables.gpus[tables.model_of[at]]
        self._unit = np.maximum(tables.speed[self._models].max(axis=1), 1e-9)
        self._room = tables.room[at]
        self._shape = (len(at), tables.capacity.shape[1])
        cells, models, places = self._speed.size, len(self._models), len(self._regions) * self._shape[1]
        lengths = {"x": cells, **{f"s{segment}": cells for segment in range(SEGMENTS)}, "pooled": cells}
        lengths |= {"lacks": len(at), "few": len(at), "less": models, "more": models, "pool": places}
        self._first = dict(zip(lengths, np.cumsum([0, *lengths.values()])[:-1].tolist(), strict=True))
        self._columns = sum(lengths.values())
        self._parts: list[tuple[Floats, Ints, Ints]] = []
        self._low: list[Floats] = []
        self._high: list[Floats] = []
        self._rows = 0
        self._add_cells()
        self._add_endpoints()
        self._add_models()
        self._add_places()

    def _add_cells(self) -> None:
        cell, none = np.arange(self._speed.size), np.zeros(self._speed.size)
        segments = ((f"s{segment}", cell, cell, -1.0) for segment in range(SEGMENTS))
        self._add(none, none, ("x", cell, cell, 1.0), *segments)

    def _add_endpoints(self) -> None:
        tables, at = self._tables, self._task.endpoints
        cell, each = np.arange(self._speed.size), np.arange(len(at))
        row, unit = cell // self._shape[1], self._unit[self._model]
        home, fewest, most = tables.home[at] / unit, tables.fewest[at].astype(float), tables.most[at].astype(float)
        speed, any_ = np.minimum(self._speed / unit[:, None], home[:, None]).ravel(), np.full(len(at), np.inf)
        self._add(home, any_, ("x", row, cell, speed), ("pooled", row, cell, home[row]), ("lacks", each, each, 1.0))
        self._add(fewest, any_, ("x", row, cell, 1.0), ("pooled", row, cell, fewest[row]), ("few", each, each, 1.0))
        self._add(-any_, most, ("x", row, cell, 1.0), ("pooled", row, cell, most[row]))
        if tables.pools is not None:
            self._add(-any_, np.ones(len(at)), ("pooled", row, cell, 1.0))

    def _add_models(self) -> None:
        cell, each = np.arange(self._speed.size), np.arange(len(self._models))
        row = cell // self._shape[1]
        unit, wanted = self._unit[self._model], self._task.wanted[self._models] / self._unit
        pools = self._tables.pools
        served = np.zeros(len(unit)) if pools is None else pools.served[self._task.endpoints] / unit
        speed = self._speed / unit[:, None]
        if self._task.no_worse:
            speed = np.minimum(speed, np.maximum(wanted, 0.0)[self._model][:, None])
        self._add(
            wanted,
            wanted,
            ("x", self._model[row], cell, speed.ravel()),
            ("pooled", self._model[row], cell, served[row]),
            ("less", each, each, 1.0),
            ("more", each, each, -1.0),
        )

    def _add_places(self) -> None:
        types, pools, at = self._shape[1], self._tables.pools, self._task.endpoints
        cell = np.arange(self._speed.size)
        place = np.asarray(self._region[cell // types] * types + cell % types, np.int64)
        every = np.arange(len(self._regions) * types)
        low, capacity = np.full(len(every), -np.inf), self._task.capacity[self._regions].ravel().astype(float)
        self._add(low, capacity, ("x", place, cell, self._gpus.ravel().astype(float)), ("pool", every, every, 1.0))
        if pools is not None:
            share = np.where(np.isfinite(pools.occupancy[at]), pools.occupancy[at], 0.0).ravel() / pools.fill
            for taken in (share, pools.weights[at].ravel()):
                self._add(low, 0.0 * capacity, ("pooled", place, cell, taken), ("pool", every, every, -1.0))

    def _add(self, low: Floats, high: Floats, *terms: tuple[str, Ints, Ints, Floats | float]) -> None:
        for name, row, column, value in terms:
            values = np.broadcast_to(np.asarray(value, float), row.shape)
            self._parts.append((values, row + self._rows, column + self._first[name]))
        self._low.append(low)
        self._high.append(high)
        self._rows += len(low)

    def lp(self, start: Standing) -> highspy.HighsLp:
        """The program; `start` limits what may lack, where that is asked for."""
        values, row, column = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        matrix = sparse.csc_matrix((values, (row, column)), shape=(self._rows, self._columns))
        matrix.eliminate_zeros()
        lp = highspy.HighsLp()
        lp.num_row_, lp.num_col_ = matrix.shape
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = self._cost(), np.zeros(self._columns), self._upper(start)
        lp.row_lower_, lp.row_upper_ = np.concatenate(self._low), np.concatenate(self._high)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = matrix.indptr, matrix.indices, matrix.data
        whole = self._blocks(x=1.0, pooled=1.0, pool=1.0) > 0
        kind = highspy.HighsVarType
        lp.integrality_ = [kind.kInteger if each else kind.kContinuous for each in whole.tolist()]
        return lp

    def _blocks(self, **values: Floats | Ints | Bools | float) -> Floats:
        """A vector over all variables, 0 where nothing is said."""
        vector = np.zeros(self._columns)
        ends = [*list(self._first.values())[1:], self._columns]
        for (name, first), end in zip(self._first.items(), ends, strict=True):
            vector[first:end] = np.ravel(values.get(name, 0.0))
        return vector

    def _cost(self) -> Floats:
        tables, task, at = self._tables, self._task, self._task.endpoints
        return self._blocks(
            **{f"s{segment}": tables.price[at, :, segment] for segment in range(SEGMENTS)},
            pooled=0.0 if tables.pools is None else tables.pools.extra[at],
            lacks=tables.home_price[at] * self._unit[self._model],
            few=tables.fewest_price[at],
            less=task.less[self._models] * self._unit,
            more=-task.more[self._models] * self._unit,
            pool=np.tile(tables.gpu_price, len(self._regions)),
        )

    def _upper(self, start: Standing) -> Floats:
        pools, at = self._tables.pools, self._task.endpoints
        lacks = self._lacks(start) if self._task.no_worse else dict.fromkeys(("lacks", "few", "less"), np.inf)
        return self._blocks(
            **{f"s{segment}": self._room[..., segment] for segment in range(SEGMENTS)},
            x=self._room.sum(axis=2),
            pooled=0.0 if pools is None else np.isfinite(pools.occupancy[at]),
            **lacks,
            more=np.inf,
            pool=0.0 if pools is None else self._task.capacity[self._regions],
        )

    def values_of(self, start: Standing) -> Floats:
        """All variables of an answer."""
        tables, at, counts, left = self._tables, self._task.endpoints, start.counts, start.counts
        segments = {}
        for segment in range(SEGMENTS):
            segments[f"s{segment}"] = np.minimum(left, self._room[..., segment])
            left = left - segments[f"s{segment}"]
        pooled = np.zeros(counts.shape)
        some = np.flatnonzero(start.pooled >= 0)
        pooled[some, start.pooled[some]] = 1.0
        over = self._served(start) - self._task.wanted[self._models]
        return self._blocks(
            **segments,
            **self._lacks(start),
            x=counts,
            pooled=pooled,
            pool=pool_gpus(tables, at, start.pooled)[self._regions],
            more=np.maximum(over, 0.0) / self._unit,
        )

    def _served(self, start: Standing) -> Floats:
        """Tokens/s by model."""
        served, pools = (start.counts * self._speed).sum(axis=1), self._tables.pools
        counted = served if pools is None else np.where(start.pooled < 0, served, pools.served[self._task.endpoints])
        return np.asarray(np.bincount(self._model, weights=counted), float)

    def _lacks(self, start: Standing) -> dict[str, Floats]:
        """What an answer falls short of: at home, of the fewest instances, of a model's demand."""
        tables, at, alone = self._tables, self._task.endpoints, start.pooled < 0
        served = (start.counts * self._speed).sum(axis=1)
        return {
            "lacks": alone * np.maximum(tables.home[at] - served, 0.0) / self._unit[self._model],
            "few": alone * np.maximum(tables.fewest[at] - start.counts.sum(axis=1), 0.0),
            "less": np.maximum(self._task.wanted[self._models] - self._served(start), 0.0) / self._unit,
        }

    def answer_of(self, values: Floats, bound: float) -> PartAnswer:
        """Counts and pools of a solution of HiGHS."""
        counts = np.rint(values[: self._speed.size]).astype(np.int64).reshape(self._shape)
        pooled = values[self._first["pooled"] :][: self._speed.size].reshape(self._shape) > 0.5
        return PartAnswer(counts=counts, pooled=np.where(pooled.any(axis=1), pooled.argmax(axis=1), -1), bound=bound)
