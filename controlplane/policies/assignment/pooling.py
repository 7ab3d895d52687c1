"""The pools of a plan among all that is scaled: what `choose_pool_slots` is told, and what its decision means for the
instances with GPUs of their own.

    PlanPools --> pool_slot_facts --> choose_pool_slots --> who is scaled (`planned_beside`) --> choose_scaling
                                            |                                                         | steps
                                            +-- rooms_beside, release_steps --> choose_slots <--------+
                                            +-- joined <----------------------------+
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from controlplane.policies.assignment.facts import PlacedInstance, SlotDecision, SlotRoom
from controlplane.policies.assignment.pools import PooledInstance, PoolSlotDecision, PoolSlotFacts
from controlplane.policies.facts import Endpoint, EndpointGpu, RegionGpu
from controlplane.policies.fit import ModelSize
from controlplane.policies.scaling.facts import ScaleStep
from dataplane.protocol.tiers import InstanceKind

Planned = Mapping[Endpoint, Mapping[str, int]]
"""Instances of their own, by endpoint and GPU type."""


@dataclass(frozen=True, kw_only=True)
class PlanPools:
    """The pools of the plan in force: GPUs by place, and what each pooled endpoint takes of one."""

    gpus: Mapping[RegionGpu, int] = field(default_factory=dict)
    occupancy: Mapping[EndpointGpu, float] = field(default_factory=dict)

    @cached_property
    def endpoints(self) -> frozenset[Endpoint]:
        """The pooled endpoints."""
        return frozenset(key.endpoint for key in self.occupancy)


def pool_slot_facts(
    pools: PlanPools,
    *,
    planned: Planned,
    limits: Mapping[Endpoint, tuple[int, int]],
    rooms: tuple[SlotRoom, ...],
    placed: tuple[PlacedInstance, ...],
    pooled: tuple[PooledInstance, ...],
    sizes: Mapping[str, ModelSize] | None = None,
) -> PoolSlotFacts:
    """The facts for `choose_pool_slots`.

    Args:
        pools: those of the plan in force.
        planned: what it wants besides.
        limits: fewest and most instances of its own of each endpoint.
        rooms: all slots.
        placed: all instances of their own.
        pooled: all pooled instances, draining ones included.
        sizes: of models' weights; None: they do not matter.
    """
    serving = [each for each in placed if each.serving and not each.stuck]
    present = Counter(_key(each) for each in serving)
    wanted = {
        EndpointGpu(model=endpoint.model, region=endpoint.region, gpu_type=gpu_type): count
        for endpoint, counts in planned.items()
        for gpu_type, count in counts.items()
    }
    return PoolSlotFacts(
        pool_gpus=pools.gpus,
        occupancy=pools.occupancy,
        slots=rooms,
        instances=pooled,
        served=frozenset(_served(planned, limits, serving)),
        dedicated=placed,
        sizes=sizes or {},
        missing={key: count - present[key] for key, count in wanted.items() if count > present[key]},
    )


def planned_beside(
    planned: Planned | None, endpoints: Iterable[Endpoint], pools: PlanPools, stranded: Iterable[EndpointGpu]
) -> dict[Endpoint, Mapping[str, int] | None]:
    """The endpoints that are scaled, those that are not pooled, with what is planned of their own; None: nothing is. A
    `stranded` endpoint, whose pool does not serve it, is planned with one instance of its own.
    """
    alone = {key.endpoint: {key.gpu_type: 1} for key in stranded}
    return {
        endpoint: alone.get(endpoint, None if planned is None else planned.get(endpoint))
        for endpoint in endpoints
        if endpoint in alone or endpoint not in pools.endpoints
    }


def release_steps(decision: PoolSlotDecision, placed: Iterable[PlacedInstance]) -> tuple[ScaleStep, ...]:
    """Instances of their own that endpoints need no more: the pool serves them."""
    left: Counter[tuple[Endpoint, InstanceKind]] = Counter(
        (each.endpoint, each.kind) for each in placed if each.serving and each.endpoint in decision.ready
    )
    return tuple(
        ScaleStep(endpoint=endpoint, gpu_type=None, delta=-count, kind=kind, reason="the pool serves it now")
        for (endpoint, kind), count in sorted(left.items())
    )


def rooms_beside(decision: PoolSlotDecision, rooms: Iterable[SlotRoom]) -> tuple[SlotRoom, ...]:
    """The slots as `choose_slots` may fill them: those of the pool are full."""
    return tuple(replace(room, gpus_free=0, pooled=True) if room.place in decision.slots else room for room in rooms)


def joined(decision: SlotDecision, pooling: PoolSlotDecision) -> SlotDecision:
    """Both decisions as one; what the pools start is tried first."""
    return replace(
        decision,
        adds=(*pooling.adds, *decision.adds),
        revives=(*pooling.revives, *decision.revives),
        drains=(*pooling.drains, *decision.drains),
        unplaced=(*pooling.unplaced, *decision.unplaced),
    )


def _served(
    planned: Planned, limits: Mapping[Endpoint, tuple[int, int]], serving: Iterable[PlacedInstance]
) -> Iterable[Endpoint]:
    """Endpoints with as many ready instances of their own as they shall have, or with some while no more start."""
    ready: Counter[Endpoint] = Counter()
    starting: Counter[Endpoint] = Counter()
    for each in serving:
        (ready if each.ready else starting)[each.endpoint] += 1
    for endpoint, (fewest, most) in limits.items():
        wanted = min(most, max(fewest, sum(planned.get(endpoint, {}).values())))
        if ready[endpoint] >= wanted or (ready[endpoint] and not starting[endpoint]):
            yield endpoint


def _key(each: PlacedInstance) -> EndpointGpu:
    return EndpointGpu(model=each.endpoint.model, region=each.endpoint.region, gpu_type=each.gpu_type)
