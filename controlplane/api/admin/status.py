"""One summary for people."""

from fastapi import APIRouter
from pydantic import BaseModel, Field

from controlplane.api.admin.fields import Answer
from controlplane.api.auth import Viewer
from controlplane.api.state import SessionDep, StateDep
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
    objective_per_hour: float | None
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


class Status(BaseModel):
    """The whole fleet at one moment."""

    fleet_index: int = Field(description="rises with every change that a plan could depend on")
    models: int
    regions: list[RegionStatus]
    nodes_draining: int
    instances: dict[str, int] = Field(description="by observed state", examples=[{"ready": 4, "loading": 1}])
    instances_pooled: int = Field(description="of these, those that share a slot")
    unplaced: list[UnplacedStatus] = Field(description="what the last run of scaling found no place for, and why")
    batches: dict[str, int] = Field(description="by state", examples=[{"in_progress": 1, "completed": 7}])
    requests_waiting: int = Field(description="batch requests in the queue")
    requests_running: int = Field(description="batch requests that a dispatcher holds")
    plan: PlanStatus | None
    planning: PlanningStatus | None


@router.get("/status", summary="How the fleet is")
def get_status(session: SessionDep, state: StateDep, _: Viewer) -> Status:
    """Regions, nodes, instances, batches, the queue and the plan in force."""
    summary = read_summary(session, alive_s=state.settings.heartbeat_stale_s)
    return Status(
        fleet_index=fleet_index(session),
        models=summary.models,
        regions=[RegionStatus.model_validate(region) for region in summary.regions],
        nodes_draining=summary.nodes_draining,
        instances=dict(summary.instances),
        instances_pooled=summary.instances_pooled,
        unplaced=[UnplacedStatus.model_validate(each) for each in read_unplaced(session)],
        batches=dict(summary.batches),
        requests_waiting=summary.requests_waiting,
        requests_running=summary.requests_running,
        plan=None if summary.plan is None else PlanStatus.model_validate(summary.plan),
        planning=None if summary.scheduled is None else PlanningStatus.model_validate(summary.scheduled),
    )
