"""When each loop last succeeded: written by the loops themselves, read by whoever judges the system's health."""

import os
import socket
from collections.abc import Mapping
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from controlplane.policies.readiness import Loop, LoopFacts
from controlplane.store.tables import Fleet, LoopRun

_ERROR_CHARACTERS_MAX = 300


def note_success(session: Session, loop: Loop) -> None:
    """A loop has just succeeded."""
    _note(session, loop, {"last_success_at": func.clock_timestamp()})


def note_failure(session: Session, loop: Loop, error: str) -> None:
    """A loop has just failed, and why."""
    short = " ".join(error.split())[:_ERROR_CHARACTERS_MAX]
    _note(session, loop, {"last_failure_at": func.clock_timestamp(), "last_error": short})


def _note(session: Session, loop: Loop, values: Mapping[str, Any]) -> None:
    row = {**values, "last_process": f"{socket.gethostname()}:{os.getpid()}"}
    statement = insert(LoopRun).values(loop=loop, **row)
    session.execute(statement.on_conflict_do_update(index_elements=["loop"], set_=row))


def read_loop_runs(session: Session) -> tuple[float, tuple[LoopFacts, ...]]:
    """Unix time on Postgres's clock, by which the loops' times are written, and all loops in their order."""
    now, since = session.execute(select(func.clock_timestamp(), Fleet.created_at)).one()
    rows = {row.loop: row for row in session.scalars(select(LoopRun))}
    return now.timestamp(), tuple(_facts(loop, rows.get(loop), since_s=since.timestamp()) for loop in Loop)


def _facts(loop: Loop, row: LoopRun | None, *, since_s: float) -> LoopFacts:
    if row is None:
        return LoopFacts(loop=loop, since_s=since_s)
    return LoopFacts(
        loop=loop,
        since_s=since_s,
        last_success_s=None if row.last_success_at is None else row.last_success_at.timestamp(),
        last_failure_s=None if row.last_failure_at is None else row.last_failure_at.timestamp(),
        last_error=row.last_error,
        last_process=row.last_process,
    )
