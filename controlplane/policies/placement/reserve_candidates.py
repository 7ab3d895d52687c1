"""Which endpoints a shared reserve can hold, on which GPU type, and why others keep quantile and minimum of their own.

The node keeps one copy of each model's weights for all its slots, so the models of a reserve must fit in the host
memory of any one node together. Where they do not, those that save most GPUs for their bytes are held. Reserves on a
GPU type have slots of one size: that of the models that take most GPUs there. Where they all fit in the memory of each
slot together, too, they stay there, and a slot changes its model without any transfer.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, PoolKey, RegionGpu
from controlplane.policies.fit import needed_bytes
from controlplane.policies.placement.decision import Placement
from controlplane.policies.placement.error_correlation import PeakErrors
from controlplane.policies.placement.facts import PlacementFacts
from controlplane.policies.placement.poolable import (
    PoolableFacts,
    PoolableSettings,
    pool_load,
    slot_gpus,
    why_not_poolable,
)
from controlplane.policies.placement.reserve_facts import ReserveEndpoint, ReserveFacts, ReservePlace


@dataclass(frozen=True, kw_only=True)
class CandidateFacts:
    """The fleet and the coming hour. `placement`: with the upper forecasts, and `placed`, its answer. `poolable`: the
    same fleet as pools see it. `medians`: of the demand, by window. `errors`: of past forecasts.
    """

    placement: PlacementFacts
    placed: Placement
    poolable: PoolableFacts
    medians: Mapping[Endpoint, tuple[float, ...]]
    errors: PeakErrors = field(default_factory=dict)


def reserve_facts(facts: CandidateFacts, settings: PoolableSettings) -> ReserveFacts:
    """The endpoints that reserves can hold, each on the GPU type on which it costs least, and the capacity that pools
    and the other endpoints leave them. Those that are pooled need none.
    """
    placed = facts.placement
    pooled = {one.endpoint for one in facts.placed.pooled}
    why_not, slots = why_not_poolable(facts.poolable), slot_gpus(facts.poolable)
    found: list[ReserveEndpoint] = []
    left_out: dict[Endpoint, str] = {}
    pairs = _cheapest_first(placed)
    for endpoint in sorted(facts.poolable.endpoints - pooled):
        keys = list(_priced(placed, endpoint, pairs[endpoint.model]))
        if not keys:
            continue
        open_keys = [key for key in keys if key.pair not in why_not and facts.poolable.pool(key) in slots]
        if endpoint in placed.overrides:
            left_out[endpoint] = "an override says how many instances it has"
        elif not open_keys:
            left_out[endpoint] = why_not.get(keys[0].pair, f"no node with {keys[0].gpu_type} serves")
        else:
            found.append(_candidate(facts, open_keys[0], settings))
    sizes = _sizes(found)
    of_size = [one for one in found if one.gpus == sizes[one.key.gpu_type]]
    held = list(_that_fit(of_size, facts))
    fitting = {one.key for one in held}
    for one in found:
        if one.gpus != sizes[one.key.gpu_type]:
            left_out[one.key.endpoint] = f"reserves have workers of {sizes[one.key.gpu_type]} GPUs, it takes {one.gpus}"
        elif one.key not in fitting:
            left_out[one.key.endpoint] = "the host memory of a node does not hold it with the others of the reserve"
    taken = _taken(facts, {one.key.endpoint for one in held})
    pools = {one.key.place: one.key.pool(one.gpus) for one in held}
    places = {
        place: ReservePlace(
            slot_gpus=slots[pool],
            free_gpus=max(0, placed.capacity.get(place, 0) - taken[place]),
            worker_gpus=pool.worker_gpus,
            most_gpus=_most(facts, pool),
            present_gpus=max(0, facts.poolable.present.get(pool, 0) - _pooled_gpus(facts, pool)),
        )
        for place, pool in pools.items()
    }
    resident = {place for place, pool in pools.items() if _stay_in_memory(pool, held, facts)}
    endpoints = tuple(
        replace(one, load=replace(one.load, switch_s=0.0)) if one.key.place in resident else one for one in held
    )
    return ReserveFacts(endpoints=endpoints, places=places, left_out=left_out, errors=facts.errors)


def _stay_in_memory(pool: PoolKey, held: Iterable[ReserveEndpoint], facts: CandidateFacts) -> bool:
    """Whether all models of a pool are known to fit together in the memory for weights of each of its slots."""
    poolable = facts.poolable
    here = {one.key.model for one in held if one.key.place == pool.place}
    here |= {one.endpoint.model for one in facts.placed.pooled if one.key.place == pool.place}
    memories = {
        slot.weights
        for node, slot in poolable.slots()
        if node.place == pool.place and slot.worker_gpus == pool.worker_gpus
    }
    for memory in memories:
        needed = [None if (size := poolable.sizes.get(model)) is None else needed_bytes(size, memory) for model in here]
        if memory.weights_bytes is None or sum(each or 0 for each in needed) > memory.weights_bytes or None in needed:
            return False
    return bool(memories)


def _sizes(found: Iterable[ReserveEndpoint]) -> dict[str, int]:
    """The GPUs of a worker in the reserves of each GPU type."""
    taken: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for one in found:
        taken[one.key.gpu_type][one.gpus] += one.gpus * one.alone
    return {gpu_type: max(gpus, key=lambda size: (gpus[size], -size)) for gpu_type, gpus in taken.items()}


def _most(facts: CandidateFacts, pool: PoolKey) -> int:
    """GPUs that slots of a reserve's size have, or could have, beside the pool."""
    nodes = [node for node in facts.poolable.nodes if node.place == pool.place]
    return max(0, sum(node.gpus_for(pool.worker_gpus) for node in nodes) - _pooled_gpus(facts, pool))


