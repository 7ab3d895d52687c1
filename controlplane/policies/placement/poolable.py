"""Which endpoints a shared GPU pool could serve, the share of a GPU that each takes, and why others
cannot be pooled.

A worker runs each model on all of its GPUs, so a model is pooled on slots whose workers have as many GPUs as it needs:
a place has a pool for each such size.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, NodeFacts, NodeSlot, PoolKey, RegionGpu
from controlplane.policies.fit import ModelSize, fits
from controlplane.policies.placement.facts import PoolFacts
from controlplane.policies.placement.pools import LATENCY_FIELDS, PoolLoad, occupancy_of

_IDLE_SHARE = 1e-4
"""What an endpoint without demand takes of a GPU: only its host memory counts, but nothing is free."""
_REASONS_MAX = 3


@dataclass(frozen=True, kw_only=True)
class PoolProfile:
    """A model on a GPU type. `gpus` of one instance; `latency`: seconds by the names of `LATENCY_FIELDS`, others are
    ignored; None: not known.
    """

    gpus: int
    latency: Mapping[str, float] | None


@dataclass(frozen=True, kw_only=True)
class PoolableFacts:
    """The facts of the fleet that decide what can be pooled.

    Attributes:
        profiles: of every model and GPU type.
        sizes: of the models' weights.
        endpoints: those that may have instances.
        demand: input tokens per second for each window of the coming hour; a missing key means none.
        nodes: those that serve.
        present: GPUs of the slots that hold pooled instances, by pool.
        pooled: endpoints pooled now.
    """

    profiles: Mapping[ModelGpu, PoolProfile]
    sizes: Mapping[str, ModelSize]
    endpoints: frozenset[Endpoint]
    demand: Mapping[Endpoint, tuple[float, ...]]
    nodes: tuple[NodeFacts, ...]
    present: Mapping[PoolKey, int] = field(default_factory=dict)
    pooled: frozenset[EndpointGpu] = frozenset()

    def misfit(self, pair: ModelGpu) -> str | None:
        """Why a model's weights do not fit on every slot of its size with a GPU type, each of which a pool may take."""
        size, gpus = self.sizes.get(pair.model), self.profiles[pair].gpus
        if size is None:
            return None
        slots = (slot for node, slot in self.slots() if node.gpu_type == pair.gpu_type and slot.worker_gpus == gpus)
        if all(fits(size, slot.weights) for slot in slots):
            return None
        return f"the weights do not fit on every slot with {pair.gpu_type}"

    def slots(self) -> Iterator[tuple[NodeFacts, NodeSlot]]:
        """The slots that there are, and those that plans may make."""
        return ((node, slot) for node in self.nodes for slot in node.possible_slots)

    def pool(self, key: EndpointGpu) -> PoolKey:
        """The pool that an endpoint would be in."""
        return key.pool(self.profiles[key.pair].gpus)


@dataclass(frozen=True, kw_only=True)
class PoolableSettings:
    """How pools are planned. `fill`: share of a pool's GPUs that may be taken. The others are of its requests: mean
    prompt and answer in tokens, target for the time between tokens, seconds between two turns of a busy model.
    """

    enabled: bool = True
    fill: float = 0.8
    prompt_tokens: float = 512.0
    output_tokens: float = 256.0
    tbt_s: float = 0.1
    round_s: float = 12.0


@dataclass(frozen=True, kw_only=True)
class PlannedPools:
    """Facts for the placement; None: nothing can be pooled. `left_out`: why models cannot be, by model and GPU type."""

    facts: PoolFacts | None
    left_out: Mapping[ModelGpu, str]
    settings: PoolableSettings

    def record(self) -> dict[str, Any]:
        """As a plan keeps it."""
        left_out = [
            {"model": key.model, "gpu_type": key.gpu_type, "reason": reason}
            for key, reason in sorted(self.left_out.items(), key=lambda item: item[0])
        ]
        return {**asdict(self.settings), "left_out": left_out}

    def summary(self) -> str:
        """In short; empty where nothing was left out."""
        if not self.settings.enabled:
            return "no pools: they are disabled"
        counts = sorted(Counter(self.left_out.values()).items(), key=lambda item: (-item[1], item[0]))
        reasons = [f"{count} x {reason}" for reason, count in counts]
        if not reasons:
            return ""
        more = f" and {len(reasons) - _REASONS_MAX} reasons more" if len(reasons) > _REASONS_MAX else ""
        return f"not poolable: {', '.join(reasons[:_REASONS_MAX])}{more}"


