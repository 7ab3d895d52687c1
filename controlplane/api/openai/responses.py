"""The Responses API: create, retrieve, delete, and the items of a response's input."""

from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

import msgspec
import uuid_utils
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from controlplane.api.auth import Client
from controlplane.api.openai.answering import Answering, Origin, begin
from controlplane.api.openai.background_responses import start_in_background
from controlplane.api.openai.event_stream import EventStreamResponse, unless_gone
from controlplane.api.openai.files import listing
from controlplane.api.openai.openapi import ERRORS
from controlplane.api.request_log import plain
from controlplane.api.state import SessionDep, State, StateDep, state_of
from controlplane.errors import InvalidValueError, NodeError, TidepoolError, UnsupportedParameterError
from controlplane.serving.fan_out import ChoiceStream
from controlplane.serving.responses.items import written
from controlplane.serving.responses.renderer import ResponseRenderer
from controlplane.serving.responses.requests import RESPONSES, ResponseRequest
from controlplane.store import responses
from controlplane.store.responses import StoredResponse
from dataplane.protocol.records import RecordedEvent

router = APIRouter(tags=["responses"])
_EVENT = 'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"Hi"}\n\n'
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the response; as server-sent events when `stream` is true",
        "content": {"application/json": {}, "text/event-stream": {"example": _EVENT}},
    },
    **ERRORS,
}


@router.post(RESPONSES, summary="Create a response", responses=_ANSWERS)
async def create(body: ResponseRequest, request: Request, caller: Client, origin: Origin = None) -> Response:
    """A response, whole or (`stream: true`) as server-sent events. It is stored unless `store` is false, so that it can
    be retrieved, and continued by the `previous_response_id` of another one.
    """
    state = state_of(request)
    request.state.record.model, request.state.record.tier = plain(body.model), body.tier().value
    earlier = await state.responses.items_before(body.previous_response_id, tenant=caller.tenant)
    query = body.query(tier=body.tier(), earlier=earlier)
    answering, events = await begin(request, query, origin)
    renderer = ResponseRenderer(answering.query.query, answer_id=uuid_utils.uuid7().hex)
    if body.background:
        started = await start_in_background(request, body, renderer, events)
        return Response(msgspec.json.encode(started), media_type="application/json")
    keeper = _Keeper(state, caller.tenant, body, renderer)
    if body.stream:
        first = await unless_gone(request, anext(events))
        lines = _lines(first, events, answering, renderer, keeper)
        return EventStreamResponse(lines, headers=answering.headers())
    whole = await unless_gone(request, _whole(events, renderer, keeper))
    return Response(msgspec.json.encode(whole), media_type="application/json", headers=answering.headers())


@router.get(f"{RESPONSES}/{{response_id}}", summary="Retrieve a response", responses=ERRORS)
def retrieve(response_id: str, session: SessionDep, caller: Client, stream: bool = False) -> dict[str, Any]:
    """A stored response of the key's tenant."""
    if stream:
        raise UnsupportedParameterError("stream: a stored response is not streamed again", param="stream")
    return responses.get_response(session, response_id, tenant=caller.tenant).response


@router.delete(f"{RESPONSES}/{{response_id}}", summary="Delete a response", responses=ERRORS)
def delete(response_id: str, session: SessionDep, caller: Client) -> dict[str, Any]:
    """Responses that continue it stay, but can no longer be continued themselves."""
    responses.delete_response(session, response_id, tenant=caller.tenant)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post(f"{RESPONSES}/{{response_id}}/cancel", summary="Cancel a response", responses=ERRORS)
def cancel(response_id: str, session: SessionDep, caller: Client) -> dict[str, Any]:
    """Cancel a response in the background; others are cancelled by disconnecting. One that has ended stays as it is."""
    return responses.cancel_response(session, response_id, tenant=caller.tenant)


@router.get(f"{RESPONSES}/{{response_id}}/input_items", summary="List the input of a response", responses=ERRORS)
def input_items(
    response_id: str,
    session: SessionDep,
    state: StateDep,
    caller: Client,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """The items that the response was made from: those of the conversation before it, up to a response that was
    deleted, and its own.
    """
    own = responses.get_response(session, response_id, tenant=caller.tenant)
    items = own.input
    if (previous_id := own.response["previous_response_id"]) is not None:
        items = state.responses.read_before(session, previous_id, tenant=caller.tenant, whole=False) + items
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise InvalidValueError(f"after: '{after}' is no item of this list", param="after")
        items = items[places[0] + 1 :]
    return listing(items[:limit], has_more=len(items) > limit)


class _Keeper:
    """Stores a response when it has ended."""

    def __init__(self, state: State, tenant: str, body: ResponseRequest, renderer: ResponseRenderer) -> None:
        self._state = state
        self._tenant = tenant
        self._body = body
        self._writer = renderer.writer

    async def keep(self) -> None:
        """Store the response as it is now, if its client wants that. If it cannot be stored, it says `store: false`."""
        if not self._body.store:
            return
        response = self._writer.response()
        stored = StoredResponse(response=response, input=written(self._body.input, response["id"]))
        if not await self._state.responses.keep(stored, tenant=self._tenant):
            self._writer.note_not_stored()


async def _whole(events: ChoiceStream, renderer: ResponseRenderer, keeper: _Keeper) -> dict[str, Any]:
    """The whole response, stored.

    Raises:
        NodeError: the stream broke off.
    """
    await renderer.write_all(events)
    await keeper.keep()
    return renderer.writer.response()


async def _lines(
    first: tuple[int, list[RecordedEvent]],
    rest: ChoiceStream,
    answering: Answering,
    renderer: ResponseRenderer,
    keeper: _Keeper,
) -> AsyncGenerator[bytes, None]:
    """The server-sent events of a stream. The response is stored before its last event, so that it can be continued as
    soon as that has arrived; one that broke off is stored as failed.
    """
    try:
        yield renderer.begin() + renderer.events(*first)
        async for choice, events in rest:
            if written_now := renderer.events(choice, events):
                yield written_now
        if not renderer.writer.has_ended:
            raise NodeError("the node ended the stream without a finish reason")
        await keeper.keep()
        yield renderer.end(answering.query.usage())
    except TidepoolError as error:
        failure = renderer.failure(error)
        await keeper.keep()
        yield failure
    finally:
        await rest.aclose()
