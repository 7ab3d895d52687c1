"""The interactive flow: a request is validated, admitted and routed to an instance, and its tokens stream back."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Annotated, TypeVar

import anyio
import msgspec
from fastapi import APIRouter, Header, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from controlplane.api.auth import require_model
from controlplane.api.openai.attainment import AnswerMeasure
from controlplane.api.openai.openapi import ANSWERS
from controlplane.api.request_log import CLIENT_GONE, note_failure, note_gone, plain
from controlplane.api.state import State, state_of
from controlplane.errors import InvalidValueError, TidepoolError, UnavailableError
from controlplane.serving.in_flight import EventStream, InFlightRequest
from controlplane.serving.offered_load import ATTEMPT_HEADER, Attempt
from controlplane.serving.openai_answers import AnswerHead, collect, openai_error, sse
from controlplane.serving.openai_requests import (
    CHAT,
    COMPLETIONS,
    AnyRequest,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
)
from controlplane.serving.tracing import step
from controlplane.store.request_log import OK, RequestRecord
from dataplane.protocol.messages import Finished, Started, StreamEvent, Token

router = APIRouter(tags=["interactive"])
T = TypeVar("T")
_PLAIN_WORD = re.compile("[A-Za-z0-9_-]{1,64}")
_WARNINGS_MAX = 8
Origin = Annotated[str | None, Header(alias="x-tidepool-region", description="region the request comes from")]


@router.post(CHAT, summary="Chat completion", responses=ANSWERS)
async def chat(body: ChatRequest, request: Request, origin: Origin = None) -> Response:
    """A chat completion, whole or (`stream: true`) as server-sent events. `service_tier` chooses the tier: `priority`
    is IW-F, `default` and `auto` are IW-N, `flex` is NIW and takes only spare capacity.
    """
    return await _answer(body, request, origin)


@router.post(COMPLETIONS, summary="Text completion", responses=ANSWERS)
async def completions(body: CompletionRequest, request: Request, origin: Origin = None) -> Response:
    """A completion of a plain prompt, whole or as server-sent events."""
    return await _answer(body, request, origin)


async def _answer(body: AnyRequest, request: Request, origin: str | None) -> Response:
    state = state_of(request)
    record: RequestRecord = request.state.record
    record.model, record.tier = plain(body.model), body.tier().value
    if state.draining:
        raise UnavailableError("this gateway is shutting down; try again", retry_after_s=1)
    arrived_s = time.monotonic()
    model = await state.fleet.model(body.model)
    require_model(request.state.caller, model.name)
    message = body.message(request_id=request.state.request_id, tier=body.tier())
    in_flight = InFlightRequest.of(state.fleet, model, message, origin=_origin(state, origin))
    head = AnswerHead.of(message, answer_id=message.request_id)
    answering = Answering(state, in_flight, arrived_s, await _attempt(request), record)
    stream = state.limits.limited(request, in_flight, answering.events())
    if not body.stream:
        whole = await _unless_gone(request, collect(stream, head))
        return JSONResponse(whole, headers=answering.headers())
    first = await _unless_gone(request, anext(stream))
    options = body.stream_options or StreamOptions()
    lines = _lines(first, stream, head, include_usage=bool(options.include_usage))
    return _EventStreamResponse(lines, headers=answering.headers() | _warning(options))


async def _attempt(request: Request) -> Attempt:
    again = request.headers.get(ATTEMPT_HEADER, "0") != "0"
    return Attempt(tenant=request.state.caller.tenant, body=await request.body(), again=again)


def _warning(options: StreamOptions) -> dict[str, str]:
    """The header that names the ignored options whose names are plain words."""
    plain = [f"stream_options.{name}" for name in options.ignored() if _PLAIN_WORD.fullmatch(name)]
    return {"x-tidepool-warning": f"ignored: {', '.join(plain[:_WARNINGS_MAX])}"} if plain else {}


def _origin(state: State, given: str | None) -> str | None:
    """The region that a request counts for: the one it names, else the gateway's own, else the first."""
    known = state.fleet.preference(None)
    if given is not None and given not in known:
        raise InvalidValueError(
            f"x-tidepool-region: '{given}' is not one of {', '.join(known)}", param="x-tidepool-region"
        )
    return given or state.settings.region or (known[0] if known else None)