def _pooled_gpus(facts: CandidateFacts, pool: PoolKey) -> int:
    """GPUs that the placement gives to a pool."""
    return sum(each.after for each in facts.placed.pools if each.key == pool)


def _cheapest_first(facts: PlacementFacts) -> Mapping[str, list[ModelGpu]]:
    """The GPU types of each model, by what a token/s costs there."""
    pairs: dict[str, list[ModelGpu]] = defaultdict(list)
    for pair in facts.profiles:
        pairs[pair.model].append(pair)

    def price(pair: ModelGpu) -> tuple[float, ModelGpu]:
        profile = facts.profiles[pair]
        return facts.gpu_cost_per_hour[pair.gpu_type] * profile.gpus / profile.tokens_per_s, pair

    for found in pairs.values():
        found.sort(key=price)
    return pairs


def _priced(facts: PlacementFacts, endpoint: Endpoint, pairs: Iterable[ModelGpu]) -> Iterable[EndpointGpu]:
    """Where an endpoint can be placed."""
    for pair in pairs:
        key = EndpointGpu(model=endpoint.model, region=endpoint.region, gpu_type=pair.gpu_type)
        if facts.capacity.get(key.place, 0) and key not in facts.unfit:
            yield key


def _candidate(facts: CandidateFacts, key: EndpointGpu, settings: PoolableSettings) -> ReserveEndpoint:
    endpoint, profile = key.endpoint, facts.placement.profiles[key.pair]
    fewest, most = facts.placement.limits_of(endpoint)
    upper = facts.placement.peak_of(endpoint)
    median = max(facts.medians.get(endpoint, (upper,)))
    return ReserveEndpoint(
        key=key,
        median=min(median, upper),
        upper=upper,
        tokens_per_s=profile.tokens_per_s,
        gpus=profile.gpus,
        load=pool_load(facts.poolable.profiles[key.pair], 0.0, settings),
        fewest=fewest,
        most=1_000_000 if most is None else most,
    )


def _taken(facts: CandidateFacts, held: Set[Endpoint]) -> Counter[RegionGpu]:
    """GPUs of pools, and of endpoints that reserves do not hold."""
    taken: Counter[RegionGpu] = Counter()
    for pool in facts.placed.pools:
        taken[pool.place] += pool.after
    for entry in facts.placed.entries:
        if entry.endpoint not in held:
            taken[entry.key.place] += entry.after * facts.placement.profiles[entry.key.pair].gpus
    return taken


def _that_fit(found: Iterable[ReserveEndpoint], given: CandidateFacts) -> Iterable[ReserveEndpoint]:
    """Those whose weights fit, together and with those of pooled models, in every node's host memory; the most worth
    keeping first.
    """
    facts = given.poolable
    host_bytes: dict[RegionGpu, int] = {}
    for node in facts.nodes:
        if node.host_bytes is not None:
            host_bytes[node.place] = min(node.host_bytes, host_bytes.get(node.place, node.host_bytes))
    used: Counter[RegionGpu] = Counter()
    for pooled in given.placed.pooled:
        used[pooled.key.place] += _weights(pooled.endpoint.model, facts)

    def worth(one: ReserveEndpoint) -> tuple[float, EndpointGpu]:
        spared = one.gpus * (one.alone - one.median / one.tokens_per_s)
        return -spared / max(1, _weights(one.key.model, facts)), one.key

    for one in sorted(found, key=worth):
        place, weights = one.key.place, _weights(one.key.model, facts)
        if used[place] + weights <= host_bytes[place]:
            used[place] += weights
            yield one


def _weights(model: str, facts: PoolableFacts) -> int:
    size = facts.sizes.get(model)
    return 0 if size is None else size.weights_bytes
