"""Server-sent events, and clients that disconnect before their answer is ready."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from controlplane.api.request_log import CLIENT_GONE
from controlplane.errors import TidepoolError
from dataplane.protocol.connections import body_writer

T = TypeVar("T")


class EventStreamResponse(StreamingResponse):
    """A stream that is closed at once when its client disconnects, so that the node cancels the request."""

    media_type = "text/event-stream"

    def __init__(self, lines: AsyncGenerator[bytes, None], *, headers: dict[str, str]) -> None:
        super().__init__(lines, headers=headers)
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with _ended_by_disconnect(scope, receive):
                await self.stream_response(send)
        except BaseException as error:  # without one, the lines have come to their end
            with anyio.CancelScope(shield=True):
                await self._lines.aclose()
            if not isinstance(error, ClientGoneError):
                raise


class ClientGoneError(TidepoolError):
    """The client disconnected before its answer was ready."""

    status = CLIENT_GONE
    code = "client_closed_request"


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects.

    Raises:
        ClientGoneError: it did.
    """
    with _ended_by_disconnect(request.scope, request.receive):
        return await work


@contextmanager
def _ended_by_disconnect(scope: Scope, receive: Receive) -> Iterator[None]:
    """Cancel the block when the client disconnects. The scope is anyio's, so that what is shielded is not cancelled.

    Raises:
        ClientGoneError: it did.
    """
    with anyio.CancelScope() as block:
        stop = _watch(scope, receive, block.cancel)
        try:
            yield
        finally:
            stop()
    if block.cancelled_caught:
        raise ClientGoneError("the client went away")


def _watch(scope: Scope, receive: Receive, on_lost: Callable[[], None]) -> Callable[[], object]:
    """Call `on_lost` when the client disconnects, until the result is called. The connection does it where it can, else
    a task that waits for it: even a plain task costs more than most of a short request.
    """
    if (writer := body_writer(scope)) is not None:
        writer.watch(on_lost)
        return writer.unwatch

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_lost()

    return asyncio.create_task(watch()).cancel
