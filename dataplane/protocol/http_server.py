"""One connection of an HTTP/1.1 server, on the parser of Node.js (`httptools`), which is strict about framing.

What the parser does not do is done here: heads are bounded, requests on one connection are refused in their turn, what
is said about the body is unambiguous, and targets may be absolute.
"""

import asyncio
import contextlib
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

_PIPELINED_MAX = 64
"""Requests that may wait for the one before them on their connection."""
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class RefusedError(Exception):
    """HTTP that this server does not take. The connection closes when it has said so."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class ServerConnection(HttpToolsProtocol):
    """The connection of one client. A head, or trailers, of over `head_bytes_max` bytes are refused; one read more may
    be in memory by then.
    """

    def __init__(
        self, config: Any, server_state: ServerState, app_state: dict[str, Any], *, head_bytes_max: int, **options: Any
    ) -> None:
        super().__init__(config, server_state, app_state, **options)
        self._head_bytes_max = head_bytes_max
        self._bytes_beside_body = 0
        self._has_progress = self._is_in_body = self._is_replayed = False
        self._refused: RefusedError | None = None
        self._answering: RequestResponseCycle | None = None
        self._hosts = 0

    @property
    def is_answering(self) -> bool:
        """Whether a request is being answered."""
        return self._answering is not None and not self._answering.response_complete

    @property
    def is_in_head(self) -> bool:
        """Whether a request may begin, or its head has not arrived as a whole."""
        return not self._is_in_body

    @property
    def has_part_of_head(self) -> bool:
        """Whether a request has begun whose head has not arrived as a whole."""
        return self.is_in_head and self._bytes_beside_body > 0

    def refusal(self, error: RefusedError) -> tuple[bytes, bytes]:
        """The media type and the body of the answer to HTTP that is not taken."""
        return b"text/plain; charset=utf-8", error.reason.encode()

    # What the event loop calls.

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._refused is not None:
            return
        self._has_progress = False
        try:
            self._feed(data)
            self._bytes_beside_body = 0 if self._has_progress else self._bytes_beside_body + len(data)
            if self._bytes_beside_body > self._head_bytes_max:
                raise RefusedError(431, f"at most {self._head_bytes_max} bytes of headers are allowed")
        except RefusedError as error:
            self._refuse(error)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, RefusedError) else RefusedError(400, f"invalid HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    # What the parser calls.

    def on_message_begin(self) -> None:
        if not self._is_replayed:
            self._hosts = 0
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_replayed:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_body:
            return  # a trailer; or the framing of a body that is given again
        name, value = name.lower(), value.rstrip(b" \t")
        if name == b"host":
            self._hosts += 1
        elif name == b"transfer-encoding" and value.lower() != b"chunked":
            raise RefusedError(400, "transfer-encoding: only 'chunked' is known")
        elif name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._is_replayed:
            return
        self._has_progress = True
        self._begin(self.parser.get_method().decode("ascii"), self.parser.get_http_version())
        self._is_in_body = True

    def on_body(self, body: bytes) -> None:
        self._has_progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # else the parser takes the body for another protocol
            self._has_progress, self._is_in_body = True, False
            super().on_message_complete()

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last and self._refused is not None and not self.transport.is_closing():
            self._write_refusal(self._refused)

    def _should_upgrade(self) -> bool:
        return False

    def _feed(self, data: bytes) -> None:
        """Parse what has arrived. No other protocol is spoken: after a request for one, its body follows."""
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._parse_body_again()
            else:
                return

    def _parse_body_again(self) -> None:
        """Take the body of the last head with another parser, which has not seen that another protocol is wanted."""
        framing = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] in _FRAMING)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._is_replayed = True
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
        finally:
            self._is_replayed = False

    def _begin(self, method: str, version: str) -> None:
        """Begin to answer the request whose head is whole, or let it wait for the one before it.

        Raises:
            RefusedError: it is no HTTP/1.1 or 1.0 that this server takes.
        """
        if version not in {"1.0", "1.1"}:
            raise RefusedError(400, f"HTTP/{version} is not spoken here; HTTP/1.1 is")
        if self._hosts > 1 or (version == "1.1" and not self._hosts):
            raise RefusedError(400, f"a request has one 'host' header; this one has {self._hosts}")
        if version == "1.0" and any(name == b"transfer-encoding" for name, _ in self.headers):
            raise RefusedError(400, "HTTP/1.0 knows no 'transfer-encoding'")
        if len(self.pipeline) >= _PIPELINED_MAX:
            raise RefusedError(429, f"at most {_PIPELINED_MAX} requests may wait on a connection")
        target, authority = _origin_form(method, self.url)
        if authority is not None:
            self.headers[:] = [header for header in self.headers if header[0] != b"host"] + [(b"host", authority)]
        raw_path, _, query = target.partition(b"?")
        path = raw_path.decode("ascii")
        self.scope["method"], self.scope["http_version"] = method, version
        self.scope["path"] = self.root_path + (unquote(path) if "%" in path else path)
        self.scope["raw_path"] = self.root_path.encode("ascii") + raw_path
        self.scope["query_string"] = query
        waits = self.is_answering
        self.cycle = _Answer(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version == "1.1" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        if waits:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))
        else:
            self._start_asgi_task(self.cycle, self.app)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _refuse(self, error: RefusedError) -> None:
        """Say so when all requests before are answered; one whose body is at fault has no other answer."""
        self._refused = error
        self.flow.pause_reading()
        if self._is_in_body and not self.cycle.response_complete:
            if self.cycle.response_started:
                self.transport.abort()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle is self._answering:
                self._write_refusal(error)
                return
            with contextlib.suppress(ValueError):
                self.pipeline.remove((self.cycle, self.app))
        if not self.is_answering:
            self._write_refusal(error)

    def _write_refusal(self, error: RefusedError) -> None:
        self.logger.warning("refused HTTP: %s", error.reason)
        media_type, body = self.refusal(error)
        headers = [
            *self.server_state.default_headers,
            (b"content-type", media_type),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        lines = [STATUS_LINE[HTTPStatus(error.status)], *(b"%b: %b\r\n" % header for header in headers), b"\r\n"]
        self.transport.write(b"".join(lines) + body)
        self.transport.close()


class _Answer(RequestResponseCycle):
    """The answer to one request. Where the client knows no chunks, the end of the connection ends the body. A client
    that waits to be told to go on, and is answered instead, does not send its body: the connection closes, since what
    follows on it would be taken for that body (RFC 9110, 10.1.1).
    """

    _is_bare = False

    async def send(self, message: Any) -> None:
        if self.waiting_for_100_continue and self.more_body:
            self.keep_alive = False
        if self.scope["http_version"] == "1.0":
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                self._is_bare = b"content-length" not in names
                self.chunked_encoding = False if self._is_bare else None
            elif self._is_bare and (body := message.get("body")):
                await self.flow.drain()
                if not self.disconnected and self.scope["method"] != "HEAD":
                    self.transport.write(body)
                message = {**message, "body": b""}
        await super().send(message)


def _origin_form(method: str, target: bytes) -> tuple[bytes, bytes | None]:
    """A target as path and query, and the authority that it names, if it is absolute.

    Raises:
        RefusedError: it is no target of an origin server.
    """
    if b"#" in target:
        raise RefusedError(400, "a request's target has no fragment")
    if target.startswith(b"/") or (target == b"*" and method == "OPTIONS"):
        return target, None
    scheme, separator, rest = target.partition(b"://")
    if method == "CONNECT" or not separator or scheme.lower() not in {b"http", b"https"}:
        raise RefusedError(400, "a request's target is a path, or a URL of http or https")
    end = min((at for at in (rest.find(b"/"), rest.find(b"?")) if at >= 0), default=len(rest))
    authority, target = rest[:end], rest[end:]
    if not authority or b"@" in authority:
        raise RefusedError(400, "a request's target names a host, and no user")
    return (target if target.startswith(b"/") else b"/" + target), authority
