"""The HTTP client of node agents: one request, one stream of events."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import TypeVar

import httptools
import msgspec

from controlplane.errors import NodeError
from controlplane.serving.node_connections import CannotConnectError, NodeConnections
from controlplane.serving.node_streams import NodeReply, NodeStream, PassOn
from controlplane.settings import Settings
from dataplane.protocol.messages import Generate
from dataplane.protocol.records import MEDIA_TYPE, RecordedEvent
from dataplane.protocol.tls import client_context

_FREE_TIMEOUT_S = 2.0
"""To wait for a free connection of this process."""
Answered = TypeVar("Answered", bound=msgspec.Struct)


class AgentClient:
    """Keeps connections to agents open between requests. It is made where the event loop runs. `connections` replaces
    those to nodes (tests).
    """

    def __init__(self, settings: Settings, *, connections: NodeConnections | None = None) -> None:
        self._first_token_s = settings.first_token_timeout_s
        self._idle_s = settings.stream_idle_timeout_s
        self._free = asyncio.Semaphore(settings.node_connections_max)
        self._connections = connections or NodeConnections(client_context(settings.tls_ca_file))
        key = settings.node_key.get_secret_value()
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})

    @property
    def is_full(self) -> bool:
        """Whether all connections of this process are in use."""
        return self._free.locked()

    async def close(self) -> None:
        self._connections.close()

    async def generate(
        self,
        url: str,
        request: Generate,
        headers: Mapping[str, str] | None = None,
        pass_on: PassOn | None = None,
        opened: Callable[[NodeStream], None] | None = None,
    ) -> AsyncGenerator[list[RecordedEvent], None]:
        """The events of one request; those that arrived together are one list. Leaving the iteration early cancels the
        request on the node. `headers`: further headers, such as a trace's. `pass_on`: takes text past this iteration.
        `opened`: is given the stream once the request is sent.

        Raises:
            NodeError: the node refused, broke off, or cannot be reached; `retryable`: another node may do. Its code is
                `gateway_busy` when all connections of this process are in use, which is not the node's fault.
        """
        stream = NodeStream(first_token_s=self._first_token_s, idle_s=self._idle_s, pass_on=pass_on)
        accept = {} if request.text_frame is None else {"accept": MEDIA_TYPE}
        with _node_errors(url):
            await self._take_turn()
            try:
                sent = {**self._headers, **accept, **(headers or {})}
                connection = await self._connections.post(f"{url}/generate", sent, msgspec.json.encode(request), stream)
                if opened is not None:
                    opened(stream)
                try:
                    while events := await stream.next():
                        connection.resume(stream)
                        yield events
                finally:
                    connection.leave(stream, at_end=stream.has_finished)
            finally:
                self._free.release()

    async def ask(self, url: str, question: msgspec.Struct, answer: type[Answered]) -> Answered:
        """The answer to a question that a node answers at once; raises as `generate`."""
        reply = NodeReply(silence_s=self._first_token_s)
        with _node_errors(url):
            await self._take_turn()
            try:
                async with asyncio.timeout(self._first_token_s):
                    connection = await self._connections.post(url, self._headers, msgspec.json.encode(question), reply)
                    try:
                        body = await reply.body()
                    finally:
                        connection.leave(reply, at_end=False)
            finally:
                self._free.release()
            return msgspec.json.decode(body, type=answer)

    async def _take_turn(self) -> None:
        """Limit the connections of this process. Whoever takes a turn releases it.

        Raises:
            NodeError: none was free in time.
        """
        if not self._free.locked():  # no timer for what does not wait
            await self._free.acquire()
            return
        try:
            async with asyncio.timeout(_FREE_TIMEOUT_S):
                await self._free.acquire()
        except TimeoutError as error:
            raise NodeError(
                "this gateway has no connection left; try again", status=429, code="gateway_busy"
            ) from error


@contextlib.contextmanager
def _node_errors(url: str) -> Iterator[None]:
    """Turn what the connection raises into NodeError."""
    try:
        yield
    except TimeoutError as error:
        raise NodeError(f"the node at {url} was silent for too long") from error
    except CannotConnectError as error:
        raise NodeError(f"the node at {url} cannot be reached: {error}", untouched=True) from error
    except (OSError, httptools.HttpParserError) as error:
        raise NodeError(f"the node at {url} broke off: {error or type(error).__name__}") from error
    except msgspec.DecodeError as error:
        raise NodeError(f"the node at {url} breaks the protocol: {error}") from error
