"""The control plane's loops in simulated time: forecast, plan, scale. The live service's policies decide on a snapshot
of the simulated fleet, which applies the decision.

    every hour     Planner.forecast -> Planner.make (choose_placement)          ten and two minutes before it begins
    every 15 s     FleetSnapshot -> choose_scale -> Fleet.apply       and after each plan
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby

from controlplane.policies.assignment.choose import choose_slots
from controlplane.policies.assignment.facts import SlotFacts, SlotSettings
from controlplane.policies.facts import Endpoint
from controlplane.policies.scale import choose_scale
from controlplane.policies.scaling.facts import Counts, ScaleStep, ScalingSettings
from controlplane.policies.snapshot import FleetSnapshot, PlanPools
from dataplane.protocol.tiers import Tier
from ops.simulator.kernel.events import Kind
from ops.simulator.world.fleet import Fleet
from ops.simulator.world.planning import FORECAST_AHEAD_S, HOUR_S, PLAN_AHEAD_S, Planner, PlanSettings
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
        self._plan = plan
        self._last_scaled_s: dict[Endpoint, float] = {}
        self._settled: dict[Endpoint, Counts | None] = {}
        if planner is not None:
            world.recorder.planned, world.recorder.planned_pools = planner.planned, planner.planned_pools

    def begin_with(self, steps: Iterable[ScaleStep]) -> None:
        """Start the instances of the beginning, on the slots that `choose_slots` assigns; those of the most GPUs first,
        so that small ones leave them the large slots.

        Raises:
            ValueError: the fleet has too few GPUs for them.
        """
        for _, same in groupby(sorted(steps, key=self._gpus_of, reverse=True), self._gpus_of):
            present = self._plan.snapshot(self._fleet, {})
            facts = SlotFacts(steps=tuple(same), slots=present.rooms, instances=(), gpus=present.gpus)
            decision = choose_slots(facts, self._now_s, self._settings.slots)
            if decision.unplaced:
                first = decision.unplaced[0]
                raise ValueError(f"fleet.instances: {first.count} of {first.endpoint.model}: {first.reason}")
            self._fleet.begin_with(decision.adds)

    def _gpus_of(self, step: ScaleStep) -> int:
        """The most GPUs that an instance of a step may take."""
        wanted = (
            profile.gpus
            for key, profile in self._plan.profiles.items()
            if key.model == step.endpoint.model and step.gpu_type in {None, key.gpu_type}
        )
        return max(wanted, default=0)

    def begin(self, begins_s: float) -> None:
        """Forecast and plan at once, then hourly; scale every `every_s` seconds."""
        if self._planner is not None:
            hour_s = begins_s // HOUR_S * HOUR_S + HOUR_S
            self._at(begins_s, self._forecast)
            self._at(begins_s, self._make_plan)
            self._hourly(hour_s - FORECAST_AHEAD_S, begins_s, self._forecast)
            self._hourly(hour_s - PLAN_AHEAD_S, begins_s, self._make_plan)
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

    def _make_plan(self) -> None:
        assert self._planner is not None
        self._planner.make(self._now_s, self._fleet)
        self._scale()

    def _scale(self) -> None:
        """Regroup what is empty; gather, decide, apply."""
        now_s = self._now_s
        self._fleet.regroup()
        snapshot = self._snapshot()
        if self._planner is not None:
            ttft_s = self._world.settings.targets[Tier.IW_F].ttft_s
            self._planner.observe(snapshot.instances, ttft_s, now_s)
        decision = choose_scale(snapshot, now_s, self._settings.scaling, self._settings.slots)
        self._fleet.apply(decision)
        self._settled |= decision.settled
        self._last_scaled_s |= dict.fromkeys(decision.scaled, now_s)

    def _snapshot(self) -> FleetSnapshot:
        """The fleet and its load. Only models with an endpoint that is not pooled need a view: pools are not scaled by
        utilization, and a view keeps the reports of its first use until the next tick.
        """
        world, now_s, limits = self._world, self._now_s, self._plan.limits
        plan = None if self._planner is None else self._planner.plan
        pools = PlanPools() if plan is None else plan.pools
        models = dict.fromkeys(endpoint.model for endpoint in limits if endpoint not in pools.endpoints)
        reports = {name: report for model in models for name, report in world.present.view(model).items()}
        forecasts = {} if self._planner is None else {at: self._planner.forecast_now(at, now_s) for at in limits}
        return replace(
            self._plan.snapshot(self._fleet, reports),
            planned=None if plan is None else plan.counts,
            pools=pools,
            window_start_s=None if plan is None else plan.window_start_s,
            observed={endpoint: world.demand.observed(endpoint, now_s) for endpoint in limits},
            forecast={endpoint: value for endpoint, value in forecasts.items() if value is not None},
            backlogs={model: backlog for model in models if (backlog := world.deferred.backlog(model)) is not None},
            last_scaled_s=self._last_scaled_s,
            settled=self._settled,
        ).corrected({} if self._planner is None else self._planner.factors)
