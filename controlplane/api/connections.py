"""Connections of clients: those that send or read too slowly are closed."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from controlplane.api.errors import RoutingError, problem
from controlplane.errors import HeadersTooLargeError
from controlplane.settings import Settings
from dataplane.protocol.connections import WritableConnection
from dataplane.protocol.http_server import RefusedError


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

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.has_part_of_head:
            self._watch_header()

    def refusal(self, error: RefusedError) -> tuple[bytes, bytes]:
        """Invalid HTTP is answered with a problem as well."""
        too_large = error.status == HeadersTooLargeError.status
        answer = HeadersTooLargeError(error.reason) if too_large else RoutingError(error.reason, status=error.status)
        return b"application/problem+json", msgspec.json.encode(problem(answer))

    def _watch_header(self) -> None:
        """Limit the time for a request's head, and for the rest of a body whose answer has been sent already."""
        if self.is_answering or self.transport.is_closing():
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
    return partial(PatientConnection, patience=patience, head_bytes_max=settings.header_bytes_max)
