"""A term begins with each server that becomes the primary, once, whoever finds it."""

from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import select, text

from controlplane.store.events import Event
from controlplane.store.session import Database
from controlplane.store.terms import Term, current_term, keep_newest, newest_known, note_reported, raise_term, read_term


def found(database: Database) -> int:
    with database.transaction() as session:
        return current_term(session)


def come_from(database: Database, column: str) -> None:
    """The stored term is that of another server."""
    with database.transaction() as session:
        session.execute(text(f"UPDATE terms SET {column} = {column} - 1"))


def test_the_newest_term_of_a_database_that_is_emptied_is_kept(database: Database) -> None:
    with database.transaction() as session:
        session.execute(text("COMMENT ON SCHEMA public IS 'of somebody else: 7'"))
        assert newest_known(session) == 0
        keep_newest(session, 500)
        assert newest_known(session) == 500
        assert raise_term(session, above=newest_known(session), why="a backup was restored") == 501
        assert newest_known(session) == 501
        session.rollback()  # a schema's comment would outlive this test


def test_a_fresh_database_begins_at_one_and_stays_there(database: Database) -> None:
    assert [found(database) for _ in range(3)] == [1, 1, 1]


def test_another_timeline_or_another_server_begins_one(database: Database) -> None:
    assert found(database) == 1
    come_from(database, "timeline")
    assert [found(database), found(database)] == [2, 2]
    come_from(database, "system_identifier")
    assert [found(database), found(database)] == [3, 3]


def test_promotions_that_a_restored_moment_does_not_know_are_counted(database: Database) -> None:
    assert found(database) == 1
    for _ in range(3):
        come_from(database, "timeline")
    assert [found(database), found(database)] == [4, 4]
    with database.transaction() as session:
        session.execute(text("UPDATE terms SET timeline = timeline + 5"))
    assert found(database) == 5, "an older timeline is another server, too"


def test_racers_raise_it_once(database: Database) -> None:
    found(database)
    come_from(database, "timeline")
    with ThreadPoolExecutor(2) as racers:
        assert list(racers.map(found, [database, database])) == [2, 2]


def test_one_that_waited_for_another_takes_its_term(database: Database) -> None:
    found(database)
    come_from(database, "timeline")
    with ThreadPoolExecutor(1) as other:
        with database.transaction() as session:
            assert current_term(session) == 2
            waiting = other.submit(found, database)
        assert waiting.result() == 2
    with database.transaction() as session:
        assert session.scalars(select(Term.term)).all() == [2]


def test_what_nodes_report_is_kept_and_an_operator_goes_above_it(database: Database) -> None:
    with database.transaction() as session:
        assert (read_term(session), newest_known(session)) == (None, 0)
        current_term(session)
        for reported in (5, 3, 2**80):
            note_reported(session, reported)
    with database.transaction() as session:
        row = read_term(session)
        assert row is not None
        assert (row.term, row.reported, newest_known(session)) == (1, 5, 5)
        assert raise_term(session, why="raised by anna") == 6
    with database.transaction() as session:
        assert raise_term(session, above=8, why="a backup was restored") == 9
    assert found(database) == 9, "it is this server's"
    with database.transaction() as session:
        began = session.scalars(select(Event).where(Event.kind == "term").order_by(Event.id)).all()
    assert [(each.subject, (each.message or "").partition(";")[0]) for each in began] == [
        ("6", "raised by anna"),
        ("9", "a backup was restored"),
    ]


def test_a_database_of_the_version_before_says_what_it_knows(database: Database) -> None:
    found(database)
    with database.transaction() as session:
        session.execute(text("ALTER TABLE terms DROP COLUMN reported"))
        assert newest_known(session) == 1
        session.execute(text("DROP TABLE terms"))
        assert newest_known(session) == 0
        session.rollback()
