"""Attempts to advance batches: which batch is next, and how often each was tried.

An attempt is counted in its own transaction before it begins, so that a batch that crashes dispatchers is counted too,
and the backoff doubles. Tenants rotate, so that no number of batches of one delays another's.

While files are read and written, which may take long, an attempt *holds* its batch: no other attempt begins, but
clients can cancel it. The row is locked for the writes that end the attempt, if its state is still the same.
"""

from enum import StrEnum
from typing import Any

from sqlalchemy import Select, func, or_, select
from sqlalchemy.orm import Session

from controlplane.policies.lifecycle import BatchState
from controlplane.store.batch_tables import Batch, QueuedRequest
from controlplane.store.batches import BatchError, fail_batch
from controlplane.store.notifications import Wake, notify

_DELAY_MAX_S = 300


class Due(StrEnum):
    """What a batch waits for: its validation, or, when none of its requests is open, its end."""

    VALIDATION = "validation"
    END = "end"

    @property
    def wake(self) -> Wake:
        return Wake.VALIDATE if self == Due.VALIDATION else Wake.FINALIZE


def begin_attempt(session: Session, due: Due, *, after: str = "") -> Batch | None:
    """The next batch that is due, with this attempt counted; the next attempt at it is allowed after 2 s, then 4 s, and
    so on to 300 s. Tenants rotate by name, from `after` on; of one tenant, the batch with the fewest attempts is first.
    """
    batch = session.scalar(
        select(Batch)
        .where(*_is(due), or_(Batch.not_before.is_(None), Batch.not_before <= func.now()))
        .order_by(Batch.tenant <= after, Batch.tenant, Batch.attempts, Batch.id)
        .limit(1)
        .with_for_update(skip_locked=True, of=Batch)
    )
    if batch is not None:
        batch.attempts += 1
        delay_s = min(2**batch.attempts, _DELAY_MAX_S)
        batch.not_before = _in_s(delay_s)
        notify(session, due.wake, delay_s=delay_s)
        session.flush()
    return batch


def hold_batch(session: Session, begun: Batch) -> Batch | None:
    """The batch of an attempt, held until the transaction ends: `begin_attempt` skips it, as its lock alone excludes
    this one (KEY SHARE). None: it has been moved on, or a later attempt has begun.
    """
    query = _as_begun(begun).where(Batch.attempts <= begun.attempts)
    return session.scalar(query.with_for_update(read=True, key_share=True))


def lock_batch(session: Session, begun: Batch) -> Batch | None:
    """The batch of an attempt, as it is now, locked until the transaction ends. None: it has been moved on."""
    query = _as_begun(begun).with_for_update(key_share=True)
    return session.scalar(query.execution_options(populate_existing=True))


def note_failure(session: Session, begun: Batch, due: Due, *, reason: str, counts: bool, attempts_max: int) -> None:
    """After a failed attempt: the batch ends with `reason` if this was the last of `attempts_max`, or if its deadline
    passed before it was validated. `counts` False: an outage failed the attempt, which is not counted. Nothing if a
    later attempt has begun, which says itself how it ends.
    """
    batch = lock_batch(session, begun)
    if batch is None or batch.attempts > begun.attempts:
        return
    late = due == Due.VALIDATION and session.scalar(select(Batch.deadline_at < func.now()).where(Batch.id == batch.id))
    if late or (counts and batch.attempts >= attempts_max):
        give_up(session, batch, due, reason=reason)
    elif not counts:
        batch.attempts -= 1


def give_up(session: Session, batch: Batch, due: Due, *, reason: str) -> None:
    """End a batch that cannot be advanced. Its requests and results are kept."""
    what = "validated, and nothing of it ran" if due == Due.VALIDATION else "finalized"
    message = f"the batch could not be {what}: {reason}"
    fail_batch(session, batch, [BatchError(code="attempts_exhausted", message=message)])


def _as_begun(begun: Batch) -> Select[Batch]:
    return select(Batch).where(Batch.id == begun.id, Batch.state == begun.state)


def _is(due: Due) -> tuple[Any, ...]:
    if due == Due.VALIDATION:
        return Batch.state == BatchState.VALIDATING, Batch.ended_at.is_(None)
    still_open = select(QueuedRequest.line).where(QueuedRequest.batch_number == Batch.number).exists()
    ending = [BatchState.IN_PROGRESS, BatchState.FINALIZING, BatchState.CANCELLING]
    return Batch.state.in_(ending), Batch.ended_at.is_(None), ~still_open


def _in_s(delay_s: float) -> Any:
    return func.now() + func.make_interval(0, 0, 0, 0, 0, 0, delay_s)
