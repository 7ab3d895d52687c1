"""The primary is lost and its standby promoted under a process, which goes on by itself."""

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import event, select, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from controlplane.settings import Settings
from controlplane.store.connection import CommitTimeoutError, SilentServerError
from controlplane.store.events import Event
from controlplane.store.notifications import Wake, listen, notify
from controlplane.store.rows import copy_rows
from controlplane.store.session import Database, defer, lift_time_limit, make_engine
from controlplane.store.tables import Base
from controlplane.store.terms import current_term
from ops.local.embedded import EmbeddedPostgres
from ops.local.supervisor import Supervisor
from tests.controlplane.world import PATIENCE_S, until
from tests.servers import Servers, Standby, suspended


class Pair:
    """A primary and its standby, and a database whose address names both."""

    def __init__(self, folder: Path) -> None:
        self.servers = Servers(folder / "primary")
        self.primary = self.servers.postgres
        self.standby = Standby(folder / "standby", self.primary)
        self.standby.prepare()
        self._running = ExitStack()
        self._running.enter_context(Supervisor([self.standby.child()]))
        at = self.primary.url()
        both = at.replace(f":{self.primary.port}/", f":{self.primary.port},127.0.0.1:{self.standby.port}/")
        self.settings = Settings(database_url=SecretStr(both), database_pool_size=4)
        self.database = Database(make_engine(self.settings))
        self.connected = 0
        event.listen(self.database.engine, "connect", self._count)

    def _count(self, *_: Any) -> None:
        self.connected += 1

    def promote(self) -> None:
        tell(self.standby, "SELECT pg_promote()")

    def port(self) -> int:
        """The port of the server that takes a write now."""
        with self.database.transaction() as session:
            return written_at(session)

    def took_a_write(self) -> bool:
        with contextlib.suppress(SQLAlchemyError):
            return self.port() == self.standby.port
        return False

    def written_while_it_stops(self) -> None:
        with self.database.transaction() as session:
            written_at(session)
            self.servers.stop("postgres")
            written_at(session)

    def copied_where_nothing_is_written(self) -> None:
        with self.database.transaction() as session:
            session.execute(text("SET TRANSACTION READ ONLY"))
            copy_rows(session, "written (at)", [(1,)])

    def failed(self, state: str) -> bool:
        """Whether an error of that state is said to have lost its connection."""
        try:
            with self.database.transaction() as session:
                session.execute(text(f"DO $$ BEGIN RAISE EXCEPTION 'failed' USING ERRCODE = '{state}'; END $$"))
        except DBAPIError as error:
            return error.connection_invalidated
        return False

    def written_alone(self) -> None:
        with self.database.statement() as session:
            session.execute(text("INSERT INTO written VALUES (0)"))

    def waiting(self) -> int:
        """How many commits wait for a standby."""
        query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        with self.database.transaction() as session:
            return session.execute(text(query)).scalar_one()

    def idle(self, count: int) -> None:
        """Have that many connections in the pool."""
        with ExitStack() as stack:
            for _ in range(count):
                stack.enter_context(self.database.transaction()).execute(text("SELECT 1"))

    def close(self) -> None:
        self.database.close()
        self._running.close()
        self.servers.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    with pair.database.transaction() as session:
        session.execute(text("CREATE TABLE written (at int)"))
    yield pair
    pair.close()


def tell(server: EmbeddedPostgres, *statements: str) -> None:
    """Run statements on one server, each by itself."""
    database = Database(make_engine(Settings(database_url=SecretStr(server.url()))))
    for statement in statements:
        with database.statement() as session:
            session.execute(text(statement))
    database.close()


def written_at(session: Session) -> int:
    session.execute(text("INSERT INTO written SELECT current_setting('port')::int"))
    return session.execute(text("SELECT current_setting('port')::int")).scalar_one()


def has_promoted(pair: Pair) -> bool:
    try:
        return pair.port() == pair.standby.port
    except SQLAlchemyError:
        return False


def test_a_process_follows_the_primary(pair: Pair) -> None:
    """What was open fails, nothing is written twice, and listeners hear of the new primary."""

    async def run() -> None:
        heard: list[tuple[Wake, float]] = []
        task = asyncio.create_task(listen(pair.settings, lambda wake, delay_s: heard.append((wake, delay_s))))
        try:
            await asyncio.to_thread(until, lambda: len(heard) == len(Wake))
            pair.idle(3)
            heard.clear()
            with pytest.raises(SQLAlchemyError):
                await asyncio.to_thread(pair.written_while_it_stops)
            with pytest.raises(SQLAlchemyError):
                pair.port()
            pair.promote()
            await asyncio.to_thread(until, lambda: has_promoted(pair))
            await asyncio.to_thread(until, lambda: len(heard) >= len(Wake), PATIENCE_S)
            with pair.database.transaction() as session:
                notify(session, Wake.RELEASE, delay_s=7)
            await asyncio.to_thread(until, lambda: (Wake.RELEASE, 7.0) in heard)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(run())
    with pair.database.transaction() as session:
        found = session.scalars(text("SELECT at FROM written")).all()
    assert found == [pair.standby.port], "what was not acknowledged by the first was undone, and not repeated"


def test_a_server_that_turns_read_only_loses_the_whole_pool(pair: Pair) -> None:
    """A demoted server may keep its connections, which answer a ping: only the error of a write says what it is."""
    pair.idle(3)
    assert (pair.port(), pair.connected) == (pair.primary.port, 3)
    pair.promote()
    tell(pair.primary, "ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()")
    until(lambda: refusal(pair) == ("25006", True))
    connected = pair.connected
    until(lambda: pair.port() == pair.standby.port)
    pair.idle(3)
    assert pair.connected - connected == 3, "none of the old connections was used again"


