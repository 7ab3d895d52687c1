"""The control plane's loops in simulated time: forecast, plan, scale. Facts are gathered from the simulated fleet, what
follows from them is decided by the live service's policies, and the fleet does it.

    every hour     Planner.forecast -> Planner.make (choose_placement)          ten and two minutes before it begins
    every 15 s     choose_pool_slots -> choose_scaling -> choose_slots -> Fleet.apply     and after each plan
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from controlplane.policies.assignment.choose import choose_slots, moved_endpoints, settled_endpoints
from controlplane.policies.assignment.facts import SlotFacts, SlotSettings
from controlplane.policies.assignment.pooling import (
    PlanPools,
    joined,
    planned_beside,
    pool_slot_facts,
    release_steps,
    rooms_beside,
)
from controlplane.policies.assignment.pools import PoolSlotFacts, choose_pool_slots
from controlplane.policies.facts import Endpoint, EndpointGpu
from controlplane.policies.routing import utilization_of
from controlplane.policies.scaling.choose import choose_scaling, kind_for
from controlplane.policies.scaling.facts import (
    Counts,
    EndpointScaleFacts,
    KindFacts,
    ScaleStep,
    ScalingFacts,
    ScalingSettings,
)
from dataplane.protocol.tiers import InstanceKind
from ops.simulator.kernel.events import Kind
from ops.simulator.world.fleet import Fleet
from ops.simulator.world.held import Held
from ops.simulator.world.planning import FORECAST_AHEAD_S, HOUR_S, PLAN_AHEAD_S, Plan, Planner, PlanSettings
from ops.simulator.world.world import World


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """How endpoints are scaled. `every_s`: how often."""

    scaling: ScalingSettings
    slots: SlotSettings = field(default_factory=SlotSettings)
    every_s: float = 15.0


class Loops:
    """Runs them from `begins_s` on. Utilization-led strategies make no plan."""

    def __init__(
        self, world: World, fleet: Fleet, planner: Planner | None, settings: LoopSettings, plan: PlanSettings
    ) -> None:
        self._world = world
        self._fleet = fleet
        self._planner = planner
        self._settings = settings
        self._limits = plan.limits
        self._tokens_per_s: dict[str, dict[str, float]] = {}
        for key, profile in plan.profiles.items():
            self._tokens_per_s.setdefault(key.model, {})[key.gpu_type] = profile.tokens_per_s
        self._gpus = {key: profile.gpus for key, profile in plan.profiles.items()}
        self._last_scaled_s: dict[Endpoint, float] = {}
        self._settled: dict[Endpoint, Counts | None] = {}
        if planner is not None:
            world.recorder.planned, world.recorder.planned_pools = planner.planned, planner.planned_pools

    def begin_with(self, steps: Iterable[ScaleStep]) -> None:
        """Instances that serve at the beginning, where `choose_slots` puts them.

        Raises:
            ValueError: they find no room.
        """
        facts = SlotFacts(steps=tuple(steps), slots=self._fleet.rooms(), instances=(), gpus=self._gpus)
        decision = choose_slots(facts, self._now_s, self._settings.slots)
        if decision.unplaced:
            first = decision.unplaced[0]
            raise ValueError(f"fleet.instances: {first.count} of {first.endpoint.model}: {first.reason}")
        self._fleet.begin_with(decision.adds)

    def begin(self, begins_s: float) -> None:
        """Plan at once, then by the clock; scale every so often."""
        if self._planner is not None:
            hour_s = begins_s // HOUR_S * HOUR_S + HOUR_S
            self._at(begins_s, self._forecast)
            self._at(begins_s, self._plan)
            self._hourly(hour_s - FORECAST_AHEAD_S, begins_s, self._forecast)
            self._hourly(hour_s - PLAN_AHEAD_S, begins_s, self._plan)
        self._every(begins_s, self._settings.every_s, self._scale)

    @property
    def _now_s(self) -> float:
        return self._world.events.now_s

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        self._world.events.at(at_s, Kind.TICK, action)

    def _hourly(self, at_s: float, begins_s: float, action: Callable[[], None]) -> None:
        self._every(at_s if at_s > begins_s else at_s + HOUR_S, HOUR_S, action)

    def _every(self, at_s: float, every_s: float, action: Callable[[], None]) -> None:
        def again() -> None:
            action()
            self._every(self._now_s + every_s, every_s, action)

        self._at(at_s, again)

    def _forecast(self) -> None:
        assert self._planner is not None
        self._planner.forecast(self._now_s)

    def _plan(self) -> None:
        assert self._planner is not None
        self._planner.make(self._now_s, self._fleet)
        self._scale()

    def _scale(self) -> None:
        """Gather, decide, apply."""
        now_s, fleet = self._now_s, self._fleet
        pooling = choose_pool_slots(self._pool_facts(), now_s, stale_s=self._settings.slots.stale_s)
        fleet.dedicate(pooling.dedicates, self._gpus)
        fleet.set_kinds({name: self._kind(one) for name, one in fleet.held.items() if one.wanted and not one.pooled})
        scaling = choose_scaling(self._facts(pooling.stranded), now_s, self._settings.scaling)
        placed = fleet.placed()
        slots = SlotFacts(
            steps=(*scaling.steps, *release_steps(pooling, placed)),
            kinds=scaling.kinds,
            slots=rooms_beside(pooling, fleet.rooms()),
            instances=placed,
            gpus=self._gpus,
        )
        decision = joined(choose_slots(slots, now_s, self._settings.slots), pooling)
        fleet.apply(decision)
        self._settled |= settled_endpoints(scaling.settled, decision.unplaced)
        for endpoint in moved_endpoints(scaling.steps, decision.unplaced):
            self._last_scaled_s[endpoint] = now_s

    @property
    def _plan_in_force(self) -> Plan | None:
        return None if self._planner is None else self._planner.plan

    def _pool_facts(self) -> PoolSlotFacts:
        """What `choose_pool_slots` is told."""
        plan, fleet = self._plan_in_force, self._fleet
        return pool_slot_facts(
            PlanPools() if plan is None else plan.pools,
            planned={} if plan is None else plan.counts,
            limits=self._limits,
            rooms=fleet.rooms(),
            placed=fleet.placed(),
            pooled=fleet.pooled(),
        )

    def _kind(self, one: Held) -> InstanceKind:
        """What an instance should be under the strategy in use."""
        _, most = self._limits[one.endpoint]
        return kind_for(self._settings.scaling.strategy, one.kind, instances_max=most)

    def _facts(self, stranded: Iterable[EndpointGpu]) -> ScalingFacts:
        """The endpoints for `choose_scaling`; see `planned_beside`."""
        mine: dict[Endpoint, dict[str, Held]] = {endpoint: {} for endpoint in self._limits}
        spot: dict[str, list[Held]] = {}
        for name, one in self._fleet.held.items():
            if one.pooled:
                continue
            if one.wanted:
                mine[one.endpoint][name] = one
            elif one.state == "spot":
                spot.setdefault(one.endpoint.region, []).append(one)
        plan = self._plan_in_force
        pools, counts = (PlanPools(), None) if plan is None else (plan.pools, plan.counts)
        return ScalingFacts(
            endpoints=tuple(
                self._endpoint_facts(endpoint, mine[endpoint], spot.get(endpoint.region, []), planned)
                for endpoint, planned in planned_beside(counts, mine, pools, stranded).items()
            ),
            window_start_s=None if plan is None else plan.window_start_s,
        )

    def _endpoint_facts(
        self, endpoint: Endpoint, mine: Mapping[str, Held], spot: Iterable[Held], planned: Mapping[str, int] | None
    ) -> EndpointScaleFacts:
        now_s, world = self._now_s, self._world
        whole, (fewest, most) = self._kind_facts(endpoint.model, mine), self._limits[endpoint]
        kinds = {
            kind: self._kind_facts(endpoint.model, {name: one for name, one in mine.items() if one.kind == kind})
            for kind in InstanceKind
        }
        backlog = world.deferred.backlog(endpoint.model)
        return EndpointScaleFacts(
            endpoint=endpoint,
            present=whole.present,
            starting=whole.starting,
            utilization=whole.utilization,
            kinds=kinds,
            min=fewest,
            max=most,
            planned=planned,
            last_scaled_s=self._last_scaled_s.get(endpoint),
            settled=self._settled.get(endpoint),
            tokens_per_s=self._tokens_per_s[endpoint.model],
            observed_tokens_per_s=world.demand.observed(endpoint, now_s),
            forecast_tokens_per_s=None if self._planner is None else self._planner.forecast_now(endpoint, now_s),
            backlog_tokens=0.0 if backlog is None else backlog[0] / len(world.settings.regions),
            backlog_due_s=None if backlog is None else backlog[1],
            spot_same=_by_gpu_type(one for one in spot if one.endpoint == endpoint),
            spot_other=_by_gpu_type(one for one in spot if one.endpoint != endpoint),
        )

    def _kind_facts(self, model: str, instances: Mapping[str, Held]) -> KindFacts:
        view = self._world.present.view(model)
        seen = [view[name] for name in instances if name in view]
        return KindFacts(
            present=_by_gpu_type(instances.values()),
            starting=_by_gpu_type(one for one in instances.values() if one.state == "warming"),
            utilization=utilization_of(seen) if seen else None,
        )


def _by_gpu_type(instances: Iterable[Held]) -> Counter[str]:
    return Counter(one.node.gpu_type for one in instances)
