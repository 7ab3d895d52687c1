"""The linear program over columns, by HiGHS: the best prices of the shared rows, as far as the columns known go.

one column per endpoint; use of the shared rows <= limit
a model's demand that nobody serves is bought at its price; pools may have GPUs beyond the shares taken of them
"""

from collections.abc import Callable
from dataclasses import dataclass

import highspy
import numpy as np
from scipy import sparse

from controlplane.policies.placement.priced.columns import Columns, Rows
from controlplane.policies.placement.priced.highs import make_program, run_program
from controlplane.policies.placement.priced.tables import Floats, Ints, Tables


@dataclass(frozen=True, kw_only=True, eq=False)
class Relaxation:
    """Answer of the linear program. `weights` of the columns, [M]; `prices` of the shared rows."""

    objective: float
    weights: Floats
    prices: Floats


def relax_master(
    tables: Tables, rows: Rows, columns: Columns, should_stop: Callable[[], bool] = lambda: False
) -> Relaxation | None:
    """The linear program over these columns; None if HiGHS has no answer, or was stopped before it had."""
    size = len(tables.home)
    solver = run_program(_program(tables, rows, columns), should_stop, random_seed=0)
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    answer = solver.getSolution()
    prices = np.clip(-np.array(answer.row_dual)[size : size + len(rows.limit)], 0.0, rows.price_most)
    weights = np.maximum(np.array(answer.col_value)[: len(columns)], 0.0)
    objective = float(solver.getInfo().objective_function_value) + tables.constant
    return Relaxation(objective=objective, weights=weights, prices=prices)


def _program(tables: Tables, rows: Rows, columns: Columns) -> highspy.HighsLp:
    size, shared = len(tables.home), len(rows.limit)
    pools = rows.places if tables.pools else 0
    chosen = (np.ones(len(columns)), (columns.endpoint, np.arange(len(columns))))
    one = sparse.csr_matrix(chosen, shape=(size, len(columns)))
    beyond = _unit(shared, np.arange(pools), 1.0) + _unit(shared, rows.places + np.arange(pools), -1.0)
    short = _unit(shared, 2 * rows.places + np.arange(len(tables.total)), -1.0)
    matrix = sparse.bmat([[one, None, None], [columns.use, short, beyond]])
    gpu_price = np.tile(tables.gpu_price, len(tables.regions))[:pools]
    ones = np.ones(size)
    return make_program(
        matrix,
        cost=np.concatenate([columns.cost, tables.total_price * rows.scale, gpu_price]),
        upper=np.full(matrix.shape[1], np.inf),
        rows=(np.concatenate([ones, np.full(shared, -np.inf)]), np.concatenate([ones, rows.limit])),
    )


def _unit(height: int, at: Ints, value: float) -> sparse.csr_matrix:
    return sparse.csr_matrix((np.full(len(at), value), (at, np.arange(len(at)))), shape=(height, len(at)))
