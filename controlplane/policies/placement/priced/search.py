"""The cheapest instances of each endpoint at given prices, exactly, for many endpoints at once.

At prices the problem falls apart into one small knapsack cover per endpoint: instances of K GPU types whose cost is
convex in their count, so much throughput at home, at least and at most so many of them. It is solved by enumeration:

1. The linear relaxation (segments of cost in the order of their price per token/s) gives a lower bound L and the price
   p of a token/s at home. With it every count has a loss: what it costs, less its throughput at p, above the least.
2. Rounding the relaxation gives an answer U. Losses add up over the GPU types, and no better answer loses more than
   U - L: that leaves a handful of counts per type. They are combined type by type, all endpoints in step.
3. The type that the relaxation splits comes last: its best count follows from the rest.

An endpoint with more than `labels_max` combinations keeps L as its bound, and U as its answer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from controlplane.policies.placement.priced.relax import (
    TOLERANCE,
    Cells,
    Relaxed,
    best_last,
    cost_of_counts,
    improve,
    relax,
    round_off,
)
from controlplane.policies.placement.priced.tables import Floats, Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """Answers of a search.

    Attributes:
        bound: no answer of the endpoint costs less, [N]; the best found costs more only where the search was cut off.
        known: every answer that costs less than this is among those given back, [N].
        endpoint: row that each answer belongs to, [M]; the cheapest of each first.
        counts: instances, [M, K].
    """

    bound: Floats
    known: Floats
    endpoint: Ints
    counts: Ints


_Answers = tuple[Ints, Ints, Floats]
"""M answers: the endpoint of each, [M], its counts, [M, K], and what it costs, [M]."""


def search(cells: Cells, *, spare: float = 0.0, keep: int = 1, labels_max: int = 4000) -> Found:
    """The best answer of each endpoint, and others that cost a little more.

    Args:
        cells: the endpoints.
        spare: how much worse than the best known an answer may be to be enumerated, as a cost per hour.
        keep: answers given back per endpoint at most.
        labels_max: combinations of an endpoint at which its search is cut off.
    """
    relaxed = relax(cells)
    value, counts = round_off(cells, relaxed)
    near = value - relaxed.bound <= TOLERANCE * np.maximum(1.0, np.abs(value)) - spare
    listed, cut = _enumerate(cells, relaxed, np.flatnonzero(~near), value, spare, labels_max)
    if len(cut):
        value[cut], counts[cut] = improve(cells.take(cut), value[cut], counts[cut])
        more, cut = _enumerate(cells, relaxed, cut, value, spare, labels_max)
        listed += more
    listed.append((np.arange(len(value)), counts, value))
    endpoint, counts, cost = (np.concatenate(part) for part in zip(*listed, strict=True))
    order = np.lexsort((*counts.T, cost, endpoint))
    endpoint, counts, cost = endpoint[order], counts[order], cost[order]
    size = np.bincount(endpoint)
    first = np.cumsum(size) - size
    known = np.where(size > keep, cost[first + np.minimum(size, keep) - 1], value + spare)
    bound = cost[first]
    bound[cut] = known[cut] = np.minimum(relaxed.bound, bound)[cut]
    kept = np.arange(len(order)) - first[endpoint] < keep
    return Found(bound=bound, known=known, endpoint=endpoint[kept], counts=counts[kept])


def _enumerate(
    cells: Cells, relaxed: Relaxed, open_: Ints, value: Floats, spare: float, labels_max: int
) -> tuple[list[_Answers], Ints]:
    """All answers of these endpoints that cost at most `value` and the spare, and the endpoints that have too many."""
    types = cells.speed.shape[1]
    limit = value + spare
    limit = limit + TOLERANCE * np.maximum(1.0, np.abs(limit))
    slack = limit - relaxed.bound
    at, rest = open_, np.zeros((len(open_), types), np.int64)
    loss, served = np.zeros(len(open_)), np.zeros(len(open_))
    cut: list[Ints] = [np.zeros(0, np.int64)]
    for turn in range(types - 1):
        kind = turn + (turn >= relaxed.split[at])
        low, high = _range(cells, relaxed, at, kind, slack[at] - loss)
        times = np.maximum(high - low + 1, 0)
        if len(many := np.flatnonzero(np.bincount(at, weights=times, minlength=len(value)) > labels_max)):
            cut.append(many)
            times[np.isin(at, many)] = 0
        parent = np.repeat(np.arange(len(at)), times)
        count = low[parent] + np.arange(len(parent)) - np.repeat(np.cumsum(times) - times, times)
        at, kind, rest = at[parent], kind[parent], rest[parent]
        rest[np.arange(len(at)), kind] = count
        loss = loss[parent] + _loss(cells, relaxed, at, kind, count)
        served = served[parent] + count * cells.speed[at, kind]
        over = relaxed.token_price[at] * np.maximum(served - cells.home[at], 0.0)
        stays = (loss + over <= slack[at]) & (rest.sum(axis=1) <= cells.most[at])
        at, rest, loss, served = at[stays], rest[stays], loss[stays], served[stays]
    found = best_last(cells, at, relaxed.split[at], rest)
    good = found <= limit[at]
    at, rest = at[good], rest[good]
    listed = [(at, rest, found[good])]
    for step in (1, -1) if spare > 0 else ():
        listed += _with_other_counts(cells, relaxed, at, rest, limit, step)
    return listed, np.unique(np.concatenate(cut))


def _with_other_counts(
    cells: Cells, relaxed: Relaxed, at: Ints, counts: Ints, limit: Floats, step: int
) -> Iterator[_Answers]:
    """The same answers with other counts of the last type, step by step while they cost no more than the limit."""
    while len(at):
        rows, kind = np.arange(len(at)), relaxed.split[at]
        counts = counts.copy()
        counts[rows, kind] += step
        fits = (counts[rows, kind] >= 0) & (counts[rows, kind] <= cells.segment_max[at, kind].sum(axis=1))
        fits &= counts.sum(axis=1) <= cells.most[at]
        at, counts = at[fits], counts[fits]
        cost = cells.take(at).value(counts)
        good = cost <= limit[at]
        at, counts = at[good], counts[good]
        yield at, counts, cost[good]


def _range(cells: Cells, relaxed: Relaxed, at: Ints, kind: Ints, slack: Floats) -> tuple[Ints, Ints]:
    """Fewest and most instances of a type whose loss stays within the slack."""
    segment_max, rate = cells.segment_max[at, kind], relaxed.loss_rate[at, kind]
    free = np.where(rate <= 0, segment_max, 0)
    low = high = free.sum(axis=1)
    up = down = slack
    for segment in range(segment_max.shape[1]):
        more = _fit(up, rate[:, segment], segment_max[:, segment] - free[:, segment])
        high, up = high + more, up - more * rate[:, segment]
    for segment in reversed(range(segment_max.shape[1])):
        less = _fit(down, -rate[:, segment], free[:, segment])
        low, down = low - less, down + less * rate[:, segment]
    return low, high


def _fit(slack: Floats, rate: Floats, segment_max: Ints) -> Ints:
    """How many instances of this loss each the slack allows."""
    fits = np.floor(np.maximum(slack, 0.0) / np.maximum(rate, 1e-12) + TOLERANCE)
    return np.minimum(fits, segment_max).astype(np.int64)


def _loss(cells: Cells, relaxed: Relaxed, at: Ints, kind: Ints, count: Ints) -> Floats:
    segment_max, rate = cells.segment_max[at, kind], relaxed.loss_rate[at, kind]
    least = (np.minimum(rate, 0.0) * segment_max).sum(axis=-1)
    return np.asarray(cost_of_counts(count, segment_max, rate) - least)
