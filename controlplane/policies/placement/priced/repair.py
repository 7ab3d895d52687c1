"""From a choice of columns to a placement that fits: over-full places are relieved, then single instances move.

Both are greedy by what they cost at the prices of the shared rows. An endpoint served by nothing fits anywhere, so
relief always ends.
"""

from dataclasses import dataclass

import numpy as np

from controlplane.policies.placement.priced.columns import Columns, Rows
from controlplane.policies.placement.priced.tables import Floats, Ints, Tables

ROUNDING = 1e-9
LEAST_NEED = 1e-3
LEAST_GAIN = 1e-7


@dataclass(frozen=True, kw_only=True, eq=False)
class Incumbent:
    """A placement: instances [E, K], and the kind of pool each endpoint is in, [E], -1 = none."""

    counts: Ints
    pooled: Ints


def served_by(tables: Tables, endpoint: Ints, counts: Ints, pooled: Ints) -> Floats:
    """Tokens/s that configurations of endpoints take off their models' rows."""
    served = (counts * tables.speed[tables.model_of[endpoint]]).sum(axis=1)
    return served if tables.pools is None else np.where(pooled >= 0, tables.pools.served[endpoint], served)


def pool_gpus(tables: Tables, endpoint: Ints, pooled: Ints) -> Ints:
    """GPUs of whole slots that pools need for these endpoints, in pools of these kinds (-1 = not pooled), [J, P]."""
    if tables.pools is None:
        return np.zeros((len(tables.regions), 0), np.int64)
    at, kind = endpoint[pooled >= 0], pooled[pooled >= 0]
    share, weights = np.zeros(tables.pools.step.shape), np.zeros(tables.pools.step.shape)
    place = (tables.region_of[at], kind)
    np.add.at(share, place, tables.pools.occupancy[at, kind] / tables.pools.fill)
    np.add.at(weights, place, tables.pools.weights[at, kind])
    slots = np.ceil((np.maximum(share, weights) - ROUNDING) / tables.pools.step)
    return np.asarray(slots * tables.pools.step).astype(np.int64)


def kinds_of_types(tables: Tables) -> Ints:
    """1 where a kind of pool is of a GPU type, else 0, [P, K]."""
    kinds = tables.pools.gpu_type if tables.pools is not None else np.zeros(0, np.int64)
    return np.asarray(kinds[:, None] == np.arange(len(tables.gpu_types)), np.int64)


def pooled_gpus(tables: Tables, gpus: Ints) -> Ints:
    """GPUs of pools, [J, P], added up by GPU type, [J, K]."""
    return np.asarray(gpus @ kinds_of_types(tables))


def rounded(tables: Tables, rows: Rows, columns: Columns, weights: Floats, prices: Floats) -> Ints:
    """One column per endpoint, [E], from a mix, region by region: what each model serves follows the mix."""
    token = rows.of_places(prices)[2] + LEAST_GAIN
    region, model = tables.region_of[columns.endpoint], tables.model_of[columns.endpoint]
    served = served_by(tables, columns.endpoint, columns.counts, columns.pooled)
    value = columns.priced(prices)
    mean = np.bincount(columns.endpoint, weights=weights * served, minlength=len(tables.home))
    behind, choice = np.zeros(len(tables.total)), np.zeros(len(tables.home), np.int64)
    for j in range(len(tables.regions)):
        at = np.flatnonzero(region == j)
        here = tables.region_of == j
        behind += mean[here]
        score = value[at] + token[model[at]] * np.abs(behind[model[at]] - served[at])
        order = at[np.lexsort((score, columns.endpoint[at]))]
        first = np.flatnonzero(np.diff(columns.endpoint[order], prepend=-1))
        choice[here] = order[first]
        behind -= served[order[first]]
    return choice


def relieved(tables: Tables, columns: Columns, choice: Ints, prices: Floats) -> Ints:
    """The choice of one column per endpoint, [E], changed until every place has enough GPUs for it.

    `columns` must let every endpoint be served by nothing.
    """
    value = columns.priced(prices)
    region = tables.region_of[columns.endpoint]
    choice = choice.copy()
    for j in range(len(tables.regions)):
        _relieve_region(tables, columns, choice, j, np.flatnonzero(region == j), value)
    return choice


def _relieve_region(tables: Tables, columns: Columns, choice: Ints, j: int, at: Ints, value: Floats) -> None:
    """Change the choice among one region's columns `at`: the least harm per GPU too many, again and again. Too many are
    those beyond the capacity of a GPU type, and beyond what a pool may have. A column that was left is not chosen
    again: a pool grows by whole slots, more than a column takes, and to and fro would never end.
    """
    endpoint, value = columns.endpoint[at], value[at]
    gpus = columns.counts[at] * tables.gpus[tables.model_of[endpoint]]
    pool_need = _pool_need(tables, columns, at)
    need = np.hstack([gpus + pool_need @ kinds_of_types(tables), pool_need])
    here, turn = np.unique(endpoint, return_inverse=True)
    chosen, left = np.searchsorted(at, choice[here]), np.zeros(len(at), bool)
    while True:
        pools = pool_gpus(tables, here, columns.pooled[at[chosen]])
        over = gpus[chosen].sum(axis=0) + pooled_gpus(tables, pools)[j] - tables.capacity[j]
        if tables.pools is not None:
            over = np.concatenate([over, pools[j] - tables.pools.most[j]])
        if (over <= 0).all():
            break
        now = chosen[turn]
        after = np.maximum(over - need[now] + need, 0)
        less = np.maximum(over, 0).sum() - after.sum(axis=1)
        helps = (less > 0) & ~left
        rate = np.where(helps, (value - value[now]) / np.where(helps, less, 1.0), np.inf)
        best = int(rate.argmin())
        assert np.isfinite(rate[best]), "an endpoint served by nothing relieves its place"
        left[now[best]] = True
        chosen[turn[best]] = best
    choice[here] = at[chosen]


