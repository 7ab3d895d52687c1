"""Run the oldest queued what-if run: write its facts, simulate them in a process of its own, keep the figures."""

from pathlib import Path
from tempfile import TemporaryDirectory

import structlog
from celery.exceptions import SoftTimeLimitExceeded

from controlplane.errors import TidepoolError
from controlplane.planner.what_if.changes import WhatIfChanges
from controlplane.planner.what_if.facts import write_facts
from controlplane.planner.what_if.figures import figures_of
from controlplane.planner.what_if.simulation import SimulationError, StoppedError, simulate
from controlplane.planner.what_if.stopping import is_stopping
from controlplane.settings import Settings
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database
from controlplane.store.what_if import WhatIfRun, claim_run, complete_run, fail_run, note_progress

log = structlog.get_logger()


def run_next(database: Database, live: LiveStore, settings: Settings) -> bool:
    """Run one run to its end. False: none is queued, or enough run already."""
    with database.transaction() as session:
        run = claim_run(session, running_max=settings.what_if_running_max)
    if run is None:
        return False
    try:
        _run(run, database, live, settings)
    except (SimulationError, TidepoolError) as error:
        _fail(database, run.id, str(error))
    except StoppedError:
        _fail(database, run.id, "its worker was stopped; start it again")  # or it was cancelled: then it stays so
    except SoftTimeLimitExceeded:
        _fail(database, run.id, "its worker ran out of time")
    except Exception:
        _fail(database, run.id, "it failed unexpectedly; the worker's log says how")
        raise
    return not is_stopping()


def _run(run: WhatIfRun, database: Database, live: LiveStore, settings: Settings) -> None:
    changes = WhatIfChanges.model_validate(run.changes)

    def go_on(share: float) -> bool:
        with database.transaction() as session:
            return note_progress(session, run.id, share) and not is_stopping()

    with TemporaryDirectory() as folder:
        facts = write_facts(Path(folder), database, live, settings, changes, hours=run.hours)
        document = simulate(
            facts.path,
            hours=run.hours,
            strategy=changes.strategy or settings.scale_strategy,
            time_max_s=settings.what_if_time_max_s,
            memory_bytes_max=settings.what_if_memory_bytes_max,
            go_on=go_on,
        )
    with database.transaction() as session:
        complete_run(
            session, run.id, figures_of(document, demand_from_s=facts.demand_from_s), document["event_log_hash"]
        )
    log.info("what-if run completed", run=run.id)


def _fail(database: Database, run_id: str, error: str) -> None:
    with database.transaction() as session:
        failed = fail_run(session, run_id, error)
    if failed:
        log.warning("what-if run failed", run=run_id, error=error)
