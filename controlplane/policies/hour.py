"""The plan of an hour: the placement, what a shared reserve makes of it, and the slots that it takes.

    choose_poolable --> choose_placement at the upper quantile --> choose_reserve: who is not pooled gives up instances
                    --> plan_layouts: slots of the sizes that this takes

An endpoint that the placement pools stays pooled. The others are sized anew together with their reserve, on the GPUs
that the pooled ones, and those that no reserve can hold, leave.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from msgspec import structs

from controlplane.policies.facts import Endpoint, EndpointGpu, PoolKey
from controlplane.policies.placement.choose import choose_placement
from controlplane.policies.placement.decision import Constraint, Placement, PlacementEntry, PlacementStatus, PoolSize
from controlplane.policies.placement.error_correlation import NO_ERRORS, PeakErrors
from controlplane.policies.placement.facts import PlacementFacts, PlacementSettings
from controlplane.policies.placement.poolable import PlannedPools, PoolableSettings, choose_poolable
from controlplane.policies.placement.reserve import choose_reserve
from controlplane.policies.placement.reserve_candidates import CandidateFacts, reserve_facts
from controlplane.policies.placement.reserve_facts import Reserve, ReserveSettings
from controlplane.policies.planned_layouts import PlacedHour, PlannedLayouts, PlannedLayoutSettings, plan_layouts
from controlplane.policies.snapshot import Demand, FleetSnapshot, placement_facts, poolable_facts


@dataclass(frozen=True, kw_only=True)
class HourSettings:
    """How hours are planned. `stale_s`: GPUs of nodes that were silent for longer do not count."""

    placement: PlacementSettings = field(default_factory=PlacementSettings)
    pools: PoolableSettings = field(default_factory=PoolableSettings)
    reserve: ReserveSettings = field(default_factory=ReserveSettings)
    layouts: PlannedLayoutSettings = field(default_factory=PlannedLayoutSettings)
    stale_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class HourPlan:
    """What is planned. `facts`: the problem that was solved. `pools`: what could be pooled. `reserve`: empty where none
    is planned. `placement`: with the own instances of what the reserve holds. `pools_before`: GPUs that models share.
    `layouts`: of nodes that plans may regroup.
    """

    facts: PlacementFacts
    pools: PlannedPools
    reserve: Reserve
    placement: Placement
    pools_before: Mapping[PoolKey, int]
    layouts: PlannedLayouts = field(default_factory=PlannedLayouts)

    @property
    def pool_sizes(self) -> tuple[PoolSize, ...]:
        """The GPUs that models share in pools and reserves, wherever there are any or endpoints are held."""
        after: Counter[PoolKey] = Counter(self.reserve.gpus)
        for pool in self.placement.pools:
            after[pool.key] += pool.after
        keys = {*self.pools_before, *after, *(one.pool for one in self.reserve.endpoints)}
        return tuple(
            PoolSize(**structs.asdict(key), before=self.pools_before.get(key, 0), after=after[key])
            for key in sorted(keys)
        )


def choose_hour(
    snapshot: FleetSnapshot,
    demand: Demand,
    medians: Demand,
    now_s: float,
    settings: HourSettings,
    *,
    errors: PeakErrors = NO_ERRORS,
    should_stop: Callable[[], bool] = lambda: False,
) -> HourPlan:
    """Plan the coming hour.

    Args:
        snapshot: the fleet.
        demand: input tokens/s by window, at the upper quantile.
        medians: the same at the median; only reserves use them.
        now_s: Unix time, only noted.
        settings: see HourSettings.
        errors: of past forecasts; only reserves use them.
        should_stop: see `choose_placement`.
    """
    hour = _placed(snapshot, demand, medians, now_s, settings, errors, should_stop)
    if hour.placement.status == PlacementStatus.FAILED:
        return hour
    placed = PlacedHour(
        placement=hour.placement,
        pool_gpus={size.key: size.after for size in hour.pool_sizes},
    )
    layouts = plan_layouts(snapshot, placed, now_s, settings.layouts, stale_s=settings.stale_s)
    return replace(hour, layouts=layouts)


def _placed(
    snapshot: FleetSnapshot,
    demand: Demand,
    medians: Demand,
    now_s: float,
    settings: HourSettings,
    errors: PeakErrors,
    should_stop: Callable[[], bool],
) -> HourPlan:
    """The hour without its layouts."""
    stale_s = settings.stale_s
    poolable = poolable_facts(snapshot, demand, stale_s=stale_s)
    pools = choose_poolable(poolable, settings.pools)
    facts = placement_facts(snapshot, demand, pool=pools.facts, stale_s=stale_s)
    placement = choose_placement(facts, now_s, settings.placement, should_stop=should_stop)
    if not settings.reserve.enabled or placement.status == PlacementStatus.FAILED:
        return HourPlan(facts=facts, pools=pools, reserve=Reserve(), placement=placement, pools_before=poolable.present)
    given = CandidateFacts(placement=facts, poolable=poolable, medians=medians, placed=placement, errors=errors)
    reserve = choose_reserve(reserve_facts(given, settings.pools), now_s, settings.reserve)
    return HourPlan(
        facts=facts,
        pools=pools,
        reserve=reserve,
        placement=with_reserve(placement, reserve, facts),
        pools_before=poolable.present,
    )


def with_reserve(placement: Placement, reserve: Reserve, facts: PlacementFacts) -> Placement:
    """The placement with what is planned with the reserve. The solver's bound is of a fleet without one."""
    chosen = {one.key.endpoint for one in reserve.endpoints}
    kept = [entry for entry in placement.entries if entry.endpoint not in chosen]
    entries = sorted([*kept, *_entries(reserve, facts.present)], key=lambda entry: (entry.endpoint, entry.gpu_type))
    cost = _cost(entries, placement, reserve, facts)
    objective = placement.objective_per_hour
    saved = placement.gpu_cost_per_hour - cost
    return replace(
        placement,
        entries=tuple(entries),
        unserved=tuple(one for one in placement.unserved if not _is_of(one.model, one.region, chosen)),
        below_minimum=tuple(one for one in placement.below_minimum if one.endpoint not in chosen),
        objective_per_hour=None if objective is None else objective - saved,
        bound_per_hour=None,
        gap=None,
        gpu_cost_per_hour=cost,
        reason=f"{placement.reason}; then the shared reserve spares {saved:.2f} per hour",
    )


