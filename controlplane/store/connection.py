"""The driver's connection to a Postgres that may be in another region, where every trip costs.

The answer to some statements is needed by nobody: BEGIN is one. They are *deferred*, and sent with the transaction's
next statement, or with its COMMIT, in one trip (libpq's pipeline mode). A transaction takes one trip for each statement
whose answer is read, and one for its commit; a statement without a transaction takes one in all.
"""

import contextlib
import math
import select
import time
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus


class CommitTimeoutError(psycopg.OperationalError):
    """A commit waited for another region for too long: nobody knows whether it is in effect, so nobody is told."""


class SilentServerError(psycopg.OperationalError):
    """The server keeps its connections and answers none, as where its machine is suspended or its disk hangs."""


class Connection(psycopg.Connection[Any]):
    """A connection in the driver's autocommit mode, whose transactions begin with `begin`. It waits for its server for
    a limited time.

    A server that works ends a statement itself (`statement_timeout`). One that hangs does not, and its kernel still
    acknowledges what it is sent, so that TCP sees nothing wrong: after `answer_max_s` seconds it is given up. A commit
    waits for `commit_max_s`: the server would wait without end for a standby that it needs, and must not be asked to
    cancel: it would call the commit done. `timeline`: of its server, while that is the primary.
    """

    answer_max_s = math.inf
    commit_max_s = math.inf
    timeline = ""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.cursor_factory = _Cursor
        self.server_cursor_factory = _ServerCursor
        self._deferred: list[tuple[Any, Any]] = []
        self._until_s: float | None = None
        """Until when answers are waited for; None: for `answer_max_s` each."""

    def begin(self) -> None:
        """Have the next statement begin a transaction."""
        self._deferred.append(("BEGIN", None))

    def defer(self, query: Any, parameters: Any) -> None:
        """Send a statement of the present transaction with the next one, which also raises its error."""
        assert self.in_transaction()
        self._deferred.append((query, parameters))

    def in_transaction(self) -> bool:
        """Whether a transaction has begun, or the next statement begins one."""
        return bool(self._deferred) or self.info.transaction_status != TransactionStatus.IDLE

    def is_quiet(self) -> bool:
        """Whether it is open, and the server has sent nothing since its last answer, as it does to end it."""
        if self.closed:
            return False
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        return not poll.poll(0)

    def commit(self) -> None:
        """Send what is still deferred and COMMIT, in one trip; none, if the transaction has no statement."""
        if len(self._deferred) == 1 and self.info.transaction_status == TransactionStatus.IDLE:
            self._deferred.clear()
        with self._bounded(self.commit_max_s):
            if not self._deferred:
                super().commit()
            else:
                with self.one_trip():
                    psycopg.Cursor(self).execute("COMMIT", prepare=False)

    def rollback(self) -> None:
        """Forget what is deferred, and roll the rest back."""
        self._deferred.clear()
        self._until_s = None
        super().rollback()

    def lift_limit(self) -> None:
        """Wait for the answers of this transaction as long as they take."""
        self._until_s = math.inf

    @contextlib.contextmanager
    def one_trip(self) -> Iterator[None]:
        """Send what is deferred together with what the block executes."""
        if not self._deferred:
            yield
            return
        deferred, self._deferred = self._deferred, []
        with self.pipeline():
            for query, parameters in deferred:
                psycopg.Cursor(self).execute(query, parameters, prepare=False)
            yield

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """`one_trip` of a statement. One without a transaction is its own commit: it waits for as long as an answer
        and a commit may take.
        """
        if self.in_transaction():
            with self.one_trip():
                yield
        else:
            with self._bounded(self.answer_max_s + self.commit_max_s):
                yield

    def wait(self, gen: Any, *args: Any, **named: Any) -> Any:
        """Drive a generator of the driver, for as long as what it does may take."""
        until_s = time.monotonic() + self.answer_max_s if self._until_s is None else self._until_s
        return super().wait(gen if until_s == math.inf else self._cut_off(gen, until_s), *args, **named)

    @contextlib.contextmanager
    def _bounded(self, most_s: float) -> Iterator[None]:
        """Wait for the block, which commits, for so many seconds."""
        self._until_s = time.monotonic() + most_s
        try:
            yield
        except SilentServerError:
            raise CommitTimeoutError("the commit waited for another region for too long") from None
        finally:
            self._until_s = None

    def _cut_off(self, gen: Any, until_s: float) -> Any:
        """The same generator. It is resumed at least ten times a second, with nothing ready."""
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > until_s:
                    self.close()
                    raise SilentServerError("the server has not answered for too long")
                wanted = gen.send(ready)
        except StopIteration as end:
            return end.value


class _Cursor(psycopg.Cursor[Any]):
    """A cursor before whose statements that which is deferred is sent, in the same trip, but for COPY."""

    def execute(self, *args: Any, **named: Any) -> Any:
        with _connection_of(self).sending():
            return super().execute(*args, **named)

    def executemany(self, *args: Any, **named: Any) -> None:
        with _connection_of(self).sending():
            super().executemany(*args, **named)

    def copy(self, *args: Any, **named: Any) -> Any:
        with _connection_of(self).one_trip():
            pass
        return super().copy(*args, **named)


class _ServerCursor(psycopg.ServerCursor[Any]):
    """A cursor of the server, whose rows are read in parts: before it, what is deferred takes a trip of its own."""

    def execute(self, *args: Any, **named: Any) -> Any:
        with _connection_of(self).one_trip():
            pass
        return super().execute(*args, **named)


def _connection_of(cursor: psycopg.Cursor[Any] | psycopg.ServerCursor[Any]) -> Connection:
    connection = cursor.connection
    assert isinstance(connection, Connection)
    return connection
