"""Usage of models by tenant."""

import csv
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from io import StringIO
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Response
from pydantic import AwareDatetime, BaseModel, Field
from sqlalchemy.orm import Session

from controlplane.api.admin.fields import AfterId, FilterWord, Limit, PageOf
from controlplane.api.auth import Viewer
from controlplane.api.state import SessionDep
from controlplane.errors import InvalidValueError
from controlplane.store.usage import COUNTED, DIMENSIONS, read_usage

router = APIRouter(tags=["admin: keys"])
Dimension = Literal["hour", "day", "month", "tenant", "model", "tier"]
_DEFAULT_DAYS = 7
_DEFAULT_BY: tuple[Dimension, ...] = ("day", "tenant", "model")
_LINES_MAX = 100_000
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What begins a formula in a spreadsheet."""


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


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Which usage, and what to add it up by."""

    by: Annotated[
        list[Dimension] | None,
        Query(description="what to add up by; may be repeated; none: day, tenant and model", max_length=6),
    ] = None
    tenant: FilterWord = None
    model: FilterWord = None
    since: Annotated[AwareDatetime | None, Query(description="none: 7 days ago")] = None
    until: Annotated[AwareDatetime | None, Query(description="before then; none: until now")] = None

    @property
    def dimensions(self) -> list[Dimension]:
        """Each once."""
        return list(dict.fromkeys(self.by or _DEFAULT_BY))

    def read(self, session: Session, *, after: int, limit: int) -> list[dict[str, Any]]:
        """Rows from number `after` on."""
        return read_usage(
            session,
            by=self.dimensions,
            since=self.since or datetime.fromtimestamp(time.time(), UTC) - timedelta(days=_DEFAULT_DAYS),
            until=self.until,
            tenant=self.tenant,
            model=self.model,
            after=after,
            limit=limit,
        )


AskedDep = Annotated[Asked, Depends()]


@router.get("/usage", summary="What tenants used")
def get_usage(
    session: SessionDep, _: Viewer, asked: AskedDep, limit: Limit = 20, after: AfterId = None
) -> PageOf[UsageRow]:
    """The newest first. Gateways write what they counted every 15 seconds; the requests of a batch count in the hour in
    which the batch ends. An hour counts whole or not at all: by its beginning.
    """
    rows = asked.read(session, after=after or 0, limit=limit + 1)
    nothing = dict.fromkeys(DIMENSIONS)
    more = len(rows) > limit
    data = [UsageRow.model_validate(nothing | row) for row in rows[:limit]]
    return PageOf(data=data, has_more=more, next=str((after or 0) + limit) if more else None)


@router.get(
    "/usage.csv",
    summary="What tenants used, as CSV",
    response_class=Response,
    responses={200: {"content": {"text/csv": {}}}},
)
def export_usage(session: SessionDep, _: Viewer, asked: AskedDep) -> Response:
    """The same rows, all of them: a header line, then a line each. A name that a spreadsheet would take for a formula
    has an apostrophe before it. 400 for more than 100,000 lines.
    """
    rows = asked.read(session, after=0, limit=_LINES_MAX + 1)
    if len(rows) > _LINES_MAX:
        raise InvalidValueError(f"since: at most {_LINES_MAX:,} lines are exported at once", param="since")
    text = StringIO()
    lines = csv.DictWriter(text, [*asked.dimensions, *COUNTED])
    lines.writeheader()
    lines.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    headers = {"Content-Disposition": 'attachment; filename="tidepool-usage.csv"'}
    return Response(text.getvalue(), media_type="text/csv", headers=headers)


def _cell(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
