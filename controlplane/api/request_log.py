"""One record for each interactive request, however it ends, refused ones too."""

import time
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from controlplane.api.state import state_of
from controlplane.errors import ContextLengthError, TidepoolError
from controlplane.serving.openai_requests import REQUESTS
from controlplane.store.request_log import CANCELLED, RequestRecord

CLIENT_GONE = 499
"""nginx's status for a request whose client went away; nobody reads it, logs do."""
_BAD_REQUEST, _DEFECT = 400, 500
_CHARACTERS_MAX = 300


class RequestRecords:
    """Wraps the app: puts a record into `request.state.record`, which fills on the way, and logs it at the end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["path"] not in REQUESTS or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()
        state = scope["state"]
        record = RequestRecord(request_id=state["request_id"], ended_at=datetime.now(UTC), endpoint=scope["path"])
        state["record"] = record
        try:
            await self._app(scope, receive, send)
        finally:
            if not record.outcome:  # nobody told the client anything: an error that nobody caught
                record.outcome, record.status = "internal_error", _DEFECT
            record.ended_at = datetime.now(UTC)
            record.duration_s = time.monotonic() - began_s
            if (caller := state.get("caller")) is not None:
                record.tenant, record.key_id = caller.tenant, caller.key_id
            state_of(Request(scope)).requests.add(record)


def record_of(request: Request) -> RequestRecord | None:
    """The record of a request that is logged."""
    record: RequestRecord | None = getattr(request.state, "record", None)
    return record


def note_gone(record: RequestRecord) -> None:
    """Its client left; what has ended already stays so."""
    if not record.outcome:
        record.outcome, record.status = CANCELLED, CLIENT_GONE


def note_failure(record: RequestRecord, error: TidepoolError) -> None:
    """Put into a request's record what its client is told, unless it has ended otherwise. Words about a bad field may
    repeat it, so they are left out.
    """
    if record.outcome:
        return
    if error.status == CLIENT_GONE:
        note_gone(record)
        return
    record.outcome, record.status = error.code, error.status
    if error.status != _BAD_REQUEST or error.code == ContextLengthError.code:
        record.error = plain(error.message)


def plain(words: str) -> str:
    """Words as they can be stored."""
    return words[:_CHARACTERS_MAX].replace("\0", "\ufffd").encode(errors="replace").decode()
