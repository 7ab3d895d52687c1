"""The NIW queue: claims with SKIP LOCKED, leases in database time, results written once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import uuid_utils
from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from controlplane.policies.facts import QueueFacts
from controlplane.policies.lifecycle import BatchRequestState
from controlplane.store.batch_tables import Batch, BatchRequest, BatchResult
from controlplane.store.batches import end_requests

_COUNT_MAX = 100
_BYTES_PER_TOKEN = 4


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A request leased to one dispatcher. Whoever writes for it must still hold `lease_id`."""

    request_id: int
    lease_id: str
    batch_id: str
    tenant: str
    endpoint: str
    custom_id: str
    model: str
    body: dict[str, Any]
    attempts: int


def queue_facts(session: Session, *, aged_s: float) -> tuple[QueueFacts, ...]:
    """Requests waiting by model, and those older than `aged_s`; both counted up to a hundred, which is as much as any
    release looks at.
    """
    rows = session.execute(
        text(
            """
            SELECT models.name, count(*), count(*) FILTER (WHERE due.created_at < now() - :aged_s * interval '1 s')
            FROM models CROSS JOIN LATERAL (
                SELECT created_at FROM batch_requests
                WHERE model = models.name AND state = 'waiting' AND (not_before IS NULL OR not_before <= now())
                ORDER BY deadline_at, id LIMIT :most
            ) AS due GROUP BY models.name ORDER BY models.name
            """
        ),
        {"aged_s": aged_s, "most": _COUNT_MAX},
    )
    return tuple(QueueFacts(model=model, waiting=waiting, aged=aged) for model, waiting, aged in rows)


@dataclass(frozen=True, kw_only=True)
class Backlog:
    """What waits of a model: about so many input tokens, the first due at the Unix time `due_s`."""

    tokens: float
    due_s: float


def backlogs(session: Session) -> dict[str, Backlog]:
    """The waiting requests of each model; their tokens by the mean length of the first ones, four bytes a token."""
    rows = session.execute(
        text(
            """
            SELECT models.name, waiting.count, extract(epoch FROM first.due), first.bytes
            FROM models
            CROSS JOIN LATERAL (
                SELECT count(*) FROM batch_requests WHERE model = models.name AND state = 'waiting'
            ) AS waiting
            CROSS JOIN LATERAL (
                SELECT min(deadline_at) AS due, avg(octet_length(body::text)) AS bytes FROM (
                    SELECT deadline_at, body FROM batch_requests WHERE model = models.name AND state = 'waiting'
                    ORDER BY deadline_at, id LIMIT :most
                ) AS nearest
            ) AS first
            WHERE waiting.count > 0
            """
        ),
        {"most": _COUNT_MAX},
    )
    return {
        model: Backlog(tokens=count * float(size) / _BYTES_PER_TOKEN, due_s=float(due))
        for model, count, due, size in rows
    }


def claim(session: Session, *, model: str, count: int, lease_s: int) -> list[Claim]:
    """Lease up to `count` waiting requests of a model, the nearest deadline first."""
    due = (
        select(BatchRequest.id)
        .where(
            BatchRequest.state == BatchRequestState.WAITING,
            BatchRequest.model == model,
            func.coalesce(BatchRequest.not_before <= func.now(), True),
        )
        .order_by(BatchRequest.deadline_at, BatchRequest.id)
        .limit(count)
        .with_for_update(skip_locked=True)
        .cte("due")
        .prefix_with("MATERIALIZED")  # else a plan may run it again, and lease more than `count`
    )
    lease_id = uuid_utils.uuid7().hex
    rows = session.scalars(
        update(BatchRequest)
        .where(BatchRequest.id == due.c.id)
        .values(
            state=BatchRequestState.RUNNING,
            lease_id=lease_id,
            lease_until=func.now() + func.make_interval(0, 0, 0, 0, 0, 0, lease_s),
            attempts=BatchRequest.attempts + 1,
        )
        .returning(BatchRequest)
    ).all()
    owners = {
        batch.id: batch for batch in session.scalars(select(Batch).where(Batch.id.in_({r.batch_id for r in rows})))
    }
    return [
        Claim(
            request_id=row.id,
            lease_id=lease_id,
            batch_id=row.batch_id,
            tenant=owners[row.batch_id].tenant,
            endpoint=owners[row.batch_id].endpoint,
            custom_id=row.custom_id,
            model=row.model,
            body=row.body,
            attempts=row.attempts,
        )
        for row in sorted(rows, key=lambda row: row.id)
    ]


def renew(session: Session, held: Sequence[Claim], *, lease_s: int) -> set[int]:
    """Extend leases; returns the requests that are still ours."""
    lease_until = func.now() + func.make_interval(0, 0, 0, 0, 0, 0, lease_s)
    kept = session.scalars(
        update(BatchRequest)
        .where(
            BatchRequest.id.in_([claim.request_id for claim in held]),
            BatchRequest.lease_id.in_({claim.lease_id for claim in held}),
        )
        .values(lease_until=lease_until)
        .returning(BatchRequest.id)
    )
    return set(kept)


def finish(session: Session, held: Claim, *, status_code: int, body: dict[str, Any], upstream_id: str) -> bool:
    """Write the one result of a request. False, and nothing written, if the lease is no longer ours."""
    state = BatchRequestState.COMPLETED if status_code < 400 else BatchRequestState.FAILED
    if not _release_lease(session, held, state=state):
        return False
    session.add(BatchResult(request_id=held.request_id, status_code=status_code, body=body, upstream_id=upstream_id))
    session.flush()
    return True


def give_back(session: Session, held: Claim, *, delay_s: float, error: str, tried: bool) -> bool:
    """Let a request wait again, for at least `delay_s`. `tried`: a node had it, so the attempt counts."""
    not_before = func.now() + func.make_interval(0, 0, 0, 0, 0, 0, delay_s)
    return _release_lease(
        session,
        held,
        state=BatchRequestState.WAITING,
        not_before=not_before,
        last_error=error[:2000].replace("\0", ""),
        attempts=held.attempts - (not tried),
    )


def _release_lease(session: Session, held: Claim, *, state: BatchRequestState, **values: Any) -> bool:
    ours = session.scalar(
        update(BatchRequest)
        .where(
            BatchRequest.id == held.request_id,
            BatchRequest.lease_id == held.lease_id,
            BatchRequest.state == BatchRequestState.RUNNING,
        )
        .values(state=state, lease_id=None, lease_until=None, **values)
        .returning(BatchRequest.id)
    )
    return ours is not None


def expire_leases(session: Session, *, attempts_max: int) -> int:
    """Let requests wait again whose dispatcher is gone; those that lost `attempts_max` of them end as failed."""
    over = (BatchRequest.state == BatchRequestState.RUNNING) & (BatchRequest.lease_until < func.now())
    poison = end_requests(session, over & (BatchRequest.attempts >= attempts_max), state=BatchRequestState.FAILED)
    return poison + len(
        session.scalars(
            update(BatchRequest)
            .where(over)
            .values(state=BatchRequestState.WAITING, lease_id=None, lease_until=None, last_error="the lease ran out")
            .returning(BatchRequest.id)
        ).all()
    )


def expire_requests(session: Session) -> int:
    """End requests past their deadline, with the line that says so."""
    return end_requests(session, BatchRequest.deadline_at < func.now(), state=BatchRequestState.EXPIRED)
