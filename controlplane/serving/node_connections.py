"""Connections to nodes: HTTP/1.1, one request at a time on each, kept open between requests.

An answer is handed to its receiver within the callback of the event loop that has read it. Streams of tokens are many
small pieces, and a task that wakes for each of them costs more than all else that is done with it.
"""

import asyncio
import contextlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

_CONNECT_TIMEOUT_S = 2.0
_IDLE_CONNECTION_S = 4.0
"""Idle connections close before nodes close them (5 s), so that none is closing when it is used."""
_END_TIMEOUT_S = 2.0
_BYTES_BESIDE_BODY_MAX = 65_536
"""Of heads, trailers and framing that arrive in a row, without a byte of the body."""
_PORTS = {"http": 80, "https": 443}


class CannotConnectError(Exception):
    """There is no connection to the node, so it has not seen the request."""


class Receiver(Protocol):
    """Takes the answer to one request; the event loop calls it. `silence_s`: how long the node may send nothing."""

    silence_s: float

    def begun(self, status: int, media_type: str) -> None:
        """The head of the answer has arrived."""

    def received(self, data: bytes) -> bool:
        """More of the body has arrived. False: no more shall be read until `NodeConnection.resume`. What it raises
        ends the answer.
        """

    def ended(self, error: Exception | None) -> None:
        """The answer is whole, or has broken off. TimeoutError: the node was silent; OSError or
        httptools.HttpParserError: it broke off; else what `received` raised.
        """


