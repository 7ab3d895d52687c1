"""The request log of a process: what it takes, what it drops, and what it does while Postgres is away."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import SQLAlchemyError

from controlplane.serving.request_log import RequestLog
from controlplane.settings import Settings
from controlplane.store.request_log import LoggedRequest, RequestRecord, find_requests
from controlplane.store.rows import delete_older
from controlplane.store.session import Database

Open = Callable[..., RequestLog]


@pytest.fixture
def dropped() -> list[int]:
    return []


@pytest.fixture
def open_log(database: Database, settings: Settings, dropped: list[int]) -> Open:
    def open_log(*, chance: float = 0.5, **changes: Any) -> RequestLog:
        return RequestLog(database, settings.model_copy(update=changes), on_drop=dropped.append, chance=lambda: chance)

    return open_log


def record(request_id: str = "r", *, outcome: str = "ok", **fields: Any) -> RequestRecord:
    values = {"ended_at": datetime.now(UTC), "endpoint": "/v1/completions", "duration_s": 0.1} | fields
    return RequestRecord(request_id=request_id, outcome=outcome, **values)


def rows(database: Database) -> list[str]:
    with database.transaction() as session:
        return list(session.scalars(select(LoggedRequest.request_id).order_by(LoggedRequest.number)))


SLOW = {"first_token_s": 60.0}


@pytest.mark.parametrize(
    ("wanted", "sample", "kept"),
    [
        ("all", 1.0, ["fast", "slow", "long wait", "failed", "gone"]),
        ("all", 0.4, ["slow", "long wait", "failed", "gone"]),
        ("errors", 1.0, ["slow", "long wait", "failed", "gone"]),
        ("off", 1.0, []),
    ],
)
def test_what_is_kept(open_log: Open, database: Database, wanted: str, sample: float, kept: list[str]) -> None:
    log = open_log(request_log=wanted, request_log_sample=sample)
    log.add(record("fast", first_token_s=0.1, duration_s=500.0))
    log.add(record("slow", **SLOW))
    log.add(record("long wait", duration_s=60.0))
    log.add(record("failed", outcome="no_capacity", status=503))
    log.add(record("gone", outcome="cancelled", status=499))
    log.write()
    assert rows(database) == kept


def test_some_go_while_postgres_is_away(open_log: Open, database: Database, dropped: list[int]) -> None:
    log = open_log(request_log_waiting_max=5)
    with database.transaction() as session:
        session.execute(text("ALTER TABLE request_log RENAME TO elsewhere"))
    for number in range(4):
        log.add(record(f"r{number}"))
    for _ in range(2):
        with pytest.raises(SQLAlchemyError):
            log.write()
    assert dropped == []
    for number in range(4, 11):
        log.add(record(f"r{number}"))
    with pytest.raises(SQLAlchemyError):
        log.write()
    assert sum(dropped) == 6
    with database.transaction() as session:
        session.execute(text("ALTER TABLE elsewhere RENAME TO request_log"))
    log.write()
    assert rows(database) == ["r4", "r5", "r6", "r7", "r8"]


def test_rows_come_in_pieces_and_nobody_waits_for_the_disk(open_log: Open, database: Database) -> None:
    log = open_log()
    for number in range(2500):
        log.add(record(f"r{number}", nodes=["n1", 'n "2", {}'], error="back\\slash\ttab\nline"))
    log.write()
    assert rows(database) == [f"r{number}" for number in range(2500)]
    with database.transaction() as session:
        [row] = find_requests(session, "r2499")
        assert (row.nodes, row.error) == (["n1", 'n "2", {}'], "back\\slash\ttab\nline")
        assert session.scalar(text("SHOW synchronous_commit")) == "on"


def test_old_rows_are_forgotten_in_pieces(open_log: Open, database: Database) -> None:
    log = open_log()
    old = datetime.now(UTC) - timedelta(hours=2)
    for number in range(10):
        log.add(record(f"old{number}", ended_at=old))
    log.add(record("new"))
    log.write()
    with database.transaction() as session:
        assert delete_older(session, column=LoggedRequest.ended_at, keep_s=3600.0, count_max=7) == 7
        assert delete_older(session, column=LoggedRequest.ended_at, keep_s=3600.0, count_max=7) == 3
        assert delete_older(session, column=LoggedRequest.ended_at, keep_s=3600.0, count_max=7) == 0
        assert session.scalar(select(func.count()).select_from(LoggedRequest)) == 1
