"""Rows of the Batch API. Counts are counted, never kept; states move as `policies.lifecycle.BATCH` says."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import uuid_utils
from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from controlplane.errors import ConflictError, NotFoundError
from controlplane.policies.lifecycle import BATCH, BatchRequestState, BatchState, can_move, require_move
from controlplane.store.batch_tables import Batch, BatchRequest, BatchResult
from controlplane.store.paging import Page, page

_OPEN = (BatchRequestState.WAITING, BatchRequestState.RUNNING)


@dataclass(frozen=True, kw_only=True)
class BatchCounts:
    """Requests of a batch: all, answered well, and ended any other way."""

    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True, kw_only=True)
class NewRequest:
    """A validated line of a batch file. `line` counts from 1."""

    line: int
    custom_id: str
    model: str
    body: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ResultLine:
    """A request and its result, as the output files need them."""

    custom_id: str
    state: BatchRequestState
    status_code: int | None
    body: dict[str, Any] | None
    error: dict[str, Any] | None
    upstream_id: str
    request_id: int


def add_batch(
    session: Session,
    *,
    tenant: str,
    input_file_id: str,
    endpoint: str,
    completion_window: str,
    window_s: int,
    labels: dict[str, Any] | None,
) -> Batch:
    """Accept a batch; a dispatcher validates it next."""
    now = session.scalar(select(func.now()))
    assert now is not None
    batch = Batch(
        id=f"batch_{uuid_utils.uuid7().hex}",
        tenant=tenant,
        endpoint=endpoint,
        completion_window=completion_window,
        state=BatchState.VALIDATING,
        input_file_id=input_file_id,
        labels=labels,
        deadline_at=now + timedelta(seconds=window_s),
    )
    session.add(batch)
    session.flush()
    session.refresh(batch)
    return batch


def get_batch(session: Session, batch_id: str, *, tenant: str) -> Batch:
    """A tenant's batch.

    Raises:
        NotFoundError: there is none of that id, or it is another tenant's.
    """
    batch = session.get(Batch, batch_id)
    if batch is None or batch.tenant != tenant:
        raise NotFoundError(f"No batch found with id '{batch_id}'.", param="batch_id")
    return batch


def list_batches(session: Session, *, tenant: str, after: str | None, limit: int) -> Page[Batch]:
    """One page of a tenant's batches, the newest first."""
    query = select(Batch).where(Batch.tenant == tenant)
    return page(session, query, Batch.id, after=after, limit=limit, newest_first=True)


def counts_of(session: Session, batch_ids: Sequence[str]) -> dict[str, BatchCounts]:
    """Request counts by batch."""
    done = func.count().filter(BatchRequest.state == BatchRequestState.COMPLETED)
    lost = func.count().filter(BatchRequest.state.in_([s for s in BatchRequestState if s not in _OPEN])) - done
    rows = session.execute(
        select(BatchRequest.batch_id, func.count(), done, lost)
        .where(BatchRequest.batch_id.in_(batch_ids))
        .group_by(BatchRequest.batch_id)
    )
    found = {batch_id: BatchCounts(total=t, completed=c, failed=f) for batch_id, t, c, f in rows}
    return {batch_id: found.get(batch_id, BatchCounts()) for batch_id in batch_ids}


def move_batch(session: Session, batch: Batch, state: BatchState) -> None:
    """Move a batch and stamp the time that its clients see.

    Raises:
        ValueError: the state machine has no such move.
    """
    require_move(BATCH, BatchState(batch.state), state)
    batch.state = state
    now = session.scalar(select(func.now()))
    if state == BatchState.IN_PROGRESS:
        batch.in_progress_at = now
    elif state == BatchState.FINALIZING:
        batch.finalizing_at = now
    elif state == BatchState.CANCELLING:
        batch.cancelling_at = now
    else:
        batch.ended_at = now
    session.flush()


