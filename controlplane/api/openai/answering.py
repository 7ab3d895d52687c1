"""What all endpoints that answer with models have in common: a query is checked, limited, admitted and sent; its events
are measured, and a renderer makes the answer of them, whole or as server-sent events.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Annotated

import msgspec
from fastapi import Header, Request
from starlette.responses import Response

from controlplane.api.auth import require_model
from controlplane.api.metrics import Stage, outcome_label
from controlplane.api.openai.attainment import AnswerMeasure
from controlplane.api.openai.event_stream import EventStreamResponse, unless_gone
from controlplane.api.request_log import note_failure, note_gone, plain
from controlplane.api.stages import StageClock
from controlplane.api.state import State, state_of
from controlplane.errors import InvalidValueError, TidepoolError
from controlplane.serving.answers import Renderer, whole_answer
from controlplane.serving.fan_out import ChoiceStream, InFlightQuery, send_query
from controlplane.serving.offered_load import ATTEMPT_HEADER, Attempt
from controlplane.serving.prompt_prefixes import conversation_name
from controlplane.serving.query import Query
from controlplane.serving.tracing import step
from controlplane.store.request_log import OK, RequestRecord
from controlplane.store.tables import Model
from dataplane.protocol.connections import BodyWriter, body_writer
from dataplane.protocol.messages import Finished, Pooled, Started, Token
from dataplane.protocol.records import RecordedEvent, TextRecord

Origin = Annotated[str | None, Header(alias="x-tidepool-region", description="region the request comes from")]


async def answer(
    request: Request,
    query: Query,
    make_renderer: Callable[[Query], Renderer],
    *,
    stream: bool,
    origin: str | None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The answer to a query, as the renderer of the query to its model makes it. `origin`: the region that the client
    names. `headers`: further ones of a stream's answer.

    Raises:
        TidepoolError: the query is refused, or failed before the first event of its stream.
    """
    answering, events = await begin(request, query, origin)
    renderer = make_renderer(answering.query.query)
    if not stream:
        whole = await unless_gone(request, whole_answer(events, answering.query, renderer))
        return Response(msgspec.json.encode(whole), media_type="application/json", headers=answering.headers())
    for number, choice in enumerate(answering.query.choices):
        choice.text_frame = renderer.text_frame(number)
    first = await unless_gone(request, anext(events))
    lines = _lines(first, events, answering, renderer, body_writer(request.scope))
    return EventStreamResponse(lines, headers=answering.headers() | dict(headers or {}))


async def begin(request: Request, query: Query, origin: str | None) -> tuple["Answering", ChoiceStream]:
    """A query that the caller may ask, to the model that answers it, and its events; the first `anext` of them admits
    and sends it.

    Raises:
        UnknownModelError: no such model, or none that the caller's key may use.
        InvalidValueError: `origin` is no region, or `max_tokens` alone is beyond the model's context.
    """
    arrived_s = time.monotonic()
    state, own = state_of(request), request.state
    record: RequestRecord = own.record
    record.model, record.tier = plain(query.model), query.tier.value
    model = await model_for(request, query.model, conversation_name(query.prompts[0], query.prompt_cache_key))
    query, record.model = query.of_model(model.name), model.name
    messages = query.choices(own.request_id)
    attempt = await _attempt(request, own.caller.tenant)
    in_flight = InFlightQuery.of(
        state.fleet, model, query, messages, tenant=attempt.tenant, origin=_origin(state, origin)
    )
    answering = Answering(state, in_flight, arrived_s, attempt, record, own.stages)
    own.stages.end(Stage.PREPARE)
    return answering, state.limits.limited(request, in_flight, answering.events())


async def model_for(request: Request, name: str, conversation: bytes = b"") -> Model:
    """The model that answers the caller's request for a name, which may be an alias. A key that is for an alias need
    not be for its models.

    Raises:
        UnknownModelError: there is neither a model nor an alias of the name, or none that the caller's key may use.
    """
    state, caller = state_of(request), request.state.caller
    require_model(caller, name)  # first: a look-up would tell by its time whether there is such a model
    model = await state.fleet.asked(name, caller.tenant.encode() + b"/" + conversation)
    if name in state.fleet.aliases():
        state.metrics.series(state.metrics.alias_requests, model.name, name).inc()
    return model


async def _attempt(request: Request, tenant: str) -> Attempt:
    again = request.headers.get(ATTEMPT_HEADER, "0") != "0"
    return Attempt(tenant=tenant, body=await request.body(), again=again)


def _origin(state: State, given: str | None) -> str | None:
    """The region that a request counts for: the one it names, else the gateway's own, else the first."""
    known = state.fleet.preference(None)
    if given is not None and given not in known:
        raise InvalidValueError(
            f"x-tidepool-region: '{given}' is not one of {', '.join(known)}", param="x-tidepool-region"
        )
    return given or state.settings.region or (known[0] if known else None)


