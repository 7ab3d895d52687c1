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

from controlplane.policies.placement.priced.dual import Dual, priced_out
from controlplane.policies.placement.priced.models import WholeModels, whole_models
from controlplane.policies.placement.priced.neighbourhood import Neighbourhood
from controlplane.policies.placement.priced.repair import served_by
from controlplane.policies.placement.priced.tables import Floats, Ints, Tables

WIDTH, GROWTH = 0.01, 1.5
"""The box at first, in the price of a GPU; it grows where the bound rose, else it halves."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Priced:
    """Prices, the columns near the best at them, and the models as wholes among these."""

    dual: Dual
    near: Neighbourhood
    models: WholeModels

    @property
    def bound(self) -> float:
        """Proven by whole models."""
        return self.dual.bound + float(self.models.gains.sum())


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
    best = _priced(tables, dual, near_at)
    seen, width = [_placements(tables, best)], WIDTH
    for _round in range(rounds):
        if should_stop():
            break
        prices = _promising(tables, seen, best.dual, width)
        tried = _priced(tables, priced_out(tables, replace(dual, bound=-np.inf), prices), near_at)
        seen.append(_placements(tables, tried))
        best, width = (tried, width * GROWTH) if tried.bound > best.bound else (best, width / 2)
    return best.bound


def _priced(tables: Tables, dual: Dual, near_at: Callable[[Dual], Neighbourhood]) -> _Priced:
    near, none = near_at(dual), np.zeros(len(tables.regions))
    models = whole_models(tables, near, dual.rows.of_places(dual.prices)[2], (none, none))
    return _Priced(dual=dual, near=near, models=models)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Placements:
    """One of each of N models: its number and cost per hour, [N], and what it takes of GPUs and host memory, [N, R]."""

    model: Ints
    cost: Floats
    use: Floats


def _placements(tables: Tables, priced: _Priced) -> _Placements:
    columns, solved = priced.near.columns, [each for each in priced.models.columns if len(each)]
    served = served_by(tables, columns.endpoint, columns.counts, columns.pooled)
    model = np.array([tables.model_of[columns.endpoint[each[0]]] for each in solved], np.int64)
    short = np.maximum(tables.total[model] - [served[each].sum() for each in solved], 0.0)
    cost = np.array([columns.cost[each].sum() for each in solved]) + tables.total_price[model] * short
    rows = priced.dual.rows.models
    use = [np.asarray(columns.use_by_column[each, :rows].sum(axis=0)).ravel() for each in solved]
    return _Placements(model=model, cost=cost, use=np.array(use).reshape(len(model), rows))


def _promising(tables: Tables, seen: list[_Placements], dual: Dual, width: float) -> Floats:
    """The prices in the box at which the placements seen bound the fleet most."""
    rows, every = dual.rows.models, np.arange(len(tables.models))
    model, cost, use = (np.concatenate([getattr(each, name) for each in seen]) for name in ("model", "cost", "use"))
    kinds = tables.pools.gpu_type if tables.pools else np.zeros(0, np.int64)
    gpu = np.concatenate([np.tile(tables.gpu_price[of], len(tables.regions)) for of in (slice(None), kinds)])
    now = dual.prices[:rows]
    low, high = np.maximum(now - width * gpu, 0.0), np.minimum(now + width * gpu, dual.rows.price_most[:rows])
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
