"""What-if runs: simulations of the running fleet with changes, which an operator asked for. A worker claims a queued
run and notes its progress; a run of which nothing is noted for a while was its worker's that died.
"""

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

import uuid_utils
from sqlalchemy import CheckConstraint, Index, func, select, text, update
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, Session, mapped_column

from controlplane.errors import BusyError, ConflictError
from controlplane.store.rows import Page, page, require
from controlplane.store.tables import Base, Json, one_of

_LOCK = 0x7768_6174  # of an advisory lock, so that two claims or two additions do not both take the last place
ERROR_CHARACTERS_MAX = 500


class WhatIfState(StrEnum):
    """What became of a run."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class WhatIfRun(Base):
    """A simulation. `changes`: what differs from the running fleet; `result`: figures of it; `heard_at`: when its
    worker last noted its progress.
    """

    __tablename__ = "what_if_runs"
    __table_args__ = (
        one_of("state", WhatIfState),
        CheckConstraint("progress BETWEEN 0 AND 1", name="progress_is_a_share"),
        CheckConstraint("state <> 'completed' OR result IS NOT NULL", name="completed_with_a_result"),
        Index("ix_what_if_runs_open", "state", "id", postgresql_where=text("state IN ('queued', 'running')")),
    )
    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    created_by: Mapped[str]
    hours: Mapped[int]
    changes: Mapped[Json]
    state: Mapped[str] = mapped_column(server_default=text("'queued'"))
    progress: Mapped[float] = mapped_column(server_default=text("0"))
    result: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    error: Mapped[str | None]
    event_log_hash: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now(), index=True)
    started_at: Mapped[datetime | None]
    heard_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]


def add_run(session: Session, *, name: str, created_by: str, hours: int, changes: Json, queued_max: int) -> WhatIfRun:
    """Queue a run.

    Raises:
        BusyError: too many are queued.
    """
    session.execute(select(func.pg_advisory_xact_lock(_LOCK)))
    if _count(session, WhatIfState.QUEUED) >= queued_max:
        raise BusyError(f"{queued_max} what-if runs are queued already (what_if_queued_max); cancel one, or try later")
    run = WhatIfRun(
        id=f"whatif_{uuid_utils.uuid7().hex}", name=name, created_by=created_by, hours=hours, changes=changes
    )
    session.add(run)
    session.flush()
    session.refresh(run)
    return run


def get_run(session: Session, run_id: str) -> WhatIfRun:
    """A run by its id; NotFoundError where there is none."""
    return require(session, WhatIfRun, run_id, param="run_id")


def list_runs(session: Session, *, state: WhatIfState | None, after: str | None, limit: int) -> Page[WhatIfRun]:
    """One page of runs, the newest first."""
    query = select(WhatIfRun)
    if state is not None:
        query = query.where(WhatIfRun.state == state)
    return page(session, query, after=after, limit=limit, newest_first=True)


def claim_run(session: Session, *, running_max: int) -> WhatIfRun | None:
    """The oldest queued run, which runs from now on. None: none is queued, or `running_max` run already."""
    session.execute(select(func.pg_advisory_xact_lock(_LOCK)))
    if _count(session, WhatIfState.RUNNING) >= running_max:
        return None
    oldest = select(WhatIfRun).where(WhatIfRun.state == WhatIfState.QUEUED).order_by(WhatIfRun.id).limit(1)
    run = session.scalar(oldest.with_for_update())
    if run is not None:
        run.state, run.started_at, run.heard_at = WhatIfState.RUNNING, func.now(), func.now()
        session.flush()
        session.refresh(run)
    return run


def is_waiting(session: Session, *, running_max: int) -> bool:
    """Whether a queued run could begin now."""
    return _count(session, WhatIfState.QUEUED) > 0 and _count(session, WhatIfState.RUNNING) < running_max


def note_progress(session: Session, run_id: str, progress: float) -> bool:
    """Note the share that is done; False where the run shall not go on."""
    return _move_running(session, run_id, progress=min(max(progress, 0.0), 1.0), heard_at=func.now())


def complete_run(session: Session, run_id: str, result: Json, event_log_hash: str) -> bool:
    """A run is done; False where it was cancelled meanwhile."""
    values = {"state": WhatIfState.COMPLETED, "progress": 1.0, "result": result, "event_log_hash": event_log_hash}
    return _move_running(session, run_id, **values, ended_at=func.now())


def fail_run(session: Session, run_id: str, error: str) -> bool:
    """A run failed; False where it was cancelled meanwhile."""
    short = error[:ERROR_CHARACTERS_MAX]
    return _move_running(session, run_id, state=WhatIfState.FAILED, error=short, ended_at=func.now())


def cancel_run(session: Session, run_id: str) -> WhatIfRun:
    """End a run that is queued or runs; its worker ends the simulation within seconds. One that has ended stays."""
    run = get_run(session, run_id)
    session.refresh(run, with_for_update=True)
    if run.state in (WhatIfState.QUEUED, WhatIfState.RUNNING):
        run.state, run.ended_at = WhatIfState.CANCELLED, func.now()
        session.flush()
        session.refresh(run)
    return run


def delete_run(session: Session, run_id: str) -> None:
    """Delete a run that has ended.

    Raises:
        ConflictError: it has not.
    """
    run = get_run(session, run_id)
    session.refresh(run, with_for_update=True)
    if run.state in (WhatIfState.QUEUED, WhatIfState.RUNNING):
        raise ConflictError(f"run '{run_id}' is {run.state}; cancel it first", param="run_id")
    session.delete(run)
    session.flush()


def fail_lost_runs(session: Session, *, silent_s: float) -> int:
    """Fail runs of which nothing was noted for `silent_s`; returns how many."""
    lost = (WhatIfRun.state == WhatIfState.RUNNING, WhatIfRun.heard_at < func.now() - timedelta(seconds=silent_s))
    values = {"state": WhatIfState.FAILED, "error": "its worker died; start it again", "ended_at": func.now()}
    return len(session.scalars(update(WhatIfRun).where(*lost).values(values).returning(WhatIfRun.id)).all())


def _count(session: Session, state: WhatIfState) -> int:
    return session.scalar(select(func.count()).select_from(WhatIfRun).where(WhatIfRun.state == state)) or 0


def _move_running(session: Session, run_id: str, **values: Any) -> bool:
    running = (WhatIfRun.id == run_id, WhatIfRun.state == WhatIfState.RUNNING)
    return session.scalar(update(WhatIfRun).where(*running).values(**values).returning(WhatIfRun.id)) is not None
