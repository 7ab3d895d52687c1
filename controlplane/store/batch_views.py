"""Batches of all tenants, as operators look at them: lists, speed, and the lines that failed."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import and_, case, func, select
from sqlalchemy.orm import Session

from controlplane.policies.lifecycle import BATCH, BatchRequestState, BatchState
from controlplane.store.batch_tables import Batch, BatchCount, BatchModel, BatchRequest, BatchResult
from controlplane.store.rows import Page, matching, page

RATE_OVER_S = 300.0
"""The time over which the speed of a batch is measured."""


@dataclass(frozen=True, kw_only=True)
class ModelLines:
    """Lines of a batch that ask for one model. Of a batch that has ended the counts are not kept by model: null."""

    model: str
    lines: int
    completed: int | None
    failed: int | None


@dataclass(frozen=True, kw_only=True)
class FailedLine:
    """A line without an answer: the status and the error that a node or the gateway gave it, or why it never ran."""

    line: int | None
    custom_id: str | None
    status: int | None
    code: str | None
    message: str | None


def find_batches(
    session: Session,
    *,
    tenant: str | None,
    model: str | None,
    state: str | None,
    ended: bool | None,
    at_risk: bool | None,
    after: str | None,
    limit: int,
) -> Page[Batch]:
    """One page of batches, the newest first; None: any. `at_risk`: those in progress that are predicted to end late."""
    query = select(Batch).where(*matching(Batch, {"tenant": tenant, "state": state}))
    if model is not None:
        query = query.where(Batch.number.in_(select(BatchModel.batch_number).where(BatchModel.model == model)))
    if ended is not None:
        query = query.where(Batch.ended_at.is_not(None) if ended else Batch.ended_at.is_(None))
    if at_risk is not None:
        late = and_(Batch.state == BatchState.IN_PROGRESS, Batch.at_risk)
        query = query.where(late if at_risk else ~late)
    if at_risk or (state is not None and BATCH[BatchState(state)]):
        query = query.where(Batch.ended_at.is_(None))  # which follows, and lets the index of these few be read
    return page(session, query, after=after, limit=limit, newest_first=True)


def lines_by_model(session: Session, batches: Sequence[Batch]) -> dict[int, list[ModelLines]]:
    """The models of batches, by the batch's number. A batch that is not validated yet has none."""
    parts = (
        select(
            BatchCount.batch_number,
            BatchCount.model,
            func.sum(BatchCount.completed).label("completed"),
            func.sum(BatchCount.failed).label("failed"),
        )
        .where(BatchCount.batch_number.in_([batch.number for batch in batches]))
        .group_by(BatchCount.batch_number, BatchCount.model)
        .subquery()
    )
    is_open = Batch.ended_at.is_(None)
    rows = session.execute(
        select(
            BatchModel.batch_number,
            BatchModel.model,
            BatchModel.requests,
            case((is_open, func.coalesce(parts.c.completed, 0))),
            case((is_open, func.coalesce(parts.c.failed, 0))),
        )
        .join(Batch, Batch.number == BatchModel.batch_number)
        .outerjoin(parts, and_(parts.c.batch_number == BatchModel.batch_number, parts.c.model == BatchModel.model))
        .where(BatchModel.batch_number.in_([batch.number for batch in batches]))
        .order_by(BatchModel.model)
    )
    found: dict[int, list[ModelLines]] = {batch.number: [] for batch in batches}
    for number, model, lines, completed, failed in rows:
        whole = None if completed is None else int(completed)
        found[number].append(
            ModelLines(model=model, lines=lines, completed=whole, failed=None if failed is None else int(failed))
        )
    return found


def lines_per_s(session: Session, batch: Batch) -> float | None:
    """How many lines ended in a second over the last minutes, or since the batch began; None: it is not in progress."""
    if batch.state != BatchState.IN_PROGRESS or batch.in_progress_at is None:
        return None
    age_s, ended = session.execute(
        select(
            func.extract("epoch", func.now() - batch.in_progress_at),
            select(func.count())
            .where(
                BatchResult.batch_number == batch.number,
                BatchResult.finished_at > func.now() - func.make_interval(0, 0, 0, 0, 0, 0, RATE_OVER_S),
            )
            .scalar_subquery(),
        )
    ).one()
    return int(ended) / max(1.0, min(RATE_OVER_S, float(age_s)))


def failed_lines(session: Session, batch: Batch, *, after: int, limit: int) -> list[FailedLine]:
    """Lines of a batch that has not ended and that have failed so far, from the line behind `after` on."""
    rows = session.execute(
        select(BatchRequest.custom_id, BatchResult)
        .join(
            BatchRequest,
            and_(BatchRequest.batch_number == BatchResult.batch_number, BatchRequest.line == BatchResult.line),
        )
        .where(
            BatchResult.batch_number == batch.number,
            BatchResult.line > after,
            BatchResult.state != BatchRequestState.COMPLETED,
        )
        .order_by(BatchResult.line)
        .limit(limit)
    )
    return [
        failed_line(result.line, custom_id, result.status_code, result.body, result.error) for custom_id, result in rows
    ]


def failed_line(line: int | None, custom_id: str | None, status: int | None, body: object, error: object) -> FailedLine:
    """A line from its result: `error` says why it has no response, otherwise the response's body does."""
    given = error if isinstance(error, dict) else body.get("error") if isinstance(body, dict) else None
    said = given if isinstance(given, dict) else {}
    code, message = said.get("code") or said.get("type"), said.get("message")
    return FailedLine(
        line=line,
        custom_id=custom_id,
        status=status,
        code=None if code is None else str(code),
        message=None if message is None else str(message),
    )
