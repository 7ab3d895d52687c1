"""Alembic's entry. The URL comes from the config that `migrations.upgrade` makes, or from TIDEPOOL_DATABASE_URL."""

import time
from typing import Any

from alembic import context
from psycopg import Connection, Cursor
from sqlalchemy import create_engine, event, pool

from controlplane.database_address import psycopg_url
from controlplane.errors import SchemaError
from controlplane.settings import Settings
from controlplane.store import (
    alias_tables,
    batch_tables,
    console,
    demand,
    events,
    keys,
    latency_comparisons,
    limit_shares,
    objectives,
    overrides,
    plans,
    profile_corrections,
    request_log,
    responses,
    tables,
    tenants,
    terms,
    token_budgets,
    usage,
    what_if,
)

for module, table in (
    (alias_tables, "aliases"),
    (batch_tables, "batches"),
    (console, "console_sessions"),
    (demand, "forecasts"),
    (events, "events"),
    (keys, "api_keys"),
    (latency_comparisons, "latency_comparisons"),
    (limit_shares, "limit_shares"),
    (objectives, "objective_counts"),
    (overrides, "pins"),
    (plans, "plans"),
    (profile_corrections, "profile_corrections"),
    (request_log, "request_log"),
    (responses, "responses"),
    (tenants, "tenants"),
    (terms, "terms"),
    (token_budgets, "token_budgets"),
    (usage, "usage_hours"),
    (what_if, "what_if_runs"),
):
    assert table in tables.Base.metadata.tables, f"{module.__name__} adds its tables to the same metadata"
target = tables.Base.metadata
_LOCKS_WITHIN_S = 0.5
"""How long after its first lock a migration waits for others at most, while it keeps those that it has. A request that
waits behind the first looks for a deadlock after PostgreSQL's deadlock_timeout (1 s by default), and is undone where it
finds one: of two that wait for each other, the migration has given way by then.
"""


def run() -> None:
    """Run migrations, each in a transaction of its own, under an advisory lock so that two processes never migrate at
    once. The lock is held by a transaction beside them, since a proxy may pool connections by transaction. That one has
    neither a snapshot nor a number, so it holds no vacuum back; servers that end idle transactions leave it alone.
    """
    given = context.config.get_main_option("sqlalchemy.url")
    url = psycopg_url(given) if given else Settings().database_url.get_secret_value()
    engine = create_engine(url, poolclass=pool.NullPool)
    event.listen(engine, "connect", _check_encoding, insert=True)  # SQLAlchemy's own first look fails on bytes
    with engine.connect() as alone, engine.connect() as connection:
        alone.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
        alone.exec_driver_sql("SELECT pg_advisory_xact_lock(7303014)")
        limit = _LockTimeout()
        event.listen(connection, "begin", limit.begin)
        event.listen(connection, "before_cursor_execute", limit.set)
        context.configure(
            connection=connection,
            target_metadata=target,
            compare_type=True,
            compare_server_default=True,
            transaction_per_migration=True,
        )
        with context.begin_transaction():
            context.run_migrations()
    engine.dispose()


class _LockTimeout:
    """Limits how long each statement of a transaction waits for a lock: all together for `_LOCKS_WITHIN_S` after the
    first that may hold one, and later ones not at all. On a busy machine a server that ends idle transactions would end
    a migration between two of its statements.
    """

    _until_s: float | None = None

    def begin(self, _connection: object) -> None:
        """A transaction has no lock yet."""
        self._until_s = None

    def set(self, _connection: object, cursor: Cursor[Any], statement: str, *_: object) -> None:
        """Before a statement."""
        if self._until_s is None and not statement.startswith("SELECT"):
            self._until_s = time.monotonic() + _LOCKS_WITHIN_S
        left_s = _LOCKS_WITHIN_S if self._until_s is None else self._until_s - time.monotonic()
        milliseconds = max(1, round(left_s * 1000))  # 0 would be no limit
        cursor.execute(f"SET LOCAL lock_timeout = {milliseconds}; SET LOCAL idle_in_transaction_session_timeout = 0")


def _check_encoding(connection: Connection[Any], _record: object) -> None:
    """Raise SchemaError where the database cannot hold every prompt. One in SQL_ASCII returns text as bytes."""
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise SchemaError(
            f"the database is encoded as {encoding}, Tidepool needs UTF8: make it anew by"
            " `createdb --encoding UTF8 --template template0 NAME`"
        )


run()
