"""The facts as the placement problem sees them: cells that can have instances, rows of demand and limits, and prices.

The exact program, the decomposition, the cost function and the reasons all read this, so they mean the same problem.
Everything is in sorted order: the same facts give the same grid, in whatever order they came.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, PoolKey, RegionGpu
from controlplane.policies.placement.facts import PlacementFacts, PlacementModel, PlacementSettings, PoolFacts, Profile

LEAST_SHARE = 1 / 50
"""A demand row that is not served at all costs at least this times its tier's ratio in dearest instances: else a model
of the long tail, with less demand than a thousandth of an instance, would be cheaper to drop than to serve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A model, region and GPU type that can have instances, and what one costs, in the unit of `gpu_cost_per_hour`.

    Attributes:
        fresh_price: of starting one on free GPUs. `donated_same_price` and `donated_other_price`: from a donated
            instance of the same or of another model; never dearer than fresh.
        donated: donated instances of this model here.
        most: what limit, replica override and capacity allow.
    """

    key: EndpointGpu
    profile: Profile
    price_per_hour: float
    fresh_price: float
    donated_same_price: float
    donated_other_price: float
    present: int
    donated: int
    most: int

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint it belongs to."""
        return self.key.endpoint

    @property
    def place(self) -> RegionGpu:
        """Whose capacity it takes."""
        return self.key.place


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolOption:
    """An endpoint that could be pooled on a GPU type, in the pool of its size. `before`: it is now."""

    key: EndpointGpu
    pool: PoolKey
    occupancy: float
    weights_bytes: int
    before: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointRow:
    """What one endpoint asks for.

    Attributes:
        home: input tokens/s that its region must serve, epsilon x its peak, and `home_price` of one not served.
        busiest: its demand in the model's busiest window: what it takes off the model's row when it is pooled.
        fewest: its minimum or its replica override, and `few_price` of an instance that lacks. `most`: None = no limit.
    """

    endpoint: Endpoint
    home: float
    home_price: float
    busiest: float
    fewest: int
    most: int | None
    few_price: float
    cells: tuple[Cell, ...]
    options: tuple[PoolOption, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRow:
    """What one model asks for over all regions: `peak` input tokens/s, and `price` of one not served anywhere."""

    name: str
    peak: float
    price: float
    endpoints: tuple[EndpointRow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRow:
    """A pool. `before`: its GPUs now. `step`: those of a slot, of which it takes whole ones. `most`: of all slots that
    it may have.
    """

    key: PoolKey
    before: int
    step: int
    most: int
    options: tuple[PoolOption, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceRow:
    """A GPU type in a region. `donated_gpus`: held by donated instances. `pools`: one for each size of workers that any
    endpoint needs or that a pool has now.
    """

    place: RegionGpu
    capacity: int
    gpu_price: float
    donated_gpus: int
    host_bytes_per_gpu: int
    cells: tuple[Cell, ...]
    pools: tuple[PoolRow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The whole problem. `move_price`: of one start or stop. `fill`: share of pool GPUs that may be occupied."""

    models: tuple[ModelRow, ...]
    places: tuple[PlaceRow, ...]
    cells: tuple[Cell, ...]
    options: tuple[PoolOption, ...]
    move_price: float
    fill: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Instances of every cell, endpoints pooled, and GPUs of every pool. What is 0 may be missing."""

    counts: Mapping[EndpointGpu, int]
    pooled: frozenset[EndpointGpu] = frozenset()
    pool_gpus: Mapping[PoolKey, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Prices:
    """`token`: dearest price of a token per second served. `instance`: of an instance, its start included."""

    token: float
    instance: float
    move: float
    override_per_gpu: float


def grid_of(facts: PlacementFacts, settings: PlacementSettings) -> Grid:
    """Lay the facts out."""
    models = sorted(facts.models)
    cells = {model.name: tuple(_cells(facts, model)) for model in models}
    prices = _prices(facts, settings, [cell for model in models for cell in cells[model.name]])
    rows = tuple(_model_row(facts, settings, prices, model, cells[model.name]) for model in models)
    all_cells = tuple(cell for row in rows for endpoint in row.endpoints for cell in endpoint.cells)
    options = tuple(option for row in rows for endpoint in row.endpoints for option in endpoint.options)
    return Grid(
        models=rows,
        places=_places(facts, all_cells, options),
        cells=all_cells,
        options=options,
        move_price=prices.move,
        fill=facts.pool.fill if facts.pool is not None else 1.0,
    )


def _cells(facts: PlacementFacts, model: PlacementModel) -> Iterable[Cell]:
    endpoints = [Endpoint(model=model.name, region=region) for region in sorted(facts.regions)]
    wanted = facts.global_peak_of(model.name) > 0 or any(facts.limits_of(endpoint)[0] for endpoint in endpoints)
    offered = ((gpu, ModelGpu(model=model.name, gpu_type=gpu)) for gpu in sorted(facts.gpu_cost_per_hour))
    profiles = {gpu_type: facts.profiles[pair] for gpu_type, pair in offered if pair in facts.profiles}
    for endpoint in endpoints:
        most = facts.limits_of(endpoint)[1]
        for gpu_type, profile in profiles.items():
            key = EndpointGpu(model=model.name, region=endpoint.region, gpu_type=gpu_type)
            fits = facts.capacity.get(RegionGpu(region=endpoint.region, gpu_type=gpu_type), 0) // profile.gpus
            fits = 0 if key in facts.unfit else fits if most is None else min(fits, most)
            if facts.present.get(key, 0) or (wanted and fits):
                yield _cell(facts, key, profile, fits, near=endpoint in facts.weights_present)


def _cell(facts: PlacementFacts, key: EndpointGpu, profile: Profile, most: int, *, near: bool) -> Cell:
    price_per_hour = profile.gpus * facts.gpu_cost_per_hour[key.gpu_type]
    fresh_s = profile.start.local_s if near else profile.start.remote_s
    other_s = min(fresh_s, profile.start.donated_other_s if near else profile.start.remote_s)
    return Cell(
        key=key,
        profile=profile,
        price_per_hour=price_per_hour,
        fresh_price=price_per_hour * fresh_s / 3600.0,
        donated_same_price=price_per_hour * min(other_s, profile.start.donated_same_s) / 3600.0,
        donated_other_price=price_per_hour * other_s / 3600.0,
        present=facts.present.get(key, 0),
        donated=facts.donated.get(key, 0),
        most=most,
    )


def _prices(facts: PlacementFacts, settings: PlacementSettings, cells: list[Cell]) -> _Prices:
    tiers = {model.name: settings.unserved_ratios[model.tier] for model in facts.models}
    whole = [cell.price_per_hour + cell.fresh_price for cell in cells]
    token = max((price / cell.profile.tokens_per_s for price, cell in zip(whole, cells, strict=True)), default=0) or 1.0
    worth = [tiers[cell.key.model] * token * cell.profile.tokens_per_s / cell.profile.gpus for cell in cells]
    return _Prices(
        token=token,
        instance=max(whole, default=0) or 1.0,
        move=settings.move_ratio * min((cell.price_per_hour for cell in cells if cell.price_per_hour), default=1.0),
        override_per_gpu=settings.override_ratio * max(worth, default=1.0),
    )


def _model_row(
    facts: PlacementFacts, settings: PlacementSettings, prices: _Prices, model: PlacementModel, cells: tuple[Cell, ...]
) -> ModelRow:
    ratio = settings.unserved_ratios[model.tier]
    here: dict[str, list[Cell]] = {}
    for cell in cells:
        here.setdefault(cell.key.region, []).append(cell)

    def price(wanted: float) -> float:
        whole_row = ratio * LEAST_SHARE * prices.instance
        return max(ratio * prices.token, whole_row / wanted if wanted > 0 else 0.0)

    window, peak = facts.busiest_window_of(model.name), facts.global_peak_of(model.name)
    gpus_most = max((cell.profile.gpus for cell in cells), default=1)
    rows = []
    for region in sorted(facts.regions):
        endpoint = Endpoint(model=model.name, region=region)
        fewest, most = facts.limits_of(endpoint)
        home = settings.epsilon * facts.peak_of(endpoint)
        overridden = endpoint in facts.overrides
        rows.append(
            EndpointRow(
                endpoint=endpoint,
                home=home,
                home_price=price(home) / 2,
                busiest=facts.demand_of(endpoint)[window],
                fewest=fewest,
                most=most,
                few_price=prices.override_per_gpu * gpus_most
                if overridden
                else settings.minimum_ratio * prices.instance,
                cells=tuple(here.get(region, ())),
                options=() if overridden or most == 0 else tuple(_options(facts, endpoint)),
            )
        )
    return ModelRow(name=model.name, peak=peak, price=price(peak), endpoints=tuple(rows))


def _options(facts: PlacementFacts, endpoint: Endpoint) -> Iterable[PoolOption]:
    """Where the endpoint could be pooled: if all slots of that type, as a pool, could hold it."""
    if facts.pool is None:
        return
    for gpu_type in sorted(facts.gpu_cost_per_hour):
        key = EndpointGpu(model=endpoint.model, region=endpoint.region, gpu_type=gpu_type)
        occupancy = facts.pool.occupancy.get(key)
        if occupancy is None:
            continue
        pool = facts.pool.pool(key)
        most = _pool_most(facts, pool)
        host_bytes = facts.pool.host_bytes_per_gpu.get(gpu_type, 0) * most
        weights_bytes = facts.pool.weights_bytes[endpoint.model]
        if occupancy <= facts.pool.fill * most and weights_bytes <= host_bytes:
            before = key in facts.pool.pooled
            yield PoolOption(key=key, pool=pool, occupancy=occupancy, weights_bytes=weights_bytes, before=before)


def _pool_step(facts: PoolFacts, pool: PoolKey) -> int:
    return facts.slot_gpus.get(pool, pool.worker_gpus)


def _pool_most(facts: PlacementFacts, pool: PoolKey) -> int:
    """GPUs of all slots that a pool may have."""
    assert facts.pool is not None, "the caller asked"
    capacity = facts.capacity.get(pool.place, 0)
    most = min(capacity, facts.pool.most.get(pool, capacity))
    return most - most % _pool_step(facts.pool, pool)


def _places(facts: PlacementFacts, cells: Iterable[Cell], options: Iterable[PoolOption]) -> tuple[PlaceRow, ...]:
    cells_at: dict[RegionGpu, list[Cell]] = {}
    donated_gpus: dict[RegionGpu, int] = {}
    for cell in cells:
        cells_at.setdefault(cell.place, []).append(cell)
    for key, count in facts.donated.items():
        place = key.place
        gpus = facts.profiles[key.pair].gpus if count else 0
        donated_gpus[place] = donated_gpus.get(place, 0) + gpus * count
    pools = _pool_rows(facts, options)
    host_bytes: Mapping[str, int] = facts.pool.host_bytes_per_gpu if facts.pool is not None else {}
    return tuple(
        PlaceRow(
            place=place,
            capacity=facts.capacity.get(place, 0),
            gpu_price=facts.gpu_cost_per_hour[place.gpu_type],
            donated_gpus=donated_gpus.get(place, 0),
            host_bytes_per_gpu=host_bytes.get(place.gpu_type, 0),
            cells=tuple(cells_at.get(place, ())),
            pools=tuple(pools.get(place, ())),
        )
        for place in sorted({*facts.capacity, *cells_at, *pools})
    )


def _pool_rows(facts: PlacementFacts, options: Iterable[PoolOption]) -> dict[RegionGpu, list[PoolRow]]:
    rows: dict[RegionGpu, list[PoolRow]] = {}
    if facts.pool is None:
        return rows
    options_of: dict[PoolKey, list[PoolOption]] = {}
    for option in options:
        options_of.setdefault(option.pool, []).append(option)
    for key in sorted({*options_of, *facts.pool.present}):
        row = PoolRow(
            key=key,
            before=facts.pool.present.get(key, 0),
            step=_pool_step(facts.pool, key),
            most=_pool_most(facts, key),
            options=tuple(options_of.get(key, ())),
        )
        rows.setdefault(key.place, []).append(row)
    return rows
