"""The hourly plan in simulated time: forecasts from the demand measured so far, and the live service's placement.

Ten minutes before an hour every endpoint is forecast, two minutes before it the plan is made and applied, as in the
live schedule. At the beginning both happen at once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite

from controlplane.policies.assignment.facts import PlacedInstance
from controlplane.policies.demand import demand_to_plan, forecast_at
from controlplane.policies.facts import Endpoint, InstanceFacts, ModelGpu, PoolKey
from controlplane.policies.fit import ModelSize
from controlplane.policies.hour import HourPlan, HourSettings, choose_hour
from controlplane.policies.placement.decision import Placement
from controlplane.policies.placement.error_correlation import NO_ERRORS, PeakErrors, peak_error
from controlplane.policies.placement.facts import PlacementSettings, Profile
from controlplane.policies.placement.poolable import PoolableSettings
from controlplane.policies.placement.reserve_facts import ReserveSettings
from controlplane.policies.planned_layouts import PlannedLayoutSettings
from controlplane.policies.profile_correction import CorrectionSettings
from controlplane.policies.snapshot import FleetSnapshot, PlanPools
from forecasts.models.baselines import LAST_HOUR_MAX
from forecasts.selection.combination import COMBINATION
from forecasts.selection.past import SeriesState
from forecasts.selection.select import PeakForecast, forecast_peak
from forecasts.series import DemandSeries
from forecasts.settings import ForecastSettings
from ops.simulator.traffic.demand import MINUTE_S, Demand
from ops.simulator.world.fleet import Fleet
from ops.simulator.world.observed_profiles import ObservedProfiles
from ops.simulator.world.recorder import Planned

HOUR_S = 3600.0
FORECAST_AHEAD_S = 600.0
PLAN_AHEAD_S = 120.0
HISTORY_S = 7 * 86_400.0


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """How to plan. `regions` to `limits` as in `FleetSnapshot`; `limits` of every endpoint. `niw_share`: beta of
    SageServe 6.3. `correction`: of profiles by what instances do; None: they stay.
    """

    regions: tuple[str, ...]
    profiles: Mapping[ModelGpu, Profile]
    latencies: Mapping[ModelGpu, Mapping[str, float]]
    sizes: Mapping[str, ModelSize]
    gpu_cost_per_hour: Mapping[str, float]
    limits: Mapping[Endpoint, tuple[int, int]]
    forecast: ForecastSettings = field(default_factory=ForecastSettings)
    placement: PlacementSettings = field(default_factory=PlacementSettings)
    niw_share: float = 0.1
    pools: PoolableSettings = field(default_factory=lambda: PoolableSettings(enabled=False))
    correction: CorrectionSettings | None = None
    reserve: ReserveSettings = field(default_factory=ReserveSettings)
    layouts: PlannedLayoutSettings = field(default_factory=PlannedLayoutSettings)

    def snapshot(self, fleet: Fleet, reports: Mapping[str, InstanceFacts]) -> FleetSnapshot:
        """The fleet as plans and scaling both take it. `reports`: of instances, by id."""
        return FleetSnapshot(
            nodes=fleet.node_facts(),
            instances=fleet.placed(reports),
            profiles=self.profiles,
            latencies=self.latencies,
            sizes=self.sizes,
            limits=self.limits,
            regions=self.regions,
            gpu_cost_per_hour=self.gpu_cost_per_hour,
            weights_present=frozenset(fleet.weights),
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan in force. `counts`: instances with GPUs of their own, by endpoint and GPU type. `expected`: the peak
    that it counts on. `forecasts`: what it was made from.
    """

    window_start_s: float
    counts: Mapping[Endpoint, Mapping[str, int]]
    pools: PlanPools
    expected: Mapping[Endpoint, float]
    forecasts: Mapping[Endpoint, PeakForecast]


