"""What the queue's benchmark runs: rows that wait, processes that take them as dispatchers do, a batch to ingest."""

import time
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
from pydantic import SecretStr
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from controlplane.dispatcher.aside import Aside
from controlplane.dispatcher.ingest import ingest_one
from controlplane.policies.lifecycle import BatchState
from controlplane.settings import Settings
from controlplane.store import fleet, queue
from controlplane.store.batch_tables import Batch
from controlplane.store.batches import add_batch, counts_of
from controlplane.store.blobs import BlobStore
from controlplane.store.files import add_file, new_file_id
from controlplane.store.queue import Outcome
from controlplane.store.session import Database, make_engine
from controlplane.store.tables import Model

BATCH_LINES = 50_000
MODELS, TENANTS = 20, 8
TOGETHER = 64
"""Requests that one process has at once: `dispatcher_concurrency_max`."""
_BODY = {"messages": [{"role": "user", "content": "What is the tide at noon? " * 8}], "max_tokens": 128}
_ANSWER = {
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "High. " * 40}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 60, "completion_tokens": 80, "total_tokens": 140},
}


def fill(url: str, rows: int) -> None:
    """Let so many rows wait, in batches of 50,000 at most, of a few models and tenants."""
    database = _open(url)
    with database.transaction() as session:
        session.execute(text("SET LOCAL statement_timeout = 0"))
        for table in ("queued_requests", "batch_requests", "batch_results", "batch_models"):
            session.execute(text(f"TRUNCATE {table}"))
        session.execute(text("UPDATE batches SET state = 'failed', ended_at = now()"))
        batches = max(MODELS, rows // BATCH_LINES)
        for number in range(batches):
            lines = rows // batches + (number < rows % batches)
            _fill_batch(session, f"tenant-{number % TENANTS}", f"model-{number % MODELS}", lines)
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("SET statement_timeout = 0"))
        connection.execute(text("VACUUM ANALYZE queued_requests, batch_requests, batch_results"))
        connection.execute(text("CHECKPOINT"))
    database.close()


def _fill_batch(session: Session, tenant: str, model: str, lines: int) -> None:
    batch = _new_batch(session, tenant)
    values = {"number": batch.number, "model": model, "lines": lines, "body": msgspec.json.encode(_BODY).decode()}
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
        expires_at=datetime.now(UTC) + timedelta(days=1),
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


def drain(url: str, processes: int, seconds: float) -> float:
    """Requests that the processes together claim and complete a second, for so many seconds or until nothing waits."""
    return rate_of(_drain_one, url, processes, seconds)


def rate_of(work: Any, url: str, processes: int, seconds: float) -> float:
    """What `work(url, start, seconds, results)` does a second, in processes that begin together. Each puts how many it
    did, and when it began and ended.
    """
    context = get_context("spawn")
    start, results = context.Barrier(processes), context.Queue()
    children = [context.Process(target=work, args=(url, start, seconds, results)) for _ in range(processes)]
    for child in children:
        child.start()
    told = [results.get(timeout=seconds + 300) for _ in children]
    for child in children:
        child.join()
    elapsed_s = max(end for _, _, end in told) - min(begin for _, begin, _ in told)
    return float(sum(done for done, _, _ in told) / elapsed_s)


def _drain_one(url: str, start: Any, seconds: float, results: Any) -> None:
    database = _open(url)
    with database.transaction() as session:
        queue.waiting_lots(session)
    start.wait()
    begin = last = time.time()
    done = 0
    while last < begin + seconds:
        with database.transaction() as session:
            lots = queue.waiting_lots(session)
        if not lots:
            break
        with database.transaction() as session:
            claims = queue.claim(session, _wanted(lots, done), lease_s=120)
        outcomes = [Outcome(claim=claim, status_code=200, body=_ANSWER, upstream_id=claim.fence) for claim in claims]
        if outcomes:
            with database.transaction() as session:
                done += len(queue.finish(session, outcomes))
            last = time.time()
    results.put((done, begin, last))
    database.close()


def _wanted(lots: Any, turn: int) -> dict[tuple[int, str], int]:
    """Two requests from each of 32 lots, others each time."""
    wanted = {}
    for place in range(min(TOGETHER // 2, len(lots))):
        lot = lots[(turn + place) % len(lots)]
        wanted[lot.batch, lot.model] = max(2, TOGETHER // len(lots))
    return wanted


def measure_ingest(url: str, folder: Path, lines: int) -> tuple[float, float]:
    """Lines of one batch that are validated and stored a second; and a second of this process's own CPU time."""
    database, blobs = _open(url), BlobStore(folder)
    with database.transaction() as session:
        model = Model(
            name="model-0", path="/x", architecture="Llama", weights_bytes=1, kv_bytes_per_token=1, context_tokens=8192
        )
        fleet.put_model(session, model)
        batch = _new_batch(session, "tenant-0")
    with blobs.writing(batch.input_file_id) as stream:
        for number in range(lines):
            line = {"custom_id": f"request-{number}", "method": "POST", "url": batch.endpoint}
            stream.write(msgspec.json.encode({**line, "body": {"model": "model-0", **_BODY}}) + b"\n")
    began_s, cpu_s = time.perf_counter(), time.process_time()
    with database.transaction() as session:
        assert ingest_one(session, blobs, _settings(url), Aside()) == batch.id
    elapsed_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
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
        session.execute(
            text(
                "INSERT INTO batch_results (batch_number, line, state, status_code, body, upstream_id)"
                " SELECT batch_number, line, 'completed', 200, CAST(:body AS json), 'u' FROM batch_requests"
                " WHERE batch_number = :number"
            ),
            {"number": batch.number, "body": msgspec.json.encode(_ANSWER).decode()},
        )
    with database.transaction() as session:
        began_s = time.perf_counter()
        for _ in range(10):
            counts_of(session, [batch])
        elapsed_s = time.perf_counter() - began_s
    database.close()
    return elapsed_s / 10


def _settings(url: str) -> Settings:
    return Settings(database_url=SecretStr(url), database_pool_size=4, database_timeout_s=300)


def _open(url: str) -> Database:
    return Database(make_engine(_settings(url)))
