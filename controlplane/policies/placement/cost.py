"""What a placement costs per hour: the objective of the placement problem (SageServe 5), in plain arithmetic.

    sum price x + starts + prices of what is not served or not held      by model
    + sum alpha P - what starts from donated instances save                 by region and GPU type
    + moves: a `move_price` for each instance started or stopped, pool GPU added or removed, endpoint pooled or not

A start costs `fresh_price`, less where it begins from a donated instance. Each place has `donated_gpus` GPUs of them:
they go to the starts that save most per GPU, those of the donated instance's own model counted apart. An instance may
start from donated GPUs in part, and saves in proportion. A pooled endpoint serves all its own demand and meets its
minimum.
"""

import math
from collections.abc import Mapping, Set

from controlplane.policies.facts import EndpointGpu, PoolKey
from controlplane.policies.placement.grid import Answer, Cell, EndpointRow, Grid, ModelRow, PlaceRow, PoolRow

ROUNDING = 1e-6


def grid_cost(grid: Grid, answer: Answer) -> float:
    """Cost per hour of any placement, also of one that does not fit (`violations_of` lists why), in the unit of
    `gpu_cost_per_hour`.
    """
    by_model = (model_cost(grid, row, answer.counts, answer.pooled) for row in grid.models)
    by_place = (place_cost(grid, row, answer.counts, answer.pool_gpus) for row in grid.places)
    return math.fsum((*by_model, *by_place))


def model_cost(grid: Grid, row: ModelRow, counts: Mapping[EndpointGpu, int], pooled: Set[EndpointGpu]) -> float:
    """A model's share: its endpoints', and what is served nowhere."""
    endpoints = [endpoint_cost(grid, endpoint, counts, pooled) for endpoint in row.endpoints]
    return sum(cost for cost, _ in endpoints) + unserved_cost(row, sum(served for _, served in endpoints))


def unserved_cost(row: ModelRow, served: float) -> float:
    """The price of what a model's instances and pools, at so many tokens/s in all, do not serve."""
    return row.price * max(0.0, row.peak - served)


def endpoint_cost(
    grid: Grid, endpoint: EndpointRow, counts: Mapping[EndpointGpu, int], pooled: Set[EndpointGpu]
) -> tuple[float, float]:
    """An endpoint's share and the tokens/s it serves: its instances, all starts as if fresh, its moves, and what is
    not served at home or not held.
    """
    cost, throughput, instances = 0.0, 0.0, 0
    for cell in endpoint.cells:
        count = counts.get(cell.key, 0)
        started = max(0, count - cell.present)
        throughput += cell.profile.tokens_per_s * count
        instances += count
        cost += cell.price_per_hour * count + cell.fresh_price * started
        cost += grid.move_price * abs(count - cell.present)
    cost += grid.move_price * sum((option.key in pooled) != option.before for option in endpoint.options)
    if any(option.key in pooled for option in endpoint.options):
        return cost, endpoint.busiest
    cost += endpoint.home_price * max(0.0, endpoint.home - throughput)
    cost += endpoint.few_price * max(0, endpoint.fewest - instances)
    return cost, throughput


def place_cost(grid: Grid, row: PlaceRow, counts: Mapping[EndpointGpu, int], pool_gpus: Mapping[PoolKey, int]) -> float:
    """A place's share: its pools, less what its donated instances save in starts."""
    pools = 0.0
    for pool in row.pools:
        gpus = pool_gpus.get(pool.key, 0)
        pools += row.gpu_price * gpus + grid.move_price * abs(gpus - pool.before)
    return pools - donated_saving(row, counts)


def donated_saving(row: PlaceRow, counts: Mapping[EndpointGpu, int]) -> float:
    """The most that starts at a place can save by reclaiming donated instances."""
    left = float(row.donated_gpus)
    saving = 0.0
    if not left:
        return saving
    for per_gpu, gpus in sorted(_donated_offers(row.cells, counts), reverse=True):
        taken = min(left, gpus)
        saving += per_gpu * taken
        left -= taken
    return saving


