"""Server-sent events, and clients that disconnect before their answer is ready."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from controlplane.api.request_log import CLIENT_GONE
from controlplane.errors import TidepoolError

T = TypeVar("T")


class EventStreamResponse(StreamingResponse):
    """A stream that is closed at once when its client disconnects, so that the node cancels the request."""

    media_type = "text/event-stream"

    def __init__(self, lines: AsyncGenerator[bytes, None], *, headers: dict[str, str]) -> None:
        super().__init__(lines, headers=headers)
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with _ended_by_disconnect(receive):
                await self.stream_response(send)
        except ClientGoneError:
            pass
        finally:
            with anyio.CancelScope(shield=True):
                await self._lines.aclose()


class ClientGoneError(TidepoolError):
    """The client disconnected before its answer was ready."""

    status = CLIENT_GONE
    code = "client_closed_request"


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects.

    Raises:
        ClientGoneError: it did.
    """
    with _ended_by_disconnect(request.receive):
        return await work


@contextmanager
def _ended_by_disconnect(receive: Receive) -> Iterator[None]:
    """Cancel the block when the client disconnects. One plain task watches it, since a task group costs as much as all
    else that a short request needs; the scope is anyio's, so that what is shielded is not cancelled.

    Raises:
        ClientGoneError: it did.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    with anyio.CancelScope() as scope:
        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()
    if scope.cancelled_caught:
        raise ClientGoneError("the client went away")
