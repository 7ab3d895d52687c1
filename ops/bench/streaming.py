"""A connection to a server that streams, as thin as Python allows: it reads requests, and others answer them."""

import asyncio
from abc import abstractmethod


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class StreamingConnection(asyncio.Protocol):
    """One connection, with one request at a time. Its client's leaving cancels the stream."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    @abstractmethod
    def got(self) -> bytes:
        """The whole answer to a GET."""

    @abstractmethod
    async def stream(self, path: bytes, body: bytes) -> None:
        """Answer a POST by writing."""

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()
        self.closed.set()

    def data_received(self, data: bytes) -> None:
        """Answer once the request is whole."""
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        lower = head.lower()
        length = int(lower.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in lower else 0
        if not end or len(body) < length:
            return
        self._received = b""
        if head.startswith(b"GET"):
            self.write(self.got())
        else:
            self._task = asyncio.create_task(self.stream(head.split(b" ", 2)[1], body))
