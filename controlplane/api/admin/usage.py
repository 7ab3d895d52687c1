"""Usage of models by tenant."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import AwareDatetime, BaseModel, Field

from controlplane.api.admin.fields import AfterId, FilterWord, Limit, PageOf
from controlplane.api.auth import Viewer
from controlplane.api.state import SessionDep
from controlplane.store.usage import DIMENSIONS, read_usage

router = APIRouter(tags=["admin: keys"])
_DEFAULT_DAYS = 7
Dimension = Literal["hour", "day", "month", "tenant", "model", "tier"]


class UsageRow(BaseModel):
    """Usage of a tenant, a model, a tier and a time, or of all of them where `by` does not name it."""

    hour: datetime | None = Field(description="its beginning")
    day: datetime | None = Field(description="its beginning, in UTC")
    month: datetime | None = Field(description="its beginning, in UTC")
    tenant: str | None
    model: str | None
    tier: str | None = Field(examples=["IW-N"])
    requests: int
    failed: int = Field(description="those of the requests that did not end well")
    input_tokens: int
    output_tokens: int


@router.get("/usage", summary="What tenants used")
def get_usage(
    session: SessionDep,
    _: Viewer,
    by: Annotated[list[Dimension], Query(description="what to add up by; may be repeated", max_length=6)] = [  # noqa: B006 - FastAPI copies it
        "day",
        "tenant",
        "model",
    ],
    tenant: FilterWord = None,
    model: FilterWord = None,
    since: Annotated[AwareDatetime | None, Query(description="none: 7 days ago")] = None,
    until: Annotated[AwareDatetime | None, Query(description="before then; none: until now")] = None,
    limit: Limit = 20,
    after: AfterId = None,
) -> PageOf[UsageRow]:
    """The newest first. Gateways write what they counted every 15 seconds; the requests of a batch count in the hour in
    which the batch ends. An hour counts whole or not at all: by its beginning.
    """
    rows = read_usage(
        session,
        by=list(dict.fromkeys(by)),
        since=since or datetime.now(UTC) - timedelta(days=_DEFAULT_DAYS),
        until=until,
        tenant=tenant,
        model=model,
        after=after or 0,
        limit=limit + 1,
    )
    nothing = dict.fromkeys(DIMENSIONS)
    more = len(rows) > limit
    data = [UsageRow.model_validate(nothing | row) for row in rows[:limit]]
    return PageOf(data=data, has_more=more, next=str((after or 0) + limit) if more else None)
