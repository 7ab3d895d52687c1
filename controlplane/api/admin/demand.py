"""Demand: recorded demand is imported as CSV, and an endpoint's demand can be read."""

import hashlib
import io
import itertools
import tempfile
from collections.abc import AsyncIterator, Iterator
from typing import IO, Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, Field

from controlplane.api.admin.demand_csv import BUCKET_S, read_rows
from controlplane.api.admin.fields import TIME_S_MAX
from controlplane.api.admin.idempotency import IdempotentRoute
from controlplane.api.auth import Operator, Viewer
from controlplane.api.state import SessionDep, StateDep
from controlplane.declarations import ModelName, RegionName
from controlplane.errors import InvalidValueError, TooLargeError
from controlplane.policies.facts import Endpoint
from controlplane.store.demand import DemandRow, latest_demand_s, put_demand, read_demand
from controlplane.store.fleet import load_catalog
from controlplane.store.keys import record
from controlplane.store.rows import require
from controlplane.store.tables import Model, Region

ROWS_PER_WRITE = 20_000
SPAN_S_MAX = 31 * 86_400
_SPOOL_BYTES = 2**20
_EXAMPLE = "start_s,region,model,tokens_per_s\n1731283200,us-east,llama-8b,5120.5\n1731283260,us-east,llama-8b,\n"
_CSV: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": f"a CSV file, whatever content type it is sent as:\n\n```\n{_EXAMPLE}```",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}

Kind = Annotated[Literal["IW", "NIW"], Query(description="interactive (both tiers) or deferred demand")]
TimeS = Annotated[int | None, Query(ge=0, le=TIME_S_MAX, description="Unix time")]


class DemandImport(BaseModel):
    """What an import wrote."""

    rows: int = Field(description="minutes with a value", examples=[120_960])
    series: int = Field(description="endpoints they belong to", examples=[12])
    first_s: int | None = Field(examples=[1_731_283_200])
    last_s: int | None = Field(description="start of the last minute", examples=[1_731_887_940])


class DemandPoint(BaseModel):
    """Input tokens per second of one minute."""

    start_s: int = Field(examples=[1_731_283_200])
    tokens_per_s: float = Field(examples=[5120.5])


class DemandSeries(BaseModel):
    """An endpoint's demand in [since_s, until_s). A minute that is not there is a gap, not zero."""

    model: str
    region: str
    kind: str
    since_s: int
    until_s: int
    data: list[DemandPoint]


async def spooled_body(request: Request, state: StateDep, _: Operator) -> AsyncIterator[IO[bytes]]:
    """The request's body in a temporary file.

    Raises:
        TooLargeError: it is over `file_bytes_max`.
    """
    digest, size_bytes = hashlib.sha256(), 0
    limit_bytes = state.settings.file_bytes_max
    with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as spool:
        async for chunk in request.stream():
            size_bytes += len(chunk)
            if size_bytes > limit_bytes:
                raise TooLargeError(f"the demand file is over the limit of {limit_bytes} bytes")
            digest.update(chunk)
            await run_in_threadpool(spool.write, chunk)
        spool.seek(0)
        request.state.body_digest = digest.hexdigest()
        yield spool


router = APIRouter(tags=["admin: demand"], route_class=IdempotentRoute)
SpooledBody = Annotated[IO[bytes], Depends(spooled_body)]


@router.post("/demand", summary="Import demand", openapi_extra=_CSV, dependencies=[Depends(spooled_body)])
def import_demand(body: SpooledBody, session: SessionDep, caller: Operator, kind: Kind = "IW") -> DemandImport:
    """All of a CSV file or nothing. Minutes known before are replaced; of a minute given twice the last line counts; an
    empty value is a gap.
    """
    catalog = load_catalog(session)
    lines = io.TextIOWrapper(body, encoding="utf-8", errors="replace", newline="")
    try:
        rows = read_rows(lines, kind=kind, models=catalog.models, regions=set(catalog.regions))
        imported = _write(session, rows)
    finally:
        lines.detach()
    record(session, actor=caller.name, action="demand.import", subject=kind, after=imported.model_dump())
    return imported


def _write(session: SessionDep, rows: Iterator[DemandRow]) -> DemandImport:
    count, endpoints, first_s, last_s = 0, set[Endpoint](), TIME_S_MAX, 0
    while chunk := {(row.endpoint, row.start_s): row for row in itertools.islice(rows, ROWS_PER_WRITE)}:
        put_demand(session, chunk.values(), imported=True)
        count += len(chunk)
        endpoints.update(endpoint for endpoint, _ in chunk)
        first_s = min(first_s, *(start_s for _, start_s in chunk))
        last_s = max(last_s, *(start_s for _, start_s in chunk))
    return DemandImport(
        rows=count, series=len(endpoints), first_s=first_s if count else None, last_s=last_s if count else None
    )


@router.get("/demand", summary="An endpoint's demand")
def get_demand(
    session: SessionDep,
    _: Viewer,
    model: Annotated[ModelName, Query()],
    region: Annotated[RegionName, Query()],
    kind: Kind = "IW",
    since_s: TimeS = None,
    until_s: TimeS = None,
) -> DemandSeries:
    """Demand per minute; by default the newest day there is. A month at most."""
    if until_s is None:
        latest_s = latest_demand_s(session)
        until_s = 0 if latest_s is None else latest_s + BUCKET_S
    if since_s is None:
        since_s = max(0, until_s - 86_400)
    if until_s - since_s > SPAN_S_MAX:
        raise InvalidValueError(f"since_s: more than {SPAN_S_MAX} s before until_s", param="since_s")
    endpoint = Endpoint(model=model, region=region)
    series = read_demand(session, kind=kind, since_s=since_s, until_s=until_s, only=endpoint)
    points = series.get(endpoint, [])
    if not points:  # what was deleted may have some still
        require(session, Model, model, param="model")
        require(session, Region, region, param="region")
    data = [DemandPoint(start_s=start_s, tokens_per_s=tokens_per_s) for start_s, tokens_per_s in points]
    return DemandSeries(model=model, region=region, kind=kind, since_s=since_s, until_s=until_s, data=data)
