"""Two Postgres queues to stand beside, each with workers of its own and a task that does nothing."""

import asyncio
import contextlib
import importlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
from sqlalchemy import make_url

from ops.bench.queue.load import BODY, Server, Speed, settle, speed_of

CONCURRENCY = 64
"""Jobs that a worker has at once; pgqueuer takes and writes as many together. It is slower with 256."""
_PAYLOAD = msgspec.json.encode(BODY)
_CHUNK = 10_000


def procrastinate(server: Server, rows: int, processes: int, seconds: float) -> Speed:
    """Jobs of procrastinate that are fetched and finished a second."""
    asyncio.run(_fill_procrastinate(server.url, rows))
    settle(server.url)
    return speed_of(_run_procrastinate, server, processes, seconds)


def _procrastinate_app(url: str) -> Any:
    library = importlib.import_module("procrastinate")
    app = library.App(connector=library.PsycopgConnector(conninfo=_plain(url), min_size=2, max_size=8))

    @app.task(name="nothing")  # type: ignore[untyped-decorator, unused-ignore]
    async def nothing(body: str) -> None:
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
            count = min(_CHUNK, rows - first)
            await app.tasks["nothing"].batch_defer_async(*({"body": _PAYLOAD.decode()} for _ in range(count)))


def _run_procrastinate(url: str, start: Any, seconds: float, results: Any) -> None:
    async def run() -> None:
        app = _procrastinate_app(url)
        async with app.open_async():
            start.wait()
            app.last = begin = time.time()
            cpu_s = time.process_time()
            worker = app.run_worker_async(concurrency=CONCURRENCY, wait=False, install_signal_handlers=False)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(worker, seconds)
            results.put((app.done, begin, app.last, time.process_time() - cpu_s))

    asyncio.run(run())


def pgqueuer(server: Server, rows: int, processes: int, seconds: float) -> Speed:
    """Jobs of pgqueuer that are dequeued and logged as done a second."""
    asyncio.run(_fill_pgqueuer(server.url, rows))
    settle(server.url)
    return speed_of(_run_pgqueuer, server, processes, seconds)


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
        await queries.enqueue(["nothing"] * count, [_PAYLOAD] * count, [0] * count)
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
        cpu_s = time.process_time()
        running = worker.run(dequeue_timeout=timedelta(seconds=1), batch_size=CONCURRENCY, mode=modes.drain)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(running, seconds)
        results.put((done, begin, last, time.process_time() - cpu_s))
        await connection.close()

    asyncio.run(run())


def _plain(url: str) -> str:
    """The address as libpq writes it."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


PEERS: dict[str, Callable[[Server, int, int, float], Speed]] = {"procrastinate": procrastinate, "pgqueuer": pgqueuer}
