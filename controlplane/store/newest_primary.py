"""Connections to the newest primary only.

A primary that hung or was cut off, and comes back, does not know at once that another has taken over: it answers reads
from the past, and even from transactions that nobody was promised. A promotion begins a timeline, so whoever has seen
a newer one uses no connection to such a server.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import psycopg
from sqlalchemy import Engine, event
from sqlalchemy.exc import DisconnectionError

_TIMELINE = "SELECT CASE WHEN NOT pg_is_in_recovery() THEN left(pg_walfile_name(pg_current_wal_lsn()), 8) END"

Connection = TypeVar("Connection", bound=psycopg.Connection[Any])


class NewestPrimary:
    """What one engine, whose address names several servers, has seen of their timelines."""

    def __init__(self, engine: Engine) -> None:
        self._newest = ""
        self._lock = threading.Lock()
        event.listen(engine, "checkout", self._check)

    def connect(self, connect: Callable[..., Connection], parameters: dict[str, Any]) -> Connection:
        """Connect to the primary; one of an older timeline than was seen before is left out.

        Raises:
            psycopg.OperationalError: there is no other.
        """
        while True:
            connection = connect(**parameters)
            timeline = self._timeline_of(connection)
            with self._lock:
                self._newest = max(self._newest, timeline)
                if timeline == self._newest:
                    return connection
            stale = connection.info.host, str(connection.info.port)
            connection.close()
            parameters = _without(parameters, stale)

    def _check(self, connection: Any, _record: Any, _proxy: Any) -> None:
        """Drop a pooled connection whose server is not the newest primary any more."""
        if connection.timeline < self._newest:
            raise DisconnectionError("another server has become the primary")

    @staticmethod
    def _timeline_of(connection: Any) -> str:
        """The timeline of the connection's server, which stays with the connection; empty for a standby."""
        row = connection.execute(_TIMELINE).fetchone()
        connection.timeline = row[0] or ""
        return str(connection.timeline)


def _without(parameters: dict[str, Any], stale: tuple[str, str]) -> dict[str, Any]:
    """The parameters without one server."""
    servers = zip(parameters["host"].split(","), str(parameters["port"]).split(","), strict=True)
    left = [server for server in servers if server != stale]
    if not left:
        raise psycopg.OperationalError("the only server that takes writes was the primary before another was promoted")
    hosts, ports = zip(*left, strict=True)
    return parameters | {"host": ",".join(hosts), "port": ",".join(ports)}