class NodeConnection(asyncio.Protocol):
    """One connection. Its public methods are for whoever has sent the request that it carries."""

    def __init__(self, pool: "NodeConnections", address: "Address") -> None:
        self._loop = asyncio.get_running_loop()
        self._pool = pool
        self.address = address
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._receiver: Receiver | None = None
        self._pieces: list[bytes] = []
        self._media_type = ""
        self._has_head = self._is_sized = self._is_whole = self._is_kept = self._is_odd = self._is_paused = False
        self._heard_s = self._armed_s = 0.0
        self._bytes_beside_body = 0
        self._timer: asyncio.TimerHandle | None = None

    def send(self, request: bytes, receiver: Receiver) -> None:
        """Send a request, whose answer goes to `receiver`."""
        self._stop_timer()
        self._media_type = ""
        self._has_head = self._is_sized = self._is_whole = False
        self._receiver = receiver
        self._bytes_beside_body = 0
        self._heard_s = self._loop.time()
        self._watch(receiver.silence_s)
        self._transport.write(request)

    def resume(self, receiver: Receiver) -> None:
        """Read again after `received` has asked for a pause; nothing if the connection carries another's answer."""
        if self._is_paused and self._receiver is receiver:
            self._read_on()

    def leave(self, receiver: Receiver, *, at_end: bool) -> None:
        """Stop to receive. The connection closes, which tells the node to cancel the request; but if nothing except the
        end of the answer is missing (`at_end`), that is awaited, and the connection is kept.
        """
        if self._receiver is receiver:
            self._receiver = _Nobody()
            if at_end:
                self._read_on()
                self._watch(_END_TIMEOUT_S)
            else:
                self.close()

    def close(self) -> None:
        """Close at once."""
        self._pool.forget(self)
        self._transport.abort()

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._pool.note_open(self)

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        try:
            self._parser.feed_data(data)
            receiver = self._receiver
            if receiver is None or self._is_odd:
                raise ConnectionError("the node sent what it was not asked for")
            if not self._pieces:
                self._bytes_beside_body += len(data)
                if self._bytes_beside_body > _BYTES_BESIDE_BODY_MAX:
                    raise ConnectionError("the node sends more than heads and trailers may be long")
            else:
                self._bytes_beside_body = 0
                pieces, self._pieces = self._pieces, []
                if not receiver.received(pieces[0] if len(pieces) == 1 else b"".join(pieces)):
                    self._is_paused = True
                    self._transport.pause_reading()
        except httptools.HttpParserUpgrade:
            self._end(ConnectionError("the node switched protocols"))
            return
        except Exception as error:  # whatever it is, it ends this answer alone
            self._end(error)
            return
        if self._is_whole:
            self._end(None)
        elif receiver.silence_s < self._armed_s:
            self._watch(receiver.silence_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        is_end_of_body = exc is None and self._has_head and not self._is_sized
        self._end(None if is_end_of_body else exc or ConnectionError("the connection closed before the answer ended"))
        del self._parser  # it refers to this object, which would wait for a garbage collection

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._is_odd = self._receiver is None or self._is_whole

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in {b"content-length", b"transfer-encoding"}:
            self._is_sized = True
        elif name == b"content-type":
            self._media_type = value.decode("latin-1").partition(";")[0].strip().lower()

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._receiver is not None and not _is_interim(status):
            self._has_head = True
            self._receiver.begun(status, self._media_type)

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        if not _is_interim(self._parser.get_status_code()):
            self._is_whole = True
            self._is_kept = self._parser.should_keep_alive()

    def _end(self, error: Exception | None) -> None:
        """End the answer, and keep the connection if both sides may use it again."""
        receiver, self._receiver = self._receiver, None
        self._stop_timer()
        if error is None and self._is_whole and self._is_kept and not self.is_closing:
            self._read_on()
            self._timer = self._loop.call_later(_IDLE_CONNECTION_S, self.close)
            self._pool.keep(self)
        else:
            self.close()
        if receiver is not None:
            receiver.ended(error)

    def _read_on(self) -> None:
        if self._is_paused and not self.is_closing:
            self._is_paused = False
            self._heard_s = self._loop.time()
            self._transport.resume_reading()

    def _watch(self, silence_s: float) -> None:
        """Look after the node's silence when it may have lasted for too long: one timer, not one for each token."""
        self._stop_timer()
        self._armed_s = silence_s
        self._timer = self._loop.call_later(silence_s, self._check_silence)

    def _check_silence(self) -> None:
        receiver = self._receiver
        if receiver is None:
            return
        if self._is_paused:  # it may not speak
            self._heard_s = self._loop.time()
        left_s = self._heard_s + receiver.silence_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check_silence)
        else:
            self._end(TimeoutError())

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class NodeConnections:
    """The connections of this process. It is made where the event loop runs."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self._open: set[NodeConnection] = set()
        self._idle: dict[Address, list[NodeConnection]] = {}

    async def post(self, url: str, headers: Mapping[str, str], body: bytes, receiver: Receiver) -> NodeConnection:
        """Send a request; its answer goes to `receiver`. Whoever sent it leaves the connection at the end.

        Raises:
            CannotConnectError: no connection within two seconds.
            ValueError: a header holds a line break.
        """
        address, path, host = _parsed(url)
        head = [f"POST {path} HTTP/1.1", f"host: {host}", f"content-length: {len(body)}"]
        head += [f"{name}: {value}" for name, value in headers.items()]
        if any("\r" in line or "\n" in line for line in head):
            raise ValueError("a header holds a line break")
        request = "\r\n".join(head).encode("latin-1", errors="replace") + b"\r\n\r\n" + body
        connection = self._take(address) or await self._connect(address)
        if connection.is_closing:
            raise CannotConnectError("the connection was closed at once")
        connection.send(request, receiver)
        return connection

    def _take(self, address: "Address") -> NodeConnection | None:
        """The idle connection that was used last, if there is one."""
        idle = self._idle.get(address, [])
        while idle:
            connection = idle.pop()
            if not connection.is_closing:
                return connection
        return None

    async def _connect(self, address: "Address") -> NodeConnection:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: NodeConnection(self, address),
                    address.host,
                    address.port,
                    ssl=self._context if address.is_secure else None,
                )
        except TimeoutError as error:
            raise CannotConnectError("no connection in time") from error
        except (OSError, UnicodeError) as error:
            raise CannotConnectError(str(error) or type(error).__name__) from error
        return connection

    def note_open(self, connection: NodeConnection) -> None:
        """Know a connection until it is closed."""
        self._open.add(connection)

    def keep(self, connection: NodeConnection) -> None:
        """Take a connection back whose answer is whole."""
        self._idle.setdefault(connection.address, []).append(connection)

    def forget(self, connection: NodeConnection) -> None:
        """Let a connection go that is closed."""
        self._open.discard(connection)
        idle = self._idle.get(connection.address, [])
        with contextlib.suppress(ValueError):
            idle.remove(connection)
        if not idle:
            self._idle.pop(connection.address, None)

    def close(self) -> None:
        """Close all connections, also those in use."""
        for connection in list(self._open):
            connection.close()


@dataclass(frozen=True)
class Address:
    """Where a node listens."""

    host: str
    port: int
    is_secure: bool


class _Nobody:
    """Receives the end of an answer that nobody reads any more."""

    silence_s = _END_TIMEOUT_S

    def begun(self, status: int, media_type: str) -> None:
        pass

    def received(self, data: bytes) -> bool:
        return True

    def ended(self, error: Exception | None) -> None:
        pass


@lru_cache(maxsize=4096)
def _parsed(url: str) -> tuple[Address, str, str]:
    """The address, the path with its query, and what the `host` header says."""
    parts = urlsplit(url)
    address = Address(parts.hostname or "", parts.port or _PORTS[parts.scheme], parts.scheme == "https")
    path = parts.path or "/"
    return address, f"{path}?{parts.query}" if parts.query else path, parts.netloc.rpartition("@")[2]


def _is_interim(status: int) -> bool:
    """Whether another head follows this one."""
    return 100 <= status < 200