def choose_poolable(facts: PoolableFacts, settings: PoolableSettings) -> PlannedPools:
    """Look at every model and GPU type. With no means for pools at all, endpoints that are pooled now stay unknown to
    the placement, which then gives them instances of their own.
    """
    if not settings.enabled:
        return PlannedPools(facts=None, left_out={}, settings=settings)
    host_bytes, slots = _host_bytes_per_gpu(facts), slot_gpus(facts)
    riders = beside_their_base(facts)
    offered: dict[str, list[Endpoint]] = defaultdict(list)
    for endpoint in sorted(facts.endpoints):
        offered[endpoint.model].append(endpoint)
    occupancy: dict[EndpointGpu, float] = {}
    left_out = why_not_poolable(facts)
    for pair, profile in facts.profiles.items():
        if pair in left_out:
            continue
        for endpoint in offered[pair.model]:
            switches = endpoint not in riders
            share = _share(profile, max(facts.demand.get(endpoint, (0.0,))), settings, switches=switches)
            key = EndpointGpu(model=endpoint.model, region=endpoint.region, gpu_type=pair.gpu_type)
            if share <= settings.fill * slots.get(facts.pool(key), 0):  # any slot there must carry it alone
                occupancy[key] = share
    if not occupancy:
        return PlannedPools(facts=None, left_out=left_out, settings=settings)
    pools = PoolFacts(
        occupancy=occupancy,
        weights_bytes=_pool_weights(facts, riders),
        host_bytes_per_gpu=host_bytes,
        fill=settings.fill,
        worker_gpus={pair: profile.gpus for pair, profile in facts.profiles.items() if profile.gpus > 1},
        slot_gpus={pool: gpus for pool, gpus in slots.items() if gpus > pool.worker_gpus},
        most=_gpus_most(facts, slots),
        present=facts.present,
        pooled=facts.pooled,
    )
    return PlannedPools(facts=pools, left_out=left_out, settings=settings)


def why_not_poolable(facts: PoolableFacts) -> dict[ModelGpu, str]:
    """Why models cannot be pooled on GPU types, whatever their demand; a missing key can."""
    host_bytes, worker_gpus = _host_bytes_per_gpu(facts), _worker_gpus(facts)
    found = {
        pair: _why_not(pair.gpu_type, profile, worker_gpus.get(pair.gpu_type), host_bytes) or facts.misfit(pair)
        for pair, profile in facts.profiles.items()
    }
    return {pair: reason for pair, reason in found.items() if reason is not None}


def _why_not(
    gpu_type: str, profile: PoolProfile, worker_gpus: set[int] | None, host_bytes: Mapping[str, int]
) -> str | None:
    """Why a model cannot be pooled on a GPU type, whatever its demand."""
    if worker_gpus is None:
        return f"no node with {gpu_type} serves"
    if profile.latency is None:
        return f"no latency in the profile on {gpu_type}"
    if gpu_type not in host_bytes:
        return f"some node with {gpu_type} does not tell its host memory"
    if profile.gpus not in worker_gpus:
        sizes = " or ".join(str(gpus) for gpus in sorted(worker_gpus))
        return f"workers on {gpu_type} have {sizes} GPUs, the model takes {profile.gpus}"
    return None


