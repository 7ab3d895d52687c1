"""Runs of the loops: the result of each run is stored, and `loop_periods_s` is how often each should succeed."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import structlog
from sqlalchemy.exc import SQLAlchemyError

from controlplane.policies.readiness import Loop
from controlplane.settings import Settings
from controlplane.store.loop_runs import note_failure, note_success
from controlplane.store.session import Database

log = structlog.get_logger()
_FORECASTER_EVERY_S = 120.0
"""One series may occupy a forecaster for so long, and pulses wait for it."""
_HOUR_S = 3600.0
_PLAN_EVERY_S = 40 * 60.0
"""The longest pause between two runs of the schedule's plan."""


def loop_periods_s(settings: Settings) -> Mapping[Loop, float]:
    """How often each loop should succeed, in seconds."""
    return {
        Loop.WORKER: settings.pulse_every_s,
        Loop.BEAT: settings.pulse_every_s,
        Loop.FORECASTER: max(_FORECASTER_EVERY_S, settings.pulse_every_s),
        Loop.DISPATCHER: settings.pulse_every_s,
        Loop.MEASURE: 60.0,
        Loop.FORECAST: _HOUR_S,
        Loop.CORRECT: _HOUR_S,
        Loop.PLAN: _PLAN_EVERY_S,
        Loop.SCALE: settings.scale_every_s,
        Loop.PREDICT: settings.predict_every_s,
        Loop.ROLL_OUT: settings.rollout_every_s,
        Loop.EXPIRE: settings.expire_every_s,
        Loop.SWEEP: _HOUR_S,
    }


@dataclass
class Run:
    """One run of a loop. `error`: set by a loop that ended without its result."""

    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class JobsRun:
    """The results of one run's jobs by name: how many rows or files each expired or deleted, and why some failed."""

    counts: Mapping[str, int]
    failed: Mapping[str, str]

    @property
    def error(self) -> str | None:
        """The jobs that failed, and why; None: all succeeded."""
        return "; ".join(f"{name}: {why}" for name, why in self.failed.items()) or None

    def done(self) -> dict[str, int]:
        """The counts that are not zero."""
        return {name: count for name, count in self.counts.items() if count}


def run_jobs(jobs: Mapping[str, Callable[[], int]]) -> JobsRun:
    """Run one job after the other, each in transactions of its own; a failing job does not affect the others."""
    counts: dict[str, int] = {}
    failed: dict[str, str] = {}
    for name, job in jobs.items():
        try:
            counts[name] = job()
        except Exception as error:  # the other jobs run all the same
            log.exception("a job failed", job=name)
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return JobsRun(counts=counts, failed=failed)


@contextlib.contextmanager
def noted(database: Database, loop: Loop) -> Iterator[Run]:
    """Around one run of a loop: store its success or failure. Exceptions propagate."""
    run = Run()
    try:
        yield run
    except Exception as error:
        note(database, loop, f"{type(error).__name__}: {error}")
        raise
    note(database, loop, run.error)


def note(database: Database, loop: Loop, error: str | None = None) -> None:
    """Store a loop's success or its error. While Postgres is unreachable nothing is stored: the loop becomes late."""
    try:
        with database.transaction(replicated=False) as session:
            if error is None:
                note_success(session, loop)
            else:
                note_failure(session, loop, error)
    except SQLAlchemyError as away:
        log.warning("a run was not noted", loop=loop, error=str(away).splitlines()[0])
