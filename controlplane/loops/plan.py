"""Planning: gather the fleet and its forecasts, solve the placement, write the plan."""

import time
from collections import Counter
from dataclasses import dataclass

import uuid_utils
from sqlalchemy.orm import Session

from controlplane.errors import StaleIndexError
from controlplane.loops.forecast import forecast_one, series_to_forecast
from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, RegionGpu
from controlplane.policies.lifecycle import PlanState
from controlplane.policies.placement.choose import choose_placement
from controlplane.policies.placement.facts import (
    Placement,
    PlacementFacts,
    PlacementModel,
    PlacementSettings,
    PlacementStatus,
    Profile,
)
from controlplane.settings import Settings
from controlplane.store.demand import NIW, mean_demand, read_forecasts
from controlplane.store.fleet import Census, fleet_index, take_census
from controlplane.store.plans import add_plan, apply_plan, is_planned
from controlplane.store.session import Database
from controlplane.store.tables import Desired, Plan, PlanEntry

_HOUR_S = 3600
_NODE_SILENT_S = 60.0
_FORECAST_FRESH_S = 1800
_ATTEMPTS_MAX = 3


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A plan not yet written."""

    plan: Plan
    entries: list[PlanEntry]


def plan_hour(database: Database, settings: Settings, *, now_s: float) -> str | None:
    """Make, and where that is automatic apply, the plan of the hour that begins nearest to now, so that a late task
    still plans its own hour. None if it is made already, by whichever worker or beat came first, or if an operator put
    a plan of that hour in force: the schedule does not overrule people.
    """
    window_start_s = (int(now_s) + _HOUR_S // 2) // _HOUR_S * _HOUR_S
    for attempt in range(1, _ATTEMPTS_MAX + 1):
        with database.transaction() as session:
            if is_planned(session, window_start_s):
                return None
        draft = draft_plan(
            database, settings, now_s=now_s, window_start_s=window_start_s, origin="schedule", created_by="schedule"
        )
        try:
            return _keep(database, settings, draft)
        except StaleIndexError:
            if attempt == _ATTEMPTS_MAX:
                raise
    return None


def _keep(database: Database, settings: Settings, draft: Draft) -> str | None:
    """Write a draft and, where that is automatic, apply it; both or neither.

    Raises:
        StaleIndexError: the fleet changed while the solver worked.
    """
    plan_id = draft.plan.id
    with database.transaction() as session:
        if not add_plan(session, draft.plan, draft.entries):
            return None
        if settings.plan_automatic and draft.plan.status != PlacementStatus.FAILED:
            apply_plan(session, plan_id, index=draft.plan.fleet_index)
    return plan_id


def draft_plan(
    database: Database,
    settings: Settings,
    *,
    now_s: float,
    window_start_s: int,
    origin: str,
    created_by: str,
    origin_s: int | None = None,
) -> Draft:
    """Gather, decide; nothing is written but forecasts that were missing. `origin_s`: use the forecasts of that moment,
    by default the newest. No transaction is open while the solver works.
    """
    with database.transaction() as session:
        index = fleet_index(session)
        facts = gather_facts(session, settings, now_s=now_s, origin_s=origin_s)
    began_s = time.monotonic()
    placement = choose_placement(
        facts,
        now_s,
        PlacementSettings(
            epsilon=settings.placement_epsilon,
            time_limit_s=settings.placement_time_limit_s,
            gap=settings.placement_gap,
        ),
    )
    return _draft(
        placement,
        window_start_s=window_start_s,
        origin=origin,
        created_by=created_by,
        index=index,
        solve_time_s=time.monotonic() - began_s,
    )


def gather_facts(session: Session, settings: Settings, *, now_s: float, origin_s: int | None) -> PlacementFacts:
    """The fleet and its coming hour as the placement wants them."""
    census = take_census(session, silent_s=_NODE_SILENT_S)
    offered = {Endpoint(model=row.model, region=row.region): row for row in census.endpoints}
    models = [model.name for model in census.models]
    running = [instance for instance in census.instances if instance.desired == Desired.RUNNING]
    present = Counter(EndpointGpu(model=i.model, region=i.region, gpu_type=i.gpu_type) for i in running)
    demand = {
        endpoint: windows
        for endpoint, windows in _gather_demand(session, settings, now_s=now_s, origin_s=origin_s).items()
        if endpoint.model in models and endpoint.region in census.regions
    }
    limits = {Endpoint(model=model, region=region): (0, 0) for model in models for region in census.regions}
    limits |= {endpoint: (row.instances_min, row.instances_max) for endpoint, row in offered.items()}
    return PlacementFacts(
        regions=tuple(census.regions),
        models=tuple(PlacementModel(name=name) for name in models),
        capacity=_capacity(census),
        profiles={
            ModelGpu(model=row.model, gpu_type=row.gpu_type): Profile(
                tokens_per_s=row.tokens_per_s, gpus=row.gpus, load_time_s=row.load_time_s
            )
            for row in census.profiles
        },
        present=present,
        demand=demand,
        limits=limits,
        gpu_cost_per_hour={gpu.name: gpu.cost_per_hour for gpu in census.gpu_types},
        weights_present=frozenset(Endpoint(model=i.model, region=i.region) for i in census.instances),
    )


def _gather_demand(
    session: Session, settings: Settings, *, now_s: float, origin_s: int | None
) -> dict[Endpoint, tuple[float, ...]]:
    """Upper forecasts for each window of the coming hour, plus beta of the NIW tokens of the past hour (6.3)."""
    forecasts = read_forecasts(session, origin_s=origin_s, until_s=int(now_s))
    fresh = origin_s is not None or (forecasts and now_s - forecasts[0].origin_s <= _FORECAST_FRESH_S)
    if not fresh:
        forecasts = []
    at_s = forecasts[0].origin_s if forecasts else origin_s if origin_s is not None else int(now_s) // 60 * 60
    done = {Endpoint(model=row.model, region=row.region) for row in forecasts}
    for endpoint in series_to_forecast(session, origin_s=at_s, settings=settings):
        if endpoint not in done:  # not forecast yet, or its task was lost: unknown is not zero
            forecasts.append(forecast_one(session, endpoint, origin_s=at_s, settings=settings))
    deferred = mean_demand(session, kind=NIW, since_s=at_s - _HOUR_S, until_s=at_s)
    demand = {Endpoint(model=row.model, region=row.region): tuple(row.path) for row in forecasts}
    windows = max((len(path) for path in demand.values()), default=1)
    for endpoint, tokens_per_s in deferred.items():
        path = demand.get(endpoint, (0.0,) * windows)
        demand[endpoint] = tuple(value + settings.niw_demand_share * tokens_per_s for value in path)
    return demand


def _capacity(census: Census) -> dict[RegionGpu, int]:
    capacity: Counter[RegionGpu] = Counter()
    nodes = {node.name: node for node in census.nodes if not node.draining and node.name in census.alive}
    for slot in census.slots:
        if slot.node in nodes:
            node = nodes[slot.node]
            capacity[RegionGpu(region=node.region, gpu_type=node.gpu_type)] += slot.gpus
    return capacity


def _draft(
    placement: Placement, *, window_start_s: int, origin: str, created_by: str, index: int, solve_time_s: float
) -> Draft:
    plan_id = f"plan_{uuid_utils.uuid7().hex}"
    failed = placement.status == PlacementStatus.FAILED
    plan = Plan(
        id=plan_id,
        state=PlanState.FAILED if failed else PlanState.DRAFT,
        origin=origin,
        window_start_s=window_start_s,
        fleet_index=index,
        solver=placement.solver,
        status=placement.status,
        objective_per_hour=placement.objective_per_hour,
        bound_per_hour=placement.bound_per_hour,
        gap=placement.gap,
        solve_time_s=solve_time_s,
        unserved=_shortfalls(placement),
        reason=placement.reason,
        created_by=created_by,
    )
    entries = [
        PlanEntry(
            plan_id=plan_id,
            model=entry.endpoint.model,
            region=entry.endpoint.region,
            gpu_type=entry.gpu_type,
            before=entry.before,
            after=entry.after,
            reason=entry.reason,
        )
        for entry in placement.entries
    ]
    return Draft(plan=plan, entries=entries)


def _shortfalls(placement: Placement) -> list[dict[str, object]]:
    """Demand the plan cannot serve, and minimums it cannot hold."""
    unserved: list[dict[str, object]] = [
        {"model": u.model, "region": u.region, "tokens_per_s": u.tokens_per_s, "reason": u.reason}
        for u in placement.unserved
    ]
    return unserved + [
        {"model": b.endpoint.model, "region": b.endpoint.region, "tokens_per_s": 0.0, "reason": b.reason}
        for b in placement.below_minimum
    ]
