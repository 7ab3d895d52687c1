"""A better bound for models: the demand of each exactly, by dynamic programming over its endpoints' columns.

At the price of a model's demand two configurations of an endpoint may be mixed; whole ones serve a little too much or
cost a little more. With all other rows at their prices, a model costs at least, above its part of the bound,

    min  sum (excess - share min(excess, gain)) + token over + (price - token) short     one column of each endpoint

over, short: tokens/s served beyond the model's demand, or below it. An endpoint's region, whose own bound
(`regions.py`) has a gain, takes a share of the excess up to that gain: the rest is the model's, so the share of the
region's gain and the model's gain may be added (cost splitting). Throughput is rounded up to steps of the demand, so
the answer is never too high; a configuration that is not known costs at least what the enumeration reached.
"""

import numpy as np

from controlplane.policies.placement.priced.neighbourhood import Neighbourhood
from controlplane.policies.placement.priced.repair import served_by
from controlplane.policies.placement.priced.tables import Floats, Ints, Tables

STEPS = 200_000
"""Of a model's demand. What a bound loses by rounding is at most a step per endpoint, at the price of a token/s."""
ROUNDING = 1e-9


def model_gains(tables: Tables, neighbourhood: Neighbourhood, token: Floats, regions: tuple[Floats, Floats]) -> Floats:
    """What each model costs per hour above its part of the bound at least, [I].

    Args:
        tables: the problem.
        neighbourhood: the columns known.
        token: price per token/s of each model, [I].
        regions: the gain of each region, [J], and the share of it that is counted already, [J].
    """
    columns = neighbourhood.columns
    served = served_by(tables, columns.endpoint, columns.counts, columns.pooled)
    excess = _kept(tables, neighbourhood.excess, columns.endpoint, regions)
    first = np.append(columns.first, len(columns))
    reached = _kept(tables, neighbourhood.complete, np.arange(len(tables.home)), regions)
    unknown = reached.reshape(len(tables.models), -1).min(axis=1)
    gains = np.zeros(len(tables.models))
    for model in np.flatnonzero((tables.total > 0) & (unknown > 0)).tolist():
        endpoints = np.flatnonzero(tables.model_of == model)
        known = [_undominated(served, excess, token[model], first[each], first[each + 1]) for each in endpoints]
        ways = [(served[at], excess[at]) for at in known]
        prices = float(token[model]), float(tables.total_price[model])
        gains[model] = min(_least(ways, float(tables.total[model]), prices, unknown[model]), unknown[model])
    return gains


def _kept(tables: Tables, excess: Floats, endpoint: Ints, regions: tuple[Floats, Floats]) -> Floats:
    """What of the excess of endpoints' columns is not their regions'."""
    gain, share = (each[tables.region_of[endpoint]] for each in regions)
    return excess - share * np.minimum(excess, gain)


def _undominated(served: Floats, excess: Floats, token: float, start: int, end: int) -> Ints:
    """The columns of an endpoint, from `start` to `end`, that none beats: one that serves as much and costs no more."""
    cost = excess[start:end] + token * served[start:end]
    order = np.lexsort((cost, -served[start:end]))
    before = np.minimum.accumulate(np.concatenate([[np.inf], cost[order][:-1]]))
    return np.asarray(start + order[cost[order] < before - ROUNDING])


def _least(ways: list[tuple[Floats, Floats]], total: float, prices: tuple[float, float], limit: float) -> float:
    """The least cost of one (throughput, excess) of each endpoint, where it is below the limit."""
    unit = total / STEPS
    token, price = prices
    beyond = min(limit / token / unit, STEPS) if token * STEPS * unit > 0 else 0
    top = STEPS + len(ways) + int(beyond) + 1
    least: Floats = np.full(top + 1, np.inf)
    least[0] = 0.0
    for served, excess in ways:
        steps = np.minimum(np.ceil(served / unit - ROUNDING), top).astype(np.int64)
        after: Floats = np.full(top + 1, np.inf)
        for step, cost in zip(steps.tolist(), excess.tolist(), strict=True):
            np.minimum(after[step:], least[: top + 1 - step] + cost, out=after[step:])
            after[top] = min(after[top], least[top - step :].min() + cost)
        least = after
    steps = np.arange(top + 1)
    over = np.maximum((steps - len(ways)) * unit - total, 0.0)
    short = np.maximum(total - steps * unit, 0.0)
    return float((least + token * over + (price - token) * short).min())