def _donated_offers(cells: tuple[Cell, ...], counts: Mapping[EndpointGpu, int]) -> list[tuple[float, float]]:
    """(saving per GPU, GPUs) of starts from donated instances of the same model, and from others."""
    offers = []
    for cell in cells:
        gpus = cell.profile.gpus
        started = max(0, counts.get(cell.key, 0) - cell.present)
        same = min(started, cell.donated)
        offers.append(((cell.fresh_price - cell.donated_same_price) / gpus, float(gpus * same)))
        offers.append(((cell.fresh_price - cell.donated_other_price) / gpus, float(gpus * (started - same))))
    return offers


def pool_gpus_needed(grid: Grid, row: PlaceRow, pool: PoolRow, pooled: Set[EndpointGpu]) -> int:
    """Fewest GPUs of a pool that hold its pooled endpoints, in whole slots: by occupancy, and by host memory for
    weights.
    """
    here = [option for option in pool.options if option.key in pooled]
    if not here:
        return 0
    by_share = math.ceil(math.fsum(option.occupancy for option in here) / grid.fill - ROUNDING)
    weights_bytes = sum(option.weights_bytes for option in here)
    by_memory = -(-weights_bytes // row.host_bytes_per_gpu) if weights_bytes else 0
    return -(-max(1, by_share, by_memory) // pool.step) * pool.step


def fleet_cost(grid: Grid, answer: Answer) -> float:
    """Price per hour of the instances and pool GPUs alone: what gaps are relative to."""
    instances = (cell.price_per_hour * answer.counts.get(cell.key, 0) for cell in grid.cells)
    pools = (row.gpu_price * answer.pool_gpus.get(pool.key, 0) for row in grid.places for pool in row.pools)
    return math.fsum((*instances, *pools))


def gap_of(objective: float, bound: float, fleet_cost_per_hour: float) -> float:
    """How far the objective may be above the best possible, as a share of the fleet's cost; of the objective's where
    nothing is placed.
    """
    above = max(0.0, objective - bound)
    reference = fleet_cost_per_hour or abs(objective)
    return above / reference if reference else 0.0


def violations_of(grid: Grid, answer: Answer) -> tuple[str, ...]:
    """The hard constraints that a placement violates: capacity, maximum or replica override, and the size of pools."""
    counts, pooled, pool_gpus = answer.counts, answer.pooled, answer.pool_gpus
    placed = {key for key, count in counts.items() if count}
    found = [f"{key}: instances where none can stand" for key in sorted(placed - {cell.key for cell in grid.cells})]
    found += [f"{key}: cannot be pooled" for key in sorted(pooled - {option.key for option in grid.options})]
    for row in grid.places:
        used = sum(cell.profile.gpus * counts.get(cell.key, 0) for cell in row.cells)
        used += sum(pool_gpus.get(pool.key, 0) for pool in row.pools)
        if used > row.capacity:
            found.append(f"{row.place}: {used} GPUs of {row.capacity}")
        for pool in row.pools:
            found += _violations_of_pool(pool, pool_gpus.get(pool.key, 0), pool_gpus_needed(grid, row, pool, pooled))
    for model in grid.models:
        for endpoint in model.endpoints:
            instances = sum(counts.get(cell.key, 0) for cell in endpoint.cells)
            pools = sum(option.key in pooled for option in endpoint.options)
            if endpoint.most is not None and instances > endpoint.most:
                found.append(f"{endpoint.endpoint}: {instances} instances of {endpoint.most}")
            if pools > 1 or (pools and instances):
                found.append(f"{endpoint.endpoint}: in {pools} pools, and {instances} instances")
    return tuple(found)


def _violations_of_pool(pool: PoolRow, gpus: int, needed: int) -> list[str]:
    found = []
    if gpus < needed:
        found.append(f"{pool.key}: a pool of {gpus} GPUs, its endpoints need {needed}")
    if gpus % pool.step:
        found.append(f"{pool.key}: a pool of {gpus} GPUs, slots have {pool.step}")
    if gpus > pool.most:
        found.append(f"{pool.key}: a pool of {gpus} GPUs of {pool.most}")
    return found
