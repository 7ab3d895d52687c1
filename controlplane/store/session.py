"""Engines and transactions. One request or task, one transaction, committed at the edge."""

import functools
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy import Engine, ExceptionContext, create_engine, event, make_url, text
from sqlalchemy.exc import ResourceClosedError
from sqlalchemy.orm import Session, sessionmaker

from controlplane.settings import Settings
from controlplane.store.newest_primary import NewestPrimary

_CLOSE_TIMEOUT_S = 10.0
_SILENT_SERVER_MS = 10_000
_LOST = frozenset({"25006", "57P01", "57P02", "57P03"})
"""States of SQL that say: this server takes no writes, ends, or does not answer yet."""


def make_engine(settings: Settings) -> Engine:
    """A connection pool to Postgres. Connections are checked before use, so a restarted server heals by itself;
    a connection that is lost silently is noticed within about ten seconds. An error that says that the server is not
    the primary any more drops all pooled connections: the next ones are made to the one that is.
    """
    engine = create_engine(
        settings.database_url.get_secret_value(),
        pool_size=settings.database_pool_size,
        max_overflow=0,
        pool_timeout=settings.database_timeout_s,
        pool_pre_ping=True,
        hide_parameters=True,  # an error in the log must not hold prompts, answers or hashes of keys
        connect_args=connect_args(settings),
    )
    event.listen(engine, "handle_error", _note_loss)
    several = "," in str(engine.url.query.get("host", ""))
    newest = NewestPrimary(engine) if several else None
    connect = functools.partial(_connect, commit_max_s=settings.database_timeout_s, newest=newest)
    event.listen(engine, "do_connect", connect)
    return engine


class CommitTimeoutError(psycopg.OperationalError):
    """A commit waited for another region for too long: nobody knows whether it is in effect, so nobody is told."""


class BoundedConnection(psycopg.Connection[Any]):
    """A connection whose commits wait for `commit_max_s` seconds at most. The server would wait without end for a
    standby that a commit needs, and must not be asked to cancel: it would call the commit done.
    """

    commit_max_s = math.inf
    timeline = ""

    def commit(self) -> None:
        self._until_s = time.monotonic() + self.commit_max_s
        try:
            super().commit()
        finally:
            del self._until_s

    def wait(self, gen: Any, *args: Any, **named: Any) -> Any:
        """Drive a generator of the driver; within `commit` until its time is over."""
        until_s = getattr(self, "_until_s", None)
        return super().wait(gen if until_s is None else self._bounded(gen, until_s), *args, **named)

    def _bounded(self, gen: Any, until_s: float) -> Any:
        """The same generator. It is resumed at least ten times a second, with nothing ready."""
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > until_s:
                    self.close()
                    raise CommitTimeoutError("the commit waited for another region for too long")
                wanted = gen.send(ready)
        except StopIteration as end:
            return end.value


def _connect(
    _dialect: Any, _record: Any, _args: Any, parameters: Any, *, commit_max_s: float, newest: NewestPrimary | None
) -> BoundedConnection:
    connection = (
        BoundedConnection.connect(**parameters)
        if newest is None
        else newest.connect(BoundedConnection.connect, parameters)
    )
    connection.commit_max_s = commit_max_s
    return connection


def is_lost(error: BaseException) -> bool:
    """Whether a driver's error means that its connection leads to no primary any more."""
    state = getattr(error, "sqlstate", None)
    return state is not None and (state in _LOST or state.startswith("08"))


def _note_loss(context: ExceptionContext) -> None:
    """A disconnect drops the pool. SQLAlchemy sees by itself those that closed the connection."""
    if is_lost(context.original_exception):
        context.is_disconnect = True


def connect_args(settings: Settings) -> dict[str, Any]:
    """libpq's parameters of a connection, but for those that the address gives itself."""
    given = make_url(settings.database_url.get_secret_value()).query
    options = f"-c statement_timeout={settings.database_timeout_s * 1000} -c timezone=UTC"
    defaults = {
        "connect_timeout": settings.database_timeout_s,
        "application_name": "tidepool",
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": _SILENT_SERVER_MS,
    }
    ours = {name: value for name, value in defaults.items() if name not in given}
    return ours | {"options": f"{given.get('options', '')} {options}".strip()}


class Database:
    """Hands out transactions until it is closed; from then on they raise ResourceClosedError, a SQLAlchemyError."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._sessions = sessionmaker(engine, expire_on_commit=False)
        self._alone = sessionmaker(engine.execution_options(isolation_level="AUTOCOMMIT"), expire_on_commit=False)
        self._open = 0
        self._closed = False
        self._changed = threading.Condition()

    @contextmanager
    def transaction(self, *, replicated: bool = True) -> Iterator[Session]:
        """A session that commits at the end of the block and rolls back on any exception.

        Args:
            replicated: the commit waits for other regions as the database is set to (`synchronous_commit`), as it must
                for whatever somebody is told. False: it waits for the primary's disk only; a lost primary may take it
                along.
        """
        with self._counted(self._sessions) as session:
            if not replicated:
                session.execute(text("SET LOCAL synchronous_commit = local"))
            yield session

    @contextmanager
    def statement(self) -> Iterator[Session]:
        """A session for one statement, which is a transaction by itself: one trip to the server instead of three."""
        with self._counted(self._alone) as session:
            yield session

    def ping(self) -> None:
        """Raise SQLAlchemyError unless Postgres answers."""
        with self.transaction() as session:
            session.execute(text("SELECT 1"))

    @contextmanager
    def _counted(self, sessions: sessionmaker[Session]) -> Iterator[Session]:
        self._count(1)
        try:
            with sessions.begin() as session:
                yield session
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._changed:
            if change > 0 and self._closed:
                raise ResourceClosedError("the connections to Postgres are closed: this process ends")
            self._open += change
            self._changed.notify_all()

    def close(self) -> None:
        """Close every pooled connection. Threads whose callers were cancelled may still be at work: they end first."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._open == 0, timeout=_CLOSE_TIMEOUT_S)
        self.engine.dispose()
