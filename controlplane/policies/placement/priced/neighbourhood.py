"""The columns nearest to the best at the best prices: what a good placement is chosen among.

A column's excess is what it costs at the prices above the cheapest of its endpoint. A placement costs the bound, plus
the excesses of its columns, plus what it leaves of the shared rows at their prices: so a good one has small excesses.
"""

from dataclasses import dataclass

import numpy as np

from controlplane.policies.placement.priced.columns import Columns, Configurations, make_columns, served_by
from controlplane.policies.placement.priced.dual import Dual, configurations_at
from controlplane.policies.placement.priced.relax import TOLERANCE
from controlplane.policies.placement.priced.tables import Bools, Floats, Ints, Tables

MORE = np.array([1, 2, 4, 8])
"""Instances that an endpoint which lacks some may get in one choice."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Neighbourhood:
    """Columns near the incumbent.

    Attributes:
        columns: M of them; those of the incumbent placement are among them.
        excess: of each column, per hour, [M].
        choice: the incumbent's column of each endpoint, [E].
        complete: every configuration with less excess is among the columns, [E].
    """

    columns: Columns
    excess: Floats
    choice: Ints
    complete: Floats

    def nearest(self, number: int) -> Bools:
        """The columns of least excess, about so many beyond one for each endpoint, [M]."""
        number += len(self.choice)
        if number >= len(self.columns):
            return np.ones(len(self.columns), bool)
        return np.asarray(self.excess <= np.partition(self.excess, number)[number])


def neighbourhood_columns(
    tables: Tables, dual: Dual, incumbent: Configurations, *, spare: float, each_max: int
) -> Neighbourhood:
    """Columns with an excess of at most `spare`, at most `each_max` found for each endpoint; the incumbent; and what
    would serve more where too little is served.
    """
    configurations = configurations_at(tables, dual.rows, dual.prices, keep=each_max, spare=spare)
    complete = np.minimum(np.maximum(configurations.known - configurations.least, 0.0), spare)
    return neighbourhood_of(tables, dual, incumbent, complete, spare, dual.columns, configurations)


def neighbourhood_of(
    tables: Tables, dual: Dual, incumbent: Configurations, complete: Floats, spare: float, *known: Configurations
) -> Neighbourhood:
    """Those of the known that are near, the incumbent's, and what would serve more where too little is served."""
    serving_more = _serving_more(tables, incumbent)
    columns = make_columns(tables, dual.rows, *known, serving_more, incumbent)
    value = columns.priced(dual.prices)
    excess = value - columns.spread(np.minimum.reduceat(value, columns.first))
    now = incumbent.counts[columns.endpoint]
    stands = (columns.counts == now).all(axis=1) & (columns.pooled == incumbent.pooled[columns.endpoint])
    more = np.isin(columns.endpoint, serving_more.endpoint) & (columns.counts >= now).all(axis=1)
    kept = np.flatnonzero(stands | more | (excess <= spare))
    columns = make_columns(tables, dual.rows, columns.at(kept))
    return Neighbourhood(columns=columns, excess=excess[kept], choice=np.flatnonzero(stands[kept]), complete=complete)


def _serving_more(tables: Tables, incumbent: Configurations) -> Configurations:
    """Some instances more of one GPU type, for each endpoint that serves too little, or whose model does; others may
    make room.
    """
    types, served = tables.capacity.shape[1], served_by(tables, incumbent)
    lacks = np.bincount(tables.model_of, weights=served) < tables.total * (1 - TOLERANCE)
    short = lacks[tables.model_of] | (served < tables.home * (1 - TOLERANCE))
    at = np.flatnonzero(short & (incumbent.pooled < 0))
    endpoint, kind, step = (each.ravel() for each in np.meshgrid(at, np.arange(types), MORE, indexing="ij"))
    more = incumbent.at(endpoint)
    more.counts[np.arange(len(endpoint)), kind] += step
    fits = (more.counts <= tables.segment_max[endpoint].sum(axis=2)).all(axis=1)
    return more.at(fits & (more.counts.sum(axis=1) <= tables.most[endpoint]))
