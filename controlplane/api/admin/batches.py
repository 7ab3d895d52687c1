"""Batches of all tenants. What a tenant wrote and what models answered it are read with a key of the tenant only."""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import islice
from typing import IO, Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Query
from pydantic import Field
from sqlalchemy.orm import Session

from controlplane.api.admin.fields import ID_PATTERN, After, Answer, Limit, PageOf
from controlplane.api.admin.idempotency import IdempotentRoute
from controlplane.api.auth import Operator, Viewer
from controlplane.api.state import SessionDep, State, StateDep
from controlplane.declarations import ModelName, Tenant
from controlplane.errors import InvalidValueError
from controlplane.policies.lifecycle import BatchState
from controlplane.store import batch_views, batches
from controlplane.store.batch_tables import Batch
from controlplane.store.batch_views import FailedLine, failed_line
from controlplane.store.files import get_file
from controlplane.store.keys import record
from controlplane.store.rows import require

router = APIRouter(tags=["admin: batches"], route_class=IdempotentRoute)
BatchPath = Annotated[str, Path(pattern=ID_PATTERN, examples=["batch_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"])]
_SERVER_ERRORS = 500
_CURSOR = re.compile("[0-9]{1,10}([|][0-9]{1,15})?", re.ASCII)


class BatchView(Answer):
    """A batch of any tenant, without what the tenant wrote."""

    id: str = Field(examples=["batch_0190f3c2a7b57c1e8d2f4b6a8c0e1f23"])
    tenant: str
    endpoint: str = Field(examples=["/v1/chat/completions"])
    state: BatchState
    models: list[str] = Field(description="models that its lines ask for; empty until it is validated")
    total: int = Field(description="its lines; 0 until it is validated")
    completed: int
    failed: int = Field(description="lines that ended without an answer")
    input_tokens: int
    output_tokens: int
    created_at: datetime
    in_progress_at: datetime | None
    ended_at: datetime | None
    deadline_at: datetime
    predicted_end_at: datetime | None = Field(description="while it is in progress, as far as is known")
    at_risk: bool = Field(description="whether the predicted end is after the deadline")
    reason: str | None = Field(description="why it will end then")


class BatchModelLines(Answer):
    """Lines of a batch that ask for one model."""

    model: str
    lines: int
    completed: int | None = Field(description="null once the batch has ended")
    failed: int | None


class BatchDetail(BatchView):
    """A batch with its speed and its files."""

    completion_window: str = Field(examples=["24h"])
    by_model: list[BatchModelLines]
    lines_per_s: float | None = Field(description="lines that ended in a second, while it is in progress")
    lines_over_s: float = Field(description="the time over which they are counted, at most")
    finalizing_at: datetime | None
    cancelling_at: datetime | None
    invalid_lines: int = Field(description="errors that its validation found; nothing ran then")
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None


class BatchLineError(Answer):
    """A line that has no answer, or why the whole batch failed (`line` null)."""

    line: int | None = Field(description="counts from 1")
    custom_id: str | None = Field(description="null in the batches of other tenants")
    status: int | None = Field(description="HTTP status of its response; null: it has none")
    code: str | None = Field(examples=["batch_expired"])
    message: str | None = Field(description="null where it may quote another tenant's request")


@router.get("/batches", summary="List batches")
def list_batches(
    session: SessionDep,
    _: Viewer,
    tenant: Annotated[Tenant | None, Query()] = None,
    model: Annotated[ModelName | None, Query(description="batches with lines for it")] = None,
    state: BatchState | None = None,
    ended: Annotated[bool | None, Query(description="whether they have ended")] = None,
    at_risk: Annotated[bool | None, Query(description="whether their predicted end is after their deadline")] = None,
    limit: Limit = 20,
    after: After = None,
) -> PageOf[BatchView]:
    """Of all tenants, the newest first, each with its counts right now."""
    page = batch_views.find_batches(
        session,
        tenant=tenant,
        model=model,
        state=state,
        ended=ended,
        at_risk=at_risk,
        after=after,
        limit=limit,
    )
    return PageOf(
        data=[BatchView.model_validate(shown) for shown in _shown(session, page.rows)],
        has_more=page.has_more,
        next=page.next,
    )


@router.get("/batches/{batch_id}", summary="How a batch goes")
def get_batch(batch_id: BatchPath, session: SessionDep, _: Viewer) -> BatchDetail:
    """Its counts by model, its speed, and when it will end. Its files are fetched with a key of its tenant."""
    return _detail(session, require(session, Batch, batch_id, param="batch_id"))


@router.post("/batches/{batch_id}/cancel", summary="Cancel a batch")
def cancel_batch(batch_id: BatchPath, session: SessionDep, caller: Operator) -> BatchDetail:
    """What waits never runs, and what runs is stopped; finished lines are kept for the tenant. Cancelling again changes
    nothing; 409 where the batch has ended.
    """
    found = require(session, Batch, batch_id, param="batch_id")
    before = found.state
    batch = batches.cancel_batch(session, batch_id, tenant=found.tenant)
    if batch.state != before:
        record(
            session,
            actor=caller.name,
            action="batch.cancel",
            subject=batch_id,
            before={"tenant": batch.tenant, "state": before},
            after={"tenant": batch.tenant, "state": batch.state},
        )
    return _detail(session, batch)