class Planner:
    """Makes the plans. `truth`: the interactive demand of the whole run, used instead of forecasts; None: forecasts.

    Each forecast of an endpoint starts from the state of the one before, as in the live service. `begins_s`: no request
    was served, and no deferred request released, before this moment.
    """

    def __init__(
        self, settings: PlanSettings, demand: Demand, truth: Demand | None = None, *, begins_s: float = 0.0
    ) -> None:
        self.plan: Plan | None = None
        self._settings = settings
        self._demand = demand
        self._truth = truth
        self._begins_s = begins_s
        self._forecasts: dict[Endpoint, PeakForecast] = {}
        self._profiles = ObservedProfiles(settings.profiles, settings.correction)

    def forecast(self, now_s: float) -> None:
        """Forecast every endpoint with demand, from the demand before this minute only."""
        origin_s = now_s // MINUTE_S * MINUTE_S
        if self._truth is not None or origin_s < MINUTE_S:
            return
        for endpoint in self._demand.endpoints:
            history = self._demand.series(endpoint, since_s=max(0.0, origin_s - HISTORY_S), until_s=origin_s)
            if history.maximum() > 0:
                before = self._forecasts.get(endpoint)
                state = None if before is None else before.state
                self._forecasts[endpoint] = forecast_peak(history, self._settings.forecast, state)

    @property
    def factors(self) -> Mapping[ModelGpu, float]:
        """By how much the profiles' tokens/s are corrected now."""
        return self._profiles.factors

    def observe(self, instances: Iterable[PlacedInstance], ttft_s: float, now_s: float) -> None:
        """Take in what the instances do now, at most once a minute. `ttft_s`: IW-F's objective."""
        self._profiles.observe(instances, ttft_s, now_s)

    def make(self, now_s: float, fleet: Fleet) -> None:
        """Plan the hour that begins nearest to now. Without any forecast there is no plan; where no solver answers, the
        plan in force stays.
        """
        window_start_s = (now_s + HOUR_S / 2) // HOUR_S * HOUR_S
        paths = self._paths(window_start_s)
        if not paths:
            return
        until_s = now_s // MINUTE_S * MINUTE_S
        since_s = max(self._begins_s, until_s - HOUR_S)
        deferred = {
            endpoint: self._demand.mean(endpoint, since_s=since_s, until_s=until_s, deferred=True)
            for endpoint in self._settings.limits
        }
        niw_share = self._settings.niw_share
        demand = demand_to_plan(paths, deferred, niw_share=niw_share)
        medians = demand_to_plan(self._paths(window_start_s, upper=False), deferred, niw_share=niw_share)
        self._profiles.correct(now_s)
        snapshot = self._settings.snapshot(fleet, {}).corrected(self.factors)
        hour = choose_hour(snapshot, demand, medians, now_s, self._hour_settings(), errors=self._errors())
        if hour.placement.objective_per_hour is not None:
            self.plan = Plan(
                window_start_s=window_start_s,
                counts=_counts(hour.placement),
                pools=_pools(hour),
                expected={endpoint: max(path) for endpoint, path in demand.items()},
                forecasts=dict(self._forecasts),
            )
        for one in hour.layouts.decision.regroupings:
            fleet.layouts.want(one.node, one.after, now_s)

    def forecast_now(self, endpoint: Endpoint, now_s: float) -> float | None:
        """The forecast of the plan in force for this moment; None: it has none."""
        forecast = None if self.plan is None else self.plan.forecasts.get(endpoint)
        if forecast is None:
            return None
        return forecast_at(
            forecast.windows_upper,
            peak_q50=forecast.peak_q50,
            peak_upper=forecast.peak_upper,
            late_s=now_s - forecast.origin_s,
        )

    def planned(self) -> dict[Endpoint, Planned]:
        """The plan in force, for the recorder."""
        if self.plan is None:
            return {}
        plan = self.plan
        return {
            endpoint: Planned(
                forecast=plan.expected.get(endpoint, 0.0), instances=sum(plan.counts.get(endpoint, {}).values())
            )
            for endpoint in self._settings.limits
        }

    def planned_pools(self) -> Mapping[PoolKey, int]:
        """GPUs of its pools, for the recorder."""
        return {} if self.plan is None else self.plan.pools.gpus

    def _hour_settings(self) -> HourSettings:
        settings = self._settings
        return HourSettings(
            placement=settings.placement,
            pools=settings.pools,
            reserve=settings.reserve,
            layouts=settings.layouts,
            stale_s=0.0,
        )

    def _errors(self) -> PeakErrors:
        """Of past forecasts, as far as each forecast remembers them; none unless reserves are planned."""
        if not self._settings.reserve.enabled:
            return NO_ERRORS
        return {endpoint: errors_of(each, self._settings.forecast) for endpoint, each in self._forecasts.items()}

    def _paths(self, window_start_s: float, *, upper: bool = True) -> dict[Endpoint, tuple[float, ...]]:
        """Upper or median forecasts, or the true demand of the hour, by window."""
        if self._truth is None:
            known = {endpoint: each for endpoint, each in self._forecasts.items() if each.known}
            return {endpoint: each.windows_upper if upper else each.windows for endpoint, each in known.items()}
        windows_s = self._settings.forecast.bucket_s
        return {
            endpoint: tuple(self._true_hour(endpoint, window_start_s).rebin(windows_s).values.tolist())
            for endpoint in self._truth.endpoints
        }

    def _true_hour(self, endpoint: Endpoint, window_start_s: float) -> DemandSeries:
        assert self._truth is not None
        return self._truth.series(endpoint, since_s=window_start_s, until_s=window_start_s + HOUR_S)


def errors_of(forecast: PeakForecast, settings: ForecastSettings) -> dict[int, float]:
    """Errors by the hour of the forecast: of the combination, or of the baseline where there was none. Live plans know
    those of the forecast that was chosen, which is another one in the hour after a shift, and of a new series.
    """
    past = SeriesState.from_json(forecast.state).past
    errors = {}
    for name in (each for each in (LAST_HOUR_MAX, COMBINATION) if each in past.median):
        columns = (past.origins_s, past.median[name], past.upper[name], past.actual)
        for origin_s, median, upper, actual in zip(*(column.tolist() for column in columns), strict=True):
            error = peak_error(median, upper, actual, settings.quantile)
            if error is not None and isfinite(error):
                errors[int(origin_s // HOUR_S)] = error
    return errors


def _counts(placement: Placement) -> dict[Endpoint, dict[str, int]]:
    counts: dict[Endpoint, dict[str, int]] = {}
    for entry in placement.entries:
        counts.setdefault(entry.endpoint, {})[entry.gpu_type] = entry.after
    return counts


def _pools(hour: HourPlan) -> PlanPools:
    return PlanPools(
        gpus={pool.key: pool.after for pool in hour.pool_sizes},
        occupancy={one.key: one.occupancy for one in hour.placement.pooled},
        held=hour.reserve.held,
    )
