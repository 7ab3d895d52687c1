"""The batch queue: claims and results a second by its length, against two other Postgres queues; and ingest of a batch.

Each queue has an embedded Postgres of its own (fsync on) and four processes. This project's do what a dispatcher does:
what waits as `WaitingGroups` keeps it, one `claim` for all that endpoints may take, and concurrently the writer of
results. The others run their own workers with an empty task, and only if they can be imported; neither is a dependency.
All are connected before they start. Load on the machine changes requests a second, but hardly the CPU time of a request
(`cpu_us`).
"""

import asyncio
import importlib
import importlib.util
import shutil
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import anyio.to_thread
import msgspec
import typer
import uvloop
from pydantic import SecretStr
from sqlalchemy import create_engine, select, text
from sqlalchemy.orm import Session

import migrations
from controlplane.dispatcher.ingest import VALIDATE
from controlplane.dispatcher.results import ResultWriter
from controlplane.dispatcher.steps import Stepper
from controlplane.dispatcher.waiting_groups import CLAIMS_MAX, WaitingGroups
from controlplane.policies.lifecycle import BatchRequestState, BatchState
from controlplane.serving.garbage import collect_less_often
from controlplane.settings import Settings
from controlplane.store import fleet, queue
from controlplane.store.batch_tables import Batch
from controlplane.store.batches import add_batch, counts_of, end_batch_requests
from controlplane.store.blobs.folder import FolderBlobs
from controlplane.store.files import add_file, new_file_id
from controlplane.store.queue import Claim, Outcome
from controlplane.store.session import Database, lift_time_limit, make_engine
from controlplane.store.tables import Model
from ops.bench.queue import peers
from ops.bench.shared import cpu_s, work_folder
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.local.embedded import EmbeddedPostgres
from ops.local.ports import free_port
from ops.local.supervisor import Supervisor

PROCESSES = 4
BATCH_LINES = 50_000
MODELS, TENANTS = 20, 8
IN_FLIGHT_MAX: int = Settings.model_fields["dispatcher_concurrency_max"].default
"""Requests in flight of one process."""
ROW_BYTES = 800
"""Disk of a waiting row, with its indexes, the log and the results of a few rounds."""
_LEFT_ENOUGH = 0.95
BODY = {"messages": [{"role": "user", "content": "What is the tide at noon? " * 8}], "max_tokens": 128}
_ANSWER = {
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "High. " * 40}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 60, "completion_tokens": 80, "total_tokens": 140},
}


def fill(url: str, rows: int) -> None:
    """Fill the queue with `rows` requests of a few models and tenants, in batches of 50,000 at most. If nearly as many
    are still queued, they are kept.
    """
    database = _open(url)
    with database.transaction() as session:
        lift_time_limit(session)
        left = session.execute(text("SELECT count(*) FROM queued_requests")).scalar_one()
        if not _LEFT_ENOUGH * rows <= left <= rows:
            _fill_anew(session, rows)
    database.close()
    settle(url)


