"""ASGI wrappers around the whole app: request ids, and a limit on bodies that endpoints read whole."""

import contextlib
import re
from collections.abc import Callable

import structlog
import uuid_utils
from sqlalchemy.exc import SQLAlchemyError
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane.api.auth import NO_KEY
from controlplane.api.errors import error_response, translate_database
from controlplane.api.state import state_of
from controlplane.errors import AuthenticationError, TidepoolError

_ID = re.compile(rb"[A-Za-z0-9_-]{1,64}")
_UPLOAD_PATHS = ("/v1/files", "/admin/demand")
_FORM_BYTES = 64 * 1024


class RequestIds:
    """Every answer carries `x-request-id`: the caller's own if it is a plain word, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = given.decode() if _ID.fullmatch(given) else f"req_{uuid_utils.uuid7().hex}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            await self._app(scope, receive, stamped)


class BodyLimit:
    """Answers 413 to bodies over the limit, declared or not. Uploads have a limit of their own."""

    def __init__(
        self, app: ASGIApp, *, bytes_max: int, upload_bytes_max: int, refuse: Callable[[int], ASGIApp]
    ) -> None:
        self._app = app
        self._bytes_max = bytes_max
        self._upload_bytes_max = upload_bytes_max + _FORM_BYTES
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        bytes_max = self._upload_bytes_max if scope["path"].startswith(_UPLOAD_PATHS) else self._bytes_max
        refuse = self._refuse(bytes_max)
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > bytes_max:
            await refuse(scope, receive, send)
            return
        seen_bytes = 0
        started = refused = False

        async def counted() -> Message:
            nonlocal seen_bytes, refused
            message = await receive()
            seen_bytes += len(message.get("body", b""))
            if seen_bytes > bytes_max:
                refused = not started
                raise _TooLargeError
            return message

        async def noted(message: Message) -> None:
            nonlocal started
            if not refused:  # else the framework's own words about a body that it could not read
                started = True
                await send(message)

        with contextlib.suppress(_TooLargeError):
            await self._app(scope, counted, noted)
        if refused:
            await refuse(scope, receive, send)


class UploadGate:
    """Answers 401 to uploads without a good key before a byte of them is read: the framework reads a whole form
    before it asks who sent it. What the key may do is the endpoint's question.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith(_UPLOAD_PATHS):
            request = Request(scope)
            kind, _, secret = request.headers.get("authorization", "").partition(" ")
            try:
                if kind.lower() != "bearer":
                    raise AuthenticationError(NO_KEY)
                await state_of(request).keys.find(secret)
            except TidepoolError as error:
                await error_response(request, error)(scope, receive, send)
                return
            except SQLAlchemyError as error:
                await error_response(request, translate_database(error))(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _TooLargeError(Exception):
    """A body without a declared length went over the limit."""
