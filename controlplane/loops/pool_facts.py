"""What a plan is told of pools: which endpoints a shared GPU could serve, how much of it each takes, and why others
cannot be pooled.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, RegionGpu
from controlplane.policies.placement.facts import PoolFacts
from controlplane.policies.placement.pools import LATENCY_FIELDS, PoolLoad, occupancy_of
from controlplane.settings import Settings
from controlplane.store.fleet import Census
from controlplane.store.tables import Desired, Instance, Json, Node, Profile, Slot

_IDLE_SHARE = 1e-4
"""What an endpoint without demand takes of a GPU: only its host memory counts, but nothing is free."""
_TOLD_MAX = 3


@dataclass(frozen=True, kw_only=True)
class PlannedPools:
    """Facts for the placement; None: nothing can be pooled. `left_out`: why models cannot be, by model and GPU type."""

    facts: PoolFacts | None
    left_out: Mapping[ModelGpu, str]
    enabled: bool = True

    def record(self) -> Json:
        """As a plan keeps it."""
        left_out = [
            {"model": key.model, "gpu_type": key.gpu_type, "reason": reason}
            for key, reason in sorted(self.left_out.items(), key=lambda item: item[0])
        ]
        return {"enabled": self.enabled, "left_out": left_out}

    def words(self) -> str:
        """In short; empty where nothing was left out."""
        if not self.enabled:
            return "no pools: they are disabled"
        reasons = Counter(self.left_out.values())
        ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
        told = [f"{count} x {reason}" for reason, count in ordered]
        if not told:
            return ""
        more = f" and {len(told) - _TOLD_MAX} reasons more" if len(told) > _TOLD_MAX else ""
        return f"not poolable: {', '.join(told[:_TOLD_MAX])}{more}"


def planned_pools(census: Census, demand: Mapping[Endpoint, tuple[float, ...]], settings: Settings) -> PlannedPools:
    """Look at every model and GPU type. With no means for pools at all, endpoints that are pooled now stay unknown to
    the placement, which then gives them instances of their own.
    """
    if not settings.pools_enabled:
        return PlannedPools(facts=None, left_out={}, enabled=False)
    host_bytes, slot_gpus = _host_bytes_per_gpu(census), _slot_gpus(census)
    weights_bytes = {model.name: model.weights_bytes for model in census.models}
    offered: dict[str, list[Endpoint]] = defaultdict(list)
    for row in census.endpoints:
        if row.instances_max:
            offered[row.model].append(Endpoint(model=row.model, region=row.region))
    occupancy: dict[EndpointGpu, float] = {}
    left_out: dict[ModelGpu, str] = {}
    for profile in census.profiles:
        pair = ModelGpu(model=profile.model, gpu_type=profile.gpu_type)
        reason = _why_not(profile, slot_gpus.get(profile.gpu_type), host_bytes)
        if reason is not None:
            left_out[pair] = reason
            continue
        for endpoint in offered[profile.model]:
            share = _share(profile, max(demand.get(endpoint, (0.0,))), settings)
            if share <= settings.pool_fill * profile.gpus:  # one slot must carry it alone
                key = EndpointGpu(model=endpoint.model, region=endpoint.region, gpu_type=profile.gpu_type)
                occupancy[key] = share
    if not occupancy:
        return PlannedPools(facts=None, left_out=left_out)
    facts = PoolFacts(
        occupancy=occupancy,
        weights_bytes=weights_bytes,
        host_bytes_per_gpu=host_bytes,
        fill=settings.pool_fill,
        present=_present(census),
        pooled=frozenset(_key_of(each) for each in _pooled(census)),
    )
    return PlannedPools(facts=facts, left_out=left_out)


def _why_not(profile: Profile, slot_gpus: set[int] | None, host_bytes: Mapping[str, int]) -> str | None:
    """Why a model cannot be pooled on a GPU type, whatever its demand."""
    gpu_type = profile.gpu_type
    if slot_gpus is None:
        return f"no node with {gpu_type} serves"
    if profile.latency is None:
        return f"no latency in the profile on {gpu_type}"
    if gpu_type not in host_bytes:
        return f"some node with {gpu_type} does not tell its host memory"
    if slot_gpus != {profile.gpus}:
        sizes = " and ".join(str(gpus) for gpus in sorted(slot_gpus))
        return f"slots of {gpu_type} have {sizes} GPUs, the model takes {profile.gpus}"
    return None


def _share(profile: Profile, peak_tokens_per_s: float, settings: Settings) -> float:
    """GPUs of a pool that an endpoint takes at its peak, in input tokens per second."""
    assert profile.latency is not None, "the caller asked why not"
    load = PoolLoad(
        **{name: profile.latency[name] for name in LATENCY_FIELDS},
        requests_per_s=peak_tokens_per_s / settings.pool_prompt_tokens,
        input_tokens=settings.pool_prompt_tokens,
        output_tokens=settings.pool_output_tokens,
        tbt_s=settings.pool_tbt_s,
        round_s=settings.pool_round_s,
        gpus=profile.gpus,
    )
    return max(_IDLE_SHARE, occupancy_of(load).total)


def _host_bytes_per_gpu(census: Census) -> dict[str, int]:
    """By GPU type, the least that a node has for each of its GPUs; only types of which every node tells."""
    gpus: Counter[str] = Counter()
    for slot in census.slots:
        gpus[slot.node] += slot.gpus
    shares: dict[str, list[int | None]] = defaultdict(list)
    for node in _serving(census):
        if gpus[node.name]:
            shares[node.gpu_type].append(None if node.host_bytes is None else node.host_bytes // gpus[node.name])
    known = {gpu_type: [each for each in found if each is not None] for gpu_type, found in shares.items()}
    return {gpu_type: min(found) for gpu_type, found in known.items() if found and len(found) == len(shares[gpu_type])}


def _slot_gpus(census: Census) -> dict[str, set[int]]:
    """The sizes of the slots of each GPU type."""
    gpu_types = {node.name: node.gpu_type for node in _serving(census)}
    sizes: dict[str, set[int]] = defaultdict(set)
    for slot in census.slots:
        if slot.node in gpu_types:
            sizes[gpu_types[slot.node]].add(slot.gpus)
    return sizes


def _serving(census: Census) -> Iterable[Node]:
    return (node for node in census.nodes if not node.draining and node.name in census.alive)


def _present(census: Census) -> dict[RegionGpu, int]:
    """GPUs of the slots that hold pooled instances, by place."""
    slots: dict[tuple[str, int], Slot] = {(slot.node, slot.index): slot for slot in census.slots}
    places = {(each.node, each.slot): RegionGpu(region=each.region, gpu_type=each.gpu_type) for each in _pooled(census)}
    gpus: Counter[RegionGpu] = Counter()
    for key, place in places.items():
        gpus[place] += slots[key].gpus
    return dict(gpus)


def _pooled(census: Census) -> list[Instance]:
    return [each for each in census.instances if each.pooled and each.desired == Desired.RUNNING]


def _key_of(instance: Instance) -> EndpointGpu:
    return EndpointGpu(model=instance.model, region=instance.region, gpu_type=instance.gpu_type)