class Answering:
    """One query being answered: passes its events on, measures them and fills its record."""

    def __init__(
        self,
        state: State,
        query: InFlightQuery,
        arrived_s: float,
        attempt: Attempt,
        record: RequestRecord,
        stages: StageClock,
    ) -> None:
        self.query = query
        self._state = state
        self._arrived_s = arrived_s
        self._attempt = attempt
        self._record = record
        self._stages = stages
        self._labels = query.query.model, query.query.tier.value
        self._measure = AnswerMeasure(state.metrics, self._labels, query.first.message.objective, arrived_s)
        self._region = ""
        self._ended = 0

    def headers(self) -> dict[str, str]:
        """The region in which the query is served."""
        return {"x-tidepool-region": self._region, "Cache-Control": "no-cache"}

    async def events(self) -> ChoiceStream:
        """The events of the query once it is admitted. It counts as demand whether or not there is capacity for it, and
        however it ends, its end is counted.
        """
        state, query = self._state, self.query
        state.offered.count(self._attempt, query)
        state.metrics.streams.inc()
        try:
            with step("admission"):
                facts = await state.admission.enter(query.first)
            self._stages.end(Stage.ADMIT)
            async with aclosing(send_query(state.sender, query, facts)) as stream:
                async for arrived in stream:
                    choice, events = arrived
                    for event in events:
                        self._measure_event(choice, event)
                    yield arrived
        except TidepoolError as error:
            note_failure(self._record, error)
            self._measure.failed(error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            note_gone(self._record)
            raise
        finally:
            query.first.pass_on = None  # it refers to this object, whose query would wait for a garbage collection
            state.metrics.streams.dec()
            if self._record.outcome != OK:
                state.offered.note_unanswered(self._attempt)
            self._fill_record()
            ended = (*self._labels, self._region, outcome_label(self._record.outcome or "internal_error"))
            state.metrics.series(state.metrics.requests, *ended).inc()
            self._count_usage()
            self._count_objective()

    def pass_on_to(self, writer: BodyWriter) -> None:
        """From now on, write text to the client within the callback that received it, unless the client does not keep
        up: then it waits as other events do. Only where there is one choice: the events of several wait for each other.
        """

        def pass_on(text: TextRecord) -> bool:
            if writer.full or writer.lost:
                return False
            if text.payload:
                writer.write(text.payload)
            self._measure.tokens(len(text.token_ids))
            return True

        if len(self.query.choices) == 1:
            self.query.first.pass_on = pass_on

    def _measure_event(self, choice: int, event: RecordedEvent) -> None:
        if isinstance(event, Token | TextRecord):
            self._measure.tokens(len(event.token_ids), choice)
        elif isinstance(event, Pooled):
            self._measure.tokens(1, choice)
        elif isinstance(event, Started):
            if choice == 0 or not self._region:
                self._region = self.query.choices[choice].routes[-1].region
            if self._record.placed_s is None:
                self._record.placed_s = time.monotonic() - self._arrived_s
                self._stages.end(Stage.PLACE)
            if self._measure.has_begun(choice):
                self._record.continuations += 1
                self._state.metrics.series(self._state.metrics.continuations, *self._labels).inc()
        elif isinstance(event, Finished):
            self._ended += 1
            instance_id = self.query.choices[choice].routes[-1].instance_id
            self._state.metrics.note_prompt(self.query.query.model, instance_id, event)
            if self._ended == len(self.query.choices):
                self._measure.finished(self.query.usage())
                self._record.outcome = OK

    def _count_usage(self) -> None:
        query = self.query
        self._state.usage.count(
            self._attempt.tenant,
            query.query.model,
            query.query.tier,
            failed=self._record.outcome != OK,
            input_tokens=query.prompt_tokens,
            output_tokens=query.output_tokens,
        )

    def _count_objective(self) -> None:
        """Count the answer in the region that served it; one that none served in the region that it came from."""
        region = self._record.region or self.query.first.origin
        if self._measure.kept is not None and region is not None:
            self._state.objectives.count(self._labels[0], region, self._labels[1], self._measure.kept)

    def _fill_record(self) -> None:
        record, query = self._record, self.query
        record.origin = query.first.origin
        if query.first.routes:
            route = query.first.routes[-1]
            record.region, record.instance_id = route.region, route.instance_id
            record.utilization, record.cached_tokens = route.utilization, route.cached_tokens
        record.nodes = list(_nodes(query))
        record.prompt_tokens, record.completion_tokens = query.prompt_tokens, query.output_tokens
        record.first_token_s = self._measure.first_token_s


def _nodes(query: InFlightQuery) -> list[str]:
    """The nodes that the first choice tried, in order, and those that only others did."""
    nodes = [route.node_id for route in query.first.routes]
    for other in query.choices[1:]:
        nodes += [route.node_id for route in other.routes if route.node_id not in nodes]
    return nodes


async def _lines(
    first: tuple[int, list[RecordedEvent]],
    rest: ChoiceStream,
    answering: Answering,
    renderer: Renderer,
    writer: BodyWriter | None,
) -> AsyncGenerator[bytes, None]:
    """The server-sent events of a stream, one write for all that arrived together. A failure after the first event is
    itself the last event. `writer`: how text reaches the client past this iteration, once the first bytes are sent.
    """
    try:
        yield renderer.begin() + renderer.events(*first)
        if writer is not None:
            answering.pass_on_to(writer)
        async for choice, events in rest:
            if written := renderer.events(choice, events):
                yield written
        yield renderer.end(answering.query.usage())
    except TidepoolError as error:
        yield renderer.failure(error)
    finally:
        await rest.aclose()
