"""Two Postgres queues to stand beside, each with workers of its own and a task that does nothing."""

import asyncio
import contextlib
import importlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sqlalchemy import make_url

from ops.bench.queue_load import rate_of

CONCURRENCY = 64
_CHUNK = 10_000


def procrastinate(url: str, rows: int, processes: int, seconds: float) -> float:
    """Jobs of procrastinate that are fetched and finished a second."""
    asyncio.run(_fill_procrastinate(url, rows))
    return rate_of(_run_procrastinate, url, processes, seconds)


def _procrastinate_app(url: str) -> Any:
    library = importlib.import_module("procrastinate")
    app = library.App(connector=library.PsycopgConnector(conninfo=_plain(url), min_size=2, max_size=8))

    @app.task(name="nothing")  # type: ignore[untyped-decorator, unused-ignore]
    async def nothing(number: int) -> None:
        app.done += 1
        app.last = time.time()

    app.done, app.last = 0, 0.0
    return app


async def _fill_procrastinate(url: str, rows: int) -> None:
    app = _procrastinate_app(url)
    async with app.open_async():
        if not await app.check_connection_async():
            await app.schema_manager.apply_schema_async()
        await app.connector.execute_query_async("TRUNCATE procrastinate_jobs CASCADE")
        for first in range(0, rows, _CHUNK):
            numbers = range(first, min(first + _CHUNK, rows))
            await app.tasks["nothing"].batch_defer_async(*({"number": number} for number in numbers))


def _run_procrastinate(url: str, start: Any, seconds: float, results: Any) -> None:
    async def run() -> None:
        app = _procrastinate_app(url)
        async with app.open_async():
            start.wait()
            app.last = begin = time.time()
            worker = app.run_worker_async(concurrency=CONCURRENCY, wait=False, install_signal_handlers=False)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(worker, seconds)
            results.put((app.done, begin, app.last))

    asyncio.run(run())


def pgqueuer(url: str, rows: int, processes: int, seconds: float) -> float:
    """Jobs of pgqueuer that are dequeued and logged as done a second."""
    asyncio.run(_fill_pgqueuer(url, rows))
    return rate_of(_run_pgqueuer, url, processes, seconds)


async def _connect(url: str) -> Any:
    return await importlib.import_module("asyncpg").connect(_plain(url))


async def _fill_pgqueuer(url: str, rows: int) -> None:
    queries_of = importlib.import_module("pgqueuer.queries").Queries
    connection = await _connect(url)
    queries = queries_of.from_asyncpg_connection(connection)
    if await connection.fetchval("SELECT to_regclass('pgqueuer')") is None:
        await queries.install()
    await queries.clear_queue()
    for first in range(0, rows, _CHUNK):
        count = min(_CHUNK, rows - first)
        await queries.enqueue(["nothing"] * count, [b"x"] * count, [0] * count)
    await connection.close()


def _run_pgqueuer(url: str, start: Any, seconds: float, results: Any) -> None:
    async def run() -> None:
        library = importlib.import_module("pgqueuer")
        modes = importlib.import_module("pgqueuer.types").QueueExecutionMode
        connection = await _connect(url)
        worker = library.PgQueuer.from_asyncpg_connection(connection)
        done, last = 0, 0.0

        @worker.entrypoint("nothing")  # type: ignore[untyped-decorator, unused-ignore]
        async def nothing(job: Any) -> None:
            nonlocal done, last
            done, last = done + 1, time.time()

        start.wait()
        begin = last = time.time()
        running = worker.run(dequeue_timeout=timedelta(seconds=1), batch_size=CONCURRENCY, mode=modes.drain)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(running, seconds)
        results.put((done, begin, last))
        await connection.close()

    asyncio.run(run())


def _plain(url: str) -> str:
    """The address as libpq writes it."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


PEERS: dict[str, Callable[[str, int, int, float], float]] = {"procrastinate": procrastinate, "pgqueuer": pgqueuer}
