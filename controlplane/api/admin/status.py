"""The summary of the whole system."""

from datetime import datetime

from fastapi import APIRouter
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session

from controlplane.api.admin.fields import Answer
from controlplane.api.auth import Viewer
from controlplane.api.health import HealthDep, SystemHealth
from controlplane.api.state import SessionDep, StateDep
from controlplane.settings import Settings
from controlplane.store.endpoint_summary import read_unplaced
from controlplane.store.fleet import fleet_index
from controlplane.store.summary import read_summary

router = APIRouter(tags=["admin: fleet"])


class RegionStatus(Answer):
    """A region. `instances` are those that are not stopped."""

    name: str
    position: int
    nodes: int
    nodes_alive: int
    gpus: int
    instances: int
    instances_ready: int


class PlanStatus(Answer):
    """The plan in force."""

    id: str
    state: str
    status: str = Field(description="the solver's", examples=["optimal"])
    window_start_s: int
    applied_at: datetime | None = Field(description="null: it is being applied")
    cost_per_hour: float = Field(description="of the GPUs of its instances and pools, by the present prices")
    objective_per_hour: float | None = Field(description="what the solver made small: starts and what is not kept too")
    reason: str


class PlanningStatus(Answer):
    """The schedule's newest plan. One that failed, or waits, leaves the plan in force as it was."""

    id: str
    state: str = Field(examples=["draft"])
    window_start_s: int
    reason: str
    approval_reason: str | None = Field(description="why it waits, or waited, for an operator")


class UnplacedStatus(Answer):
    """Instances that are wanted and have no place."""

    model: str
    region: str
    gpu_type: str | None = Field(description="null: any that the model has a profile on")
    count: int
    reason: str


class HealthStatus(Answer):
    """What `/readyz` of this gateway says."""

    status: str = Field(description="ok, degraded or unavailable", examples=["degraded"])
    missing: list[str] = Field(description="what this gateway needs to serve and lacks")
    away: list[str] = Field(description="servers that do not answer", examples=[["redis"]])
    late: list[str] = Field(description="loops that have not succeeded for too long", examples=[["plan"]])
    lost: list[str] = Field(
        description="nodes that are not heard of, and were neither drained nor shut down", examples=[["node-us-east-1"]]
    )
    behind: list[str] = Field(description="copies of the database that are too old to be read first: replica, or none")
    replica_age_s: float | None = Field(
        description="seconds that the region's copy of the database may be behind; null: there is none, or nobody knows"
    )
    term: int | None = Field(description="the primary's; each promotion raises it; null: nobody knows")
    reported_term: int | None = Field(
        description="the newest that nodes reported when it was newer than the primary's: those obey this one no more"
    )


class LoopStatus(BaseModel):
    """One loop, and how its last runs ended."""

    loop: str = Field(examples=["scale"])
    late: bool
    since_success_s: float | None = Field(description="seconds since its last success; null: there was none")
    since_failure_s: float | None = Field(description="seconds since its last failure; null: there was none")
    last_error: str | None = Field(description="of its last failure, which may be older than its last success")
    last_process: str | None = Field(description="where it last ran", examples=["host-1:4711"])


class Status(BaseModel):
    """The whole fleet at one moment."""

    health: HealthStatus
    loops: list[LoopStatus]
    fleet_index: int = Field(description="rises with every change that a plan could depend on")
    models: int
    regions: list[RegionStatus]
    nodes_draining: int
    instances: dict[str, int] = Field(description="by state, as in their list", examples=[{"ready": 4, "loading": 1}])
    instances_pooled: int = Field(description="of these, those that share a slot")
    unplaced: list[UnplacedStatus] = Field(description="what the last run of scaling found no place for, and why")
    batches: dict[str, int] = Field(description="by state", examples=[{"in_progress": 1, "completed": 7}])
    batches_at_risk: int = Field(description="batches in progress that are predicted to miss their deadline")
    requests_waiting: int = Field(description="batch requests in the queue")
    requests_running: int = Field(description="batch requests that a dispatcher holds")
    plan: PlanStatus | None
    planning: PlanningStatus | None


@router.get("/status", summary="How the fleet is")
def get_status(session: SessionDep, state: StateDep, health: HealthDep, _: Viewer) -> Status:
    """Health, regions, nodes, instances, batches, the queue and the plan in force."""
    return status_of(session, state.settings, health)


def status_of(session: Session, settings: Settings, health: SystemHealth, *, unplaced_max: int | None = None) -> Status:
    """The status as a transaction sees it, with the unplaced instances of at most so many endpoints."""
    summary = read_summary(session, alive_s=settings.heartbeat_stale_s)
    here = {
        "health": health.verdict,
        "loops": _loops(health),
        "fleet_index": fleet_index(session),
        "unplaced": read_unplaced(session, limit=unplaced_max),
    }
    return Status.model_validate(summary | here)


def _loops(health: SystemHealth) -> list[LoopStatus]:
    """None while Postgres is away."""
    stored = health.stored

    def since_s(then_s: float | None) -> float | None:
        return None if then_s is None else max(0.0, stored.now_s - then_s)

    return [
        LoopStatus(
            loop=facts.loop,
            late=facts.loop in health.verdict.late,
            since_success_s=since_s(facts.last_success_s),
            since_failure_s=since_s(facts.last_failure_s),
            last_error=facts.last_error,
            last_process=facts.last_process,
        )
        for facts in stored.loops
    ]
