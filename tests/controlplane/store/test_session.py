"""Connections to Postgres."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import InternalError, ResourceClosedError

from controlplane.settings import Settings
from controlplane.store.schema import check_schema
from controlplane.store.session import Database, make_engine


def test_a_server_that_vanishes_is_noticed(database: Database) -> None:
    """libpq takes these names: an unknown one would be an error, and a default one is not listed."""
    with database.transaction() as session:
        session.execute(text("SELECT 1"))
        connection = session.connection().connection.driver_connection
        assert connection is not None
        given = connection.info.get_parameters()
    wanted = {"keepalives_idle": "5", "keepalives_interval": "2", "keepalives_count": "3", "tcp_user_timeout": "10000"}
    assert {name: given.get(name) for name in wanted} == wanted


def test_a_statement_alone_is_a_transaction(database: Database) -> None:
    """What it did stays, whatever comes after it; a transaction on the same connection is one again."""
    with suppress(ZeroDivisionError), database.statement() as session:
        session.execute(text("CREATE TABLE scratch (n int)"))
        raise ZeroDivisionError
    with suppress(ZeroDivisionError), database.transaction() as session:
        session.execute(text("DROP TABLE scratch"))
        raise ZeroDivisionError
    with database.transaction() as session:
        assert session.execute(text("SELECT count(*) FROM scratch")).scalar_one() == 0
        session.execute(text("DROP TABLE scratch"))


def test_all_statements_of_one_moment_see_the_same_and_write_nothing(database: Database) -> None:
    with database.one_moment() as session:
        before = session.execute(text("SELECT version FROM fleet")).scalar_one()
        with database.transaction() as other:
            other.execute(text("UPDATE fleet SET version = version + 1"))
        assert session.execute(text("SELECT version FROM fleet")).scalar_one() == before
    with pytest.raises(InternalError, match="read-only transaction"), database.one_moment() as session:
        session.execute(text("UPDATE fleet SET version = 0"))


def test_closing_waits_for_a_probe_whose_caller_went_away(settings: Settings) -> None:
    database, probed, go_on = Database(make_engine(settings)), threading.Event(), threading.Event()
    connections: list[Any] = []

    def hold(connection: Any, *_: Any) -> None:
        connections.append(connection)
        probed.set()
        go_on.wait()

    event.listen(database.engine, "checkout", hold)
    with ThreadPoolExecutor(2) as threads:
        probe = threads.submit(check_schema, database)
        probed.wait()
        closing = threads.submit(database.close)
        go_on.set()
        probe.result()
        closing.result()
    assert [connection.closed for connection in connections] == [True]


def test_nothing_is_begun_after_the_end(settings: Settings) -> None:
    database = Database(make_engine(settings))
    database.close()
    with pytest.raises(ResourceClosedError), database.transaction():
        pass
