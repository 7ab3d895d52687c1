"""The request log: the outcome of interactive requests of all gateways."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from controlplane.api.admin.fields import TIME_S_MAX, After, Answer, Limit, PageOf, RequestPath
from controlplane.api.auth import Admin
from controlplane.api.state import SessionDep, StateDep
from controlplane.declarations import ModelName, RegionName, Tenant
from controlplane.errors import NotFoundError
from controlplane.settings import Settings
from controlplane.store.request_log import LoggedRequest as Row
from controlplane.store.request_log import find_requests
from controlplane.store.request_log import list_requests as read_requests
from dataplane.protocol.tiers import Tier

router = APIRouter(tags=["admin: requests"])


class OwnRequest(Answer):
    """A request as its tenant sees it. Seconds are from its arrival."""

    request_id: str = Field(description="x-request-id of its answer; where clients choose them, several may have one")
    ended_at: datetime
    endpoint: str = Field(examples=["/v1/chat/completions"])
    model: str | None
    tier: str | None = Field(examples=["IW-N"])
    region: str | None = Field(description="where it was served last")
    outcome: str = Field(description="ok, cancelled (its client left), or the code of the error", examples=["ok"])
    status: int = Field(description="the error's HTTP status; of a stream that broke, what it would have had")
    error: str | None
    prompt_tokens: int
    completion_tokens: int
    placed_s: float | None = Field(description="until a node had it")
    first_token_s: float | None
    duration_s: float


class LoggedRequest(OwnRequest):
    """A request as operators see it."""

    number: int = Field(description="of its row; ids are chosen by clients")
    tenant: str | None
    key_id: str | None
    nodes: list[str] = Field(description="nodes it was sent to, in order; the last one served it, if any did")
    continuations: int = Field(description="how often another instance went on with its answer")
    gateway: str | None = Field(description="the gateway that had it", examples=["gw-1:8080"])
    origin: str | None = Field(description="the region it counts for, whose order of preference routing followed")
    instance_id: str | None = Field(description="the instance of its last attempt")
    utilization: float | None = Field(
        description="effective memory utilization of that instance's endpoint when it was chosen"
    )
    cached_tokens: int | None = Field(description="tokens of the prompt that routing expected to be cached there")
    trace_id: str | None = Field(description="its trace, where this gateway exports spans")
    trace_url: str | None = Field(None, description="where its trace is shown, by the setting `trace_url`")


class LoggedRequests(Answer):
    """Requests with one id, the newest first."""

    data: list[LoggedRequest]


class OwnRequests(Answer):
    """Requests with one id, the newest first."""

    data: list[OwnRequest]


def nothing_found(request_id: str, keep_s: float) -> NotFoundError:
    """The refusal for an id that no row has."""
    return NotFoundError(
        f"no request '{request_id}' is in the log, which goes back {keep_s / 3600:g} hours", param="request_id"
    )


@router.get("/requests", summary="List requests")
def list_requests(
    session: SessionDep,
    state: StateDep,
    _: Admin,
    outcome: Annotated[
        str | None, Query(max_length=64, pattern="^[a-z_]+$", description="ok, cancelled, failed, or an error's code")
    ] = None,
    model: Annotated[ModelName | None, Query()] = None,
    tenant: Annotated[Tenant | None, Query()] = None,
    region: Annotated[RegionName | None, Query(description="where it was served last")] = None,
    tier: Tier | None = None,
    since_s: Annotated[float | None, Query(ge=0, le=TIME_S_MAX, description="Unix time")] = None,
    limit: Limit = 20,
    after: After = None,
) -> PageOf[LoggedRequest]:
    """Requests of the last day, the newest first."""
    which = {"model": model, "tenant": tenant, "region": region, "tier": None if tier is None else tier.value}
    page = read_requests(session, outcome=outcome, which=which, since_s=since_s, after=after, limit=limit)
    data = [_shown(row, state.settings) for row in page.rows]
    return PageOf(data=data, has_more=page.has_more, next=page.next)


@router.get("/requests/{request_id}", summary="How a request went")
def get_request(request_id: RequestPath, session: SessionDep, state: StateDep, _: Admin) -> LoggedRequests:
    """Every request with this id."""
    rows = find_requests(session, request_id)
    if not rows:
        raise nothing_found(request_id, state.settings.request_log_keep_s)
    return LoggedRequests(data=[_shown(row, state.settings) for row in rows])


def _shown(row: Row, settings: Settings) -> LoggedRequest:
    shown = LoggedRequest.model_validate(row)
    if settings.trace_url is not None and row.trace_id is not None:
        shown.trace_url = settings.trace_url.replace("{trace_id}", row.trace_id)
    return shown
