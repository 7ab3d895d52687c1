"""From a choice of columns to a placement that fits: over-full places are relieved, then single instances move.

Both are greedy by what they cost at the prices of the shared rows. An endpoint served by nothing fits anywhere, so
relief always ends.
"""

from dataclasses import replace

import numpy as np

from controlplane.policies.placement.priced.columns import Columns, Configurations, Rows, served_by
from controlplane.policies.placement.priced.tables import Floats, Ints, Tables

ROUNDING = 1e-9
LEAST_NEED = 1e-3
LEAST_GAIN = 1e-7


def pool_gpus(tables: Tables, configurations: Configurations) -> Ints:
    """GPUs of whole slots that pools need for these configurations, [J, P]."""
    pooled = configurations.pooled >= 0
    at, kind = configurations.endpoint[pooled], configurations.pooled[pooled]
    share, weights = np.zeros(tables.pools.step.shape), np.zeros(tables.pools.step.shape)
    place = (tables.region_of[at], kind)
    np.add.at(share, place, tables.pools.share[at, kind])
    np.add.at(weights, place, tables.pools.weights[at, kind])
    slots = np.ceil((np.maximum(share, weights) - ROUNDING) / tables.pools.step)
    return np.asarray(slots * tables.pools.step).astype(np.int64)


def kinds_of_types(tables: Tables) -> Ints:
    """1 where a kind of pool is of a GPU type, else 0, [P, K]."""
    return np.asarray(tables.pools.gpu_type[:, None] == np.arange(len(tables.gpu_types)), np.int64)


def free_gpus(tables: Tables, placement: Configurations) -> Ints:
    """GPUs that a placement leaves, [J, K]; below 0 where it takes too many."""
    pools = pool_gpus(tables, placement) @ kinds_of_types(tables)
    instances = placement.counts * tables.gpus[tables.model_of]
    return np.asarray(tables.capacity - pools - instances.reshape(-1, *tables.capacity.shape).sum(axis=0))


def rounded(tables: Tables, rows: Rows, columns: Columns, weights: Floats, prices: Floats) -> Ints:
    """One column per endpoint, [E], from a mix, region by region: what each model serves follows the mix."""
    token = rows.of_places(prices)[2] + LEAST_GAIN
    region, model = tables.region_of[columns.endpoint], tables.model_of[columns.endpoint]
    served = served_by(tables, columns)
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
        pools = pool_gpus(tables, columns.at(at[chosen]))[j]
        over = gpus[chosen].sum(axis=0) + pools @ kinds_of_types(tables) - tables.capacity[j]
        over = np.concatenate([over, pools - tables.pools.most[j]])
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
    need = np.zeros((len(at), len(tables.pools.gpu_type)))
    some = np.flatnonzero(columns.pooled[at] >= 0)
    kind, endpoint = columns.pooled[at[some]], columns.endpoint[at[some]]
    share, weights = tables.pools.share[endpoint, kind], tables.pools.weights[endpoint, kind]
    need[some, kind] = np.maximum(np.maximum(share, weights), LEAST_NEED)
    return need


def moved(tables: Tables, incumbent: Configurations, steps_max: int) -> Configurations:
    """Single instances added where demand is short and GPUs are free, and left out where nothing needs them."""
    placement = replace(incumbent, counts=incumbent.counts.copy())
    shape = (len(tables.models), len(tables.regions), len(tables.gpu_types))
    for _ in range(steps_max):
        gain, step = _gains(tables, placement)
        best = gain.reshape(shape).max(axis=(1, 2))
        cell = gain.reshape(shape[0], -1).argmax(axis=1)
        moving = np.flatnonzero(best > LEAST_GAIN)
        if not len(moving):
            break
        order = moving[np.lexsort((moving, -best[moving], cell[moving]))]
        _, first = np.unique(cell[order], return_index=True)
        chosen = order[first]
        at, kind = chosen * shape[1] + cell[chosen] // shape[2], cell[chosen] % shape[2]
        placement.counts[at, kind] += step[at, kind]
    return placement


def _gains(tables: Tables, placement: Configurations) -> tuple[Floats, Ints]:
    """What one instance more or less of each cell saves per hour, the better of the two, [E, K], and which it is."""
    counts, model = placement.counts, tables.model_of
    speed, gpus = tables.speed[model], tables.gpus[model]
    served = (counts * speed).sum(axis=1)
    short = tables.total - np.bincount(model, weights=served_by(tables, placement), minlength=len(tables.total))
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
    grows = ((placement.pooled < 0) & (counts.sum(axis=1) < tables.most))[:, None]
    may_add = grows & (counts < held[..., -1]) & (gpus <= free_gpus(tables, placement)[tables.region_of])
    more = np.where(may_add, now - penalty(speed, 1) - dearer, -np.inf)
    less = np.where(counts > 0, now - penalty(-speed, -1) + saved, -np.inf)
    return np.maximum(more, less), np.where(more >= less, 1, -1)


def _segment(held: Ints, counts: Ints) -> Ints:
    """Segment that the instance after so many is in, [E, K, 1]."""
    before = (held <= np.maximum(counts, 0)[..., None]).sum(axis=2, keepdims=True)
    return np.asarray(np.minimum(before, held.shape[2] - 1))
