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
        bound: no answer of the endpoint costs less, [N].
        value: what the best found costs, [N]; above `bound` only where the search was cut off.
        known: every answer that costs less than this is among those given back, [N].
        endpoint: row that each answer belongs to, [M].
        counts: instances, [M, K].
    """

    bound: Floats
    value: Floats
    known: Floats
    endpoint: Ints
    counts: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class _Listed:
    """Answers enumerated, and the endpoints that had too many."""

    endpoint: Ints
    counts: Ints
    value: Floats
    cut: Ints

    def joined(self, later: "_Listed") -> "_Listed":
        return _Listed(
            endpoint=np.concatenate([self.endpoint, later.endpoint]),
            counts=np.concatenate([self.counts, later.counts]),
            value=np.concatenate([self.value, later.value]),
            cut=later.cut,
        )


def search(cells: Cells, *, spare: Floats | float = 0.0, keep: int = 1, labels_max: int = 4000) -> Found:
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
    others = bool(np.any(np.asarray(spare) > 0))
    listed = _enumerate(cells, relaxed, np.flatnonzero(~near), value + spare, labels_max, others)
    if len(cut := listed.cut):
        value[cut], counts[cut] = improve(cells.take(cut), value[cut], counts[cut])
        listed = listed.joined(_enumerate(cells, relaxed, cut, value + spare, labels_max, others))
    listed = listed.joined(_Listed(endpoint=np.arange(len(value)), counts=counts, value=value, cut=listed.cut))
    order = np.lexsort((*listed.counts.T, listed.value, listed.endpoint))
    size = np.bincount(listed.endpoint, minlength=len(value))
    first = np.cumsum(size) - size
    last = listed.value[order][first + np.minimum(size, keep) - 1]
    known = np.where(size > keep, last, value + spare)
    value = listed.value[order][first]
    bound = value.copy()
    bound[listed.cut] = np.minimum(relaxed.bound, value)[listed.cut]
    known[listed.cut] = bound[listed.cut]
    rank = np.arange(len(order)) - first[listed.endpoint[order]]
    kept = order[rank < keep]
    return Found(bound=bound, value=value, known=known, endpoint=listed.endpoint[kept], counts=listed.counts[kept])


def _enumerate(cells: Cells, relaxed: Relaxed, open_: Ints, value: Floats, labels_max: int, others: bool) -> _Listed:
    """All answers of these endpoints that cost at most `value`."""
    types = cells.speed.shape[1]
    slack = value - relaxed.bound
    slack = slack + TOLERANCE * np.maximum(1.0, np.abs(value))
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
    limit = value + TOLERANCE * np.maximum(1.0, np.abs(value))
    good = found <= limit[at]
    listed = [(at[good], rest[good], found[good])]
    if others:
        listed += [
            *_with_other_counts(cells, relaxed, *listed[0][:2], limit, 1),
            *_with_other_counts(cells, relaxed, *listed[0][:2], limit, -1),
        ]
    endpoint, counts, cost = (np.concatenate(part) for part in zip(*listed, strict=True))
    return _Listed(endpoint=endpoint, counts=counts, value=cost, cut=np.unique(np.concatenate(cut)))


def _with_other_counts(
    cells: Cells, relaxed: Relaxed, at: Ints, counts: Ints, limit: Floats, step: int
) -> Iterator[tuple[Ints, Ints, Floats]]:
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
    low = high = np.zeros(len(at), np.int64)
    down, up = slack.copy(), slack.copy()
    free = np.where(rate <= 0, segment_max, 0)
    high = free.sum(axis=1)
    low = high.copy()
    for segment in range(segment_max.shape[1]):
        fits = _fit(up, rate[:, segment], segment_max[:, segment] - free[:, segment])
        full = fits == segment_max[:, segment] - free[:, segment]
        high = high + fits
        up = np.where(full, up - fits * np.maximum(rate[:, segment], 0.0), -1.0)
    for segment in reversed(range(segment_max.shape[1])):
        fits = _fit(down, -rate[:, segment], free[:, segment])
        low = low - fits
        down = np.where(fits == free[:, segment], down + fits * np.minimum(rate[:, segment], 0.0), -1.0)
    return low, high


def _fit(slack: Floats, rate: Floats, segment_max: Ints) -> Ints:
    """How many instances of this loss each the slack allows."""
    fits = np.floor(np.maximum(slack, 0.0) / np.maximum(rate, 1e-12) + TOLERANCE)
    return np.where(slack >= 0, np.minimum(fits, segment_max), 0).astype(np.int64)


def _loss(cells: Cells, relaxed: Relaxed, at: Ints, kind: Ints, count: Ints) -> Floats:
    segment_max, rate = cells.segment_max[at, kind], relaxed.loss_rate[at, kind]
    least = np.minimum(rate, 0.0)
    return np.asarray(
        cost_of_counts(count, segment_max, rate) - (np.where(segment_max > 0, least, 0.0) * segment_max).sum(axis=-1)
    )
