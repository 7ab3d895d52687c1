"""Connections to Postgres."""

from contextlib import suppress

from sqlalchemy import text

from controlplane.store.session import Database


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