def _is_of(model: str, region: str | None, chosen: Set[Endpoint]) -> bool:
    """Whether a shortfall is of endpoints that are planned with the reserve, which says itself what is missing."""
    if region is None:
        return any(endpoint.model == model for endpoint in chosen)
    return Endpoint(model=model, region=region) in chosen


def _cost(entries: Iterable[PlacementEntry], placement: Placement, reserve: Reserve, facts: PlacementFacts) -> float:
    """Price per hour of instances, pools and reserves."""
    prices = facts.gpu_cost_per_hour
    gpus = [(entry.gpu_type, _gpus(entry, facts)) for entry in entries]
    gpus += [(pool.gpu_type, pool.after) for pool in placement.pools]
    gpus += [(pool.gpu_type, count) for pool, count in reserve.gpus.items()]
    return math.fsum(prices[gpu_type] * count for gpu_type, count in gpus)


def _gpus(entry: PlacementEntry, facts: PlacementFacts) -> int:
    return entry.after * facts.profiles[entry.key.pair].gpus


def _entries(reserve: Reserve, present: Mapping[EndpointGpu, int]) -> list[PlacementEntry]:
    """What endpoints of the reserve have of their own; instances on other GPU types go."""
    chosen = {one.key: one for one in reserve.endpoints}
    endpoints = {key.endpoint: one for key, one in chosen.items()}
    keys = {*chosen, *(key for key, count in present.items() if count and key.endpoint in endpoints)}
    entries = []
    for key in sorted(keys):
        one, before = chosen.get(key), present.get(key, 0)
        after = 0 if one is None else one.instances
        if before or after:
            entries.append(
                PlacementEntry(
                    endpoint=key.endpoint,
                    gpu_type=key.gpu_type,
                    before=before,
                    after=after,
                    reason=endpoints[key.endpoint].reason,
                    constraint=Constraint.RESERVE,
                )
            )
    return entries
