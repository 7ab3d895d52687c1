"""Planning: gather the fleet and its forecasts, solve the placement, write the plan."""

import time
from collections import Counter
from collections.abc import Mapping

import structlog

from controlplane.errors import StaleIndexError
from controlplane.planner.draft import Draft, DraftOf, Problem, draft_of, failed_draft
from controlplane.planner.expected import expected_demand
from controlplane.planner.pool_facts import planned_pools
from controlplane.policies.facts import Endpoint, EndpointGpu, ModelGpu, RegionGpu
from controlplane.policies.fit import WeightsRoom, why_unfit
from controlplane.policies.lifecycle import PlanState
from controlplane.policies.placement.choose import choose_placement
from controlplane.policies.placement.facts import (
    PlacementFacts,
    PlacementModel,
    PlacementSettings,
    PoolFacts,
    Profile,
    StartTimes,
)
from controlplane.settings import Settings
from controlplane.store.fleet import FleetInventory, fleet_index, read_inventory
from controlplane.store.pins import pins_in_force
from controlplane.store.plans import (
    SCHEDULE,
    add_plan,
    apply_plan,
    fail_stale_drafts,
    is_planned,
    supersede_drafts,
)
from controlplane.store.session import Database
from controlplane.store.tables import Desired
from controlplane.store.weights import room_of, sizes_of

_HOUR_S = 3600
_NODE_SILENT_S = 60.0
_ATTEMPTS_MAX = 3
log = structlog.get_logger()


def plan_hour(database: Database, settings: Settings, *, now_s: float) -> str | None:
    """Make, and where the policy lets it pass, apply the plan of the hour that begins nearest to now, so that a late
    task still plans its own hour. None if it is made already, by whichever worker or beat came first, or if an operator
    put a plan of that hour in force: the schedule does not overrule people. Scheduled plans of earlier hours that still
    wait for an operator are superseded.

    An attempt that fails leaves the plan in force as it is and a failed plan that says why; the next beat tries again.
    """
    window_start_s = hour_nearest(now_s)
    with database.transaction() as session:
        for plan_id in supersede_drafts(session, before_s=window_start_s):
            log.warning("plan not approved in its hour", plan=plan_id)
        for plan_id in fail_stale_drafts(session, window_start_s=window_start_s):
            log.warning("plan went stale before it was approved; planning anew", plan=plan_id)
    of = DraftOf(window_start_s=window_start_s, origin=SCHEDULE, created_by=SCHEDULE)
    for attempt in range(1, _ATTEMPTS_MAX + 1):
        with database.transaction() as session:
            if is_planned(session, window_start_s):
                return None
            index = fleet_index(session)
        try:
            draft = draft_plan(database, settings, of, now_s=now_s)
        except Exception as error:  # whatever went wrong, the last plan stays, and people can read why
            log.exception("planning failed", window_start_s=window_start_s)
            reason = f"planning failed, the plan in force stays: {type(error).__name__}: {error}"
            draft = failed_draft(of, index=index, reason=reason)
        try:
            return _keep(database, draft, now_s=now_s)
        except StaleIndexError as error:
            if attempt == _ATTEMPTS_MAX:
                reason = f"planning failed, the plan in force stays: {attempt} attempts went stale; {error}"
                return _keep(database, failed_draft(of, index=index, reason=reason), now_s=now_s)
    return None


