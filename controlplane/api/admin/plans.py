"""Plans: a dry run shows what would change and the index it was made at; applying with a stale index is refused."""

import time
from datetime import datetime
from typing import Any

from fastapi import APIRouter, BackgroundTasks
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from controlplane.api.admin.fields import TIME_S_MAX, After, Answer, Limit, PageOf, PlanPath, page_of
from controlplane.api.admin.idempotency import IdempotentRoute
from controlplane.api.auth import Operator, Viewer
from controlplane.api.state import SessionDep, StateDep
from controlplane.declarations import Note
from controlplane.errors import InvalidValueError, NotFoundError
from controlplane.planner.draft import DraftOf
from controlplane.planner.explain import explanation_of
from controlplane.planner.plan import draft_plan, hour_nearest
from controlplane.planner.schedule import enqueue
from controlplane.policies.lifecycle import PlanState
from controlplane.store import plans
from controlplane.store.demand import latest_demand_s
from controlplane.store.keys import record
from controlplane.store.plans import Plan, PlanEntry
from controlplane.store.session import server_time_s

router = APIRouter(tags=["admin: plans"], route_class=IdempotentRoute)


class PlanView(Answer):
    """What the solver answered, and what became of it. Costs are in the currency of the GPU types' prices."""

    id: str
    state: str = Field(examples=["draft"])
    origin: str = Field(description="schedule or operator")
    window_start_s: int = Field(description="Unix time at which the planned hour begins")
    fleet_index: int = Field(description="the fleet's index the plan was made at")
    solver: str = Field(examples=["highs"])
    status: str = Field(description="optimal, bounded, time_limit, failed, or restored by a rollback")
    objective_per_hour: float | None
    bound_per_hour: float | None
    gap: float | None
    solve_time_s: float
    reason: str
    approval_reason: str | None = Field(description="why it waits, or waited, for an operator; null: it need not")
    approved_by: str | None = Field(description="an operator, or 'automatic'")
    approved_at: datetime | None
    previous_plan_id: str | None = Field(description="the plan in force before this one; a rollback goes back to it")
    created_by: str
    created_at: datetime | None
    applied_at: datetime | None


class EntryView(Answer):
    """One cell: instances now and then, why, what makes the count necessary, and what not changing it would cost."""

    model: str
    region: str
    gpu_type: str
    before: int
    after: int
    reason: str
    constraint: str = Field(examples=["home"])
    cost_if_not: float = Field(description="per hour; 0 where nothing changes")


class LayoutChange(BaseModel):
    """A node whose GPUs are grouped into other slots, why, and the GPUs of each slot, in their order."""

    node: str
    region: str
    gpu_type: str
    before: list[int] = Field(examples=[[1, 1, 1, 1]])
    after: list[int] = Field(examples=[[4]])
    reason: str


class PlanWhole(BaseModel):
    """A plan with its cells, and what it could not serve."""

    plan: PlanView
    entries: list[EntryView]
    unserved: list[Any]
    pools: list[Any] = Field(
        description="pool GPUs by region, GPU type and GPUs of a worker, with the endpoints each serves or"
        " holds in reserve"
    )
    layouts: list[LayoutChange] = Field(description="nodes whose GPUs it groups into other slots")
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


class Remark(BaseModel):
    """Why an operator does this."""

    model_config = ConfigDict(extra="forbid")
    note: Note = ""


class Inputs(BaseModel):
    """What a plan was made from."""

    problem: Any = Field(description="the fleet, the demand and the settings, as `tidepool plan solve` reads them")
    forecasts: Any = Field(description="the origin, the quantile, and each series with what stood in for a forecast")
    pools: Any = Field(
        None, description="whether pools were planned and how, which models could not be pooled, and why"
    )
    corrections: Any = Field(None, description="profiles that count otherwise than stated, and why")
    latencies: Any = Field(None, description="endpoints whose time between tokens is not what their profiles say")
    layouts: Any = Field(
        None,
        description="GPUs that are taken by the size of their slots, and slots that are missing; null: not planned",
    )


class Explanation(BaseModel):
    """A plan in words."""

    text: str


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
def run_forecasts(
    body: Run, state: StateDep, session: SessionDep, caller: Operator, after_commit: BackgroundTasks
) -> Started:
    """Starts tasks of some series each, for all workers. While the task queue is away it is refused."""
    origin_s = body.origin_s
    _require_past(origin_s, time.time())
    if origin_s is None:
        known_s = latest_demand_s(session)
        minute_s = int(time.time()) // 60 * 60
        origin_s = minute_s if known_s is None else min(minute_s, known_s + 60)
    state.live.ping()
    record(session, actor=caller.name, action="forecast.run", subject=str(origin_s), after={"origin_s": origin_s})
    after_commit.add_task(enqueue, "forecast", origin_s=origin_s)
    return Started(origin_s=origin_s)


@router.post("/plans", summary="Solve the placement")
def create_plan(body: NewPlan, state: StateDep, session: SessionDep, caller: Operator) -> PlanWhole:
    """A dry run writes nothing; otherwise the plan waits as a draft to be applied."""
    now_s = server_time_s(session)
    _require_past(body.origin_s, now_s)
    of = DraftOf(window_start_s=hour_nearest(now_s), origin="operator", created_by=caller.name)
    keep = not body.dry_run
    draft = draft_plan(state.database, state.settings, of, now_s=now_s, origin_s=body.origin_s, keep_forecasts=keep)
    if not body.dry_run:
        plans.add_plan(session, draft.plan, draft.entries)
        after = _state(session, draft.plan.id)
        record(session, actor=caller.name, action="plan.create", subject=draft.plan.id, after=after)
        return _whole(plans.get_plan(session, draft.plan.id), draft.entries)
    return _whole(draft.plan, draft.entries)