def cancel_batch(session: Session, batch_id: str, *, tenant: str) -> Batch:
    """Cancel a batch: what waits never runs, what runs is not waited for. Cancelling again changes nothing.

    Raises:
        NotFoundError: no such batch of this tenant.
        ConflictError: it has ended.
    """
    batch = session.scalar(select(Batch).where(Batch.id == batch_id, Batch.tenant == tenant).with_for_update())
    if batch is None:
        raise NotFoundError(f"No batch found with id '{batch_id}'.", param="batch_id")
    state = BatchState(batch.state)
    if state in {BatchState.CANCELLING, BatchState.CANCELLED}:
        return batch
    if not can_move(BATCH, state, BatchState.CANCELLING):
        raise ConflictError(f"Cannot cancel a batch with status '{state}'.", param="batch_id")
    move_batch(session, batch, BatchState.CANCELLING)
    end_requests(session, BatchRequest.batch_id == batch_id, state=BatchRequestState.CANCELLED)
    return batch


_END_ERRORS: Mapping[BatchRequestState, dict[str, str]] = {
    BatchRequestState.EXPIRED: {
        "code": "batch_expired",
        "message": "This request could not be executed before the completion window expired.",
    },
    BatchRequestState.FAILED: {
        "code": "attempts_exhausted",
        "message": "Every attempt at this request ended without an answer.",
    },
    BatchRequestState.CANCELLED: {
        "code": "batch_cancelled",
        "message": "The batch was cancelled before this request ran.",
    },
}


def end_requests(session: Session, where: Any, *, state: BatchRequestState) -> int:
    """End all open requests that match, with the result line that says why; returns how many."""
    ended = list(
        session.scalars(
            update(BatchRequest)
            .where(where, BatchRequest.state.in_(_OPEN))
            .values(state=state, lease_id=None, lease_until=None)
            .returning(BatchRequest.id)
        )
    )
    if ended:
        session.execute(
            text(
                "INSERT INTO batch_results (request_id, error, upstream_id)"
                " SELECT id, CAST(:error AS jsonb), '' FROM unnest(CAST(:ids AS bigint[])) AS ended(id)"
            ),
            {"error": msgspec.json.encode(_END_ERRORS[state]).decode(), "ids": ended},
        )
    return len(ended)


def claim_validating(session: Session) -> Batch | None:
    """A batch to validate, locked until the transaction ends, so that nobody else does."""
    return session.scalar(
        select(Batch)
        .where(Batch.state == BatchState.VALIDATING)
        .order_by(Batch.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    )


def add_requests(session: Session, batch: Batch, requests: Iterable[NewRequest]) -> None:
    """Put a validated batch's requests in the queue, all of them or (with the transaction) none."""
    deadline = batch.deadline_at
    session.execute(text("SET LOCAL statement_timeout = 0"))  # a copy lasts as long as its rows take to come
    cursor = session.connection().connection.cursor()
    with cursor.copy("COPY batch_requests (batch_id, line, custom_id, model, body, deadline_at) FROM STDIN") as copy:
        for request in requests:
            body = msgspec.json.encode(request.body).decode()
            copy.write_row((batch.id, request.line, request.custom_id, request.model, body, deadline))


def claim_finished(session: Session) -> Batch | None:
    """A batch with no open request and no output yet, locked until the transaction ends."""
    still_open = (
        select(BatchRequest.id).where(BatchRequest.batch_id == Batch.id, BatchRequest.state.in_(_OPEN)).exists()
    )
    ending = [BatchState.IN_PROGRESS, BatchState.FINALIZING, BatchState.CANCELLING]
    return session.scalar(
        select(Batch)
        .where(Batch.state.in_(ending), ~still_open)
        .order_by(Batch.id)
        .limit(1)
        .with_for_update(skip_locked=True, of=Batch)
    )


def result_lines(session: Session, batch_id: str) -> Iterator[ResultLine]:
    """Every request of an ended batch with its result, in the order of the input lines, read a thousand at a time."""
    rows = session.execute(
        select(BatchRequest.custom_id, BatchRequest.state, BatchResult, BatchRequest.id)
        .join(BatchResult, BatchResult.request_id == BatchRequest.id)
        .where(BatchRequest.batch_id == batch_id)
        .order_by(BatchRequest.line)
        .execution_options(yield_per=1000)
    )
    for custom_id, state, result, request_id in rows:
        yield ResultLine(
            custom_id=custom_id,
            state=BatchRequestState(state),
            status_code=result.status_code,
            body=result.body,
            error=result.error,
            upstream_id=result.upstream_id,
            request_id=request_id,
        )
