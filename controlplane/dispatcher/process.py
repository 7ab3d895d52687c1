"""The dispatcher's process: four loops over the same parts. Any number may run; Postgres keeps them apart."""

import asyncio
import contextlib
import functools
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable

import anyio.to_thread
import structlog
import uvloop
from sqlalchemy.exc import SQLAlchemyError

from controlplane.agents import AgentClient
from controlplane.dispatcher.finalize import FINALIZE
from controlplane.dispatcher.ingest import VALIDATE
from controlplane.dispatcher.release import Releaser
from controlplane.dispatcher.steps import Stepper
from controlplane.errors import TidepoolError
from controlplane.serving.demand import DemandCounter
from controlplane.serving.fleet import FleetCache
from controlplane.serving.send import Sender
from controlplane.settings import Settings
from controlplane.store.blobs import BlobStore, open_blobs
from controlplane.store.live import LiveStore
from controlplane.store.session import Database, make_engine

log = structlog.get_logger()
_RELEASE_EVERY_S = 0.25
_BATCHES_EVERY_S = 0.5
_RETRY_AFTER_S = 1.0


class Dispatcher:
    """Runs until it is cancelled; what it was working on is given back."""

    def __init__(self, settings: Settings, *, agents: AgentClient | None = None) -> None:
        self._settings = settings
        self._agents = agents

    async def run(self) -> None:
        """Validate, release, renew leases and finalize, each in its own loop."""
        settings = self._settings
        async with self._parts() as (database, blobs, releaser), asyncio.TaskGroup() as group:
            for step, what in ((VALIDATE, "validate"), (FINALIZE, "finalize")):
                steps = Stepper(step, database, blobs, settings)
                group.create_task(_forever(functools.partial(_all_due, steps), _BATCHES_EVERY_S, what))
            group.create_task(_forever(releaser.release, _RELEASE_EVERY_S, "release"))
            group.create_task(_forever(releaser.renew, settings.niw_lease_s / 3, "renew"))

    @contextlib.asynccontextmanager
    async def _parts(self) -> AsyncGenerator[tuple[Database, BlobStore, Releaser], None]:
        settings = self._settings
        database = Database(make_engine(settings))
        live = LiveStore(settings)
        agents = self._agents or AgentClient(settings)
        fleet = FleetCache(database, live, settings)
        demand = DemandCounter(live, gateway=False)
        releaser = Releaser(database, live, fleet, Sender(fleet, agents, settings), demand, settings)
        try:
            async with fleet.following(), demand.flushing():
                try:
                    yield database, open_blobs(settings), releaser
                finally:
                    await releaser.stop()
        finally:
            await agents.close()
            live.close()
            database.close()


async def _all_due(steps: Stepper) -> None:
    while await anyio.to_thread.run_sync(steps.one) is not None:
        pass


async def _forever(work: Callable[[], Awaitable[None]], every_s: float, what: str) -> None:
    """Do it again and again. While Postgres, Redis or the disk is away, say so once and try every second."""
    down = False
    while True:
        try:
            await work()
        except (SQLAlchemyError, TidepoolError, OSError) as error:
            if not down:
                log.warning("the dispatcher waits", what=what, error=f"{type(error).__name__}: {error}".splitlines()[0])
            down = True
            await asyncio.sleep(_RETRY_AFTER_S)
            continue
        except Exception:
            log.exception("a defect in the dispatcher", what=what)  # the other loops and batches go on
            await asyncio.sleep(_RETRY_AFTER_S)
            continue
        if down:
            log.info("the dispatcher goes on", what=what)
        down = False
        await asyncio.sleep(every_s)


def serve(settings: Settings) -> None:
    """Run a dispatcher until SIGTERM or SIGINT."""

    async def main() -> None:
        task = asyncio.create_task(Dispatcher(settings).run())
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    uvloop.run(main())
