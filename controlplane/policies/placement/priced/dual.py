"""Prices of what endpoints share, and the lower bound they prove (Lagrangian relaxation, columns made as needed).

For any prices y >= 0 of the shared rows (use <= limit), no placement costs less than

    L(y) = sum over endpoints (cheapest way to serve it at y) - limit y

The first term is found exactly (`search.py`), so L(y) is proven however y came about. y climbs on the columns
known so far: L is smoothed by a soft minimum of width tau, which falls, and L-BFGS climbs within a box around the best
y; then the columns that are cheapest at the new y are added.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy import optimize

from controlplane.policies.placement.priced.columns import Columns, Configurations, Rows, make_columns, rows_of
from controlplane.policies.placement.priced.relax import Cells
from controlplane.policies.placement.priced.search import search
from controlplane.policies.placement.priced.tables import Floats, Tables

CHUNK, CHUNK_SPARE = 4096, 512
"""Endpoints searched at a time: it bounds the memory."""
WIDTH_FIRST, WIDTH_GROWTH = 1.0, 1.5
"""The box around the best prices, in their scale: it grows with each step that raised the bound, else it halves."""
TAU_FIRST, TAU_LAST, TAU_FALL = 0.1, 0.001, 0.7
"""In dearest prices of a GPU per hour."""
CLIMB_STEPS, PATIENCE = 400, 4
KEPT = 3
"""Configurations of each endpoint that a round adds at most."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Dual:
    """State of the ascent. `bound`: proven by `prices`."""

    rows: Rows
    columns: Columns
    bound: float
    prices: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class Cheapest(Configurations):
    """Configurations of N endpoints: `least`, the proven least cost of each endpoint, [N]; `known`, every configuration
    that costs less is listed, [N].
    """

    least: Floats
    known: Floats


def configurations_at(tables: Tables, rows: Rows, prices: Floats, *, keep: int = 1, spare: float = 0.0) -> Cheapest:
    """The cheapest configurations to serve each endpoint at these prices.

    Args:
        tables: the problem.
        rows: its shared rows.
        prices: of them.
        keep: configurations of each endpoint at most.
        spare: list configurations that cost so much more per hour than the cheapest too.
    """
    gpu, host, token = rows.of_places(prices)
    gpu, host = gpu.reshape(tables.capacity.shape), host.reshape(len(tables.regions), -1)
    model, size = tables.model_of, len(tables.home)
    unit = gpu[tables.region_of] * tables.gpus[model] - token[model][:, None] * tables.speed[model]
    cells = Cells(
        speed=tables.speed[model],
        segment_max=tables.segment_max,
        price=tables.price + unit[:, :, None],
        most=tables.most,
        fewest=tables.fewest,
        fewest_price=tables.fewest_price,
        home=tables.home,
        home_price=tables.home_price,
    )
    least, known, found = np.zeros(size), np.zeros(size), []
    chunk = CHUNK_SPARE if spare else CHUNK
    for start in range(0, size, chunk):
        at = np.arange(start, min(start + chunk, size))
        answer = search(cells.take(at), keep=keep, spare=spare)
        least[at], known[at] = answer.bound, answer.known
        found.append((at[answer.endpoint], answer.counts, np.full(len(answer.endpoint), -1)))
    cost = _pool_costs(tables, gpu, host, token)
    least = np.minimum(least, cost.min(axis=1, initial=np.inf))
    known = np.minimum(known, least + spare)
    number, kind = np.nonzero(cost <= (least + spare)[:, None])
    found.append((number, np.zeros((len(number), tables.capacity.shape[1]), np.int64), kind))
    endpoint, counts, pooled = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return Cheapest(least=least, known=known, endpoint=endpoint, counts=counts, pooled=pooled)