def hour_nearest(now_s: float) -> int:
    """When the hour begins whose start is nearest to `now_s`."""
    return (int(now_s) + _HOUR_S // 2) // _HOUR_S * _HOUR_S


def _keep(database: Database, draft: Draft, *, now_s: float) -> str | None:
    """Write a draft and, where nobody must agree, apply it; both or neither.

    Raises:
        StaleIndexError: the fleet changed while the solver worked.
    """
    plan_id, index, reason = draft.plan.id, draft.plan.fleet_index, draft.plan.approval_reason
    failed = draft.plan.state == PlanState.FAILED
    words = draft.plan.reason
    with database.transaction() as session:
        if is_planned(session, draft.plan.window_start_s) or not add_plan(session, draft.plan, draft.entries):
            return None
        if not failed and reason is None:
            apply_plan(session, plan_id, index=index, now_s=now_s)
    if failed:
        log.error("no plan, the one in force stays", plan=plan_id, reason=words)
    elif reason is not None:
        log.warning("plan waits for an operator", plan=plan_id, reason=reason)
    return plan_id


def draft_plan(
    database: Database,
    settings: Settings,
    of: DraftOf,
    *,
    now_s: float,
    origin_s: int | None = None,
    keep_forecasts: bool = True,
) -> Draft:
    """Gather, decide; nothing is written but, unless told otherwise, forecasts that were missing. `origin_s`: use the
    forecasts of that moment, by default the newest. No transaction is open while a forecaster or the solver works.
    """
    expected = expected_demand(database, settings, now_s=now_s, origin_s=origin_s, keep=keep_forecasts)
    with database.transaction() as session:
        index = fleet_index(session)
        pins = pins_in_force(session, max(now_s, of.window_start_s))
        inventory = read_inventory(session, silent_s=_NODE_SILENT_S)
        pools = planned_pools(inventory, expected.demand, settings)
        facts = placement_facts(inventory, demand=expected.demand, pins=pins, pool=pools.facts)
    problem = Problem(index=index, facts=facts, pools=pools, settings=_placement_settings(settings), expected=expected)
    began_s = time.monotonic()
    stop_s = began_s + problem.settings.time_limit_s
    placement = choose_placement(facts, now_s, problem.settings, should_stop=lambda: time.monotonic() > stop_s)
    solve_time_s = time.monotonic() - began_s
    return draft_of(placement, problem, of, now_s=now_s, solve_time_s=solve_time_s, settings=settings)


def _placement_settings(settings: Settings) -> PlacementSettings:
    return PlacementSettings(
        epsilon=settings.placement_epsilon,
        time_limit_s=settings.placement_time_limit_s,
        gap=settings.placement_gap,
    )


def placement_facts(
    inventory: FleetInventory,
    *,
    demand: Mapping[Endpoint, tuple[float, ...]],
    pins: Mapping[Endpoint, int],
    pool: PoolFacts | None,
) -> PlacementFacts:
    """The fleet and its coming hour as the placement wants them. Demand of models or regions that are not registered
    is left out; a pin stands in place of its endpoint's limits.
    """
    offered = {Endpoint(model=row.model, region=row.region): row for row in inventory.endpoints}
    models = [model.name for model in inventory.models]
    known = {
        endpoint: windows
        for endpoint, windows in demand.items()
        if endpoint.model in models and endpoint.region in inventory.regions
    }
    limits = {Endpoint(model=model, region=region): (0, 0) for model in models for region in inventory.regions}
    limits |= {endpoint: (row.instances_min, row.instances_max) for endpoint, row in offered.items()}
    return PlacementFacts(
        regions=tuple(inventory.regions),
        models=tuple(PlacementModel(name=name) for name in models),
        capacity=_capacity(inventory),
        profiles={
            ModelGpu(model=row.model, gpu_type=row.gpu_type): Profile(
                tokens_per_s=row.tokens_per_s, gpus=row.gpus, start=StartTimes.of_load(row.load_time_s)
            )
            for row in inventory.profiles
        },
        present=_instances(inventory, Desired.RUNNING),
        spot=_instances(inventory, Desired.SPOT),
        demand=known,
        pins=pins,
        limits=limits,
        gpu_cost_per_hour={gpu.name: gpu.cost_per_hour for gpu in inventory.gpu_types},
        weights_present=frozenset(Endpoint(model=i.model, region=i.region) for i in inventory.instances),
        pool=pool,
        unfit=_unfit(inventory),
    )


def _unfit(inventory: FleetInventory) -> dict[EndpointGpu, str]:
    """Where a model with a profile fits on no slot of the GPU type in the region, and why."""
    nodes, sizes = {node.name: node for node in inventory.nodes}, sizes_of(inventory.models)
    rooms: dict[RegionGpu, set[tuple[str, WeightsRoom]]] = {}
    for slot in inventory.slots:
        node = nodes[slot.node]
        place = RegionGpu(region=node.region, gpu_type=node.gpu_type)
        rooms.setdefault(place, set()).add((node.gpu_type, room_of(node, slot)))
    unfit = {}
    for row in inventory.profiles:
        for place, found in rooms.items():
            if place.gpu_type != row.gpu_type:
                continue
            reason = why_unfit(row.model, sizes[row.model], found, place.region)
            if reason is not None:
                unfit[EndpointGpu(model=row.model, region=place.region, gpu_type=place.gpu_type)] = reason
    return unfit


def _instances(inventory: FleetInventory, desired: Desired) -> Counter[EndpointGpu]:
    return Counter(
        EndpointGpu(model=each.model, region=each.region, gpu_type=each.gpu_type)
        for each in inventory.instances
        if each.desired == desired and not each.pooled
    )


def _capacity(inventory: FleetInventory) -> dict[RegionGpu, int]:
    capacity: Counter[RegionGpu] = Counter()
    nodes = {node.name: node for node in inventory.nodes if node.accepting and node.name in inventory.alive}
    for slot in inventory.slots:
        if slot.node in nodes:
            node = nodes[slot.node]
            capacity[RegionGpu(region=node.region, gpu_type=node.gpu_type)] += slot.gpus
    return capacity
