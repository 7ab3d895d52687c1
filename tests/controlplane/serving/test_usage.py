"""Counting usage: nothing twice, and nothing lost while Postgres is away."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.exc import OperationalError

from controlplane.serving.usage import UsageCounter
from controlplane.store.rows import delete_older
from controlplane.store.session import Database
from controlplane.store.usage import Usage, UsageHour, UsageKey, add_batch_usage, add_up_usage, read_usage
from dataplane.protocol.tiers import Tier

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


def totals(database: Database, *by: str, **which: Any) -> list[tuple[Any, ...]]:
    asked = {"since": LONG_AGO, "until": None, "tenant": None, "model": None, "after": 0, "limit": 100} | which
    with database.transaction() as session:
        rows = read_usage(session, by=by, **asked)
    return [tuple(row.values()) for row in rows]


class CommitLostDatabase:
    """Commits, and then tells that the connection broke: nobody knows whether it did."""

    def __init__(self, database: Database, *, commits: bool) -> None:
        self._database, self._commits, self.loses = database, commits, True

    @contextmanager
    def transaction(self, *, replicated: bool = True) -> Iterator[Any]:
        with self._database.transaction(replicated=replicated) as session:
            yield session
            if self.loses and not self._commits:
                raise OperationalError("COMMIT", {}, Exception("gone"))
        if self.loses:
            raise OperationalError("COMMIT", {}, Exception("gone"))


@pytest.mark.parametrize("commits", [True, False])
def test_a_write_of_unknown_end_is_repeated_and_counts_once(database: Database, commits: bool) -> None:
    losing = CommitLostDatabase(database, commits=commits)
    counter = UsageCounter(losing)  # type: ignore[arg-type]
    for _ in range(3):
        counter.count("acme", "m", Tier.IW_N, failed=False, input_tokens=10, output_tokens=2)
    for _ in range(2):
        with pytest.raises(OperationalError):
            counter.flush()
    counter.count("acme", "m", Tier.IW_N, failed=True, input_tokens=0, output_tokens=1)
    losing.loses = False
    counter.flush()
    assert totals(database, "tenant", "model", "tier") == [("acme", "m", "IW-N", 4, 1, 30, 7)]
    counter.flush()
    assert totals(database, "tenant") == [("acme", 4, 1, 30, 7)]


def test_processes_add_up_and_so_do_their_hours_later(database: Database) -> None:
    for process in range(2):
        counter = UsageCounter(database)
        for tenant in ("acme", "blue"):
            counter.count(tenant, f"m{process}", Tier.IW_F, failed=False, input_tokens=5, output_tokens=1)
            counter.flush()
    with database.transaction() as session:
        hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        for _ in range(2):
            add_batch_usage(session, {UsageKey(hour, "acme", "m0", "NIW"): Usage(requests=9, output_tokens=4)})
    expected = [("acme", 20, 0, 10, 10), ("blue", 2, 0, 10, 2)]
    assert totals(database, "tenant") == expected
    assert totals(database, "model", tenant="acme") == [("m0", 19, 0, 5, 9), ("m1", 1, 0, 5, 1)]
    assert totals(database, "tenant", since=hour + timedelta(hours=1)) == []
    assert totals(database, "tenant", after=1, limit=1) == expected[1:]

    def rows() -> Any:
        with database.transaction() as session:
            return session.scalar(select(func.count()).select_from(UsageHour))

    before = rows()
    with database.transaction() as session:
        add_up_usage(session, older_s=3600 * 2)
    assert rows() == before, "hours of now stay as their processes wrote them"
    with database.transaction() as session:
        session.execute(update(UsageHour).values(hour=hour - timedelta(hours=20)))
    for _ in range(2):
        with database.transaction() as session:
            add_up_usage(session, older_s=3600 * 2)
        assert totals(database, "tenant") == expected
    with database.transaction() as session:
        assert set(session.scalars(select(UsageHour.writer))) == {""}
    with database.transaction() as session:
        assert delete_older(session, column=UsageHour.hour, keep_s=3600, count_max=100) > 0
    assert totals(database, "tenant") == []
