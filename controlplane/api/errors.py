"""Errors of the API: OpenAI's shape under /v1 and of /tokenize and /detokenize, Anthropic's under /v1/messages, RFC
9457 problem+json elsewhere, and never a bare 500.
"""

import math
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DataError, DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from controlplane.api.request_log import CLIENT_GONE, note_failure, note_gone, record_of
from controlplane.errors import (
    ConflictError,
    InvalidValueError,
    NotFoundError,
    SchemaError,
    TidepoolError,
    UnavailableError,
)
from controlplane.serving.anthropic.errors import anthropic_error
from controlplane.serving.anthropic.requests import MESSAGES
from controlplane.serving.openai_answers import openai_error
from controlplane.serving.openai_requests import first_fault
from controlplane.serving.token_requests import DETOKENIZE, TOKENIZE

log = structlog.get_logger()
_RETRY_AFTER_S = 1.0
_TRY_LATER = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_SERVER_ERRORS = 500


_COLLISIONS = {"40001", "40P01"}  # serialization failure, deadlock
_TAKEN_MEANWHILE = {"23505", "23503"}  # unique violation, foreign key violation
_NOT_PRIMARY = "25006"  # the server takes no writes: it is a standby, or becomes one
_NO_SUCH_TABLE = {"42P01", "42703"}  # undefined table, undefined column


class RoutingError(TidepoolError):
    """A refusal by the web framework itself: an unknown path, a wrong method."""

    code = "request_error"

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class InternalError(TidepoolError):
    """A defect. The log has the details under the request id."""


def problem(error: TidepoolError) -> dict[str, Any]:
    """An RFC 9457 problem; `code` and `param` are extensions of ours, and some kinds have more."""
    return {
        "type": f"urn:tidepool:problem:{error.code}",
        "title": HTTPStatus(error.status).phrase,
        "status": error.status,
        "detail": error.message,
        "code": error.code,
        "param": error.param,
        **error.extensions(),
    }


def error_response(request: Request, error: TidepoolError) -> JSONResponse:
    """The answer to a failed request, in the shape of its path."""
    if (record := record_of(request)) is not None:
        note_failure(record, error)
    headers = {"x-should-retry": str(_may_retry(error)).lower()}  # OpenAI's clients obey it
    if error.retry_after_s is not None or error.status in _TRY_LATER:
        wait_s = error.retry_after_s or _RETRY_AFTER_S
        headers["Retry-After"] = str(math.ceil(wait_s))
        headers["retry-after-ms"] = str(math.ceil(wait_s * 1000))
    if error.status == HTTPStatus.REQUEST_TIMEOUT:
        headers["Connection"] = "close"  # the rest of its body is not read
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if request.url.path.startswith(MESSAGES):
        told = anthropic_error(error, getattr(request.state, "request_id", None))
        return JSONResponse(told, status_code=error.status, headers=headers)
    if request.url.path.startswith("/v1/") or request.url.path in {TOKENIZE, DETOKENIZE}:
        return JSONResponse(openai_error(error), status_code=error.status, headers=headers)
    return JSONResponse(
        problem(error), status_code=error.status, headers=headers, media_type="application/problem+json"
    )


def _may_retry(error: TidepoolError) -> bool:
    """Whether the same request may fare better in a while."""
    if error.retry_helps is not None:
        return error.retry_helps
    return error.status in _TRY_LATER or error.status == HTTPStatus.REQUEST_TIMEOUT or error.status >= _SERVER_ERRORS


def translate_validation(error: RequestValidationError) -> InvalidValueError:
    """The first fault of a body or query, with its field."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return InvalidValueError(f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if isinstance(first.get("input"), bytes):  # the framework leaves a body of another type as it is
        return InvalidValueError("send the body with Content-Type: application/json")
    return first_fault({**first, "loc": first["loc"][1:]})


def body_fault(error: BaseException | None) -> str | None:
    """Why a body was not read, where the framework has no words for it: it may be JSON beyond the decoder's limits."""
    if isinstance(error, RecursionError):
        return "the body is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "the body is not UTF-8"
    if isinstance(error, ValueError) and "integer string conversion" in str(error):
        return f"the body holds an integer of more than {sys.get_int_max_str_digits()} digits"
    return None


def translate_database(error: SQLAlchemyError) -> TidepoolError:
    """An unavailable database is worth a retry; most other errors of it are defects."""
    away = isinstance(error, PoolTimeoutError) or (isinstance(error, DBAPIError) and error.connection_invalidated)
    state = getattr(error.orig, "sqlstate", None) if isinstance(error, DBAPIError) else None
    if state in _COLLISIONS:
        return UnavailableError("the change collided with another one and was undone; try again")
    if state in _TAKEN_MEANWHILE:  # what was looked up before is another now; if it happens again, that look is wrong
        log.exception("a change collided with another one", exc_info=error)
        return ConflictError("the change collided with another one and was undone; try again", retry_helps=True)
    if state in _NO_SUCH_TABLE:
        log.error("the database's schema is not this version's", error=str(error).splitlines()[0])
        return SchemaError("the database's schema is not this version's: run `tidepool migrate`")
    if state == _NOT_PRIMARY:
        return UnavailableError("no primary database answers; nothing was changed")
    if away or type(error).__name__ in {"OperationalError", "InterfaceError"}:
        return UnavailableError("the database does not answer")
    if isinstance(error, DataError):
        return InvalidValueError("a value cannot be stored: it holds U+0000, or is out of range")
    log.exception("database error", exc_info=error)
    return InternalError("internal error; the request id finds it in the log")


def install(app: FastAPI) -> None:
    """Register the translations."""

    def answer(kind: type[Exception], translate: Callable[[Any], TidepoolError]) -> None:
        async def handler(request: Request, error: Exception) -> JSONResponse:
            return error_response(request, translate(error))

        app.add_exception_handler(kind, handler)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        cause = error.__cause__
        if isinstance(cause, ClientDisconnect):  # the framework reports it as an unreadable body
            return await on_disconnect(request, cause)
        if isinstance(cause, TidepoolError):  # so it does what refuses the body
            return error_response(request, cause)
        if (fault := body_fault(cause)) is not None:
            return error_response(request, InvalidValueError(fault))
        if error.status_code == HTTPStatus.NOT_FOUND:
            return error_response(request, NotFoundError(f"no such path: {request.method} {request.url.path}"))
        return error_response(request, RoutingError(str(error.detail), status=error.status_code))

    async def on_disconnect(request: Request, _error: Exception) -> Response:
        if (record := record_of(request)) is not None:
            note_gone(record)
        return Response(status_code=CLIENT_GONE)

    async def on_any(request: Request, error: Exception) -> JSONResponse:
        log.exception("unhandled error", path=request.url.path, exc_info=error)
        response = error_response(request, InternalError("internal error; the request id finds it in the log"))
        response.headers["x-request-id"] = request.state.request_id  # this handler runs outside of `AnswerHeaders`
        response.headers["connection"] = "close"  # the server closes it after such an error
        return response

    answer(TidepoolError, lambda error: error)
    answer(RequestValidationError, translate_validation)
    answer(SQLAlchemyError, translate_database)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    app.add_exception_handler(Exception, on_any)
