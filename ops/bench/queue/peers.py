"""The other Postgres queues: procrastinate and pgqueuer, each filled with jobs and worked off by its own worker."""

import asyncio
import contextlib
import importlib
import time
from datetime import timedelta
from typing import Any

from sqlalchemy import make_url

CONCURRENCY = 64
"""Jobs in flight of a worker of the others, and a batch of pgqueuer, which is slower with 256."""
_CHUNK = 10_000


def _procrastinate_app(url: str) -> Any:
    library = importlib.import_module("procrastinate")
    app = library.App(connector=library.PsycopgConnector(conninfo=_plain(url), min_size=2, max_size=8))

    @app.task(name="nothing")  # type: ignore[untyped-decorator, unused-ignore]
    async def nothing(body: str) -> None:
        app.done += 1
        app.last = time.time()

    app.done, app.last = 0, 0.0
    return app


async def fill_procrastinate(url: str, rows: int, payload: bytes) -> None:
    """Queue `rows` jobs and no others."""
    app = _procrastinate_app(url)
    async with app.open_async():
        if not await app.check_connection_async():
            await app.schema_manager.apply_schema_async()
        await app.connector.execute_query_async("TRUNCATE procrastinate_jobs CASCADE")
        for first in range(0, rows, _CHUNK):
            count = min(_CHUNK, rows - first)
            await app.tasks["nothing"].batch_defer_async(*({"body": payload.decode()} for _ in range(count)))


def run_procrastinate(url: str, start: Any, seconds: float, results: Any) -> None:
    """The work of one process, for `speed_of`."""

    async def run() -> None:
        app = _procrastinate_app(url)
        async with app.open_async():
            start.wait()
            app.last = begin = time.time()
            began_cpu_s = time.process_time()
            worker = app.run_worker_async(concurrency=CONCURRENCY, wait=False, install_signal_handlers=False)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(worker, seconds)
            results.put((app.done, begin, app.last, time.process_time() - began_cpu_s))

    asyncio.run(run())


async def _connect(url: str) -> Any:
    return await importlib.import_module("asyncpg").connect(_plain(url))


async def fill_pgqueuer(url: str, rows: int, payload: bytes) -> None:
    """Queue `rows` jobs and no others."""
    queries_of = importlib.import_module("pgqueuer.queries").Queries
    connection = await _connect(url)
    queries = queries_of.from_asyncpg_connection(connection)
    if await connection.fetchval("SELECT to_regclass('pgqueuer')") is None:
        await queries.install()
    await queries.clear_queue()
    for first in range(0, rows, _CHUNK):
        count = min(_CHUNK, rows - first)
        await queries.enqueue(["nothing"] * count, [payload] * count, [0] * count)
    await connection.close()


def run_pgqueuer(url: str, start: Any, seconds: float, results: Any) -> None:
    """The work of one process, for `speed_of`."""

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
        began_cpu_s = time.process_time()
        running = worker.run(dequeue_timeout=timedelta(seconds=1), batch_size=CONCURRENCY, mode=modes.drain)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(running, seconds)
        results.put((done, begin, last, time.process_time() - began_cpu_s))
        await connection.close()

    asyncio.run(run())


def _plain(url: str) -> str:
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
