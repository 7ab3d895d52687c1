"""`/ui`: the console's files. Every path that is no file is its page, whose script shows what the path names."""

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane.api.browsers import root_of, route_path
from controlplane.api.console.built_files import ASSETS
from controlplane.api.state import StateDep
from controlplane.errors import NotFoundError

router = APIRouter(include_in_schema=False)
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    b"connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
]


@router.get("/ui")
async def entrance(request: Request) -> Response:
    """To where the page's relative addresses lead to what they name."""
    return RedirectResponse(f"{root_of(request.scope)}/ui/")


@router.get("/ui/{path:path}")
async def console(request: Request, state: StateDep, path: str) -> Response:
    """A file of the console, or its page."""
    found = state.console.find(path)
    if found is None and path.startswith(ASSETS):
        raise NotFoundError(f"no such path: GET {request.url.path}")
    return (found or state.console.page(root_of(request.scope))).response(request)


class ConsoleHeaders:
    """Adds to every answer under `/ui` what keeps its pages from loading, or being shown in, anything foreign."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope) if scope["type"] == "http" else ""
        if path != "/ui" and not path.startswith("/ui/"):
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_HEADERS]
            await send(message)

        await self._app(scope, receive, guarded)
