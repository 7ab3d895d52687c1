"""The columns nearest to the best at the best prices: what a good placement is chosen among.

A column's excess is what it costs at the prices above the cheapest of its endpoint. A placement costs the bound, plus
the excesses of its columns, plus what it leaves of the shared rows at their prices: so a good one has small excesses.
"""

from dataclasses import dataclass

import numpy as np

from controlplane.policies.placement.prices_columns import Columns, joined
from controlplane.policies.placement.prices_dual import Dual, ways_at
from controlplane.policies.placement.prices_repair import Standing
from controlplane.policies.placement.prices_tables import Bools, Floats, Ints, Tables


@dataclass(frozen=True, kw_only=True, eq=False)
class Near:
    """Near columns.

    Attributes:
        columns: M of them; those of the standing placement are among them.
        excess: of each column, per hour, [M].
        choice: the column of each endpoint that stands, [E].
        least: what each endpoint costs at least at the prices, [E].
    """

    columns: Columns
    excess: Floats
    choice: Ints
    least: Floats

    def nearest(self, number: int) -> Bools:
        """The columns of least excess, about so many beyond one for each endpoint, [M]."""
        number += len(self.choice)
        if number >= len(self.columns):
            return np.ones(len(self.columns), bool)
        return np.asarray(self.excess <= np.partition(self.excess, number)[number])


def near_columns(
    tables: Tables, dual: Dual, known: Columns, standing: Standing, *, spare: float, each_max: int
) -> Near:
    """Columns with an excess of at most `spare`, at most `each_max` found for each endpoint; and what stands."""
    every = np.arange(len(tables.home))
    ways = ways_at(tables, dual.rows, dual.prices, keep=each_max, spare=np.full(len(every), spare))
    columns = joined(
        tables,
        dual.rows,
        known,
        np.concatenate([ways.endpoint, every]),
        np.concatenate([ways.counts, standing.counts]),
        np.concatenate([ways.pooled, standing.pooled]),
    )
    value = columns.priced(dual.prices)
    excess = value - columns.spread(np.minimum.reduceat(value, columns.first))
    stands = (columns.counts == standing.counts[columns.endpoint]).all(axis=1)
    stands &= columns.pooled == standing.pooled[columns.endpoint]
    kept = stands | (excess <= spare)
    return Near(columns=columns.take(kept), excess=excess[kept], choice=np.flatnonzero(stands[kept]), least=ways.least)