class Answering:
    """One request being answered: passes its events on, measures them and fills its record."""

    def __init__(
        self, state: State, request: InFlightRequest, arrived_s: float, attempt: Attempt, record: RequestRecord
    ) -> None:
        self._state = state
        self._request = request
        self._arrived_s = arrived_s
        self._attempt = attempt
        self._record = record
        self._labels = request.message.model, request.message.tier.value
        self._measure = AnswerMeasure(state.metrics, self._labels, request.message.objective, arrived_s)
        self._region = ""

    def headers(self) -> dict[str, str]:
        """The region in which the request is served."""
        return {"x-tidepool-region": self._region, "Cache-Control": "no-cache"}

    async def events(self) -> EventStream:
        """The events of the stream once the request is admitted. The request counts as demand whether or not there is
        capacity for it, and however it ends, its end is counted.
        """
        state, request = self._state, self._request
        state.offered.count(self._attempt, request)
        state.metrics.streams.inc()
        try:
            with step("admission"):
                facts = await state.admission.enter(request)
            async with aclosing(state.sender.send(request, facts)) as stream:
                async for events in stream:
                    for event in events:
                        self._measure_event(event)
                    yield events
        except TidepoolError as error:
            note_failure(self._record, error)
            self._measure.failed(error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            note_gone(self._record)
            raise
        finally:
            state.metrics.streams.dec()
            if self._record.outcome != OK:
                state.offered.note_unanswered(self._attempt)
            self._fill_record()
            state.metrics.requests.labels(*self._labels, self._region, self._record.outcome or "internal_error").inc()
            self._count_usage()

    def _measure_event(self, event: StreamEvent) -> None:
        if isinstance(event, Token):
            self._measure.tokens(len(event.token_ids))
        elif isinstance(event, Started):
            self._region = self._request.routes[-1].region
            if self._record.placed_s is None:
                self._record.placed_s = time.monotonic() - self._arrived_s
            if self._measure.begun:
                self._record.continuations += 1
                self._state.metrics.continuations.labels(*self._labels).inc()
        elif isinstance(event, Finished):
            self._measure.finished(event)
            self._record.outcome = OK

    def _count_usage(self) -> None:
        request = self._request
        self._state.usage.count(
            self._attempt.tenant,
            request.message.model,
            request.message.tier,
            failed=self._record.outcome != OK,
            input_tokens=0 if request.end is None else request.end.prompt_tokens,
            output_tokens=len(request.token_ids),
        )

    def _fill_record(self) -> None:
        record, request = self._record, self._request
        record.region = request.routes[-1].region if request.routes else None
        record.nodes = [route.node_id for route in request.routes]
        record.prompt_tokens, record.completion_tokens = request.prompt_tokens, len(request.token_ids)
        record.first_token_s = self._measure.first_token_s


async def _lines(
    first: list[StreamEvent], rest: EventStream, head: AnswerHead, *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The server-sent events of a stream: one for each piece of text, and one write for all that arrived together. A
    failure after the first event is itself the last event.
    """
    frame = head.text_frame()
    role = head.first_chunk()
    try:
        yield (sse(role) if role is not None else b"") + _written(first, head, frame, include_usage=include_usage)
        async for events in rest:
            if written := _written(events, head, frame, include_usage=include_usage):
                yield written
        yield b"data: [DONE]\n\n"
    except TidepoolError as error:
        yield sse(openai_error(error))
    finally:
        await rest.aclose()


def _written(events: list[StreamEvent], head: AnswerHead, frame: tuple[bytes, bytes], *, include_usage: bool) -> bytes:
    before, after = frame
    pieces: list[bytes] = []
    for event in events:
        if isinstance(event, Token):
            if event.text:
                pieces += (before, msgspec.json.encode(event.text), after)
        elif isinstance(event, Finished):
            pieces.append(sse(head.last_chunk(event)))
            if include_usage:
                pieces.append(sse(head.usage_chunk(event)))
    return b"".join(pieces)


class _EventStreamResponse(StreamingResponse):
    """A stream that is closed at once when its client disconnects, so that the node cancels the request."""

    media_type = "text/event-stream"

    def __init__(self, lines: AsyncGenerator[bytes, None], *, headers: dict[str, str]) -> None:
        super().__init__(lines, headers=headers)
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True):
                await self._lines.aclose()


class ClientGoneError(TidepoolError):
    """The client disconnected before its answer was ready."""

    status = CLIENT_GONE
    code = "client_closed_request"


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects."""
    result: T | None = None
    failure: TidepoolError | None = None

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        try:
            result = await work
        except TidepoolError as error:
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if result is None:
        raise ClientGoneError("the client went away")
    return result