def refusal(pair: Pair) -> tuple[str | None, bool] | None:
    """The state of a write's error, and whether its connection is said to be lost."""
    try:
        pair.port()
    except DBAPIError as error:
        return getattr(error.orig, "sqlstate", None), error.connection_invalidated
    return None


def test_each_state_that_says_the_server_is_lost_drops_the_pool_and_no_other(pair: Pair) -> None:
    lost = {"25006", "57P01", "57P02", "57P03", "08006", "08P01"}
    for state in (*sorted(lost), "22012", "57014", "40001"):
        pair.idle(2)
        connected = pair.connected
        assert pair.failed(state) == (state in lost), state
        pair.idle(2)
        assert pair.connected - connected == (2 if state in lost else 0), state


def test_a_copy_that_meets_a_server_without_writes_loses_its_connection(pair: Pair) -> None:
    with pytest.raises(DBAPIError) as lost:
        pair.copied_where_nothing_is_written()
    assert lost.value.connection_invalidated
    connected = pair.connected
    assert pair.port() == pair.primary.port
    assert pair.connected == connected + 1


def test_only_what_was_promised_waits_for_another_region(pair: Pair) -> None:
    """No standby of the quorum answers: commits of both kinds wait for one, and those of the third do not."""
    tell(pair.primary, "ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    pair.servers.stop("postgres")
    pair.servers.start("postgres")
    with ThreadPoolExecutor(2) as threads:
        promised = [threads.submit(pair.port), threads.submit(pair.written_alone)]
        try:
            until(lambda: pair.waiting() == len(promised))
            with pair.database.transaction(replicated=False) as session:
                written_at(session)
            assert pair.waiting() == len(promised)
            assert not any(each.done() for each in promised)
        finally:
            tell(pair.primary, "ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
        for each in promised:
            each.result()
    with pair.database.transaction() as session:
        assert session.execute(text("SELECT count(*) FROM written")).scalar_one() == 3
        assert session.execute(text("SHOW synchronous_commit")).scalar_one() == "on", "it held for one transaction"


def test_a_commit_that_waits_for_another_region_for_too_long_is_told_to_nobody(pair: Pair) -> None:
    """The connection is given up, not cancelled: to a cancelled wait the server answers that the commit is done."""
    hasty = Database(make_engine(pair.settings.model_copy(update={"database_timeout_s": 1, "database_pool_size": 1})))
    tell(pair.primary, "ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()")
    until(lambda: quorum(pair) == "nobody")

    def with_what_is_deferred(session: Session) -> None:
        written_at(session)
        defer(session, text("SELECT 1"))

    for opened, write in (
        (hasty.transaction, written_at),
        (hasty.transaction, with_what_is_deferred),
        (hasty.statement, written_at),
    ):
        with pytest.raises(DBAPIError) as waited, opened() as session:
            write(session)
        assert isinstance(waited.value.orig, CommitTimeoutError)
        assert waited.value.connection_invalidated
    with hasty.transaction(replicated=False) as session:
        written_at(session)
    tell(pair.primary, "ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
    until(lambda: quorum(pair) == "")
    with hasty.transaction() as session:
        written_at(session)
    hasty.close()


def test_a_server_that_hangs_is_given_up(pair: Pair) -> None:
    """It takes connections, its kernel acknowledges what it is sent, and it answers nothing; also within a copy, whose
    statements may take as long as they need.
    """
    hasty = Database(make_engine(pair.settings.model_copy(update={"database_timeout_s": 1, "database_pool_size": 1})))
    with hasty.transaction() as session:
        lift_time_limit(session)
        session.execute(text("SELECT pg_sleep(2.5)"))
    with pytest.raises(DBAPIError) as silent:
        asks_until_it_hangs(hasty, pair.primary)
    assert isinstance(silent.value.orig, SilentServerError)
    assert silent.value.connection_invalidated
    until(lambda: answers(hasty))
    hasty.close()


def asks_until_it_hangs(database: Database, server: EmbeddedPostgres) -> None:
    with database.transaction() as session:
        session.execute(text("SELECT 1"))
        with suspended(server):
            session.execute(text("SELECT 1"))


def answers(database: Database) -> bool:
    with contextlib.suppress(SQLAlchemyError), database.statement() as session:
        session.execute(text("SELECT 1"))
        return True
    return False


def quorum(pair: Pair) -> str:
    with pair.database.transaction() as session:
        return str(session.execute(text("SHOW synchronous_standby_names")).scalar_one())


def test_a_promotion_begins_a_term(pair: Pair) -> None:
    with pair.database.transaction() as session:
        Base.metadata.create_all(
            session.connection(), tables=[Base.metadata.tables[name] for name in ("terms", "events")]
        )
        assert current_term(session) == 1
    pair.servers.stop("postgres")
    pair.promote()
    until(lambda: has_promoted(pair))
    for _ in range(2):
        with pair.database.transaction() as session:
            assert current_term(session) == 2
    with pair.database.transaction() as session:
        [began] = session.scalars(select(Event))
    assert (began.kind, began.what, began.subject) == ("term", "began", "2")
    assert (began.message or "").startswith("timeline 2 of server ")


def test_no_connection_leads_to_a_primary_that_was_replaced_and_does_not_know(pair: Pair) -> None:
    """It still takes writes, and stands first in the address; its pooled connections are dropped too."""
    assert pair.port() == pair.primary.port
    pair.idle(3)
    pair.promote()
    pair.servers.stop("postgres")
    until(pair.took_a_write)
    pair.servers.start("postgres")
    tell(pair.primary, "INSERT INTO written VALUES (0)")
    pair.database.engine.dispose()
    pair.idle(3)
    assert [pair.port() for _ in range(5)] == [pair.standby.port] * 5
