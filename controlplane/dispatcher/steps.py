"""Advancing batches by a step, one after the other; a failing batch is quarantined with backoff."""

from collections.abc import Callable
from dataclasses import dataclass

import structlog
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from controlplane.errors import TidepoolError, UnavailableError
from controlplane.policies.lifecycle import BatchState
from controlplane.settings import Settings
from controlplane.store.batch_attempts import Due, begin_attempt, give_up, hold_batch, lock_batch, note_failure
from controlplane.store.batch_tables import Batch
from controlplane.store.blobs.base import BlobStore
from controlplane.store.notifications import Wake, notify
from controlplane.store.session import Database

log = structlog.get_logger()
_OUTAGES = {"08", "25", "40", "53", "55", "57", "58"}
"""Classes of SQLSTATE whose cause is the server or other transactions."""
_QUERY_CANCELED = "57014"


@dataclass(frozen=True)
class Step:
    """A step that batches are `due` for. `take` reads and writes files in the caller's transaction, with the batch
    held; what it returns ends the step, with the batch's row locked.
    """

    due: Due
    take: Callable[[Session, Batch, BlobStore, Settings], Callable[[], None]]


class Stepper:
    """Takes one step with all batches that are due for it. Any number of processes may have one."""

    def __init__(self, step: Step, database: Database, blobs: BlobStore, settings: Settings) -> None:
        self._step = step
        self._database = database
        self._blobs = blobs
        self._settings = settings
        self._tenant = ""
        self._failed: tuple[Batch, Exception] | None = None
        """The attempt whose failure is not written down yet."""

    def one(self) -> str | None:
        """Take the step with the next batch; returns its id, also if the step failed. None: none is due.

        Raises:
            SQLAlchemyError, OSError, UnavailableError: Postgres or the files are unavailable; the batch is retried.
        """
        self._note_failure()
        due, attempts_max = self._step.due, self._settings.batch_attempts_max
        with self._database.transaction() as session:
            batch = begin_attempt(session, due, after=self._tenant)
            if batch is None:
                return None
            self._tenant = batch.tenant
            if batch.attempts > attempts_max:
                give_up(session, batch, due, reason="the dispatcher ended on it")
                return batch.id
        try:
            self._take(batch)
        except Exception as error:  # whatever it is, it does not block the other batches
            defect = not isinstance(error, SQLAlchemyError | OSError | TidepoolError)
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            log.warning(
                "batch not moved on", batch=batch.id, step=due, attempt=batch.attempts, error=text, exc_info=defect
            )
            self._failed = batch, error
            self._note_failure()
            if _is_outage(error):
                raise
        return batch.id

    def _note_failure(self) -> None:
        """Write down the attempt that failed last; while Postgres is away it is remembered until the next call."""
        if self._failed is None:
            return
        (begun, error), self._failed = self._failed, None
        most, counts = self._settings.batch_attempts_max, not _is_outage(error)
        try:
            with self._database.transaction() as session:
                note_failure(session, begun, self._step.due, reason=_reason(error), counts=counts, attempts_max=most)
        except Exception as trouble:
            if _is_outage(trouble):
                self._failed = begun, error
            raise

    def _take(self, begun: Batch) -> None:
        with self._database.transaction() as session:
            batch = hold_batch(session, begun)
            if batch is None:
                return
            end = self._step.take(session, batch, self._blobs, self._settings)
            moved = lock_batch(session, begun) is None
            if moved:
                session.rollback()
            else:
                end()
        if not moved:
            log.info("batch moved on", batch=batch.id, state=BatchState(batch.state))
            return
        with self._database.transaction() as session:  # it was cancelled, and could not be finalized while it was held
            notify(session, Wake.FINALIZE)


def _is_outage(error: Exception) -> bool:
    """Whether Postgres, the disk or the bucket is unavailable or busy, which is no fault of the batch. A statement that
    timed out may be its batch's fault.
    """
    if not isinstance(error, DBAPIError):
        return isinstance(error, OSError | UnavailableError | PoolTimeoutError)
    sqlstate: str | None = getattr(error.orig, "sqlstate", None)
    if sqlstate is None:
        return isinstance(error, OperationalError | InterfaceError)
    return sqlstate[:2] in _OUTAGES and sqlstate != _QUERY_CANCELED


def _reason(error: Exception) -> str:
    """The error for the batch's owner, without paths and statements."""
    if isinstance(error, TidepoolError):
        return error.message
    if isinstance(error, OSError):
        return f"its files cannot be read or written ({error.strerror or type(error).__name__})"
    if isinstance(error, DBAPIError):
        return f"Postgres refuses it ({str(error.orig).splitlines()[0]})"
    return f"an internal error ({type(error).__name__}); the dispatcher's log has the details"