def _pool_need(tables: Tables, columns: Columns, at: Ints) -> Floats:
    """Parts of a GPU that pooled columns take, [., P]."""
    need = np.zeros((len(at), 0 if tables.pools is None else len(tables.pools.gpu_type)))
    if tables.pools is not None:
        some = np.flatnonzero(columns.pooled[at] >= 0)
        kind, endpoint = columns.pooled[at[some]], columns.endpoint[at[some]]
        share = tables.pools.occupancy[endpoint, kind] / tables.pools.fill
        need[some, kind] = np.maximum(np.maximum(share, tables.pools.weights[endpoint, kind]), LEAST_NEED)
    return need


def moved(tables: Tables, incumbent: Incumbent, steps_max: int) -> Incumbent:
    """Single instances added where demand is short and GPUs are free, and left out where nothing needs them."""
    counts, pooled = incumbent.counts.copy(), incumbent.pooled
    free = tables.capacity - pooled_gpus(tables, pool_gpus(tables, np.arange(len(pooled)), pooled))
    gpus = tables.gpus[tables.model_of]
    shape = (len(tables.models), len(tables.regions), len(tables.gpu_types))
    for _ in range(steps_max):
        left = free - (counts * gpus).reshape(shape).sum(axis=0)
        gain, step = _gains(tables, counts, pooled, left)
        best = gain.reshape(shape).max(axis=(1, 2))
        cell = gain.reshape(shape[0], -1).argmax(axis=1)
        moving = np.flatnonzero(best > LEAST_GAIN)
        if not len(moving):
            break
        order = moving[np.lexsort((moving, -best[moving], cell[moving]))]
        _, first = np.unique(cell[order], return_index=True)
        chosen = order[first]
        at, kind = chosen * shape[1] + cell[chosen] // shape[2], cell[chosen] % shape[2]
        counts[at, kind] += step[at, kind]
    return Incumbent(counts=counts, pooled=pooled)


def _gains(tables: Tables, counts: Ints, pooled: Ints, left: Ints) -> tuple[Floats, Ints]:
    """What one instance more or less of each cell saves per hour, the better of the two, [E, K], and which it is."""
    model, region = tables.model_of, tables.region_of
    speed, gpus = tables.speed[model], tables.gpus[model]
    served = (counts * speed).sum(axis=1)
    busy = served if tables.pools is None else np.where(pooled >= 0, tables.pools.served, served)
    short = tables.total - np.bincount(model, weights=busy, minlength=len(tables.total))
    lacks = (tables.home - served)[:, None]
    below, price = short[model][:, None], tables.total_price[model][:, None]
    few = (tables.fewest - counts.sum(axis=1))[:, None]
    held = np.cumsum(tables.segment_max, axis=2)
    dearer = np.take_along_axis(tables.price, _segment(held, counts), axis=2)[..., 0]
    saved = np.take_along_axis(tables.price, _segment(held, counts - 1), axis=2)[..., 0]
    home_price, few_price = tables.home_price[:, None], tables.fewest_price[:, None]

    def penalty(change: Floats, number: int) -> Floats:
        home = home_price * np.maximum(lacks - change, 0) + few_price * np.maximum(few - number, 0)
        return np.asarray(home + price * np.maximum(below - change, 0))

    now = penalty(np.zeros_like(speed), 0)
    alone = (pooled < 0)[:, None]
    may_add = alone & (counts < held[..., -1]) & (gpus <= left[region]) & (counts.sum(axis=1) < tables.most)[:, None]
    more = np.where(may_add, now - penalty(speed, 1) - dearer, -np.inf)
    less = np.where(counts > 0, now - penalty(-speed, -1) + saved, -np.inf)
    return np.maximum(more, less), np.where(more >= less, 1, -1)


def _segment(held: Ints, counts: Ints) -> Ints:
    """Segment that the instance after so many is in, [E, K, 1]."""
    before = (held <= np.maximum(counts, 0)[..., None]).sum(axis=2, keepdims=True)
    return np.asarray(np.minimum(before, held.shape[2] - 1))


def incumbent_of(columns: Columns, choice: Ints) -> Incumbent:
    """The placement of a choice of one column per endpoint."""
    return Incumbent(counts=columns.counts[choice].copy(), pooled=columns.pooled[choice].copy())
