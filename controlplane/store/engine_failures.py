"""On which engines models failed, by GPU type: kept so that nobody tries again and again. See `policies.engines`."""

from collections.abc import Mapping
from datetime import timedelta

from sqlalchemy import case, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from controlplane.policies.engines import Engine, EngineFailure
from controlplane.store.tables import EngineFailureRow, Instance, Json

_ERROR_CHARACTERS_MAX = 300


def engine_failures(session: Session) -> Mapping[tuple[str, str], Mapping[Engine, EngineFailure]]:
    """All that is known, by model and GPU type."""
    known: dict[tuple[str, str], dict[Engine, EngineFailure]] = {}
    for row in session.scalars(select(EngineFailureRow)):
        failure = EngineFailure(times=row.times, failed_s=row.failed_at.timestamp(), error=row.error)
        known.setdefault((row.model, row.gpu_type), {})[row.engine] = failure
    return known


def note_engine_failure(session: Session, instance: Instance, *, forget_s: float) -> Json | None:
    """Count that an instance failed on its engine, from the first again where the one before it is older than
    `forget_s`. What was noted, but for when; None: this failure was counted before, perhaps with another instance.
    """
    error = f"{instance.node}: {instance.error}"[:_ERROR_CHARACTERS_MAX]
    place = {"model": instance.model, "gpu_type": instance.gpu_type, "engine": instance.engine}
    long_ago = EngineFailureRow.failed_at < func.now() - timedelta(seconds=forget_s)
    latest = {"failed_at": func.now(), "error": error}
    times = session.scalar(
        insert(EngineFailureRow)
        .values(**place, times=1, **latest)
        .on_conflict_do_update(
            index_elements=list(place),
            set_={"times": case((long_ago, 1), else_=EngineFailureRow.times + 1), **latest},
            where=EngineFailureRow.failed_at < instance.changed_at,
        )
        .returning(EngineFailureRow.times)
    )
    return None if times is None else {**place, "times": times, "error": error}
