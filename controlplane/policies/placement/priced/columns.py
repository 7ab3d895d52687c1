"""Configurations of endpoints, and columns: configurations with what they cost and take of what endpoints share.

Shared are the rows: GPUs of a place (J x K), host memory for the weights of a pool (J x P), and the demand of a model
over all regions (I). A pooled endpoint takes its occupancy over the fill in GPUs, as if pools came in parts of a GPU
and might have all GPUs of their place; the host row holds what its weights take beyond that. So every price of the rows
gives a lower bound.
"""

from dataclasses import dataclass, field

import numpy as np
from scipy import sparse

from controlplane.policies.placement.priced.relax import cost_of_counts
from controlplane.policies.placement.priced.tables import Floats, Ints, Tables


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The shared rows: use <= `limit`, price between 0 and `price_most`; `scale`: tokens/s per unit of demand, [I].
    `places`, `pools`: rows of GPUs, and of host memory; `gpu_price` per hour of a GPU in each of them, [JK + JP].
    """

    limit: Floats
    price_most: Floats
    gpu_price: Floats
    scale: Floats
    places: int
    pools: int

    @property
    def models(self) -> int:
        """The first row of demand."""
        return self.places + self.pools

    def of_places(self, prices: Floats) -> tuple[Floats, Floats, Floats]:
        """Prices of a GPU [JK], of host memory [JP], and of a token/s of each model [I]."""
        gpu, host, token = np.split(prices, [self.places, self.models])
        return gpu, host, token / self.scale


def rows_of(tables: Tables) -> Rows:
    """The shared rows of these tables. Demand rows are divided by the model's best throughput."""
    scale = np.where(tables.total_price > 0, tables.speed.max(axis=1), 1.0)
    scale = np.where(scale > 0, scale, 1.0)
    places = tables.capacity.size
    gpu, host = (
        np.tile(price, len(tables.regions)) for price in (tables.gpu_price, tables.gpu_price[tables.pools.gpu_type])
    )
    return Rows(
        limit=np.concatenate([tables.capacity.ravel().astype(float), 0.0 * host, -tables.total / scale]),
        price_most=np.concatenate([np.full(places, np.inf), host, tables.total_price * scale]),
        gpu_price=np.concatenate([gpu, host]),
        scale=scale,
        places=places,
        pools=len(host),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Configurations:
    """M configurations; a placement has one of each endpoint, in order.

    Attributes:
        endpoint: whose it is, [M].
        counts: instances, [M, K]; all zero where pooled.
        pooled: kind of the pool, -1 = none, [M].
    """

    endpoint: Ints
    counts: Ints
    pooled: Ints

    def at(self, chosen: Ints) -> "Configurations":
        """Some of them, by their numbers."""
        return Configurations(endpoint=self.endpoint[chosen], counts=self.counts[chosen], pooled=self.pooled[chosen])


@dataclass(frozen=True, kw_only=True, eq=False)
class Columns(Configurations):
    """M configurations, ordered by endpoint, none twice.

    Attributes:
        cost: per hour, prices of what lacks at home included, [M].
        use: of the shared rows by each column, [M, rows].
        first: the first column of each endpoint that has any.
    """

    cost: Floats
    use: sparse.csr_matrix
    first: Ints = field(init=False)

    def __post_init__(self) -> None:
        """Index the endpoints."""
        object.__setattr__(self, "first", np.flatnonzero(np.diff(self.endpoint, prepend=-1)))

    def __len__(self) -> int:
        """Number of columns."""
        return len(self.endpoint)

    def spread(self, by_endpoint: Floats) -> Floats:
        """A number of each endpoint that has columns, for each of its columns, [M]."""
        return np.repeat(by_endpoint, np.diff(self.first, append=len(self.endpoint)))

    def priced(self, prices: Floats) -> Floats:
        """Cost at these prices, [M]."""
        return np.asarray(self.cost + self.use @ prices)


def served_by(tables: Tables, configurations: Configurations) -> Floats:
    """Tokens/s that configurations take off their models' rows, [M]."""
    endpoint, counts = configurations.endpoint, configurations.counts
    served = (counts * tables.speed[tables.model_of[endpoint]]).sum(axis=1)
    return np.where(configurations.pooled >= 0, tables.pools.served[endpoint], served)


def make_columns(tables: Tables, rows: Rows, *parts: Configurations) -> Columns:
    """Columns of all these configurations, doubles left out."""
    tall = [np.column_stack([part.endpoint, part.pooled, part.counts]).astype(np.int32) for part in parts]
    distinct = np.unique(np.concatenate(tall), axis=0).astype(np.int64)
    endpoint, pooled, counts = distinct[:, 0], distinct[:, 1], distinct[:, 2:]
    size, types = len(endpoint), tables.capacity.shape[1]
    model, region = tables.model_of[endpoint], tables.region_of[endpoint]
    served = served_by(tables, Configurations(endpoint=endpoint, counts=counts, pooled=pooled))
    at, kind = np.nonzero(counts)
    of, many = endpoint[at], counts[at, kind]
    cost, alone = np.zeros(size), pooled < 0
    np.add.at(cost, at, cost_of_counts(many, tables.segment_max[of, kind], tables.price[of, kind]))
    cost += alone * np.maximum(tables.home[endpoint] - served, 0.0) * tables.home_price[endpoint]
    cost += alone * np.maximum(tables.fewest[endpoint] - counts.sum(axis=1), 0) * tables.fewest_price[endpoint]
    uses = [(region[at] * types + kind, at, (many * tables.gpus[model[at], kind]).astype(float))]
    at = np.flatnonzero(~alone)
    kind, of = pooled[at], endpoint[at]
    gpu_type, share = tables.pools.gpu_type[kind], tables.pools.share[of, kind]
    host = rows.places + region[at] * len(tables.pools.gpu_type) + kind
    uses += [(region[at] * types + gpu_type, at, share), (host, at, tables.pools.weights[of, kind] - share)]
    cost[at] += tables.pools.extra[of, kind] + tables.gpu_price[gpu_type] * share
    uses.append((rows.models + model, np.arange(size), -served / rows.scale[model]))
    row, number, amount = (np.concatenate(each) for each in zip(*uses, strict=True))
    use = sparse.csr_matrix((amount, (number, row)), shape=(size, len(rows.limit)))
    use.eliminate_zeros()
    return Columns(endpoint=endpoint, counts=counts, pooled=pooled, cost=cost, use=use)
