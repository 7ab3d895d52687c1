"""Connections of an HTTP server whose answers may be written as their parts arise, with no task woken for each part.

An application of ASGI waits for `send` at every part of a body. Behind a `WritableConnection`, it may instead send the
head of its answer, write the parts of the body to the `BodyWriter` of the request, from any callback of the event loop,
and at last send the end of the body. A reader that leaves much unread says so by `BodyWriter.full`, and is disconnected
if it goes on.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

from dataplane.protocol.http_server import ServerConnection

_EXTENSION = "tidepool.body"
_GATHERED_BYTES_MAX = 65_536
_UNSENT_BYTES_MAX = 65_536
"""What the kernel buffers for a reader that does not read; the rest stays in the process, which can measure it."""


class GatheredWrites:
    """The writing side of a transport. What is written within one turn of the event loop, such as a head and the first
    part of its body, becomes one write: a system call costs as much as much else of a short request. Everything else
    is the transport's.
    """

    __slots__ = ("_loop", "_parts", "_parts_bytes", "_transport", "is_closing")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self.is_closing = transport.is_closing  # asked twice for each token
        self._loop = loop
        self._parts: list[bytes] = []
        self._parts_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write, at the end of this turn or when much has been gathered."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)
        self._parts_bytes += len(data)
        if self._parts_bytes >= _GATHERED_BYTES_MAX:
            self._flush()

    def write_now(self, data: bytes) -> None:
        """Write what was gathered and this."""
        if self._parts:
            self._parts.append(data)
            self._flush()
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Close once everything is written."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._parts:
            parts, self._parts, self._parts_bytes = self._parts, [], 0
            if not self.is_closing():
                self._transport.write(b"".join(parts))


class BodyWriter:
    """Writes the body of one answer between its head and its end, neither of which it sends. The head must name no
    length. `on_room` is called when there is room again after `full`, `on_lost` when the reader is gone.
    """

    __slots__ = ("_flow", "_transport", "on_lost", "on_room")

    def __init__(self, transport: GatheredWrites, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow
        self.on_room: Callable[[], None] | None = None
        self.on_lost: Callable[[], None] | None = None

    @property
    def lost(self) -> bool:
        """Whether the reader is gone, or is being disconnected."""
        return self._transport.is_closing()

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call `on_lost` when the reader is gone, at once if it is already. What else it sends is read, so that its end
        is noticed.
        """
        self.on_lost = on_lost
        self._flow.resume_reading()
        if self.lost:
            on_lost()

    def unwatch(self) -> None:
        """Call nothing when the reader is gone."""
        self.on_lost = None

    @property
    def full(self) -> bool:
        """Whether the reader has left more unread than the transport's high-water mark (64 KiB)."""
        return self._flow.write_paused

    def write(self, data: bytes) -> None:
        """Write a part, which must not be empty. What is written after the reader is gone is dropped."""
        if not self.lost:
            self._transport.write_now(b"%x\r\n%b\r\n" % (len(data), data))


def body_writer(scope: Any) -> BodyWriter | None:
    """The writer of the answer to an ASGI request; None where its body must be sent part by part: behind another
    server, and for clients to which no chunks can be sent.
    """
    writer: BodyWriter | None = scope.get("extensions", {}).get(_EXTENSION)
    return writer


class WritableConnection(ServerConnection):
    """The connection of one client. A client that leaves more than the transport's high-water mark (64 KiB) unread, and
    does not read down to its low-water mark (16 KiB) within `reading_s` seconds, is disconnected.
    """

    def __init__(self, *args: Any, reading_s: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._reading_s = reading_s
        self._reading_timer: asyncio.TimerHandle | None = None
        self._writer: BodyWriter | None = None
        self._app, self.app = self.app, self._run

    async def _run(self, scope: Any, receive: Any, send: Any) -> None:
        """Give the request a writer, as long as it is answered."""
        writer = BodyWriter(self._gathered, self.flow)
        if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            self._writer = writer
            scope["extensions"] = {**scope.get("extensions", {}), _EXTENSION: writer}
        try:
            await self._app(scope, receive, send)
        finally:
            if self._writer is writer:
                self._writer = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._gathered = GatheredWrites(transport, self.loop)
        self.transport = self._gathered  # type: ignore[assignment]
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in {socket.AF_INET, socket.AF_INET6} and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES_MAX)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        if self._writer is not None and self._writer.on_lost is not None:
            self._writer.on_lost()
        self.app = self._app  # a cycle would keep the connection, and its last request, until the next collection

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading_timer = self.loop.call_later(self._reading_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timer()
        if self._writer is not None and self._writer.on_room is not None:
            self._writer.on_room()

    def _stop_timer(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None