@router.get("/plans", summary="List plans")
def list_plans(
    session: SessionDep, _: Viewer, state: PlanState | None = None, limit: Limit = 20, after: After = None
) -> PageOf[PlanView]:
    """The newest first."""
    return page_of(PlanView, plans.list_plans(session, state=state, after=after, limit=limit))


@router.get("/plans/{plan_id}", summary="A plan")
def get_plan(plan_id: PlanPath, session: SessionDep, _: Viewer) -> PlanWhole:
    """With its cells."""
    return _whole_of(session, plans.get_plan(session, plan_id))


@router.get("/plans/{plan_id}/inputs", summary="What a plan was made from")
def get_inputs(plan_id: PlanPath, session: SessionDep, _: Viewer) -> Inputs:
    """The problem and the forecasts. 404 for a plan that no solver made, or that is older than this record."""
    inputs = plans.inputs_of(session, plan_id)
    if inputs is None:
        raise NotFoundError(f"plan '{plan_id}' has no inputs", param="plan_id")
    return Inputs.model_validate(inputs)


@router.get("/plans/{plan_id}/explanation", summary="A plan in words")
def get_explanation(plan_id: PlanPath, session: SessionDep, _: Viewer) -> Explanation:
    """What was expected, what binds, what changes and why, what is not served, and how sure all that is."""
    return Explanation(text=explanation_of(session, plan_id))


@router.post("/plans/{plan_id}/apply", summary="Apply a plan")
def apply_plan(
    plan_id: PlanPath, body: Apply, session: SessionDep, caller: Operator, after_commit: BackgroundTasks
) -> PlanWhole:
    """Puts the plan in force; a fleet that has changed since answers 409 `stale_index`."""
    before = _state(session, plan_id)
    plan = plans.apply_plan(session, plan_id, index=body.index, now_s=time.time(), approved_by=caller.name)
    after = _state(session, plan_id) | {"index": body.index}
    record(session, actor=caller.name, action="plan.apply", subject=plan_id, before=before, after=after)
    after_commit.add_task(enqueue, "scale")
    return _whole_of(session, plan)


@router.post("/plans/{plan_id}/approve", summary="Approve a plan that waits")
def approve_plan(plan_id: PlanPath, session: SessionDep, caller: Operator, after_commit: BackgroundTasks) -> PlanWhole:
    """Puts the plan in force if the fleet is still the one it was made for; else 409 `stale_index`."""
    before = _state(session, plan_id)
    plan = plans.approve_plan(session, plan_id, now_s=time.time(), approved_by=caller.name)
    after = _state(session, plan_id) | {"index": plan.fleet_index}
    record(session, actor=caller.name, action="plan.approve", subject=plan_id, before=before, after=after)
    after_commit.add_task(enqueue, "scale")
    return _whole_of(session, plan)


@router.post("/plans/{plan_id}/reject", summary="Reject a plan that waits")
def reject_plan(plan_id: PlanPath, body: Remark, session: SessionDep, caller: Operator) -> PlanWhole:
    """The plan in force stays, and the schedule makes no other one of that hour."""
    before = _state(session, plan_id)
    plan = plans.reject_plan(session, plan_id, rejected_by=caller.name, note=body.note)
    after = _state(session, plan_id) | {"note": body.note}
    record(session, actor=caller.name, action="plan.reject", subject=plan_id, before=before, after=after)
    return _whole_of(session, plan)


@router.post("/plans/{plan_id}/rollback", summary="Roll the plan in force back")
def roll_back_plan(
    plan_id: PlanPath, body: Remark, session: SessionDep, caller: Operator, after_commit: BackgroundTasks
) -> PlanWhole:
    """Restores the placement before it, as a new plan in force. The schedule leaves that alone for its hour. 409 where
    the plan is not in force or nothing was before it.
    """
    window_start_s = hour_nearest(time.time())
    before = _state(session, plan_id)
    plan = plans.roll_back(session, plan_id, window_start_s=window_start_s, by=caller.name, note=body.note)
    after = _state(session, plan_id) | {"restored_as": plan.id, "note": body.note}
    record(session, actor=caller.name, action="plan.rollback", subject=plan_id, before=before, after=after)
    after_commit.add_task(enqueue, "scale")
    return _whole_of(session, plan)


def layout_changes(plan: Plan) -> list[LayoutChange]:
    """The nodes that a plan regroups."""
    return [LayoutChange.model_validate(each) for each in plan.layouts]


def _require_past(origin_s: int | None, now_s: float) -> None:
    if origin_s is not None and origin_s > now_s:
        raise InvalidValueError(f"origin_s: {origin_s} is in the future", param="origin_s")


def _state(session: Session, plan_id: str) -> dict[str, str]:
    """Of a plan, for the audit."""
    return {"state": plans.get_plan(session, plan_id).state}


def _whole_of(session: Session, plan: Plan) -> PlanWhole:
    return _whole(plan, plans.entries_of(session, plan.id))


def _whole(plan: Plan, entries: list[PlanEntry]) -> PlanWhole:
    return PlanWhole(
        plan=PlanView.model_validate(plan),
        entries=[EntryView.model_validate(entry) for entry in entries],
        unserved=plan.unserved,
        pools=plan.pools,
        layouts=layout_changes(plan),
        index=plan.fleet_index,
    )
