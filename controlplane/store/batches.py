"""Rows of the Batch API. `policies.lifecycle.BATCH` defines the moves between states."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
import uuid_utils
from sqlalchemy import delete, func, insert, literal, select, text
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.orm import InstrumentedAttribute, Session

from controlplane.errors import ConflictError, InvalidValueError, NotFoundError
from controlplane.policies.lifecycle import BATCH, BatchRequestState, BatchState, can_move, require_move
from controlplane.store.batch_tables import Batch, BatchCount, BatchModel, BatchRequest, BatchResult, BatchSpeed, File
from controlplane.store.files import get_file, is_there
from controlplane.store.notifications import Wake, notified, notify
from controlplane.store.rows import Page, copy_rows, page
from controlplane.store.session import defer, lift_time_limit
from controlplane.store.storable import storable

_MESSAGE_CHARACTERS_MAX, _PARAM_CHARACTERS_MAX = 500, 200
_COUNTED = ("completed", "failed", "input_tokens", "output_tokens")


@dataclass(frozen=True, kw_only=True)
class BatchCounts:
    """Requests of a batch: all, completed, and ended otherwise; input and output tokens so far."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class BatchError:
    """Why a batch failed, as OpenAI's `errors.data` shows it. `line` counts from 1. May quote what clients wrote."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None

    def shown(self) -> dict[str, Any]:
        """The error as JSON that can be stored, truncated."""
        param = None if self.param is None else storable(self.param[:_PARAM_CHARACTERS_MAX])
        message = storable(self.message[:_MESSAGE_CHARACTERS_MAX])
        return {"code": self.code, "message": message, "param": param, "line": self.line}


class NewRequest(NamedTuple):
    """A validated line of a batch file. `line` counts from 1; `body`: JSON of the message that nodes take (`Generate`);
    `input_tokens` and `tokens`: estimates of the prompt, and of prompt and answer together.
    """

    line: int
    custom_id: str
    model: str
    body: bytes
    input_tokens: int = 0
    tokens: int = 0


def add_batch(
    session: Session,
    *,
    tenant: str,
    input_file_id: str,
    endpoint: str,
    completion_window: str,
    window_s: int,
    labels: dict[str, Any] | None,
    models: list[str] | None = None,
    output_keep_s: int | None = None,
) -> Batch:
    """Accept a batch; a dispatcher validates it next. `models`: those that its lines may ask for; None is all.
    `output_keep_s`: how long its output files are kept, if not as long as others. One statement looks for the file,
    writes the row and tells dispatchers.

    Raises:
        NotFoundError: the tenant has no such file.
        InvalidValueError: it is no file for a batch.
    """
    values: dict[InstrumentedAttribute[Any], Any] = {
        Batch.id: f"batch_{uuid_utils.uuid7().hex}",
        Batch.tenant: tenant,
        Batch.endpoint: endpoint,
        Batch.completion_window: completion_window,
        Batch.state: BatchState.VALIDATING,
        Batch.output_keep_s: output_keep_s,
        Batch.labels: labels,
        Batch.models: models,
    }
    row = [literal(value, column.type) for column, value in values.items()]
    deadline = func.now() + timedelta(seconds=window_s)
    source = select(File.id, deadline, *row).where(*is_there(input_file_id, tenant), File.purpose == "batch")
    added = insert(Batch).from_select([Batch.input_file_id, Batch.deadline_at, *values], source)
    found = session.execute(added.returning(Batch, notified(Wake.VALIDATE))).one_or_none()
    if found is None:
        file = get_file(session, input_file_id, tenant=tenant)
        raise InvalidValueError(f"file '{file.id}' has purpose '{file.purpose}', not 'batch'", param="input_file_id")
    return found[0]


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
    return page(session, query, after=after, limit=limit, newest_first=True)


def counts_of(session: Session, batches: Sequence[Batch]) -> dict[str, BatchCounts]:
    """The counts of batches by id: the final ones of batches that have ended, and the current ones of others."""
    columns = [func.coalesce(func.sum(getattr(BatchCount, name)), getattr(Batch, name)) for name in _COUNTED]
    query = select(Batch.id, Batch.total, *columns).outerjoin(BatchCount, BatchCount.batch_number == Batch.number)
    rows = session.execute(query.where(Batch.id.in_([batch.id for batch in batches])).group_by(Batch.id))
    return {
        batch_id: BatchCounts(total=total, **dict(zip(_COUNTED, map(int, counts), strict=True)))
        for batch_id, total, *counts in rows
    }


def move_batch(session: Session, batch: Batch, state: BatchState) -> None:
    """Move a batch to a state and set the time of it.

    Raises:
        ValueError: the state machine has no such move.
    """
    require_move(BATCH, BatchState(batch.state), state)
    batch.state = state
    batch.attempts, batch.not_before = 0, None
    if state == BatchState.IN_PROGRESS:
        batch.in_progress_at = func.now()
    elif state == BatchState.FINALIZING:
        batch.finalizing_at = func.now()
    elif state == BatchState.CANCELLING:
        batch.cancelling_at = func.now()
    if not BATCH[state]:
        batch.ended_at = func.now()
    else:
        notify(session, Wake.FINALIZE, *([Wake.RELEASE] if state == BatchState.IN_PROGRESS else []))
    session.flush()


def fail_batch(session: Session, batch: Batch, errors: Sequence[BatchError]) -> None:
    """End a batch with its errors: as cancelled if it is being cancelled, else as failed."""
    batch.errors = {"object": "list", "data": [error.shown() for error in errors]}
    cancelled = batch.state == BatchState.CANCELLING
    move_batch(session, batch, BatchState.CANCELLED if cancelled else BatchState.FAILED)


def cancel_batch(session: Session, batch_id: str, *, tenant: str) -> Batch:
    """Cancel a batch: its open requests end at once, running ones too. Cancelling again changes nothing.

    Raises:
        NotFoundError: no such batch of this tenant.
        ConflictError: it has ended.
    """
    query = select(Batch).where(Batch.id == batch_id, Batch.tenant == tenant)
    batch = session.scalar(query.with_for_update(key_share=True))  # a step that holds the batch is not waited for
    if batch is None:
        raise NotFoundError(f"No batch found with id '{batch_id}'.", param="batch_id")
    state = BatchState(batch.state)
    if state in {BatchState.CANCELLING, BatchState.CANCELLED}:
        return batch
    if not can_move(BATCH, state, BatchState.CANCELLING):
        raise ConflictError(f"Cannot cancel a batch with status '{state}'.", param="batch_id")
    move_batch(session, batch, BatchState.CANCELLING)
    end_batch_requests(session, batch.number, state=BatchRequestState.CANCELLED)
    return batch


ATTEMPTS_EXHAUSTED: Mapping[str, str] = {
    "code": "attempts_exhausted",
    "message": "Every attempt at this request ended without an answer.",
}
_END_ERRORS: Mapping[BatchRequestState, Mapping[str, str]] = {
    BatchRequestState.EXPIRED: {
        "code": "batch_expired",
        "message": "This request could not be executed before the completion window expired.",
    },
    BatchRequestState.FAILED: ATTEMPTS_EXHAUSTED,
    BatchRequestState.CANCELLED: {
        "code": "batch_cancelled",
        "message": "The batch was cancelled before this request ran.",
    },
}
COUNT_WRITTEN = """
    INSERT INTO batch_counts AS counts (batch_number, model, part, completed, failed, input_tokens, output_tokens)
    SELECT batch_number, model, pg_backend_pid() % 16, count(*) FILTER (WHERE state = 'completed'),
           count(*) FILTER (WHERE state <> 'completed'), sum(input_tokens), sum(output_tokens)
    FROM ended GROUP BY batch_number, model ORDER BY batch_number, model
    ON CONFLICT (batch_number, model, part) DO UPDATE
    SET completed = counts.completed + excluded.completed, failed = counts.failed + excluded.failed,
        input_tokens = counts.input_tokens + excluded.input_tokens,
        output_tokens = counts.output_tokens + excluded.output_tokens
