"""The admin API: the fleet, its models, demand, forecasts, keys and the audit."""

from fastapi import APIRouter
from fastapi.routing import APIRoute

from controlplane.api.admin import (
    aliases,
    batches,
    deletions,
    demand,
    events,
    forecasts,
    instances,
    keys,
    live_status,
    models,
    nodes,
    objectives,
    overview,
    pins,
    plan_changes,
    plans,
    pools,
    profile_corrections,
    regions,
    requests,
    rollouts,
    search,
    settings,
    spot,
    status,
    tenants,
    terms,
    usage,
    what_if,
)
from controlplane.api.admin.problems import PROBLEMS

__all__ = ["router"]


def _operation_id(route: APIRoute) -> str:
    return f"admin_{route.name}"


router = APIRouter(prefix="/admin", responses=PROBLEMS, generate_unique_id_function=_operation_id)
for part in (
    *(overview, search, status, live_status, objectives, regions, nodes, pools, models, instances, spot, deletions),
    *(aliases, rollouts, profile_corrections),
    *(
        demand,
        forecasts,
        plans,
        plan_changes,
        what_if,
        pins,
        keys,
        tenants,
        usage,
        batches,
        events,
        requests,
        settings,
        terms,
    ),
):
    router.include_router(part.router)