def pool_load(profile: PoolProfile, requests_per_s: float, settings: PoolableSettings) -> PoolLoad:
    """A model whose latency is known, and its requests."""
    assert profile.latency is not None, "the caller asked why not"
    return PoolLoad(
        **{name: profile.latency[name] for name in LATENCY_FIELDS},
        requests_per_s=requests_per_s,
        input_tokens=settings.prompt_tokens,
        output_tokens=settings.output_tokens,
        tbt_s=settings.tbt_s,
        round_s=settings.round_s,
        gpus=profile.gpus,
    )


def beside_their_base(facts: PoolableFacts) -> frozenset[Endpoint]:
    """Endpoints of LoRA adapters that a region offers together with their base, or with an adapter of it that is before
    them by name: that one stands for the weights of the base and for the switches to it.
    """
    found: set[Endpoint] = set()
    first: set[tuple[str, str]] = {(endpoint.model, endpoint.region) for endpoint in facts.endpoints}
    for endpoint in sorted(facts.endpoints):
        size = facts.sizes.get(endpoint.model)
        if size is None or size.adapter is None:
            continue
        family = size.adapter.base, endpoint.region
        if family in first:
            found.add(endpoint)
        first.add(family)
    return frozenset(found)


def _pool_weights(facts: PoolableFacts, riders: frozenset[Endpoint]) -> dict[str, int]:
    """Host memory by model. An adapter has its own alone where it is beside its base in all regions."""
    alone = {endpoint.model for endpoint in facts.endpoints - riders}
    return {
        model: (size.adapter.weights_bytes if size.adapter else 0)
        + (0 if size.adapter and model not in alone else size.weights_bytes)
        for model, size in facts.sizes.items()
    }


def _share(
    profile: PoolProfile, peak_tokens_per_s: float, settings: PoolableSettings, *, switches: bool = True
) -> float:
    """GPUs of a pool that an endpoint takes at its peak, in input tokens per second. `switches`: False where its slot
    has its weights anyway.
    """
    load = pool_load(profile, peak_tokens_per_s / settings.prompt_tokens, settings)
    if not switches:
        load = replace(load, switch_s=0.0)
    return max(_IDLE_SHARE, occupancy_of(load).total)


def _host_bytes_per_gpu(facts: PoolableFacts) -> dict[str, int]:
    """By GPU type, the least that a node has for each of its GPUs; only of types for which every node reports it."""
    shares: dict[str, list[int | None]] = defaultdict(list)
    for node in facts.nodes:
        if gpus := sum(slot.gpus for slot in node.slots):
            shares[node.gpu_type].append(None if node.host_bytes is None else node.host_bytes // gpus)
    known = {gpu_type: [each for each in found if each is not None] for gpu_type, found in shares.items()}
    return {gpu_type: min(found) for gpu_type, found in known.items() if found and len(found) == len(shares[gpu_type])}


def _worker_gpus(facts: PoolableFacts) -> dict[str, set[int]]:
    """GPUs of the workers of each GPU type."""
    sizes: defaultdict[str, set[int]] = defaultdict(set)
    for node, slot in facts.slots():
        sizes[node.gpu_type].add(slot.worker_gpus)
    return sizes


def slot_gpus(facts: PoolableFacts) -> dict[PoolKey, int]:
    """GPUs of the smallest slot that each pool may have."""
    sizes: dict[PoolKey, int] = {}
    for node, slot in facts.slots():
        pool = PoolKey(region=node.region, gpu_type=node.gpu_type, worker_gpus=slot.worker_gpus)
        sizes[pool] = min(slot.gpus, sizes.get(pool, slot.gpus))
    return sizes


def _gpus_most(facts: PoolableFacts, slots: Mapping[PoolKey, int]) -> dict[PoolKey, int]:
    """GPUs of all slots that each pool may have; only of pools that may not have all GPUs of their place."""
    most: Counter[PoolKey] = Counter()
    total: Counter[RegionGpu] = Counter()
    for node in facts.nodes:
        total[node.place] += node.gpus
    for pool in slots:
        most[pool] = sum(node.gpus_for(pool.worker_gpus) for node in facts.nodes if node.place == pool.place)
    return {pool: gpus for pool, gpus in most.items() if gpus < total[pool.place]}
