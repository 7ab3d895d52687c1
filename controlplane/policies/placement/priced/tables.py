"""The placement problem as arrays: what the solver by prices works on. Everything in the grid's order.

Endpoints are rows (model by model, region by region), GPU types columns. What x instances of a cell cost is convex in
x: segments of so many instances at so much each, kept ones first, then starts from own donated instances, then the
rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from controlplane.policies.facts import EndpointGpu, PoolKey
from controlplane.policies.placement.grid import Answer, Cell, Grid

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

SEGMENTS = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolTables:
    """What pools can take: E endpoints, P kinds of pools (a GPU type and a size of workers), J regions. P = 0 without
    pools.

    Attributes:
        gpu_type: of each kind, its number, [P]; in rising order. worker_gpus: of each kind, [P].
        share: GPUs that an endpoint takes, its occupancy over what may be occupied, [E, P]; infinite where it cannot be
            pooled.
        weights: bytes in units of the host memory per GPU of that type, [E, P].
        extra: cost per hour of pooling there, the move, [E, P].
        served: tokens/s it takes off its model's row, [E].
        step: GPUs by which a pool grows, [J, P].
        most: GPUs that it may have, [J, P].
    """

    gpu_type: Ints
    worker_gpus: Ints
    share: Floats
    weights: Floats
    extra: Floats
    served: Floats
    step: Ints
    most: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """E endpoints (I models by J regions), K GPU types, S segments of cost.

    Attributes:
        speed: tokens/s of an instance, [I, K]; 0 = no profile.
        gpus: GPUs of an instance, [I, K].
        segment_max: instances each segment holds, [E, K, S].
        price: per hour of an instance in that segment, moves and start included, [E, K, S]; rising along S.
        most: instances allowed over all types, [E].
        fewest: instances wanted, [E]; `fewest_price` per hour of one that lacks, [E].
        home: tokens/s wanted at home, [E]; `home_price` per token/s that lacks, [E].
        total: tokens/s of a model over all regions, [I]; `total_price` per token/s that lacks, [I].
        capacity: GPUs, [J, K].
        gpu_price: per hour of a GPU, [K].
        constant: cost per hour of an empty fleet: every present instance stopped.
    """

    models: tuple[str, ...]
    regions: tuple[str, ...]
    gpu_types: tuple[str, ...]
    speed: Floats
    gpus: Ints
    segment_max: Ints
    price: Floats
    most: Ints
    fewest: Ints
    fewest_price: Floats
    home: Floats
    home_price: Floats
    total: Floats
    total_price: Floats
    capacity: Ints
    gpu_price: Floats
    constant: float
    pools: PoolTables
    model_of: Ints = field(init=False)
    region_of: Ints = field(init=False)

    def __post_init__(self) -> None:
        """Index the endpoints."""
        models, regions = len(self.models), len(self.regions)
        object.__setattr__(self, "model_of", np.repeat(np.arange(models), regions))
        object.__setattr__(self, "region_of", np.tile(np.arange(regions), models))

    def answer(self, counts: Ints, pooled: Ints, pool_gpus: Ints) -> Answer:
        """A placement by keys, what is 0 left out: instances, [E, K], the kind of pool that each endpoint is in, [E],
        -1 = none, and GPUs of pools, [J, P].
        """
        kinds = self.pools.gpu_type
        return Answer(
            counts={self._cell(e, k): int(counts[e, k]) for e, k in np.argwhere(counts).tolist()},
            pooled=frozenset(self._cell(e, int(kinds[pooled[e]])) for e in np.flatnonzero(pooled >= 0).tolist()),
            pool_gpus={
                PoolKey(
                    region=self.regions[j],
                    gpu_type=self.gpu_types[kinds[p]],
                    worker_gpus=int(self.pools.worker_gpus[p]),
                ): int(pool_gpus[j, p])
                for j, p in np.argwhere(pool_gpus)
            },
        )

    def _cell(self, endpoint: int, gpu_type: int) -> EndpointGpu:
        return EndpointGpu(
            model=self.models[self.model_of[endpoint]],
            region=self.regions[self.region_of[endpoint]],
            gpu_type=self.gpu_types[gpu_type],
        )


def build_tables(grid: Grid) -> Tables:
    """The arrays of a grid that has a model and a region at least."""
    regions = tuple(row.endpoint.region for row in grid.models[0].endpoints)
    gpu_types = tuple(sorted({row.place.gpu_type for row in grid.places}))
    type_at = {name: at for at, name in enumerate(gpu_types)}
    region_at = {name: at for at, name in enumerate(regions)}
    rows = [endpoint for model in grid.models for endpoint in model.endpoints]
    shape = (len(grid.models), len(regions), len(gpu_types))
    speed, gpus = np.zeros((shape[0], shape[2])), np.zeros((shape[0], shape[2]), np.int64)
    capacity, gpu_price = np.zeros(shape[1:], np.int64), np.zeros(shape[2])
    donated_places = {place.place for place in grid.places if place.donated_gpus}
    for place in grid.places:
        at = type_at[place.place.gpu_type]
        capacity[region_at[place.place.region], at] = place.capacity
        gpu_price[at] = place.gpu_price
    segment_max, price = np.zeros((len(rows), shape[2], SEGMENTS), np.int64), np.zeros((len(rows), shape[2], SEGMENTS))
    for number, row in enumerate(rows):
        for cell in row.cells:
            at = type_at[cell.key.gpu_type]
            segment_max[number, at], price[number, at] = _segments(
                cell, grid.move_price, donated_there=cell.place in donated_places
            )
            speed[number // shape[1], at] = cell.profile.tokens_per_s
            gpus[number // shape[1], at] = cell.profile.gpus
    stops = grid.move_price * sum(cell.present for cell in grid.cells)
    unpooled = grid.move_price * sum(option.before for option in grid.options)
    return Tables(
        models=tuple(model.name for model in grid.models),
        regions=regions,
        gpu_types=gpu_types,
        speed=speed,
        gpus=gpus,
        segment_max=segment_max,
        price=price,
        most=np.array([segment_max[n].sum() if row.most is None else row.most for n, row in enumerate(rows)], np.int64),
        fewest=np.array([row.fewest for row in rows], np.int64),
        fewest_price=np.array([row.few_price for row in rows]),
        home=np.array([row.home for row in rows]),
        home_price=np.array([row.home_price for row in rows]),
        total=np.array([model.peak for model in grid.models]),
        total_price=np.array([model.price for model in grid.models]),
        capacity=capacity,
        gpu_price=gpu_price,
        constant=stops + unpooled,
        pools=_pools(grid, type_at, region_at),
    )


def _segments(
    cell: Cell, move_price: float, *, donated_there: bool
) -> tuple[tuple[int, int, int], tuple[float, float, float]]:
    """Kept, started from own donated ones, started otherwise: as if there were donated GPUs enough for all that save by
    them.
    """
    kept = min(cell.present, cell.most)
    own = min(cell.donated, cell.most - kept)
    start = cell.price_per_hour + move_price
    return (kept, own, cell.most - kept - own), (
        cell.price_per_hour - move_price,
        start + cell.donated_same_price,
        start + (cell.donated_other_price if donated_there else cell.fresh_price),
    )


def _pools(grid: Grid, type_at: Mapping[str, int], region_at: Mapping[str, int]) -> PoolTables:
    size = len(grid.models) * len(region_at)
    kinds = sorted({(type_at[option.key.gpu_type], option.pool.worker_gpus) for option in grid.options})
    kind_at = {kind: at for at, kind in enumerate(kinds)}
    share = np.full((size, len(kinds)), np.inf)
    weights, extra = np.zeros(share.shape), np.zeros(share.shape)
    host = {row.place: row.host_bytes_per_gpu for row in grid.places}
    step = np.ones((len(region_at), len(kinds)), np.int64)
    most = np.zeros(step.shape, np.int64)
    for row in (pool for place in grid.places for pool in place.pools if pool.options):
        at = region_at[row.key.region], kind_at[type_at[row.key.gpu_type], row.key.worker_gpus]
        step[at], most[at] = row.step, row.most
    endpoints = [endpoint for model in grid.models for endpoint in model.endpoints]
    for number, endpoint in enumerate(endpoints):
        for option in endpoint.options:
            kind = kind_at[type_at[option.key.gpu_type], option.pool.worker_gpus]
            brings = host[option.key.place]
            if option.weights_bytes and not brings:
                continue
            share[number, kind] = option.occupancy / grid.fill
            weights[number, kind] = option.weights_bytes / brings if brings else 0.0
            extra[number, kind] = -grid.move_price if option.before else grid.move_price
    return PoolTables(
        gpu_type=np.array([gpu_type for gpu_type, _ in kinds], np.int64),
        worker_gpus=np.array([gpus for _, gpus in kinds], np.int64),
        share=share,
        weights=weights,
        extra=extra,
        served=np.array([endpoint.busiest for endpoint in endpoints]),
        step=step,
        most=most,
    )
