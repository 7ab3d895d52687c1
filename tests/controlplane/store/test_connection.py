"""Statements that are sent together, what they undo together, and how many trips they take."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import text
from sqlalchemy.exc import DataError, IntegrityError
from sqlalchemy.orm import Session

from controlplane.settings import Settings
from controlplane.store.rows import copy_rows
from controlplane.store.session import Database, defer, make_engine
from tests.controlplane.trips import TripCounter
from tests.controlplane.world import until


@pytest.fixture
def trips(database_url: str) -> Iterator[TripCounter]:
    counter = TripCounter(database_url)
    yield counter
    counter.close()


@pytest.fixture
def far(settings: Settings, trips: TripCounter) -> Iterator[Database]:
    """The test's database through the counter, with a table of notes."""
    database = Database(make_engine(settings.model_copy(update={"database_url": SecretStr(trips.at)})))
    with database.statement() as session:
        session.execute(text("CREATE TABLE notes (word text UNIQUE)"))
    yield database
    with database.statement() as session:
        session.execute(text("DROP TABLE notes"))
    database.close()


def note(word: str) -> object:
    return text("INSERT INTO notes VALUES (:word)").bindparams(word=word)


def noted(session: Session) -> list[str]:
    return list(session.scalars(text("SELECT word FROM notes ORDER BY word")))


def kept(database: Database) -> list[str]:
    with database.statement() as session:
        return noted(session)


def test_a_transaction_takes_a_trip_for_each_answer_and_one_for_its_commit(far: Database, trips: TripCounter) -> None:
    def run(*, replicated: bool, deferred: int, read: int) -> None:
        with far.transaction(replicated=replicated) as session:
            for _ in range(read):
                defer(session, text("SELECT 1"))
                noted(session)
            for _ in range(deferred):
                defer(session, text("SELECT 1"))

    for replicated in (True, False):
        for deferred, read, expected in ((0, 1, 2), (0, 3, 4), (5, 1, 2), (5, 0, 1)):
            ran = trips.least(lambda d=deferred, r=read, w=replicated: run(replicated=w, deferred=d, read=r))
            assert ran == expected, (replicated, deferred, read)
    assert trips.least(lambda: run(replicated=True, deferred=0, read=0)) == 0
    assert trips.least(lambda: kept(far)) == 1


def test_what_is_deferred_comes_before_the_next_statement(far: Database) -> None:
    with far.transaction() as session:
        defer(session, note("a"))
        defer(session, note("b"))
        assert noted(session) == ["a", "b"]
        defer(session, note("c"))
        assert kept(far) == []
    assert kept(far) == ["a", "b", "c"]


def test_what_is_deferred_is_undone_with_its_transaction(far: Database) -> None:
    for reads in (False, True):
        with suppress(ZeroDivisionError), far.transaction() as session:
            defer(session, note("a"))
            if reads:
                noted(session)
            defer(session, note("b"))
            raise ZeroDivisionError
        assert kept(far) == []


def test_an_error_of_what_is_deferred_is_raised_with_the_next_statement_or_the_commit(far: Database) -> None:

    def write_twice(*, then_read: bool) -> None:
        with far.transaction() as session:
            defer(session, note("a"))
            defer(session, note("a"))
            if then_read:
                noted(session)

    for then_read in (True, False):
        with pytest.raises(IntegrityError):
            write_twice(then_read=then_read)
        assert kept(far) == []


def test_a_first_statement_that_fails_leaves_a_connection_that_works(far: Database) -> None:
    with pytest.raises(DataError), far.transaction() as session:
        session.execute(text("SELECT 1 / 0"))
    with far.transaction() as session:
        session.execute(note("a"))
    assert kept(far) == ["a"]


def test_outside_of_a_transaction_nothing_is_deferred(far: Database) -> None:
    with far.statement() as session:
        defer(session, note("a"))
        assert kept(far) == ["a"]


def test_copies_many_rows_and_cursors_are_of_the_transaction_too(far: Database) -> None:
    """None of them goes before the BEGIN that it is the first to follow."""

    def copy(session: Session) -> None:
        copy_rows(session, "notes", [("a",)])

    def many(session: Session) -> None:
        session.execute(text("INSERT INTO notes VALUES (:word)"), [{"word": "a"}, {"word": "b"}])

    def read_in_parts(session: Session) -> None:
        defer(session, note("a"))
        words = text("SELECT word FROM notes").execution_options(yield_per=1)
        assert list(session.scalars(words)) == ["a"]

    for write in (copy, many, read_in_parts):
        with suppress(ZeroDivisionError), far.transaction() as session:
            write(session)
            raise ZeroDivisionError
        assert kept(far) == [], write
    with far.transaction() as session:
        copy(session)
    assert kept(far) == ["a"]


def test_a_connection_that_the_server_has_ended_is_not_used(far: Database, database: Database) -> None:
    """Nobody has to ask the server for it."""
    with far.statement() as session:
        pid = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
        kept_open: Any = session.connection().connection.driver_connection
    with database.statement() as session:
        assert session.execute(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid}).scalar_one()
    until(lambda: not kept_open.is_quiet())  # the server's last word has come through the counter
    assert kept(far) == []
