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

from controlplane.policies.placement.priced.columns import served_by
from controlplane.policies.placement.priced.neighbourhood import Neighbourhood
from controlplane.policies.placement.priced.tables import Floats, Ints, Tables

STEPS = 1_000_000
"""Of a model's demand. What a bound loses by rounding is at most a step per endpoint, at the price of a token/s."""
ROUNDING = 1e-9


def whole_models(
    tables: Tables, neighbourhood: Neighbourhood, token: Floats, regions: tuple[Floats, Floats]
) -> tuple[Floats, list[Ints]]:
    """Solve each model by itself: what each costs per hour above its part of the bound at least, [I], and the columns
    that it costs this with, one of each endpoint; none where no known columns cost so little.

    Args:
        tables: the problem.
        neighbourhood: the columns known.
        token: price per token/s of each model, [I].
        regions: the gain of each region, [J], and the share of it that is counted already, [J].
    """
    columns = neighbourhood.columns
    served = served_by(tables, columns)
    excess = _kept(tables, neighbourhood.excess, columns.endpoint, regions)
    first = np.append(columns.first, len(columns))
    reached = _kept(tables, neighbourhood.complete, np.arange(len(tables.home)), regions)
    unknown = reached.reshape(len(tables.models), -1).min(axis=1)
    gains, chosen = np.zeros(len(tables.models)), [np.zeros(0, np.int64)] * len(tables.models)
    for model in np.flatnonzero((tables.total > 0) & (unknown > 0)).tolist():
        endpoints = np.flatnonzero(tables.model_of == model)
        known = [_undominated(served, excess, token[model], first[each], first[each + 1]) for each in endpoints]
        ways = [(served[at], excess[at]) for at in known]
        prices = float(token[model]), float(tables.total_price[model])
        gains[model], picked = _least(ways, float(tables.total[model]), prices, unknown[model])
        chosen[model] = np.array([at[pick] for at, pick in zip(known, picked, strict=False)], np.int64)
    return gains, chosen


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


def _least(
    ways: list[tuple[Floats, Floats]], total: float, prices: tuple[float, float], limit: float
) -> tuple[float, list[int]]:
    """The least cost of one (throughput, excess) of each endpoint, and which; or the limit, and none. What is served
    counts in steps, and as twice the demand where it is more. Only sums are kept from which the rest can end where
    neither `over` nor `short` costs the limit.
    """
    unit = total / STEPS
    token, price = prices
    top = STEPS + len(ways) + _steps(limit, token * unit)
    bottom = STEPS - _steps(limit, (price - token) * unit)
    known = [(np.minimum(np.ceil(served / unit - ROUNDING), top).astype(np.int64), excess) for served, excess in ways]
    fewest, most = sum(int(steps.min()) for steps, _excess in known), sum(int(steps.max()) for steps, _excess in known)
    stages, first = [np.zeros(1)], [0]
    for steps, excess in known:
        fewest, most = fewest - int(steps.min()), most - int(steps.max())
        end = min(first[-1] + len(stages[-1]) - 1 + int(steps.max()), top - fewest)
        begin = min(max(first[-1] + int(steps.min()), bottom - most), end)
        stages.append(_added(stages[-1], steps + first[-1] - begin, excess, end - begin + 1))
        first.append(begin)
    ends = first[-1] + np.arange(len(stages[-1]))
    over, short = np.maximum((ends - len(ways)) * unit - total, 0.0), np.maximum(total - ends * unit, 0.0)
    cost = stages[-1] + token * over + (price - token) * short
    at = int(cost.argmin())
    if cost[at] >= limit:
        return limit, []
    picked: list[int] = []
    for stage in reversed(range(len(known))):
        steps, excess = known[stage]
        pick, at = _came_from(stages[stage], steps + first[stage] - first[stage + 1], excess, stages[stage + 1], at)
        picked.insert(0, pick)
    return float(cost.min()), picked


def _steps(limit: float, each: float) -> int:
    """Steps that cost the limit, all of them at most."""
    return int(min(limit / each, STEPS)) + 1 if each > 0 else STEPS


def _added(sums: Floats, starts: Ints, excess: Floats, size: int) -> Floats:
    """The least of `sums` moved to each start and with its excess, [size]: what falls before it is left out, and what
    falls behind it is at its end.
    """
    added: Floats = np.full(size, np.inf)
    for start, cost in zip(starts.tolist(), excess.tolist(), strict=True):
        moved = sums[max(0, -start) :]
        here = added[max(0, start) :][: len(moved)]
        np.minimum(here, moved[: len(here)] + cost, out=here)
        if len(beyond := moved[len(here) :]):
            added[-1] = min(added[-1], beyond.min() + cost)
    return added


def _came_from(sums: Floats, starts: Ints, excess: Floats, added: Floats, at: int) -> tuple[int, int]:
    """Which start, and from where in `sums`, made `added[at]`."""
    last = at == len(added) - 1
    for pick, (start, cost) in enumerate(zip(starts.tolist(), excess.tolist(), strict=True)):
        begin = max(at - start, 0)
        before = sums[begin:] if last else sums[begin : max(at - start + 1, 0)]
        if len(before) and before.min() + cost == added[at]:
            return pick, begin + int(before.argmin())
    raise AssertionError("every sum was made from one before")