def _pool_costs(tables: Tables, gpu: Floats, host: Floats, token: Floats) -> Floats:
    """What each pool costs each endpoint at these prices, [E, P]; infinite where it cannot be pooled."""
    region, gpu_type = tables.region_of, tables.pools.gpu_type
    pooled = np.isfinite(tables.pools.share)
    share = np.where(pooled, tables.pools.share, 0.0)
    value = tables.pools.extra + ((tables.gpu_price + gpu[region])[:, gpu_type] - host[region]) * share
    value += host[region] * tables.pools.weights - (token[tables.model_of] * tables.pools.served)[:, None]
    return np.where(pooled, value, np.inf)


def climb(tables: Tables, rounds: int, least_gain: float, should_stop: Callable[[], bool]) -> Dual:
    """Raise the bound, adding columns, for so many rounds at most, or until `PATIENCE` of them raise it by less than
    the share `least_gain`; from prices of zero, where every endpoint may be served by nothing.
    """
    rows, size = rows_of(tables), len(tables.home)
    counts = np.zeros((size, len(tables.gpu_types)), np.int64)
    nothing = Configurations(endpoint=np.arange(size), counts=counts, pooled=np.full(size, -1))
    prices = np.zeros(len(rows.limit))
    dual = Dual(rows=rows, columns=make_columns(tables, rows, nothing), bound=-np.inf, prices=prices)
    step, width, bounds = _step_of_prices(tables, rows), WIDTH_FIRST, [-np.inf]
    for turn in range(rounds):
        dual = priced_out(tables, dual, prices)
        width = width * WIDTH_GROWTH if dual.bound > bounds[-1] else width / 2
        bounds.append(dual.bound)
        if turn + 1 == rounds or should_stop():
            break
        if turn >= PATIENCE and bounds[-1] - bounds[-1 - PATIENCE] <= least_gain * abs(bounds[-1]):
            break
        tau = max(TAU_FIRST * TAU_FALL**turn, TAU_LAST) * float(tables.gpu_price.max(initial=0.0) or 1.0)
        low = np.maximum(0.0, dual.prices - width * step)
        high = np.minimum(dual.rows.price_most, dual.prices + width * step)
        prices = _climb_smoothed(dual, np.clip(prices, low, high), low, high, tau)
    return dual


def priced_out(tables: Tables, dual: Dual, prices: Floats) -> Dual:
    """The bound that these prices prove, if it is better, and the columns that are cheapest at them."""
    configurations = configurations_at(tables, dual.rows, prices, keep=KEPT)
    bound = float(configurations.least.sum() - dual.rows.limit @ prices) + tables.constant
    if bound > dual.bound:
        dual = replace(dual, bound=bound, prices=prices)
    return replace(dual, columns=make_columns(tables, dual.rows, dual.columns, configurations))


def _step_of_prices(tables: Tables, rows: Rows) -> Floats:
    """What a price may change by in a round: that of a GPU; of the model's cheapest instance per unit of its demand."""
    instance = np.where(tables.speed > 0, tables.gpu_price * tables.gpus, np.inf).min(axis=1)
    return np.concatenate([rows.gpu_price, np.where(np.isfinite(instance), instance, 0.0)])


def _climb_smoothed(dual: Dual, start: Floats, low: Floats, high: Floats, tau: float) -> Floats:
    columns, limit = dual.columns, dual.rows.limit

    def negated(prices: Floats) -> tuple[float, Floats]:
        value, weights = soft_choice(columns, prices, tau)
        return float(limit @ prices) - value, limit - columns.use.T @ weights

    options = {"maxiter": CLIMB_STEPS, "maxcor": 20}
    bounds = np.column_stack([low, high])
    found = optimize.minimize(negated, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return np.asarray(np.clip(found.x, low, high))


def soft_choice(columns: Columns, prices: Floats, tau: float) -> tuple[float, Floats]:
    """The soft minimum over each endpoint's columns, summed, and its weights."""
    value = columns.priced(prices)
    least = np.minimum.reduceat(value, columns.first)
    weights = np.exp(-(value - columns.spread(least)) / tau)
    total = np.add.reduceat(weights, columns.first)
    return float(np.sum(least - tau * np.log(total))), weights / columns.spread(total)
