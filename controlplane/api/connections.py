"""Connections of clients: those that send or read too slowly are closed."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import h11
import msgspec

from controlplane.api.errors import RoutingError, problem
from controlplane.settings import Settings
from dataplane.protocol.connections import WritableConnection


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a client may take to send a request's head, and to read what was written, in seconds."""

    header_s: float
    reading_s: float


class PatientConnection(WritableConnection):
    """The connection of one client. A request's head must arrive within `header_s` of the connection's start or of its
    own first byte. A client that does not read is disconnected as `WritableConnection` says.
    """

    def __init__(self, *args: Any, patience: Patience, **options: Any) -> None:
        super().__init__(*args, reading_s=patience.reading_s, **options)
        self._patience = patience
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_header()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._header_timer = _stopped(self._header_timer)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with a problem as well, and close the connection."""
        body = msgspec.json.encode(problem(RoutingError(msg, status=400)))
        headers = [
            (b"content-type", b"application/problem+json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch_header(self) -> None:
        """Limit the time for a request's head, and for the rest of a body whose answer has been sent already."""
        is_due = self.conn.their_state is h11.IDLE or (
            self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE
        )
        if not is_due:
            self._header_timer = _stopped(self._header_timer)
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self._patience.header_s, self.transport.abort)


def _stopped(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    if timer is not None:
        timer.cancel()
    return None


def connection_class(settings: Settings) -> Callable[..., asyncio.Protocol]:
    """The factory of connections for uvicorn."""
    patience = Patience(header_s=settings.header_timeout_s, reading_s=settings.client_idle_timeout_s)
    return partial(PatientConnection, patience=patience)
