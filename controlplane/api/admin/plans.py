"""Plans: a dry run shows what would change and the index it was made at; applying with a stale index is refused."""

import time
from datetime import datetime
from typing import Any

from fastapi import APIRouter, BackgroundTasks
from pydantic import BaseModel, ConfigDict, Field

from controlplane.api.admin.fields import TIME_S_MAX, After, Answer, Limit, PageOf, page_of
from controlplane.api.admin.idempotency import IdempotentRoute
from controlplane.api.auth import Operator, Viewer
from controlplane.api.state import SessionDep, StateDep
from controlplane.errors import CapacityError, InvalidValueError
from controlplane.loops.plan import draft_plan
from controlplane.loops.schedule import enqueue
from controlplane.store import plans
from controlplane.store.demand import latest_demand_s
from controlplane.store.keys import record
from controlplane.store.tables import Plan, PlanEntry

router = APIRouter(tags=["admin: plans"], route_class=IdempotentRoute)
_HOUR_S = 3600


class PlanView(Answer):
    """What the solver answered, and what became of it. Costs are in the currency of the GPU types' prices."""

    id: str
    state: str = Field(examples=["draft"])
    origin: str = Field(description="schedule or operator")
    window_start_s: int = Field(description="Unix time at which the planned hour begins")
    fleet_index: int = Field(description="the fleet's index the plan was made at")
    solver: str = Field(examples=["highs"])
    status: str = Field(description="optimal, time_limit or failed")
    objective_per_hour: float | None
    bound_per_hour: float | None
    gap: float | None
    solve_time_s: float
    reason: str
    created_by: str
    created_at: datetime | None
    applied_at: datetime | None


class EntryView(Answer):
    """One cell: instances now and then, and why."""

    model: str
    region: str
    gpu_type: str
    before: int
    after: int
    reason: str


class PlanWhole(BaseModel):
    """A plan with its cells, and what it could not serve."""

    plan: PlanView
    entries: list[EntryView]
    unserved: list[Any]
    index: int = Field(description="send this when applying")


class NewPlan(BaseModel):
    """How to plan."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"dry_run": True}})
    dry_run: bool = Field(False, description="solve and show, write nothing")
    origin_s: int | None = Field(
        None, ge=0, le=TIME_S_MAX, description="use the forecasts of this moment; none: newest"
    )


class Apply(BaseModel):
    """Which state of the fleet the plan was reviewed for."""

    model_config = ConfigDict(extra="forbid")
    index: int = Field(ge=0)


class Run(BaseModel):
    """When to forecast from."""

    model_config = ConfigDict(extra="forbid")
    origin_s: int | None = Field(
        None, ge=0, le=TIME_S_MAX, description="none: now, or the end of the demand known where that is older"
    )


class Started(BaseModel):
    """A forecast under way; `GET /admin/forecasts?origin_s=` shows what is done."""

    origin_s: int


@router.post("/forecasts/run", status_code=202, summary="Forecast every series now")
def run_forecasts(body: Run, session: SessionDep, caller: Operator) -> Started:
    """Starts one task for each series."""
    origin_s = body.origin_s
    if origin_s is not None and origin_s > time.time():
        raise InvalidValueError(f"origin_s: {origin_s} is in the future", param="origin_s")
    if origin_s is None:
        known_s = latest_demand_s(session)
        minute_s = int(time.time()) // 60 * 60
        origin_s = minute_s if known_s is None else min(minute_s, known_s + 60)
    if not enqueue("forecast", origin_s=origin_s):
        raise CapacityError("the task queue does not answer; try again", retry_after_s=2)
    record(session, actor=caller.name, action="forecast.run", subject=str(origin_s))
    return Started(origin_s=origin_s)


@router.post("/plans", summary="Solve the placement")
def create_plan(body: NewPlan, state: StateDep, session: SessionDep, caller: Operator) -> PlanWhole:
    """A dry run writes nothing; otherwise the plan waits as a draft to be applied."""
    now_s = time.time()
    draft = draft_plan(
        state.database,
        state.settings,
        now_s=now_s,
        window_start_s=int(now_s) // _HOUR_S * _HOUR_S,
        origin="operator",
        created_by=caller.name,
        origin_s=body.origin_s,
    )
    if not body.dry_run:
        plans.add_plan(session, draft.plan, draft.entries)
        record(session, actor=caller.name, action="plan.create", subject=draft.plan.id)
        return _whole(plans.get_plan(session, draft.plan.id), draft.entries)
    return _whole(draft.plan, draft.entries)


@router.get("/plans", summary="List plans")
def list_plans(session: SessionDep, _: Viewer, limit: Limit = 20, after: After = None) -> PageOf[PlanView]:
    """The newest first."""
    return page_of(PlanView, plans.list_plans(session, after=after, limit=limit), lambda row: row.id)


@router.get("/plans/{plan_id}", summary="A plan")
def get_plan(plan_id: str, session: SessionDep, _: Viewer) -> PlanWhole:
    """With its cells."""
    return _whole(plans.get_plan(session, plan_id), plans.entries_of(session, plan_id))


@router.post("/plans/{plan_id}/apply", summary="Apply a plan")
def apply_plan(
    plan_id: str, body: Apply, session: SessionDep, caller: Operator, after_commit: BackgroundTasks
) -> PlanWhole:
    """Puts the plan in force; a fleet that has changed since answers 409 `stale_index`."""
    plan = plans.apply_plan(session, plan_id, index=body.index)
    record(session, actor=caller.name, action="plan.apply", subject=plan_id, after={"index": body.index})
    after_commit.add_task(enqueue, "scale")
    return _whole(plan, plans.entries_of(session, plan_id))


def _whole(plan: Plan, entries: list[PlanEntry]) -> PlanWhole:
    return PlanWhole(
        plan=PlanView.model_validate(plan),
        entries=[EntryView.model_validate(entry) for entry in entries],
        unserved=plan.unserved,
        index=plan.fleet_index,
    )
