"""Prices of GPUs at which whole models prove most (cutting planes in a box).

The prices that prove most while the configurations of an endpoint may be mixed (`dual.py`) are not those that prove
most once each model is solved as a whole (`models.py`). The bound by whole models

    sum over models of min over placements p of the model (cost_p + price use_p) - price limit

is concave in the prices, and a placement that is the least at some prices bounds the model's term at all others. The
linear program over the placements seen finds the next prices, in a box around the best; the box shrinks where its
promise was not kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy import optimize, sparse

from controlplane.policies.placement.priced.columns import served_by
from controlplane.policies.placement.priced.dual import Dual, priced_out
from controlplane.policies.placement.priced.models import whole_models
from controlplane.policies.placement.priced.neighbourhood import Neighbourhood
from controlplane.policies.placement.priced.tables import Floats, Ints, Tables

WIDTH, GROWTH = 0.01, 1.5
"""The box at first, in the price of a GPU; it grows where the bound rose, else it halves."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tried:
    """Prices, the bound that whole models prove at them, and a placement of least cost of N models: their numbers and
    cost per hour, [N], and what it takes of GPUs and host memory, [N, R].
    """

    dual: Dual
    bound: float
    model: Ints
    cost: Floats
    use: Floats


def ascend(
    tables: Tables, dual: Dual, near_at: Callable[[Dual], Neighbourhood], rounds: int, should_stop: Callable[[], bool]
) -> float:
    """The most that whole models prove, at any of the prices tried: no placement costs less per hour.

    Args:
        tables: the problem.
        dual: where to begin.
        near_at: the columns near the best at the prices of a dual.
        rounds: prices tried.
        should_stop: asked before each.
    """
    best = _tried(tables, dual, near_at)
    seen, width = [best], WIDTH
    for _round in range(rounds):
        if should_stop():
            break
        prices = _promising(tables, seen, best.dual, width)
        seen.append(_tried(tables, priced_out(tables, replace(dual, bound=-np.inf), prices), near_at))
        best, width = (seen[-1], width * GROWTH) if seen[-1].bound > best.bound else (best, width / 2)
    return best.bound


def _tried(tables: Tables, dual: Dual, near_at: Callable[[Dual], Neighbourhood]) -> _Tried:
    near, none, rows = near_at(dual), np.zeros(len(tables.regions)), dual.rows.models
    gains, chosen = whole_models(tables, near, dual.rows.of_places(dual.prices)[2], (none, none))
    columns, solved = near.columns, [each for each in chosen if len(each)]
    served = served_by(tables, columns)
    model = np.array([tables.model_of[columns.endpoint[each[0]]] for each in solved], np.int64)
    short = np.maximum(tables.total[model] - [served[each].sum() for each in solved], 0.0)
    use = [np.asarray(columns.use[each, :rows].sum(axis=0)).ravel() for each in solved]
    return _Tried(
        dual=dual,
        bound=dual.bound + float(gains.sum()),
        model=model,
        cost=np.array([columns.cost[each].sum() for each in solved]) + tables.total_price[model] * short,
        use=np.array(use).reshape(len(model), rows),
    )


def _promising(tables: Tables, seen: list[_Tried], dual: Dual, width: float) -> Floats:
    """The prices in the box at which the placements seen bound the fleet most."""
    rows, every = dual.rows.models, np.arange(len(tables.models))
    model, cost, use = (np.concatenate([getattr(each, name) for each in seen]) for name in ("model", "cost", "use"))
    now, step = dual.prices[:rows], width * dual.rows.gpu_price
    low, high = np.maximum(now - step, 0.0), np.minimum(now + step, dual.rows.price_most[:rows])
    free = np.where(np.isin(every, model), np.inf, 0.0)
    found = optimize.linprog(
        np.concatenate([-np.ones(len(every)), dual.rows.limit[:rows]]),
        A_ub=sparse.hstack([sparse.csr_matrix(model[:, None] == every, dtype=float), -sparse.csr_matrix(use)]),
        b_ub=cost,
        bounds=np.column_stack([np.concatenate([-free, low]), np.concatenate([free, high])]),
        method="highs",
    )
    prices = dual.prices.copy()
    if found.success:
        prices[:rows] = np.clip(found.x[len(every) :], low, high)
    return prices
