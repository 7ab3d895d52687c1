"""One endpoint at given prices, and its linear relaxation: a lower bound, and answers made by rounding it."""

import itertools
from dataclasses import dataclass

import numpy as np

from controlplane.policies.placement.priced.tables import Floats, Ints

TOLERANCE = 1e-9
COUNT_PRICE_DOUBLINGS = 12
COUNT_PRICE_HALVINGS = 14
IMPROVEMENTS = 20
STEPS = (-3, -1, 1, 3)


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """N endpoints to be searched, with K GPU types and S segments of cost each; prices are those of the moment.

    Attributes:
        speed: tokens/s of an instance, [N, K]; above 0 wherever there is room.
        segment_max: instances in each segment, [N, K, S].
        price: of an instance in each segment, [N, K, S]; rising along S. It may be negative.
        most: instances over all types, [N].
        fewest: instances wanted, [N], and the price of each that lacks, [N].
        home: tokens/s wanted, [N], and the price of each that lacks, [N].
    """

    speed: Floats
    segment_max: Ints
    price: Floats
    most: Ints
    fewest: Ints
    fewest_price: Floats
    home: Floats
    home_price: Floats

    def take(self, chosen: Ints) -> "Cells":
        """Some of the endpoints."""
        return Cells(**{name: getattr(self, name)[chosen] for name in self.__dataclass_fields__})

    def value(self, counts: Ints) -> Floats:
        """What one answer for each endpoint costs, [N], of counts [N, K]; prices of what lacks included."""
        short = np.maximum(self.home - (counts * self.speed).sum(axis=1), 0.0)
        few = np.maximum(self.fewest - counts.sum(axis=1), 0)
        instances = cost_of_counts(counts, self.segment_max, self.price).sum(axis=1)
        return np.asarray(instances + short * self.home_price + few * self.fewest_price)


@dataclass(frozen=True, kw_only=True, eq=False)
class Relaxed:
    """`loss_rate`: by segment, with the price of a token and that of an instance."""

    bound: Floats
    token_price: Floats
    counts: Ints
    split: Ints
    loss_rate: Floats


def cost_of_counts(counts: Ints, segment_max: Ints, price: Floats) -> Floats:
    """What instances cost, [..., K], segment by segment."""
    total = np.zeros(counts.shape)
    left = counts
    for segment in range(segment_max.shape[-1]):
        here = np.minimum(left, segment_max[..., segment])
        total += here * price[..., segment]
        left = left - here
    return total


def relax(cells: Cells) -> Relaxed:
    """The linear relaxation; where it takes too many instances, each has a price of its own as well, by bisection."""
    count_price = np.zeros(len(cells.home))
    over = np.flatnonzero(_fill(cells, count_price).counts.sum(axis=1) > cells.most)
    if len(over):
        tight = cells.take(over)
        low, high = np.zeros(len(over)), np.abs(tight.price).max(axis=(1, 2)) / 4
        for _ in range(COUNT_PRICE_DOUBLINGS):
            high = np.where(_fill(tight, high).counts.sum(axis=1) > tight.most, 2 * high, high)
        for _ in range(COUNT_PRICE_HALVINGS):
            middle = (low + high) / 2
            many = _fill(tight, middle).counts.sum(axis=1) > tight.most
            low, high = np.where(many, middle, low), np.where(many, high, middle)
        count_price[over] = high
    return _fill(cells, count_price)


def _fill(cells: Cells, count_price: Floats) -> Relaxed:
    """The relaxation at a price per instance: segments in the order of their rate, until the home demand is met."""
    size, types, segments = cells.segment_max.shape
    rows = np.arange(size)
    speed = np.repeat(np.where(cells.speed > 0, cells.speed, 1.0), segments, axis=1)
    price = cells.price + count_price[:, None, None]
    segment_max = cells.segment_max.reshape(size, -1)
    rate = np.where(segment_max > 0, price.reshape(size, -1) / speed, np.inf)
    order = np.argsort(rate, axis=1, kind="stable")
    served = np.cumsum(np.take_along_axis(segment_max * speed, order, axis=1), axis=1)
    at = np.minimum((served < cells.home[:, None]).sum(axis=1), types * segments - 1)
    met = served[:, -1] >= cells.home
    sorted_rate = np.take_along_axis(rate, order, axis=1)
    token_price = np.where(met, sorted_rate[rows, at], np.inf)
    token_price = np.where(cells.home > 0, np.clip(token_price, 0.0, cells.home_price), 0.0)
    before = np.where(at > 0, served[rows, np.maximum(at - 1, 0)], 0.0)
    taken = np.where(sorted_rate < token_price[:, None], np.take_along_axis(segment_max, order, axis=1), 0)
    split = order[rows, at]
    part = np.minimum(np.floor(np.maximum(cells.home - before, 0.0) / speed[rows, split]), segment_max[rows, split])
    taken[rows, at] = np.where(sorted_rate[rows, at] == token_price, part, taken[rows, at])
    counts = np.zeros((size, types * segments), np.int64)
    np.put_along_axis(counts, order, taken.astype(np.int64), axis=1)
    loss_rate = np.where(cells.segment_max > 0, price - token_price[:, None, None] * cells.speed[:, :, None], 0.0)
    least = (np.minimum(loss_rate, 0.0) * cells.segment_max).sum(axis=(1, 2))
    return Relaxed(
        bound=token_price * cells.home - count_price * cells.most + least,
        token_price=token_price,
        counts=counts.reshape(size, types, segments).sum(axis=2),
        split=split // segments,
        loss_rate=loss_rate,
    )


