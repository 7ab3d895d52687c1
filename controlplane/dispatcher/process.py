"""The dispatcher's process: its loops, and one that records whether they succeed. Any number of processes may run;
Postgres coordinates them.
"""

import asyncio
import contextlib
import functools
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

import anyio.to_thread
import structlog
import uvloop
from sqlalchemy.exc import SQLAlchemyError

from controlplane.dispatcher.finalize import FINALIZE
from controlplane.dispatcher.ingest import VALIDATE
from controlplane.dispatcher.outcomes import Outcomes
from controlplane.dispatcher.pauses import Alarm, Pauses
from controlplane.dispatcher.release import Releaser
from controlplane.dispatcher.steps import Stepper
from controlplane.errors import TidepoolError
from controlplane.planner.runs import note
from controlplane.policies.readiness import Loop
from controlplane.serving.agent_client import AgentClient
from controlplane.serving.demand_counter import DemandCounter
from controlplane.serving.fleet_cache import FleetCache
from controlplane.serving.garbage import collect_less_often
from controlplane.serving.regional_reads import RegionalReads
from controlplane.serving.send import Sender
from controlplane.settings import Settings
from controlplane.store.blobs.base import BlobStore
from controlplane.store.blobs.open import open_blobs
from controlplane.store.notifications import Wake, listen
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database, make_engine

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Seconds between runs of the loops, which run when Postgres notifies of work for them, and when a request has
    ended: `release_s` while requests wait, and `release_gap_s` and `batches_s` at least between two releases and two
    looks for batches. Without notifications they run every `poll_s`. `retry_s`: until a failed loop runs again, and
    until a returned request may be claimed again.
    """

    release_s: float = 0.25
    release_gap_s: float = 0.05
    batches_s: float = 0.5
    poll_s: float = 30.0
    retry_s: float = 1.0


class Dispatcher:
    """Runs until it is cancelled; its requests are then returned to the queue."""

    def __init__(self, settings: Settings, intervals: Intervals = Intervals()) -> None:
        self._settings = settings
        self._intervals = intervals

    async def run(self) -> None:
        """Validate, release, renew leases and finalize, each in its own loop."""
        settings, intervals, outcomes = self._settings, self._intervals, Outcomes()
        forever = functools.partial(run_forever, outcomes=outcomes, retry_s=intervals.retry_s)
        release = Pauses(gap_s=intervals.release_gap_s, least_s=intervals.release_s, most_s=intervals.poll_s)
        validate, finalize = (
            Pauses(gap_s=intervals.batches_s, least_s=intervals.poll_s, most_s=intervals.poll_s) for _ in range(2)
        )

        def woken() -> None:
            release.wake()
            finalize.wake()

        async with self.parts(woken) as (database, blobs, fleet, releaser), asyncio.TaskGroup() as group:

            def queued() -> None:
                releaser.forget_waiting()
                release.wake()

            alarms = {
                Wake.VALIDATE: Alarm(validate.wake),
                Wake.RELEASE: Alarm(queued),
                Wake.FINALIZE: Alarm(finalize.wake),
            }
            for step, pauses, what in ((VALIDATE, validate, "validate"), (FINALIZE, finalize, "finalize")):
                due = functools.partial(_all_due, Stepper(step, database, blobs, settings))
                group.create_task(forever(due, pauses.rest, what))
            group.create_task(forever(functools.partial(_release, releaser, release), release.rest, "release"))
            group.create_task(listen(settings, lambda wake, delay_s: alarms[wake].ring_in(delay_s)))
            group.create_task(forever(releaser.renew, _every(settings.niw_lease_s / 3), "renew"))
            group.create_task(_noting(database, fleet, outcomes, settings.pulse_every_s))

    @contextlib.asynccontextmanager
    async def parts(
        self, woken: Callable[[], None]
    ) -> AsyncGenerator[tuple[Database, BlobStore, FleetCache, Releaser], None]:
        """What the loops work with; on exit the releaser returns its requests to the queue. `woken` is called when it
        may release more.
        """
        settings = self._settings
        database = Database(make_engine(settings))
        live = LiveStore(settings)
        agents = AgentClient(settings)
        reads = RegionalReads(database, settings)
        fleet = FleetCache(reads, live, settings)
        demand = DemandCounter(live, gateway=False)
        sender = Sender(fleet, agents, settings)
        releaser = Releaser(
            database,
            live,
            fleet,
            sender,
            demand,
            settings,
            retry_s=self._intervals.retry_s,
            poll_s=self._intervals.poll_s,
            woken=woken,
        )
        try:
            async with reads.following(), fleet.following(), demand.flushing():
                try:
                    yield database, open_blobs(settings), fleet, releaser
                finally:
                    await releaser.stop()
        finally:
            await agents.close()
            live.close()
            database.close()


async def _all_due(steps: Stepper) -> None:
    """Advance every batch that is due by a step."""
    while await anyio.to_thread.run_sync(steps.one) is not None:
        pass


async def _release(releaser: Releaser, pauses: Pauses) -> None:
    pauses.note(found=await releaser.release())


def _every(seconds: float) -> Callable[[], Awaitable[None]]:
    return functools.partial(asyncio.sleep, seconds)


async def _noting(database: Database, fleet: FleetCache, outcomes: Outcomes, every_s: float) -> None:
    """Record every `every_s` seconds whether the loops succeed, or why not."""
    while True:
        trouble = outcomes.trouble(time.monotonic()) if fleet.is_fresh() else "the live view is old"
        await anyio.to_thread.run_sync(note, database, Loop.DISPATCHER, trouble)
        await asyncio.sleep(every_s)


async def run_forever(
    work: Callable[[], Awaitable[None]],
    rest: Callable[[], Awaitable[None]],
    what: str,
    outcomes: Outcomes,
    *,
    retry_s: float,
) -> None:
    """Repeat `work` with a rest after each run. While Postgres, Redis or the disk is unavailable, log it once and retry
    every `retry_s`.
    """
    outcomes.begin(what, time.monotonic())
    while True:
        try:
            await work()
        except (SQLAlchemyError, TidepoolError, OSError) as error:
            if outcomes.end(what, time.monotonic(), error):
                log.warning("the dispatcher waits", what=what, error=f"{type(error).__name__}: {error}".splitlines()[0])
            await asyncio.sleep(retry_s)
            continue
        except Exception as error:
            outcomes.end(what, time.monotonic(), error)
            log.exception("a defect in the dispatcher", what=what)  # the other loops and batches go on
            await asyncio.sleep(retry_s)
            continue
        if outcomes.end(what, time.monotonic()):
            log.info("the dispatcher goes on", what=what)
        await rest()


def serve(settings: Settings) -> None:
    """Run a dispatcher until SIGTERM or SIGINT."""

    async def main() -> None:
        collect_less_often()
        task = asyncio.create_task(Dispatcher(settings).run())
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    uvloop.run(main())
