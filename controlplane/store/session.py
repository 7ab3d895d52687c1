"""Engines and transactions. One request or task, one transaction, committed at the edge."""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection as SqlConnection
from sqlalchemy import Engine, ExceptionContext, Executable, create_engine, event, func, make_url, select, text
from sqlalchemy.engine.interfaces import ExecutionContext
from sqlalchemy.exc import DisconnectionError, ResourceClosedError
from sqlalchemy.orm import Session, sessionmaker

from controlplane.settings import Settings
from controlplane.store.connection import Connection
from controlplane.store.newest_primary import NewestPrimary

_CLOSE_TIMEOUT_S = 10.0
_SILENT_SERVER_MS = 10_000
_ANSWER_GRACE_S = 1.0
"""For the answer of a server that has ended a statement at its `statement_timeout`."""
_LOST = frozenset({"25006", "57P01", "57P02", "57P03"})
"""States of SQL that say: this server takes no writes, ends, or does not answer yet."""
_ALONE, _DEFERRED = "tidepool_alone", "tidepool_deferred"
"""Execution options: of connections whose statements are no transaction, and of statements that are sent later."""


def make_engine(settings: Settings) -> Engine:
    """A connection pool to Postgres. A connection that its server has ended is not used again, so a restarted server
    heals by itself; one that is lost silently is noticed within about ten seconds, a server that hangs a second after
    `database_timeout_s`. An error that says that the server is not the primary any more drops all pooled connections:
    the next ones are made to the one that is.
    """
    engine = create_engine(
        settings.database_url.get_secret_value(),
        pool_size=settings.database_pool_size,
        max_overflow=0,
        pool_timeout=settings.database_timeout_s,
        hide_parameters=True,  # an error in the log must not hold prompts, answers or hashes of keys
        connect_args=connect_args(settings),
    )
    for name, listener in (
        ("handle_error", _note_loss),
        ("checkout", _check_quiet),
        ("begin", _begin),
        ("do_execute", _defer),
    ):
        event.listen(engine, name, listener)
    several = "," in str(engine.url.query.get("host", ""))
    newest = NewestPrimary(engine) if several else None
    connect = functools.partial(_connect, timeout_s=settings.database_timeout_s, newest=newest)
    event.listen(engine, "do_connect", connect)
    return engine


def lift_time_limit(session: Session) -> None:
    """Let the statements of this transaction take as long as they need, as a copy must that is as long as its rows."""
    defer(session, text("SET LOCAL statement_timeout = 0"))
    _driver(session.connection().connection.driver_connection).lift_limit()


def _connect(
    _dialect: Any, _record: Any, _args: Any, parameters: Any, *, timeout_s: float, newest: NewestPrimary | None
) -> Connection:
    parameters = {**parameters, "autocommit": True}  # `_begin` begins
    connect = Connection.connect
    connection = connect(**parameters) if newest is None else newest.connect(connect, parameters)
    connection.commit_max_s = timeout_s
    connection.answer_max_s = timeout_s + _ANSWER_GRACE_S
    return connection


def _begin(connection: SqlConnection) -> None:
    if not connection.get_execution_options().get(_ALONE):
        _driver(connection.connection.driver_connection).begin()


def _defer(cursor: Any, statement: str, parameters: Any, context: ExecutionContext | None) -> bool:
    """Whether a statement is one to `defer`; then the driver sends it later."""
    driver = _driver(cursor.connection)
    deferred = context is not None and context.execution_options.get(_DEFERRED) and driver.in_transaction()
    if deferred:
        driver.defer(statement, parameters)
    return bool(deferred)


def _driver(connection: Any) -> Connection:
    assert isinstance(connection, Connection)
    return connection


def _check_quiet(connection: Connection, _record: Any, _proxy: Any) -> None:
    """Drop a pooled connection that its server has ended, without asking the server."""
    if not connection.is_quiet():
        raise DisconnectionError("the server has ended this connection")


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


def defer(session: Session, statement: Executable) -> None:
    """Execute a statement whose answer nobody needs. It is sent with the transaction's next one, or with its commit, so
    that it takes no trip to the server, and its error is raised there. It returns no rows.
    """
    session.connection().execute(statement, execution_options={_DEFERRED: True})


def server_time_s(session: Session) -> float:
    """Unix time by Postgres's clock, at which the transaction began: what the times in rows are compared with."""
    return float(session.scalar(select(func.extract("epoch", func.now()))) or 0)


class Database:
    """Hands out transactions until it is closed; from then on they raise ResourceClosedError, a SQLAlchemyError."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._sessions = sessionmaker(engine, expire_on_commit=False)
        self._alone = sessionmaker(engine.execution_options(**{_ALONE: True}), expire_on_commit=False)
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
                defer(session, text("SET LOCAL synchronous_commit = local"))
            yield session

    @contextmanager
    def one_moment(self) -> Iterator[Session]:
        """A transaction that only reads, and whose statements all see the database as its first one does. In others
        each statement sees what was committed before it, so that two of them may contradict each other.
        """
        with self._counted(self._sessions) as session:
            defer(session, text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"))
            yield session

    @contextmanager
    def statement(self) -> Iterator[Session]:
        """A session for one statement, which is a transaction by itself: one trip to the server instead of two. Each
        further one is a transaction too.
        """
        with self._counted(self._alone) as session:
            yield session

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
