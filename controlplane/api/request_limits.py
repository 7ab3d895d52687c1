"""ASGI middleware of the whole app: headers of every answer, and limits of what clients send."""

import asyncio
import re
import sys
import time
from contextlib import suppress

import structlog
import uuid_utils
from sqlalchemy.exc import SQLAlchemyError
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane.api.auth import bearer_of, identify, require
from controlplane.api.errors import error_response, translate_database
from controlplane.api.state import state_of
from controlplane.errors import (
    HeadersTooLargeError,
    RequestTimeoutError,
    TidepoolError,
    TooLargeError,
)
from controlplane.serving.anthropic.requests import MESSAGES
from controlplane.serving.token_requests import DETOKENIZE, TOKENIZE
from controlplane.settings import Settings
from controlplane.store.keys import KeyScope
from controlplane.store.tables import Role

_ID = re.compile(rb"[A-Za-z0-9_-]{1,64}")
_KEY_PATHS = ("/v1/", TOKENIZE, DETOKENIZE, "/admin/", "/node/")
"""Starts of paths where nothing is done without a key or a session."""
_UPLOADS: dict[str, tuple[Role, KeyScope | None]] = {
    "/v1/files": (Role.CLIENT, KeyScope.FILES),
    "/admin/demand": (Role.OPERATOR, None),
}
"""Starts of paths that take files, which are spooled to disk, and the rights that their endpoints ask for too."""
_COUNTED = {"/v1/files": _UPLOADS["/v1/files"], "/v1/batches": (Role.CLIENT, KeyScope.BATCH)}
"""Paths whose POST counts towards the requests per minute of a tenant, as interactive requests do, and the rights that
their endpoints ask for too: who lacks them is refused and not charged.
"""
_FORM_BYTES = 64 * 1024
_SMALL_BODIES = {"/ui/": 16 * 1024, "/v1/batches": 128 * 1024}
"""Bytes of bodies, by the start of their path. Nobody has signed in yet who sends one to the console's."""


_DROPPED_S, _PAUSE_S = 5.0, 0.1
"""How long a body that nobody reads is dropped, and how long it may pause meanwhile."""


