"""Responses in the background as endpoints start them."""

import asyncio
import time
from typing import Any

import anyio
import structlog
from fastapi import Request

from controlplane.api.request_log import log_record, note_failure, take_record
from controlplane.api.state import state_of
from controlplane.errors import TidepoolError, UnavailableError
from controlplane.serving.fan_out import ChoiceStream
from controlplane.serving.responses.items import written
from controlplane.serving.responses.renderer import ResponseRenderer
from controlplane.serving.responses.requests import ResponseRequest
from controlplane.store.request_log import RequestRecord
from controlplane.store.responses import StoredResponse

log = structlog.get_logger()


async def start_in_background(
    request: Request, body: ResponseRequest, renderer: ResponseRenderer, events: ChoiceStream
) -> dict[str, Any]:
    """Store a response in progress and run it; returns it as it is now.

    Raises:
        BusyError: the gateway runs as many as it may.
        UnavailableError: the response cannot be stored.
    """
    began_s = time.monotonic()
    state = state_of(request)
    response = renderer.writer.response()
    stored = StoredResponse(response=response, input=written(body.input, response["id"]))
    with state.background.room():
        if not await state.responses.keep(stored, tenant=request.state.caller.tenant):
            raise UnavailableError("the response cannot be stored now")
        state.background.start(response["id"], _run(request, renderer, events, take_record(request), began_s))
    return response


async def _run(
    request: Request, renderer: ResponseRenderer, events: ChoiceStream, record: RequestRecord, began_s: float
) -> None:
    """Run a response to its end, whatever that is."""
    responses = state_of(request).responses
    try:
        try:
            await renderer.write_all(events)
        except TidepoolError as error:
            note_failure(record, error)
            renderer.failure(error)
        except Exception:
            log.exception("a response in the background failed", id=renderer.response_id)
            renderer.failure(TidepoolError("internal error; the response's id finds it in the log"))
        await responses.end(renderer.writer.response())
    except asyncio.CancelledError:
        renderer.failure(UnavailableError("the gateway that ran this response was shut down"))
        with anyio.CancelScope(shield=True):
            await responses.end(renderer.writer.response(), attempts_max=1)
        raise
    finally:
        log_record(request, record, began_s)