"""
"""Counts the requests in `ended` by their results. It locks rows in the order of their keys."""

_END = f"""
    WITH ended AS (
        DELETE FROM queued_requests WHERE {{which}}
        RETURNING batch_number, line, model, CAST(:state AS text) AS state, 0 AS input_tokens, 0 AS output_tokens
    ), written AS (
        INSERT INTO batch_results (batch_number, line, state, error, upstream_id)
        SELECT batch_number, line, state, CAST(:error AS jsonb), '' FROM ended RETURNING line
    ), counted AS ({COUNT_WRITTEN})
    SELECT line FROM written
"""  # noqa: S608 - of constants


def end_requests(session: Session, keys: Sequence[tuple[int, int]], *, state: BatchRequestState) -> int:
    """End these open requests (batch number, line) with an error as their result; returns how many."""
    which = """
        (batch_number, line) IN (SELECT * FROM unnest(CAST(:numbers AS bigint[]), CAST(:lines AS bigint[])))
    """
    if not keys:
        return 0
    notify(session, Wake.FINALIZE)
    numbers, lines = [number for number, _ in keys], [line for _, line in keys]
    return _end(session, which, {"numbers": numbers, "lines": lines}, state)


def end_batch_requests(session: Session, number: int, *, state: BatchRequestState) -> int:
    """End all open requests of a batch, after the transactions that are writing results of it. These are waited for as
    long as a statement may take; to end the requests takes as long as they are many.
    """
    defer(session, select(func.pg_advisory_xact_lock(-number)))
    lift_time_limit(session)
    notify(session, Wake.FINALIZE)
    return _end(session, "batch_number = :number", {"number": number}, state)


def _end(session: Session, which: str, values: Mapping[str, Any], state: BatchRequestState) -> int:
    error = msgspec.json.encode(_END_ERRORS[state]).decode()
    rows = session.execute(text(_END.format(which=which)), {**values, "state": state.value, "error": error})
    return len(rows.all())


def add_requests(session: Session, batch: Batch, requests: Iterable[NewRequest]) -> None:
    """Put the requests of a batch into the queue, all of them or (with the transaction) none."""
    lift_time_limit(session)
    batch_number = batch.number
    queued: list[tuple[int, int, str, int]] = []
    counts: dict[str, tuple[int, int]] = {}

    def bodies() -> Iterator[tuple[int, int, str, str]]:
        for request in requests:
            queued.append((batch_number, request.line, request.model, request.tokens))
            number, input_tokens = counts.get(request.model, (0, 0))
            counts[request.model] = number + 1, input_tokens + request.input_tokens
            yield batch_number, request.line, request.custom_id, request.body.decode()

    copy_rows(session, "batch_requests (batch_number, line, custom_id, body)", bodies())
    copy_rows(session, "queued_requests (batch_number, line, model, tokens)", queued)
    groups = [
        {"batch_number": batch_number, "model": model, "requests": number, "tokens": input_tokens}
        for model, (number, input_tokens) in counts.items()
    ]
    if groups:
        session.execute(insert(BatchModel), groups)
    batch.total = len(queued)


def result_lines(session: Session, batch: Batch) -> Iterator[tuple[str, BatchResult]]:
    """Every ended request of a batch, by its `custom_id`, with its result, in the order of the input lines, read
    some at a time, for a result may have megabytes.
    """
    rows = session.execute(
        select(BatchRequest.custom_id, BatchResult)
        .join(
            BatchResult,
            (BatchResult.batch_number == BatchRequest.batch_number) & (BatchResult.line == BatchRequest.line),
        )
        .where(BatchRequest.batch_number == batch.number)
        .order_by(BatchRequest.line)
        .execution_options(yield_per=20)
    )
    for custom_id, result in rows:
        yield custom_id, result
        session.expunge(result)


def models_of(session: Session, batch: Batch) -> list[str]:
    """The models that lines of an open batch ask for."""
    return list(session.scalars(select(BatchModel.model).where(BatchModel.batch_number == batch.number)))


def forget_requests(session: Session, batch: Batch) -> None:
    """Delete the requests and results of a batch whose output files are written; its models' speeds keep its counts,
    and it keeps the names of its models.
    """
    lift_time_limit(session)
    completed = (
        select(BatchCount.model, func.sum(BatchCount.completed))
        .where(BatchCount.batch_number == batch.number)
        .group_by(BatchCount.model)
        .order_by(BatchCount.model.collate("C"))  # as Python orders them, so that no two wait for each other
    )
    ended = upsert(BatchSpeed).from_select(["model", "ended"], completed)
    added = {"ended": BatchSpeed.ended + ended.excluded.ended}
    session.execute(ended.on_conflict_do_update(index_elements=["model"], set_=added))
    for table in (BatchRequest, BatchResult, BatchCount):
        session.execute(delete(table).where(table.batch_number == batch.number))
