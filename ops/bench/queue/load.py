"""What the queue's benchmark runs: rows that wait, processes that take them as dispatchers do, a batch to ingest."""

import asyncio
import os
import time
from collections import Counter, deque
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import uvloop
from pydantic import SecretStr
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from controlplane.dispatcher.ingest import VALIDATE
from controlplane.dispatcher.results import ResultWriter
from controlplane.dispatcher.steps import Stepper
from controlplane.policies.facts import LotFacts
from controlplane.policies.lifecycle import BatchRequestState, BatchState
from controlplane.settings import Settings
from controlplane.store import fleet, queue
from controlplane.store.batch_tables import Batch
from controlplane.store.batches import add_batch, counts_of, end_batch_requests
from controlplane.store.blobs.folder import FolderBlobs
from controlplane.store.files import add_file, new_file_id
from controlplane.store.queue import Claim, Outcome
from controlplane.store.session import Database, make_engine
from controlplane.store.tables import Model

BATCH_LINES = 50_000
MODELS, TENANTS = 20, 8
TOGETHER = 256
"""Requests that one process has at once: `dispatcher_concurrency_max`."""
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
    """Let so many rows wait, in batches of 50,000 at most, of a few models and tenants. Where nearly as many are left
    from before, these do.
    """
    database = _open(url)
    with database.transaction() as session:
        session.execute(text("SET LOCAL statement_timeout = 0"))
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
    """Let Postgres know its tables, and have nothing left to do, before it is measured."""
    database = _open(url)
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("SET statement_timeout = 0"))
        connection.execute(text("VACUUM ANALYZE"))
        connection.execute(text("CHECKPOINT"))
    database.close()


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
    """A Postgres to measure: its address, and its first process."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        """CPU time of all its processes so far, those that ended too."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        ticks = sum(sum(_ticks(pid)[:2]) for pid in children) + sum(_ticks(self.pid))
        return ticks / os.sysconf("SC_CLK_TCK")


def _ticks(pid: str | int) -> list[int]:
    """A process's time: user, system, and both of its children that ended. Nothing if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return []
    return [int(field) for field in stat.rpartition(")")[2].split()[11:15]]


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Requests completed a second, and the CPU time of each: of all workers and of Postgres."""

    per_s: float
    cpu_us: float


def drain(server: Server, processes: int, seconds: float) -> Speed:
    """What the processes together claim and complete, in so many seconds or until nothing waits."""
    return speed_of(_drain_one, server, processes, seconds)


def speed_of(work: Any, server: Server, processes: int, seconds: float) -> Speed:
    """What `work(url, start, seconds, results)` does in processes that begin together. Each puts how many it did, when
    it began and ended, and the CPU time that it took.
    """
    context = get_context("spawn")
    start, results = context.Barrier(processes + 1), context.Queue()
    children = [context.Process(target=work, args=(server.url, start, seconds, results)) for _ in range(processes)]
    for child in children:
        child.start()
    start.wait()
    cpu_s = -server.cpu_s()
    told = [results.get(timeout=seconds + 300) for _ in children]
    cpu_s += server.cpu_s() + sum(each for *_, each in told)
    for child in children:
        child.join()
    elapsed_s = max(end for _, _, end, _ in told) - min(begin for _, begin, _, _ in told)
    done = sum(done for done, *_ in told)
    return Speed(per_s=done / elapsed_s, cpu_us=cpu_s / done * 1e6)


def _drain_one(url: str, start: Any, seconds: float, results: Any) -> None:
    """As a dispatcher does: claims and results side by side. It looks again when half of its room is free."""

    async def run() -> None:
        database, done, last = _open(url), 0, 0.0
        writer, running, room = ResultWriter(database), set[asyncio.Task[None]](), asyncio.Event()

        async def complete(claim: Claim) -> None:
            nonlocal done, last
            outcome = Outcome(claim=claim, status_code=200, body=_ANSWER, upstream_id=claim.fence)
            written = await writer.write(outcome)
            done, last = done + written, time.time()

        def ended(task: asyncio.Task[None]) -> None:
            running.remove(task)
            if len(running) <= TOGETHER // 2:
                room.set()

        await anyio.to_thread.run_sync(_lots, database)
        start.wait()
        begin, cpu_s = time.time(), time.process_time()
        last = begin
        while last < begin + seconds:
            claims = await anyio.to_thread.run_sync(_claim, database, TOGETHER - len(running), done)
            if not claims:
                break
            for claim in claims:
                task = asyncio.create_task(complete(claim))
                running.add(task)
                task.add_done_callback(ended)
            room.clear()
            if len(running) > TOGETHER // 2:
                await room.wait()
        await asyncio.gather(*running)
        results.put((done, begin, last, time.process_time() - cpu_s))
        database.close()

    uvloop.run(run())


def _lots(database: Database) -> tuple[LotFacts, ...]:
    with database.statement() as session:
        return queue.waiting_lots(session)


def _claim(database: Database, room: int, turn: int) -> list[Claim]:
    """As many as there is room for, evenly of all models and, as a release does, of one batch for each of them; of
    others the next time.
    """
    lots = deque((lot.model, lot.batch) for lot in _lots(database))
    lots.rotate(-turn)
    chosen = [(batch, model) for model, batch in dict(lots).items()]
    with database.statement() as session:
        return queue.claim(session, Counter(islice(cycle(chosen), room)), lease_s=120)


def measure_ingest(url: str, folder: Path, lines: int) -> tuple[float, float]:
    """Lines of one batch that are validated and stored a second; and a second of this process's own CPU time."""
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
    began_s, cpu_s = time.perf_counter(), time.process_time()
    validated = Stepper(VALIDATE, database, blobs, _settings(url)).one()
    elapsed_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    assert validated == batch.id
    with database.transaction() as session:
        batch = session.get_one(Batch, batch.id)
        assert (batch.state, batch.total) == (BatchState.IN_PROGRESS, lines), batch.errors
    database.close()
    return lines / elapsed_s, lines / cpu_s


def measure_counts_s(url: str) -> float:
    """Seconds to count the results of a batch of which every line has one."""
    database = _open(url)
    with database.transaction() as session:
        session.execute(text("SET LOCAL statement_timeout = 0"))
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