@router.get("/batches/{batch_id}/errors", summary="List lines of a batch that failed")
def list_batch_errors(
    batch_id: BatchPath, session: SessionDep, state: StateDep, caller: Operator, limit: Limit = 20, after: After = None
) -> PageOf[BatchLineError]:
    """By line: from the error file of a batch that has ended, else those that failed so far; of a batch that failed
    whole, what its validation found. In the batches of other tenants what they wrote is left out.
    """
    start = _position_of(after)
    batch = require(session, Batch, batch_id, param="batch_id")
    found = list(islice(_errors(session, state, batch, start, limit + 1), limit + 1))
    shown = [_without_words(line) if caller.tenant != batch.tenant else line for line, _ in found[:limit]]
    data = [BatchLineError.model_validate(line) for line in shown]
    more = len(found) > limit
    return PageOf(data=data, has_more=more, next=str(found[limit - 1][1]) if more else None)


def _shown(session: Session, rows: list[Batch]) -> Iterator[dict[str, Any]]:
    counts, models = batches.counts_of(session, rows), batch_views.lines_by_model(session, rows)
    for row in rows:
        in_progress = row.state == BatchState.IN_PROGRESS
        yield {
            **{name: getattr(row, name) for name in BatchDetail.model_fields if hasattr(row, name)},
            **asdict(counts[row.id]),
            "models": [lines.model for lines in models[row.number]],
            "predicted_end_at": row.predicted_end_at if in_progress else None,
            "at_risk": in_progress and row.at_risk,
            "reason": row.end_reason if in_progress else None,
        }


def _detail(session: Session, batch: Batch) -> BatchDetail:
    [shown] = _shown(session, [batch])
    return BatchDetail.model_validate(
        {
            **shown,
            "by_model": batch_views.lines_by_model(session, [batch])[batch.number],
            "lines_per_s": batch_views.lines_per_s(session, batch),
            "lines_over_s": batch_views.RATE_OVER_S,
            "invalid_lines": len((batch.errors or {}).get("data", ())),
        }
    )


@dataclass(frozen=True, kw_only=True)
class _Position:
    """Where a page ends: behind a line and, in an error file, before a byte."""

    line: int = 0
    byte: int = 0

    def __str__(self) -> str:
        return f"{self.line}|{self.byte}" if self.byte else str(self.line)


Positioned = Iterator[tuple[FailedLine, _Position]]


def _errors(session: Session, state: State, batch: Batch, start: _Position, limit: int) -> Positioned:
    """The failed lines behind `start`, each with the position behind it. Errors of the validation may name no line, so
    there the positions count them.
    """
    if batch.errors is not None:
        for number, each in enumerate(batch.errors["data"][start.line :], start=start.line + 1):
            line = FailedLine(
                line=each.get("line"), custom_id=None, status=None, code=each.get("code"), message=each.get("message")
            )
            yield line, _Position(line=number)
    elif batch.ended_at is None:
        for line in batch_views.failed_lines(session, batch, after=start.line, limit=limit):
            yield line, _Position(line=line.line or 0)
    elif batch.error_file_id is not None:
        file = get_file(session, batch.error_file_id, tenant=batch.tenant)
        with state.blobs.open(file.id) as stream:
            yield from _errors_in(stream, start)


def _errors_in(stream: IO[bytes], start: _Position) -> Positioned:
    """The lines of an error file behind `start`; what is before its byte is not read."""
    at = stream.seek(start.byte)
    for written in stream:
        is_first = start.byte and at == start.byte  # a file that is broken elsewhere is not the cursor's fault
        at += len(written)
        try:
            line = msgspec.json.decode(written)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if is_first:
                raise _no_cursor(str(start)) from error
            raise
        number = int(line["id"].rpartition("_")[2])
        if number > start.line:
            response = line["response"] or {}
            failed = failed_line(
                number, line["custom_id"], response.get("status_code"), response.get("body"), line["error"]
            )
            yield failed, _Position(line=number, byte=at)


def _without_words(line: FailedLine) -> FailedLine:
    """A line without what its tenant wrote: errors about a request may quote it, those of the serving side do not."""
    ours = line.custom_id is not None and (line.status is None or line.status >= _SERVER_ERRORS)
    return replace(line, custom_id=None, message=line.message if ours else None)


def _position_of(after: str | None) -> _Position:
    if after is None:
        return _Position()
    if not _CURSOR.fullmatch(after):
        raise _no_cursor(after)
    line, _, byte = after.partition("|")
    return _Position(line=int(line), byte=int(byte or 0))


def _no_cursor(after: str) -> InvalidValueError:
    return InvalidValueError(f"after: '{after}' is no cursor of this list", param="after")