def round_off(cells: Cells, relaxed: Relaxed) -> tuple[Floats, Ints]:
    """The best of: the relaxation with one type's count left open, and one type alone."""
    rows, types = np.arange(len(cells.home)), cells.speed.shape[1]
    value = cells.home * cells.home_price + cells.fewest * cells.fewest_price
    counts = np.zeros(relaxed.counts.shape, np.int64)
    for base in (relaxed.counts, counts.copy()):
        for kind in range(types):
            rest = base.copy()
            rest[:, kind] = 0
            found = best_last(cells, rows, np.full(len(rows), kind), rest)
            better = found < value - TOLERANCE
            value[better], counts[better] = found[better], rest[better]
    return value, counts


def improve(cells: Cells, value: Floats, counts: Ints) -> tuple[Floats, Ints]:
    """Change the count of one type by a few and find the best of another for it, while that helps."""
    types = cells.speed.shape[1]
    moves = np.array([(*pair, step) for pair in itertools.permutations(range(types), 2) for step in STEPS])
    for _ in range(IMPROVEMENTS if types > 1 else 0):
        at = np.repeat(np.arange(len(value)), len(moves))
        changed, other, step = np.tile(moves, (len(value), 1)).T
        rest = counts[at]
        rows = np.arange(len(at))
        most = cells.segment_max[at, changed].sum(axis=1)
        rest[rows, changed] = np.clip(rest[rows, changed] + step, 0, most)
        rest[rows, other] = 0
        found = best_last(cells, at, other, rest).reshape(len(value), -1)
        best = found.argmin(axis=1) + np.arange(len(value)) * len(moves)
        better = found.min(axis=1) < value - TOLERANCE
        if not better.any():
            break
        value = np.where(better, found.min(axis=1), value)
        counts = np.where(better[:, None], rest[best], counts)
    return value, counts


def best_last(cells: Cells, at: Ints, kind: Ints, rest: Ints) -> Floats:
    """Give one type, whose count is 0 as yet, its best count in `rest`; the whole cost, infinite where none fits.

    The cost is convex in the count, so the best is at a bend of it, rounded down or up.
    """
    speed, segment_max, price = cells.speed[at, kind], cells.segment_max[at, kind], cells.price[at, kind]
    rest_cost = cost_of_counts(rest, cells.segment_max[at], cells.price[at]).sum(axis=1)
    served = (rest * cells.speed[at]).sum(axis=1)
    number = rest.sum(axis=1)
    upper = np.minimum(segment_max.sum(axis=1), cells.most[at] - number)
    bend = np.maximum(cells.home[at] - served, 0.0) / np.where(speed > 0, speed, 1.0)
    few = cells.fewest[at] - number
    options = (
        0 * number,
        np.floor(bend + TOLERANCE),
        np.ceil(bend - TOLERANCE),
        few,
        *np.cumsum(segment_max, axis=1).T,
    )
    best_count, best = np.zeros(len(at), np.int64), np.full(len(at), np.inf)
    for option in options:
        count = np.clip(option, 0, np.maximum(upper, 0)).astype(np.int64)
        short = np.maximum(cells.home[at] - served - count * speed, 0.0)
        value = cost_of_counts(count, segment_max, price) + short * cells.home_price[at]
        value += rest_cost + np.maximum(few - count, 0) * cells.fewest_price[at]
        better = (value < best) & (upper >= 0)
        best_count, best = np.where(better, count, best_count), np.where(better, value, best)
    rest[np.arange(len(at)), kind] = best_count
    return best