def _fill_anew(session: Session, rows: int) -> None:
    for table in ("queued_requests", "batch_requests", "batch_results", "batch_counts", "batch_models"):
        session.execute(text(f"TRUNCATE {table}"))
    session.execute(text("UPDATE batches SET state = 'failed', ended_at = now()"))
    batches = max(MODELS, rows // BATCH_LINES)
    for number in range(batches):
        lines = rows // batches + (number < rows % batches)
        _fill_batch(session, f"tenant-{number % TENANTS}", f"model-{number % MODELS}", lines)


def settle(url: str) -> None:
    """Vacuum, analyse and checkpoint, so that Postgres has no background work while it is measured."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("VACUUM ANALYZE"))
        connection.execute(text("CHECKPOINT"))
    engine.dispose()


def _fill_batch(session: Session, tenant: str, model: str, lines: int) -> None:
    batch = _new_batch(session, tenant)
    values = {"number": batch.number, "model": model, "lines": lines, "body": msgspec.json.encode(BODY).decode()}
    queued = "SELECT :number, n, :model FROM generate_series(1, :lines) n"
    asked = "SELECT :number, n, 'c' || n, CAST(:body AS json) FROM generate_series(1, :lines) n"
    for statement in (
        "INSERT INTO batch_models VALUES (:number, :model, :lines, 60 * :lines)",
        f"INSERT INTO batch_requests {asked}",
        f"INSERT INTO queued_requests (batch_number, line, model) {queued}",
    ):
        names = {name: value for name, value in values.items() if f":{name}" in statement}
        session.execute(text(statement), names)
    batch.total, batch.state = lines, BatchState.IN_PROGRESS
    session.flush()


def _new_batch(session: Session, tenant: str) -> Batch:
    file = add_file(
        session,
        file_id=new_file_id(),
        tenant=tenant,
        filename="in.jsonl",
        purpose="batch",
        size_bytes=1,
        keep=timedelta(days=1),
    )
    return add_batch(
        session,
        tenant=tenant,
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        window_s=86_400,
        labels=None,
    )


@dataclass(frozen=True, kw_only=True)
class Server:
    """A Postgres to measure: its address, and its main process."""

    url: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Requests completed a second, and the CPU time of each in all workers and Postgres, in microseconds."""

    per_s: float
    cpu_us: float


def speed_of(work: Any, server: Server, seconds: float) -> Speed:
    """Run `work(url, start, seconds, results)` in `PROCESSES` processes that start together. Each puts how many
    requests it completed, when it began and ended, and the CPU seconds that it used.
    """
    context = get_context("spawn")
    start, results = context.Barrier(PROCESSES + 1), context.Queue()
    arguments = (work, server.url, start, seconds, results)
    children = [context.Process(target=_work_in_process, args=arguments) for _ in range(PROCESSES)]
    for child in children:
        child.start()
    start.wait()
    used_s = -cpu_s(server.pid)
    reported = [results.get(timeout=seconds + 300) for _ in children]
    used_s += cpu_s(server.pid) + sum(each for *_, each in reported)
    for child in children:
        child.join()
    elapsed_s = max(end for _, _, end, _ in reported) - min(begin for _, begin, _, _ in reported)
    done = sum(done for done, *_ in reported)
    return Speed(per_s=done / elapsed_s, cpu_us=used_s / done * 1e6)


def _work_in_process(work: Any, *arguments: Any) -> None:
    """Any queue's work in a process of its own. As in a dispatcher, the garbage collector does not look at what was
    imported: one such look takes a third of the CPU time of a short round.
    """
    collect_less_often()
    work(*arguments)


def _drain(url: str, start: Any, seconds: float, results: Any) -> None:
    """Claim and complete as a dispatcher does, concurrently; claim again when half of the requests in flight ended."""

    async def run() -> None:
        database, done, last = _open(url), 0, 0.0
        writer, waiting = ResultWriter(database), WaitingGroups(database, poll_s=seconds)
        running, half_free = set[asyncio.Task[None]](), asyncio.Event()

        async def complete(claim: Claim) -> None:
            nonlocal done, last
            outcome = Outcome(claim=claim, status_code=200, body=_ANSWER, upstream_id=claim.fence)
            written = await writer.write(outcome)
            done, last = done + written, time.time()

        def ended(task: asyncio.Task[None]) -> None:
            running.remove(task)
            waiting.note_ended()
            if len(running) <= IN_FLIGHT_MAX // 2:
                half_free.set()

        await waiting.read()
        await anyio.to_thread.run_sync(_connect_twice, database)
        start.wait()
        begin, began_cpu_s = time.time(), time.process_time()
        last = begin
        while last < begin + seconds:
            claims = await _claim(database, waiting, min(IN_FLIGHT_MAX - len(running), CLAIMS_MAX), done)
            if not claims:
                break
            for claim in claims:
                task = asyncio.create_task(complete(claim))
                running.add(task)
                task.add_done_callback(ended)
            half_free.clear()
            if len(running) > IN_FLIGHT_MAX // 2:
                await half_free.wait()
        await asyncio.gather(*running)
        results.put((done, begin, last, time.process_time() - began_cpu_s))
        database.close()

    uvloop.run(run())


def _connect_twice(database: Database) -> None:
    """Connect for claims and for results, with statements that find nothing."""
    with database.statement() as claiming, database.statement() as writing:
        queue.claim(claiming, {}, lease_s=1)
        queue.finish(writing, [])


async def _claim(database: Database, waiting: WaitingGroups, count: int, offset: int) -> list[Claim]:
    """Claim up to `count` requests, evenly over all models and of one batch of each, as a release does. Another
    `offset` chooses other batches. None: nothing waits.
    """
    claims: list[Claim] = []
    while not claims and (known := await waiting.read()):
        groups = deque((group.model, group.batch) for group in known)
        groups.rotate(-offset)
        chosen = [(batch, model) for model, batch in dict(groups).items()]
        wanted = Counter(islice(cycle(chosen), count))
        claims = await anyio.to_thread.run_sync(_lease, database, wanted)
        waiting.note_claimed(wanted, claims)
    return claims


def _lease(database: Database, wanted: Mapping[tuple[int, str], int]) -> list[Claim]:
    with database.statement() as session:
        return queue.claim(session, wanted, lease_s=120)


def measure_ingest(url: str, folder: Path, lines: int) -> tuple[float, float]:
    """Lines of one batch validated and stored per second, and per CPU second of this process."""
    database, blobs = _open(url), FolderBlobs(folder)
    with database.transaction() as session:
        model = Model(
            name="model-0", path="/x", architecture="Llama", weights_bytes=1, kv_bytes_per_token=1, context_tokens=8192
        )
        fleet.put_model(session, model)
        batch = _new_batch(session, "tenant-0")
    with blobs.writing(batch.input_file_id) as stream:
        for number in range(lines):
            line = {"custom_id": f"request-{number}", "method": "POST", "url": batch.endpoint}
            stream.write(msgspec.json.encode({**line, "body": {"model": "model-0", **BODY}}) + b"\n")
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    validated = Stepper(VALIDATE, database, blobs, _settings(url)).one()
    elapsed_s, used_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    assert validated == batch.id
    with database.transaction() as session:
        batch = session.get_one(Batch, batch.id)
        assert (batch.state, batch.total) == (BatchState.IN_PROGRESS, lines), batch.errors
    database.close()
    return lines / elapsed_s, lines / used_s


def measure_counts_s(url: str) -> float:
    """Seconds to count the results of a batch of which every line has one."""
    database = _open(url)
    with database.transaction() as session:
        lift_time_limit(session)
        batch = session.scalars(select(Batch).where(Batch.total > 0).limit(1)).one()
        ended = end_batch_requests(session, batch.number, state=BatchRequestState.FAILED)
    with database.transaction() as session:
        began_s = time.perf_counter()
        for _ in range(10):
            counts = counts_of(session, [batch])
        elapsed_s = time.perf_counter() - began_s
    assert counts[batch.id].failed == ended > 0
    database.close()
    return elapsed_s / 10


def _settings(url: str) -> Settings:
    return Settings(database_url=SecretStr(url), database_pool_size=4, database_timeout_s=300)


def _open(url: str) -> Database:
    return Database(make_engine(_settings(url)))


_PAYLOAD = msgspec.json.encode(BODY)


def procrastinate(server: Server, rows: int, seconds: float) -> Speed:
    """Jobs of procrastinate that are fetched and finished a second."""
    asyncio.run(peers.fill_procrastinate(server.url, rows, _PAYLOAD))
    settle(server.url)
    return speed_of(peers.run_procrastinate, server, seconds)


def pgqueuer(server: Server, rows: int, seconds: float) -> Speed:
    """Jobs of pgqueuer that are dequeued and logged as done a second."""
    asyncio.run(peers.fill_pgqueuer(server.url, rows, _PAYLOAD))
    settle(server.url)
    return speed_of(peers.run_pgqueuer, server, seconds)


def tidepool(server: Server, rows: int, seconds: float) -> Speed:
    """Requests of this project's queue that dispatchers claim and complete a second."""
    fill(server.url, rows)
    return speed_of(_drain, server, seconds)


Measure = Callable[[Server, int, float], Speed]
QUEUES: dict[str, Measure] = {"tidepool": tidepool, "procrastinate": procrastinate, "pgqueuer": pgqueuer}


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
    queues = {name: one for name, one in QUEUES.items() if name == "tidepool" or importlib.util.find_spec(name)}
    for name in QUEUES.keys() - queues:
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
    with _database() as server, work_folder() as folder:
        found_ingest = [measure_ingest(server.url, folder, ingest_lines) for _ in range(rounds)]
        ingest, ingest_cpu = (median(each) for each in zip(*found_ingest, strict=True))
        counts_s = measure_counts_s(server.url)
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
    """Measure all queues in each round, so that other load on the machine affects them alike."""
    found: dict[str, list[Speed]] = {name: [] for name in queues}
    for number in range(rounds):
        for name, (measure, server) in queues.items():
            notes().print(f"{name}, {waiting} rows, round {number + 1}")
            found[name].append(measure(server, waiting, seconds))
    for name, speeds in found.items():
        rates = tuple(speed.per_s for speed in speeds)
        cpu_us = median(speed.cpu_us for speed in speeds)
        yield Rate(queue=name, waiting=waiting, per_s=median(rates), cpu_us=cpu_us, rounds=rates)


def _require_disk(rows: int) -> None:
    """Print how much disk so many rows take; a usage error if less is free."""
    folder, needed_gb = tempfile.gettempdir(), rows * ROW_BYTES / 1e9
    free_gb = shutil.disk_usage(folder).free / 1e9
    if needed_gb > free_gb:
        raise typer.BadParameter(f"{rows} rows take {needed_gb:.0f} GB, and {folder} has {free_gb:.0f} GB (see TMPDIR)")
    notes().print(f"up to {needed_gb:.1f} GB of {folder} are used, and freed at the end")


@contextmanager
def _database() -> Iterator[Server]:
    """An embedded Postgres with this project's tables."""
    with work_folder() as folder:
        server = EmbeddedPostgres(folder, free_port())
        server.prepare()
        with Supervisor([server.child()], report=lambda _: None) as supervisor:
            migrations.upgrade(server.url())
            yield Server(url=server.url(), pid=supervisor.pids()[server.name])


if __name__ == "__main__":
    typer.run(main)
