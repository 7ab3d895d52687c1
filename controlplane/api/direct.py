"""The way of most requests: straight to their endpoint.

The framework documents these endpoints and can run them; its routing, dependencies and validation cost a short request
more than all of our own work. So what is asked most often is read here instead: a key that may, and a valid body of
JSON. Every other body goes the framework's way, which says what is wrong with it, in one form for all endpoints.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast, get_type_hints

from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane.api.auth import bearer_of, require
from controlplane.api.metrics import Stage
from controlplane.bodies import TOO_MANY_FAULTS
from controlplane.serving.openai_requests import first_fault
from controlplane.store.keys import KeyScope
from controlplane.store.tables import Role

ORIGIN_HEADER = "x-tidepool-region"
_JSON = "application/json"


class Answer(Protocol):
    """An endpoint that answers with a model. The annotation of `body` is the model of its body."""

    def __call__(self, body: Any, request: Request, origin: str | None) -> Awaitable[Response]:
        """The answer to a valid body."""
        ...


@dataclass(frozen=True, kw_only=True)
class DirectRoute:
    """One endpoint: its path, the model of its body, and what answers it."""

    path: str
    body: type[BaseModel]
    answer: Answer


def direct_routes(endpoints: Mapping[str, Answer]) -> dict[str, DirectRoute]:
    """The direct routes of these endpoints, by path."""
    return {
        path: DirectRoute(path=path, body=get_type_hints(answer)["body"], answer=answer)
        for path, answer in endpoints.items()
    }


class DirectRoutes:
    """Wraps the framework's router. `routes`: those of POST, by path."""

    def __init__(self, app: ASGIApp, *, routes: Mapping[str, DirectRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        response = await _response(request, route)
        if response is None:
            await self._app(scope, _again(await request.body(), receive), send)
        else:
            await response(scope, receive, send)


async def _response(request: Request, route: DirectRoute) -> Response | None:
    """The answer, or the refusal; None: the framework shall say what is wrong with the request."""
    request.scope["route"] = route
    try:
        body = await _read(request, route)
        if body is None:
            return None
        request.state.stages.end(Stage.CHECK)
        return await route.answer(body, request, request.headers.get(ORIGIN_HEADER))
    except Exception as error:
        return await _handler_of(error, request.app)(request, error)


async def _read(request: Request, route: DirectRoute) -> BaseModel | None:
    """A valid body of a caller who may ask; None: it is not valid.

    Raises:
        TidepoolError: the caller may not ask, whose body is not read; or it has very many faults, and is not read
            a second time.
    """
    await require(request, bearer_of(request), Role.CLIENT, KeyScope.CHAT)
    body = await request.body()
    request.state.stages.end(Stage.RECEIVE)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
        return None
    try:
        return route.body.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        if first["type"] == TOO_MANY_FAULTS:
            raise first_fault(first) from None
        return None


def _handler_of(error: Exception, app: FastAPI) -> Callable[[Request, Exception], Awaitable[Response]]:
    """What answers an error. A defect is raised again: the server answers it."""
    for kind in type(error).__mro__:
        handler = None if kind is Exception else app.exception_handlers.get(kind)
        if handler is not None:
            return cast("Callable[[Request, Exception], Awaitable[Response]]", handler)
    raise error


def _again(body: bytes, receive: Receive) -> Receive:
    """What a request receives whose body was read already."""
    is_read = False

    async def receive_again() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again
