"""One record for each interactive request, however it ends, refused ones too."""

import time
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from controlplane.api.stages import StageClock
from controlplane.api.state import state_of
from controlplane.errors import ContextLengthError, TidepoolError
from controlplane.serving.endpoints import ENDPOINTS
from controlplane.serving.tracing import trace_id
from controlplane.store.request_log import CANCELLED, RequestRecord

CLIENT_GONE = 499
"""nginx's status for a request whose client disconnected; only logs show it."""
_BAD_REQUEST, _DEFECT = 400, 500
_CHARACTERS_MAX = 300


class RequestRecords:
    """Wraps the app: puts a record into `request.state.record`, which the endpoints fill, and logs it at the end. The
    clock of the request's stages, `request.state.stages`, starts here.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in ENDPOINTS or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()
        state = scope["state"]
        record = RequestRecord(
            request_id=state["request_id"],
            ended_at=datetime.fromtimestamp(time.time(), UTC),
            endpoint=scope["path"],
            trace_id=trace_id(),
        )
        state["record"] = record
        state["stages"] = StageClock(scope["app"].state.tidepool.metrics)
        try:
            await self._app(scope, receive, send)
        finally:
            if state["record"] is record:
                log_record(Request(scope), record, began_s)


def log_record(request: Request, record: RequestRecord, began_s: float) -> None:
    """Log a request that has ended. `began_s`: when it began, by `time.monotonic`."""
    if not record.outcome:  # an error that no handler caught
        record.outcome, record.status = "internal_error", _DEFECT
    record.ended_at = datetime.fromtimestamp(time.time(), UTC)
    record.duration_s = time.monotonic() - began_s
    if (caller := getattr(request.state, "caller", None)) is not None:
        record.tenant, record.key_id = caller.tenant, caller.key_id
    state_of(request).requests.add(record)


def take_record(request: Request) -> RequestRecord:
    """The record of a request whose work outlives its connection: who takes it logs it."""
    record: RequestRecord = request.state.record
    request.state.record = None
    return record


def record_of(request: Request) -> RequestRecord | None:
    """The record of a request; None: its path is not logged."""
    record: RequestRecord | None = getattr(request.state, "record", None)
    return record


def note_gone(record: RequestRecord) -> None:
    """Record that the client disconnected, unless the request has ended already."""
    if not record.outcome:
        record.outcome, record.status = CANCELLED, CLIENT_GONE


def note_failure(record: RequestRecord, error: TidepoolError) -> None:
    """Record the error that the client receives, unless the request has ended already. Messages about an invalid field
    may quote the prompt, so they are left out.
    """
    if record.outcome:
        return
    if error.status == CLIENT_GONE:
        note_gone(record)
        return
    record.outcome, record.status = plain(error.code), error.status  # a node may have named the code
    if error.status != _BAD_REQUEST or error.code == ContextLengthError.code:
        record.error = plain(error.message)


def plain(text: str) -> str:
    """A text as it can be stored: of limited length and valid Unicode."""
    return text[:_CHARACTERS_MAX].replace("\0", "\ufffd").encode(errors="replace").decode()
