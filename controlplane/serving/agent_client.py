"""The HTTP client of node agents: one request, one stream of events."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from http import HTTPStatus
from typing import TypeVar

import aiohttp
import msgspec

from controlplane.errors import NodeError
from controlplane.settings import Settings
from dataplane.protocol.messages import (
    INSTANCE_NOT_READY,
    Failed,
    Finished,
    Generate,
    Started,
    StreamEvent,
    Token,
    decode_lines,
)
from dataplane.protocol.tls import client_context

_CONNECT_TIMEOUT_S = 2.0
"""To connect to a node, and to wait for a free connection of this process."""
_IDLE_CONNECTION_S = 4.0
"""Idle connections close before nodes close them (5 s), so that none is closing when it is used."""
_END_TIMEOUT_S = 2.0
_REQUEST_AT_FAULT = frozenset({400, 413})
Answered = TypeVar("Answered", bound=msgspec.Struct)
_STATUS_FOR_CLIENTS = {400: 400, 409: 503, 413: 413, 429: 429, 503: 503}


class AgentClient:
    """Keeps connections to agents open between requests. It is made where the event loop runs."""

    def __init__(self, settings: Settings) -> None:
        self._first_token_s = settings.first_token_timeout_s
        self._idle_s = settings.stream_idle_timeout_s
        self._silence_s = max(self._first_token_s, self._idle_s)
        self._free = asyncio.Semaphore(settings.node_connections_max)
        key = settings.node_key.get_secret_value()
        self._session = aiohttp.ClientSession(  # no proxy and no cookies: nodes belong to this installation
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_IDLE_CONNECTION_S, ssl=client_context(settings.tls_ca_file)
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=self._silence_s),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def generate(
        self, url: str, request: Generate, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[list[StreamEvent], None]:
        """The events of one request; those that arrived together are one list. Leaving the iteration early cancels the
        request on the node. `headers`: further headers, such as a trace's.

        Raises:
            NodeError: the node refused, broke off, or cannot be reached; `retryable`: another node may do. Its code is
                `gateway_busy` when all connections of this process are in use, which is not the node's fault.
        """
        with _node_errors(url):
            async with self._connection(), self._post(f"{url}/generate", request, headers) as (status, chunks):
                if status != HTTPStatus.OK:
                    raise _refusal(b"".join([chunk async for chunk in chunks]), status)
                async for events in self._events(chunks):
                    yield events

    async def ask(self, url: str, question: msgspec.Struct, answer: type[Answered]) -> Answered:
        """The answer to a question that a node answers at once; raises as `generate`."""
        with _node_errors(url):
            async with self._connection(), self._post(url, question, None) as (status, chunks):
                async with asyncio.timeout(self._first_token_s):
                    body = b"".join([chunk async for chunk in chunks])
            if status != HTTPStatus.OK:
                raise _refusal(body, status)
            return msgspec.json.decode(body, type=answer)

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncGenerator[None, None]:
        """Limit the connections of this process."""
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self._free.acquire()
        except TimeoutError as error:
            raise NodeError(
                "this gateway has no connection left; try again", status=429, code="gateway_busy"
            ) from error
        try:
            yield
        finally:
            self._free.release()

    @contextlib.asynccontextmanager
    async def _post(
        self, url: str, request: msgspec.Struct, headers: Mapping[str, str] | None
    ) -> AsyncGenerator[tuple[int, AsyncIterator[bytes]], None]:
        """The status of the node's answer, and the pieces of its body."""
        body = msgspec.json.encode(request)
        async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
            yield response.status, response.content.iter_any()

    async def _events(self, chunks: AsyncIterator[bytes]) -> AsyncGenerator[list[StreamEvent], None]:
        """The events of a valid stream: `Started`, tokens, `Finished`. What a parser held back until the answer ended
        belongs to no token, so a node that continues the answer would send it again: it is held until `Finished`.
        """
        last: StreamEvent | None = None
        held: list[StreamEvent] = []
        rest = b""
        while not isinstance(last, Finished):
            timeout_s = self._idle_s if isinstance(last, Token) else self._first_token_s
            if timeout_s < self._silence_s:
                async with asyncio.timeout(timeout_s):
                    chunk = await anext(chunks, None)
            else:  # the connection has that timeout; one more timer for every token costs time
                chunk = await anext(chunks, None)
            if chunk is None:
                raise NodeError("the node ended the stream without a finish reason")
            lines, newline, rest = (rest + chunk).rpartition(b"\n")
            if not newline:
                continue
            events = decode_lines(lines)
            if not events:  # blank lines
                continue
            failed = _check_order(events, first=last is None)
            if failed is not None:
                if before := events[: events.index(failed)]:
                    yield before
                raise _error_of(failed)
            last = events[-1]
            events, held = [*held, *events] if held else events, []
            if _is_held_back(last):
                held.append(events.pop())
            if events:
                yield events
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):  # read to the end: the connection is reused
            async with asyncio.timeout(_END_TIMEOUT_S):
                await anext(chunks, None)


def _is_held_back(event: StreamEvent) -> bool:
    """Whether an event is more than text, but of no token."""
    return isinstance(event, Token) and not event.token_ids and bool(event.tool_calls or event.reasoning)


@contextlib.contextmanager
def _node_errors(url: str) -> Iterator[None]:
    """Turn what the connection raises into NodeError."""
    try:
        yield
    except TimeoutError as error:
        raise NodeError(f"the node at {url} was silent for too long") from error
    except aiohttp.ClientConnectorError as error:
        raise NodeError(f"the node at {url} cannot be reached: {error}", untouched=True) from error
    except aiohttp.ClientError as error:
        raise NodeError(f"the node at {url} broke off: {error or type(error).__name__}") from error
    except msgspec.DecodeError as error:
        raise NodeError(f"the node at {url} breaks the protocol: {error}") from error


def _check_order(events: list[StreamEvent], *, first: bool) -> Failed | None:
    """The failure among these events, if there is one.

    Raises:
        NodeError: `started` is missing, or is there twice.
    """
    for event in events:
        if isinstance(event, Failed):
            return event
        if isinstance(event, Started) != first:
            raise NodeError("the node's stream does not begin with its one 'started'")
        first = False
    return None


def _refusal(body: bytes, status: int) -> NodeError:
    try:
        return _error_of(msgspec.json.decode(body, type=Failed))
    except ValueError:
        return NodeError(f"the node answered {status}")


def _error_of(event: Failed) -> NodeError:
    """The failure that a node reports. Only faults of the request are final; otherwise another node may do better."""
    return NodeError(
        event.message,
        status=_STATUS_FOR_CLIENTS.get(event.status, 502),
        code=event.code,
        param=event.param,
        retryable=event.retryable or event.status not in _REQUEST_AT_FAULT,
        untouched=event.code == INSTANCE_NOT_READY,
    )
