"""Methods of every path: HEAD wherever there is GET, and OPTIONS for web pages of other origins (CORS)."""

import anyio
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane.settings import Settings

_EXPOSED = (
    "x-request-id",
    "x-tidepool-region",
    "x-tidepool-warning",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    *(f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")),
)
_PREFLIGHT_KEEP_S = 600


class HeadRequests:
    """Answers HEAD as GET; the server sends only the headers. A stream is ended where its body would begin."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        with anyio.CancelScope() as answering:

            async def send_head(message: Message) -> None:
                is_stream = message["type"] == "http.response.body" and message.get("more_body", False)
                await send({"type": "http.response.body"} if is_stream else message)
                if is_stream:
                    answering.cancel()

            await self._app({**scope, "method": "GET"}, receive, send_head)


def allow_origins(app: FastAPI, settings: Settings) -> None:
    """Allow pages of `cors_origins` to call the API with a key; cookies are never used."""
    if not settings.cors_origins:
        return
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.origins(),
        allow_methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"],
        allow_headers=["*"],
        expose_headers=_EXPOSED,
        max_age=_PREFLIGHT_KEEP_S,
    )
