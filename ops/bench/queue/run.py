"""The NIW queue: claims and results a second, by how much waits, beside two Postgres queues; and the ingest of a batch.

Each queue has an embedded Postgres like the others' (fsync on) and four processes. Ours does what a dispatcher does:
`waiting_lots` and one `claim` for all that endpoints may take, beside its writer of results. The others run their own
workers, with an empty task, and are measured only if they can be imported; neither is a dependency. A crowded machine
changes what is done a second; the CPU time of a request (`cpu_us`) hardly.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
import typer
from sqlalchemy import make_url

import migrations
from ops.bench.queue.load import (
    BODY,
    ROW_BYTES,
    Server,
    Speed,
    drain,
    fill,
    measure_counts_s,
    measure_ingest,
    settle,
    speed_of,
)
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.local.embedded import EmbeddedPostgres
from ops.local.ports import free_port
from ops.local.supervisor import Supervisor

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


PROCESSES = 4
Measure = Callable[[Server, int, int, float], Speed]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """One queue at one length: requests claimed and completed a second, and the CPU time of each in Postgres and its
    clients (microseconds); medians of the rounds.
    """

    queue: str
    waiting: int
    per_s: float
    cpu_us: float
    rounds: tuple[float, ...]


def main(
    waiting: Annotated[list[int], typer.Option(help="Rows that wait; may be given several times.")] = [  # noqa: B006
        10_000,
        1_000_000,
    ],
    peers_waiting: Annotated[list[int], typer.Option(help="... for the other queues.")] = [10_000],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[float, typer.Option(help="Longest time of a round.")] = 8.0,
    ingest_lines: Annotated[int, typer.Option(min=1)] = 50_000,
    as_json: AsJson = False,
) -> None:
    """Measure the queue.

    \b
    Examples:
      python -m ops.bench.queue.run
      python -m ops.bench.queue.run --waiting 10000 --waiting 10000000 --rounds 2 --json
    """
    _require_disk(max(waiting))
    queues: dict[str, Measure] = {"tidepool": _tidepool}
    for name, peer in PEERS.items():
        if importlib.util.find_spec(name) is not None:
            queues[name] = peer
        else:
            notes().print(f"{name} cannot be imported and is left out (pip install it, or set PYTHONPATH)")
    rates: list[Rate] = []
    for size in sorted({*waiting, *peers_waiting}):
        with ExitStack() as stack:
            servers = {
                name: stack.enter_context(_database())
                for name in queues
                if size in (waiting if name == "tidepool" else peers_waiting)
            }
            rates += _compare({name: (queues[name], server) for name, server in servers.items()}, size, rounds, seconds)
    notes().print(f"ingest of {ingest_lines} lines")
    with _database() as server, tempfile.TemporaryDirectory(prefix="tidepool-bench-") as folder:
        url = server.url
        found_ingest = [measure_ingest(url, Path(folder), ingest_lines) for _ in range(rounds)]
        ingest, ingest_cpu = (median(each) for each in zip(*found_ingest, strict=True))
        counts_s = measure_counts_s(url)
    if as_json:
        figures = {"ingest_lines_per_s": ingest, "ingest_lines_per_cpu_s": ingest_cpu, "counts_s": counts_s}
        print_json({"rates": [asdict(rate) for rate in rates], **figures})
        return
    columns: Columns = {
        "queue": "queue",
        "waiting": "waiting",
        "completed/s": lambda row: f"{row['per_s']:,.0f}",
        "CPU us": lambda row: f"{row['cpu_us']:,.0f}",
    }
    print_table("Claim and complete, 4 processes", columns, [asdict(rate) for rate in rates])
    notes().print(f"ingest: {ingest:,.0f} lines/s, {ingest_cpu:,.0f} a second of its CPU time")
    notes().print(f"counts of a batch of {ingest_lines} results: {counts_s * 1000:.1f} ms")


def _compare(queues: Mapping[str, tuple[Measure, Server]], waiting: int, rounds: int, seconds: float) -> Iterator[Rate]:
    """Each round goes through all queues, so that whatever else the machine does meets them alike."""
    found: dict[str, list[Speed]] = {name: [] for name in queues}
    for number in range(rounds):
        for name, (measure, server) in queues.items():
            notes().print(f"{name}, {waiting} rows, round {number + 1}")
            found[name].append(measure(server, waiting, PROCESSES, seconds))
    for name, speeds in found.items():
        rates = tuple(speed.per_s for speed in speeds)
        cpu_us = median(speed.cpu_us for speed in speeds)
        yield Rate(queue=name, waiting=waiting, per_s=median(rates), cpu_us=cpu_us, rounds=rates)


def _require_disk(rows: int) -> None:
    """Say what so many rows take while they are measured; a usage error where there is not so much."""
    folder, needed_gb = tempfile.gettempdir(), rows * ROW_BYTES / 1e9
    free_gb = shutil.disk_usage(folder).free / 1e9
    if needed_gb > free_gb:
        raise typer.BadParameter(f"{rows} rows take {needed_gb:.0f} GB, and {folder} has {free_gb:.0f} GB (see TMPDIR)")
    notes().print(f"up to {needed_gb:.1f} GB of {folder} are used, and given back at the end")


def _tidepool(server: Server, waiting: int, processes: int, seconds: float) -> Speed:
    fill(server.url, waiting)
    return drain(server, processes, seconds)


@contextmanager
def _database() -> Iterator[Server]:
    """A Postgres of its own, with our tables."""
    with tempfile.TemporaryDirectory(prefix="tidepool-bench-") as folder:
        server = EmbeddedPostgres(Path(folder), free_port())
        server.prepare()
        with Supervisor([server.child()], report=lambda _: None) as supervisor:
            migrations.upgrade(server.url())
            yield Server(url=server.url(), pid=supervisor.pids()[server.name])


if __name__ == "__main__":
    typer.run(main)
