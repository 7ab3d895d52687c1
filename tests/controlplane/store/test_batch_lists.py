"""What looks for some batches or files reads these, however many there ever were."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.orm import Session

from controlplane.policies.lifecycle import BatchState
from controlplane.store.batch_views import find_batches
from controlplane.store.batches import list_batches
from controlplane.store.files import expire_files, list_files
from controlplane.store.session import Database
from tests.controlplane.world import World

EVER = 40_000
"""Batches that have ended, of `TENANTS` tenants, each with a file."""
TENANTS = 400
READ_MAX = 50


@pytest.fixture
def old(world: World) -> Database:
    """The database of a fleet that has been in use for long, with one open batch."""
    world.add_batch(lines=1)
    rows = f"FROM generate_series(1, {EVER}) AS number"
    with world.database.transaction() as session:
        session.execute(
            text(
                "INSERT INTO files (id, tenant, filename, purpose, bytes, expires_at)"
                f" SELECT 'file-' || lpad(number::text, 32, '0'), 't' || number % {TENANTS}, 'x', 'batch', 1,"
                f" now() + interval '1 day' {rows}"
            )
        )
        session.execute(
            text(
                "INSERT INTO batches (id, tenant, endpoint, completion_window, state, input_file_id, deadline_at,"
                f" ended_at) SELECT 'batch_' || lpad(number::text, 32, '0'), 't' || number % {TENANTS},"
                " '/v1/completions', '24h', 'completed', 'file-' || lpad(number::text, 32, '0'), now(), now()"
                f" {rows}"
            )
        )
    for table in ("files", "batches"):
        with world.database.transaction() as session:
            session.execute(text(f"ANALYZE {table}"))
    return world.database


def rows_read(database: Database, look: Callable[[Session], Any]) -> int:
    """How many rows of tables its first statement reads."""
    sent: list[tuple[str, Any]] = []

    def note(_connection: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        sent.append((statement, parameters))

    event.listen(database.engine, "before_cursor_execute", note)
    with database.transaction() as session:
        look(session)
        event.remove(database.engine, "before_cursor_execute", note)
        statement, parameters = next(each for each in sent if each[0].startswith("SELECT"))
        explained = session.connection().exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters)
        return sum(_rows(explained.scalar_one()[0]["Plan"]))


def _rows(plan: dict[str, Any]) -> Iterator[int]:
    if "Relation Name" in plan:
        yield (plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)) * plan["Actual Loops"]
    for part in plan.get("Plans", ()):
        yield from _rows(part)


FIND: dict[str, Any] = {
    "tenant": None,
    "model": None,
    "state": None,
    "ended": None,
    "at_risk": None,
    "after": None,
    "limit": 20,
}
FILES: dict[str, Any] = {"purpose": None, "after": None, "limit": 20, "newest_first": True}


@pytest.mark.parametrize("tenant", ["t7", "nobody"])
def test_a_page_of_a_tenant_is_read_alone(old: Database, tenant: str) -> None:
    assert rows_read(old, lambda session: list_batches(session, tenant=tenant, after=None, limit=20)) <= READ_MAX
    assert rows_read(old, lambda session: list_files(session, tenant=tenant, **FILES)) <= READ_MAX
    assert rows_read(old, lambda session: find_batches(session, **(FIND | {"tenant": tenant}))) <= READ_MAX


@pytest.mark.parametrize("which", [{"state": BatchState.IN_PROGRESS}, {"at_risk": True}, {"ended": False}])
def test_open_batches_are_read_alone(old: Database, which: dict[str, Any]) -> None:
    assert rows_read(old, lambda session: find_batches(session, **(FIND | which))) <= READ_MAX


def test_files_past_their_time_are_read_alone(old: Database) -> None:
    assert rows_read(old, expire_files) == 0
