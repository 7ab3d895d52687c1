"""Server-sent events, and clients that disconnect before their answer is ready."""

from collections.abc import AsyncGenerator, Awaitable
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
            await super().__call__(scope, receive, send)
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
    result: T | None = None
    failure: TidepoolError | None = None

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        try:
            result = await work
        except TidepoolError as error:
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if result is None:
        raise ClientGoneError("the client went away")
    return result