class AnswerHeaders:
    """Adds to every answer, also to errors, `x-request-id` (the caller's own if it is a plain word, else a new one),
    where Anthropic's clients ask also as `request-id`, and the headers that its endpoint put into
    `request.state.answer_headers`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = given.decode() if _ID.fullmatch(given) else f"req_{uuid_utils.uuid7().hex}"
        state = scope.setdefault("state", {})
        state["request_id"] = request_id

        names = (b"x-request-id", b"request-id") if scope["path"].startswith(MESSAGES) else (b"x-request-id",)

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name, request_id.encode()) for name in names] + list(state.get("answer_headers", ()))
                message["headers"] = [*message.get("headers", []), *added]
            await send(message)

        structlog.contextvars.bind_contextvars(request_id=request_id)  # of this task alone, which ends with the request
        await self._app(scope, receive, stamped)


class RequestLimits:
    """Answers 431 to too many headers, 413 to bodies over the limit, declared or not, 408 to bodies that arrive too
    slowly, and 401 before the body is read where a key or session is needed: the framework would read all of it before
    it authenticates. Uploads and bodies that are never large have limits of their own; uploads and new batches answer
    as early the 403 of a key that is not for them, and the 429 of a tenant that sends too many. What else the caller
    may do is checked by the endpoint.

    Where an answer begins before its request's body is whole, what arrives of it is read and dropped for a moment: a
    client that is still sending when its connection is closed would not see the answer.
    """

    def __init__(self, app: ASGIApp, *, settings: Settings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(scope, receive, self._settings)
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            if body.refusal is None or started:  # else it is the framework's error about an unreadable body
                if not started:
                    await body.drop()
                started = True
                await send(message)

        try:
            self._check_head(scope, body.bytes_max)
            await self._app(scope, body.receive, noted)
        except TidepoolError as error:
            body.refusal = error
        if body.refusal is not None and not started:
            await body.drop()
            await error_response(Request(scope), body.refusal)(scope, receive, send)

    def _check_head(self, scope: Scope, bytes_max: int) -> None:
        if len(scope["headers"]) > self._settings.header_count_max:
            raise HeadersTooLargeError(f"at most {self._settings.header_count_max} headers are allowed")
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self._settings.header_bytes_max:
            raise HeadersTooLargeError(f"at most {self._settings.header_bytes_max} bytes of headers are allowed")
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > bytes_max:
            raise _too_large(bytes_max)


class _Body:
    """The body of a request while it arrives. `refusal`: why it is not accepted."""

    def __init__(self, scope: Scope, receive: Receive, settings: Settings) -> None:
        self._upload = next((rights for start, rights in _UPLOADS.items() if scope["path"].startswith(start)), None)
        self.bytes_max = _bytes_max(scope["path"], settings, is_upload=self._upload is not None)
        self.refusal: TidepoolError | None = None
        self._scope = scope
        self._receive = receive
        self._idle_s = settings.body_idle_timeout_s
        self._total_s = settings.request_body_timeout_s if self._upload is None else settings.body_timeout_s
        self._begun_s = time.monotonic()
        self._seen_bytes = 0
        self._is_whole = False
        self._waits = dict(scope["headers"]).get(b"expect", b"").lower() == b"100-continue"

    async def receive(self) -> Message:
        """The next piece.

        Raises:
            TidepoolError: nobody may send a body here without a key, or it is too large, or too slow.
        """
        if self._is_whole:
            return await self._receive()  # waits for the disconnect
        if "caller" not in self._scope["state"] and self._scope["path"].startswith(_KEY_PATHS):
            await self._identify()
        self._waits = False  # the server tells the client to go on
        try:
            async with asyncio.timeout(min(self._idle_s, self._begun_s + self._total_s - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            self.refusal = RequestTimeoutError("the body did not arrive in time")
            raise self.refusal from None
        self._is_whole = not message.get("more_body", False)
        self._seen_bytes += len(message.get("body", b""))
        if self._seen_bytes > self.bytes_max:
            self.refusal = _too_large(self.bytes_max)
            raise self.refusal
        return message

    async def drop(self) -> None:
        """Read what still arrives, and keep none of it, until it pauses. A client that waits to be told to go on sends
        nothing.
        """
        headers = dict(self._scope["headers"])
        if self._is_whole or self._waits or not headers.keys() & {b"content-length", b"transfer-encoding"}:
            return
        ends_s = time.monotonic() + _DROPPED_S
        with suppress(TimeoutError):
            while not self._is_whole and time.monotonic() < ends_s:
                async with asyncio.timeout(_PAUSE_S):
                    message = await self._receive()
                self._is_whole = not message.get("more_body", False)

    async def _identify(self) -> None:
        """Ask who sends the body, once, and charge an upload or a new batch to its tenant."""
        request = Request(self._scope)
        counted = _COUNTED.get(request.url.path) if request.method == "POST" else None
        rights = self._upload or counted
        try:
            if rights is None:
                caller = await identify(request, bearer_of(request))
            else:
                caller = await require(request, bearer_of(request), *rights)
            if counted is not None:
                await state_of(request).limits.one_write(request, caller)
        except TidepoolError as error:
            self.refusal = error
            raise
        except SQLAlchemyError as error:
            self.refusal = translate_database(error)
            raise self.refusal from error


def _bytes_max(path: str, settings: Settings, *, is_upload: bool) -> int:
    if is_upload:
        return settings.file_bytes_max + _FORM_BYTES
    small = next((size for start, size in _SMALL_BODIES.items() if path.startswith(start)), sys.maxsize)
    return min(small, settings.request_body_bytes_max)


def _too_large(bytes_max: int) -> TooLargeError:
    return TooLargeError(f"the body is over the limit of {bytes_max} bytes")
