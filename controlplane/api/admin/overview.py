"""The fleet at a glance, once or as a stream of server-sent events: what the console shows first."""

import time
from collections import defaultdict
from collections.abc import Mapping

import anyio
import anyio.to_thread
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from sqlalchemy.orm import Session
from starlette.responses import StreamingResponse

from controlplane.api.admin.events import Event
from controlplane.api.admin.live_status import COUNT_MAX, QueueStatus
from controlplane.api.admin.status import Status, status_of
from controlplane.api.auth import Viewer, bearer_of, require
from controlplane.api.health import HealthDep, SystemHealth, read_health
from controlplane.api.live_stream import LiveStream, events_of
from controlplane.api.state import State, StateDep
from controlplane.policies.routing import is_usable, utilization_of
from controlplane.store import events
from controlplane.store.batch_ends import ends_by_model
from controlplane.store.endpoint_summary import backlogs, count_unplaced
from controlplane.store.gpu_counts import read_gpu_counts
from controlplane.store.objectives import BUCKET_S, read_kept
from controlplane.store.redis.live import FleetView
from controlplane.store.tables import Role

router = APIRouter(tags=["admin: fleet"])
_EVERY_S = 2.0
_EVENTS = 20
_QUEUES = 20
_UNPLACED = 20
_DAY_S = 86_400


class GpuCounts(BaseModel):
    """GPUs by what they do."""

    dedicated: int = 0
    pooled: int = Field(0, description="of slots that several models share")
    spot: int = Field(0, description="of donated instances")
    free: int = 0
    lost: int = Field(0, description="of nodes that are not heard of")


class TierObjectives(BaseModel):
    """How a tier's objectives were kept by the answers of a region."""

    tier: str = Field(examples=["IW-F"])
    answers_now: int = Field(description="in the last 10 to 20 minutes")
    kept_now: int
    answers_day: int = Field(description="in the last 24 hours")
    kept_day: int


class RegionOverview(BaseModel):
    """A region as its live view shows it."""

    name: str
    gpus: GpuCounts
    utilization: float | None = Field(description="effective memory utilization, 0 to 1; null: nothing is usable")
    load: float | None = Field(description="of its busiest node; above 1 that cannot keep up with its decodes")
    objectives: list[TierObjectives] = Field(description="by tier, of those that had answers")


class QueueOverview(QueueStatus):
    """What waits of a model, and when it will be done."""

    predicted_end_s: float | None = Field(description="Unix time, of its last batch; null: not known")
    batches_at_risk: int = Field(description="its batches that are predicted to miss their deadline")


class Overview(BaseModel):
    """The whole fleet in one answer whose size depends on the number of regions, not on that of models or nodes."""

    as_of_s: float = Field(description="Unix time")
    view_fresh: bool = Field(description="false: Redis is away, and the live view is its last copy")
    status: Status = Field(description=f"with the unplaced instances of the first {_UNPLACED} endpoints")
    endpoints_unplaced: int = Field(description="endpoints with instances that have no place")
    regions: list[RegionOverview]
    queues: list[QueueOverview] = Field(description=f"the {_QUEUES} of the nearest deadlines")
    events: list[Event] = Field(description=f"the last {_EVENTS}, the newest first")


@router.get("/overview", summary="The fleet at a glance")
def get_overview(state: StateDep, health: HealthDep, _: Viewer) -> Overview:
    """Regions with their GPUs and load, the queue, the plan in force, and what happened last."""
    return _overview(state, health)


@router.get(
    "/live",
    summary="The fleet at a glance, as it changes",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}, "description": "an event `overview` at each change"}},
)
async def follow_overview(request: Request, _: Viewer) -> StreamingResponse:
    """Server-sent events: `overview` with the answer of `GET /admin/overview`, and `away` with what cannot be read.
    The stream ends when its caller's key or session does.
    """

    async def may_go_on() -> None:
        await require(request, bearer_of(request), Role.VIEWER)

    stream = request.app.state.overviews
    assert isinstance(stream, LiveStream)
    return StreamingResponse(
        events_of(stream, may_go_on),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


def overviews_of(state: State) -> LiveStream:
    """The stream of a process, for all who follow it."""
    threads = anyio.CapacityLimiter(1)

    async def read() -> bytes:
        health = await read_health(state)
        overview = await anyio.to_thread.run_sync(_overview, state, health, limiter=threads)
        return overview.model_dump_json().encode()

    return LiveStream(read, name="overview", every_s=_EVERY_S)


def _overview(state: State, health: SystemHealth) -> Overview:
    alive_s = state.settings.heartbeat_stale_s
    with state.database.transaction() as session:
        gpus = read_gpu_counts(session, alive_s=alive_s)
        status = status_of(session, state.settings, health, unplaced_max=_UNPLACED)
        without_place = count_unplaced(session)
        queues = _queues(session)
        objectives = _objectives(session)
        page = events.list_events(session, which={}, since=None, after=None, limit=_EVENTS)
        happened = [Event.model_validate(row) for row in page.rows]
    usable = defaultdict(list)
    hosted = _hosted_adapters(state.fleet.view)
    for instance in state.fleet.instances():
        if is_usable(instance, alive_s) and instance.instance_id not in hosted:
            usable[instance.endpoint.region].append(instance)
    return Overview(
        as_of_s=time.time(),
        view_fresh=state.fleet.is_fresh(),
        status=status,
        endpoints_unplaced=without_place,
        regions=[
            RegionOverview(
                name=region.name,
                gpus=GpuCounts.model_validate(gpus.get(region.name, {})),
                utilization=utilization_of(usable[region.name]) if usable[region.name] else None,
                load=max((each.load for each in usable[region.name]), default=None),
                objectives=objectives[region.name],
            )
            for region in status.regions
        ],
        queues=queues,
        events=happened,
    )


def _hosted_adapters(view: FleetView) -> set[str]:
    """The adapters on instances of their bases, by instance id: their load is in the reports of those."""
    reports = (report for node in view.nodes.values() for report in node.heartbeat.instances)
    return {report.instance_id for report in reports if report.host is not None}


def _queues(session: Session) -> list[QueueOverview]:
    waiting = sorted(backlogs(session, count_max=COUNT_MAX).items(), key=lambda item: item[1].due_s)[:_QUEUES]
    ends = ends_by_model(session) if waiting else {}
    queues = []
    for model, backlog in waiting:
        end_s, at_risk = ends.get(model, (None, 0))
        known = QueueStatus.of(model, backlog)
        queues.append(QueueOverview(**dict(known), predicted_end_s=end_s, batches_at_risk=at_risk))
    return queues


def _objectives(session: Session) -> Mapping[str, list[TierObjectives]]:
    """By region."""
    now_s = int(time.time())
    kept: dict[str, list[TierObjectives]] = defaultdict(list)
    now_since_s = now_s // BUCKET_S * BUCKET_S - BUCKET_S
    counts = read_kept(session, since_s=now_s - _DAY_S, now_since_s=now_since_s)
    for region, tier, day, kept_day, now, kept_now in counts:
        kept[region].append(
            TierObjectives(tier=tier, answers_now=now, kept_now=kept_now, answers_day=day, kept_day=kept_day)
        )
    return kept
