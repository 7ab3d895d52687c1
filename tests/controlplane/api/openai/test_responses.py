"""The Responses API before nodes that answer as told, as the official client sees it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel
from sqlalchemy import text

from controlplane.store.request_log import find_requests
from controlplane.store.tenants import Tenant, put_tenant
from dataplane.protocol.messages import ChatMessage, Finished, StreamEvent, Token, ToolCall, ToolCallDelta
from tests.controlplane.api.gateway import Gateway, assert_error, running_gateway
from tests.controlplane.world import FakeAgent, World, until

ASK: dict[str, Any] = {"model": "tide", "input": "hi"}
TOOL: Any = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    "strict": False,
}


def answer(*tokens: Token, reason: Any = "stop") -> list[StreamEvent]:
    end = Finished(finish_reason=reason, prompt_tokens=7, completion_tokens=3, cached_tokens=4, reasoning_tokens=1)
    return [*tokens, end]


CALLS = answer(
    Token(text="", token_ids=(1,), reasoning="hm"),
    Token(text="", token_ids=(2,), tool_calls=(ToolCallDelta(index=0, name="look", arguments='{"where"'),)),
    Token(text="", token_ids=(3,), tool_calls=(ToolCallDelta(index=0, arguments=': "sea"}'),)),
    reason="tool_calls",
)


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent()


@pytest.fixture
def gateway(world: World, agent: FakeAgent) -> Iterator[Gateway]:
    with running_gateway(world, agent) as gateway:
        yield gateway


def strict(response: Response) -> None:
    """The object is valid by its own type, which the client does not check."""
    Response.model_validate(response.model_dump(exclude_unset=True, by_alias=True))


def test_whole_streamed_and_retrieved(gateway: Gateway, agent: FakeAgent) -> None:
    api = gateway.client.responses
    whole = api.create(**ASK, instructions="be brief", metadata={"a": "b"}, max_output_tokens=9)
    strict(whole)
    assert (whole.output_text, whole.status, whole.service_tier) == ("the tide turns", "completed", "default")
    assert agent.asked[0].messages == (
        ChatMessage(role="system", content="be brief"),
        ChatMessage(role="user", content="hi"),
    )
    assert api.retrieve(whole.id) == whole

    with api.stream(**ASK) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert final.output_text == "the tide turns"
    events = list(api.create(**ASK, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.completed"
    strict(last.response)
    assert api.retrieve(last.response.id) == last.response


def test_functions_are_called_and_answered(gateway: Gateway, agent: FakeAgent) -> None:
    agent.events = CALLS
    first = gateway.client.responses.create(**ASK, tools=[TOOL], tool_choice="required")
    strict(first)
    thought, call = first.output
    assert thought.type == "reasoning"
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("look", '{"where": "sea"}')
    assert first.usage is not None
    assert first.usage.input_tokens_details.cached_tokens == 4
    assert first.usage.output_tokens_details.reasoning_tokens == 1
    agent.events = ()
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "a sail"}]
    second = gateway.client.responses.create(
        model="tide", input=output, previous_response_id=first.id, instructions="be brief", tools=[TOOL]
    )
    assert second.previous_response_id == first.id
    assert agent.asked[-1].messages == (
        ChatMessage(role="system", content="be brief"),
        ChatMessage(role="user", content="hi"),
        ChatMessage(
            role="assistant",
            reasoning="hm",
            tool_calls=(ToolCall(id=call.call_id, name="look", arguments='{"where": "sea"}'),),
        ),
        ChatMessage(role="tool", content="a sail", name="look", tool_call_id=call.call_id),
    )
    items = gateway.client.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in items.data] == ["message", "reasoning", "function_call", "function_call_output"]


def test_the_same_conversation_by_items(gateway: Gateway, agent: FakeAgent) -> None:
    agent.events = CALLS
    first = gateway.client.responses.create(**ASK, tools=[TOOL], store=False)
    call = first.output[-1]
    assert call.type == "function_call"
    context: Any = [{"role": "user", "content": "hi"}, *first.output]
    context.append({"type": "function_call_output", "call_id": call.call_id, "output": "a sail"})
    gateway.client.responses.create(model="tide", input=context, tools=[TOOL])
    assert [each.role for each in agent.asked[-1].messages or ()] == ["user", "assistant", "tool"]


def test_parsed_answers(gateway: Gateway, agent: FakeAgent) -> None:
    class Place(BaseModel):
        name: str

    agent.events = answer(Token(text='{"name": "sea"}', token_ids=(1,)))
    parsed = gateway.client.responses.parse(**ASK, text_format=Place)
    assert parsed.output_parsed == Place(name="sea")
    constraint = agent.asked[-1].constraint
    assert constraint is not None
    assert constraint.kind == "json_schema"


def test_what_is_not_stored_is_not_there(gateway: Gateway) -> None:
    api = gateway.client.responses
    kept, not_kept = api.create(**ASK), api.create(**ASK, store=False)
    for missing in (not_kept.id, "resp_nobody"):
        with pytest.raises(openai.NotFoundError):
            api.retrieve(missing)
    with pytest.raises(openai.BadRequestError) as refused:
        api.create(**ASK, previous_response_id=not_kept.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    api.delete(kept.id)
    for call in (api.retrieve, api.delete, api.cancel, api.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(kept.id)


def test_other_tenants_see_nothing(gateway: Gateway, world: World) -> None:
    kept = gateway.client.responses.create(**ASK)
    other = gateway.client_of(world.key(tenant="other")).responses
    for call in (other.retrieve, other.delete, other.cancel, other.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(kept.id)
    with pytest.raises(openai.BadRequestError):
        other.create(**ASK, previous_response_id=kept.id)
    assert gateway.client.responses.retrieve(kept.id) == kept


def test_pages_of_input_items(gateway: Gateway) -> None:
    items: Any = [{"role": "user", "content": str(number)} for number in range(5)]
    made = gateway.client.responses.create(model="tide", input=items)
    for order, expected in (("asc", "01234"), ("desc", "43210")):
        page = gateway.client.responses.input_items.list(made.id, limit=2, order=order)  # type: ignore[arg-type]
        seen: Any = list(page)
        assert "".join(item.content[0].text for item in seen) == expected
    answer = gateway.http.get(f"/v1/responses/{made.id}/input_items", params={"after": "nobody"})
    assert (answer.status_code, assert_error(answer)["param"]) == (400, "after")


def test_input_items_are_listed_although_responses_before_them_are_deleted(gateway: Gateway) -> None:
    api = gateway.client.responses
    first = api.create(**ASK)
    second = api.create(model="tide", input="and", previous_response_id=first.id)
    third = api.create(model="tide", input="then", previous_response_id=second.id)

    def listed() -> list[str]:
        items: Any = api.input_items.list(third.id, order="asc").data
        return [item.content[0].text for item in items]

    assert listed() == ["hi", "the tide turns", "and", "the tide turns", "then"]
    api.delete(first.id)
    assert listed() == ["and", "the tide turns", "then"]
    api.delete(second.id)
    assert listed() == ["then"]
    with pytest.raises(openai.BadRequestError, match="not found"):
        api.create(**ASK, previous_response_id=third.id)


def test_only_what_runs_in_the_background_can_be_cancelled(gateway: Gateway) -> None:
    made = gateway.client.responses.create(**ASK)
    with pytest.raises(openai.BadRequestError, match="background"):
        gateway.client.responses.cancel(made.id)


def test_an_answer_that_is_cut(gateway: Gateway, agent: FakeAgent) -> None:
    agent.events = answer(Token(text="the", token_ids=(1,)), reason="length")
    whole = gateway.client.responses.create(**ASK, max_output_tokens=1)
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert list(gateway.client.responses.create(**ASK, stream=True))[-1].type == "response.incomplete"


def test_a_stream_that_breaks_is_stored_as_failed(world: World) -> None:
    with running_gateway(world, FakeAgent(then="fail later"), stream_continuations_max=0) as gateway:
        events: list[Any] = []
        stream = gateway.client.responses.create(**ASK, stream=True)
        with pytest.raises(openai.APIError, match="the worker died"):
            events.extend(stream)
        failed = events[-1]
        assert failed.type == "response.failed"
        assert failed.response.error is not None
        assert failed.response.error.message == "the worker died"
        assert gateway.client.responses.retrieve(failed.response.id).status == "failed"
        with pytest.raises(openai.APIStatusError):
            gateway.client.responses.create(**ASK)


def test_an_answer_that_cannot_be_stored_is_not_lost(gateway: Gateway, world: World) -> None:
    with world.database.transaction() as session:
        session.execute(text("ALTER TABLE responses RENAME TO away"))
    try:
        whole: Any = gateway.client.responses.create(**ASK)
        assert (whole.output_text, whole.store) == ("the tide turns", False)
    finally:
        with world.database.transaction() as session:
            session.execute(text("ALTER TABLE away RENAME TO responses"))
    assert gateway.client.responses.create(**ASK).model_dump()["store"]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0", "unsupported_parameter"),
        ({"background": True, "store": False}, "background", "invalid_value"),
        ({"background": True, "stream": True}, "background", "unsupported_parameter"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"surprise": 1}, "surprise", "unknown_parameter"),
        ({"input": None}, "input", "invalid_value"),
        ({"previous_response_id": "resp_nobody"}, "previous_response_id", "previous_response_not_found"),
        ({"previous_response_id": "nul\0"}, None, "invalid_value"),
        ({"max_output_tokens": 100_000}, "max_tokens", "context_length_exceeded"),
    ],
)
def test_refusals(gateway: Gateway, body: dict[str, Any], param: str | None, code: str) -> None:
    refused = gateway.http.post("/v1/responses", json=ASK | body)
    error = assert_error(refused)
    assert (refused.status_code, error["param"], error["code"]) == (400, param, code)


def test_requests_are_logged_like_others(gateway: Gateway, world: World) -> None:
    gateway.http.post("/v1/responses", json=ASK, headers={"x-request-id": "mine"})

    def logged() -> Any:
        with world.database.transaction() as session:
            return find_requests(session, "mine")

    until(logged)
    [row] = logged()
    assert (row.endpoint, row.model, row.outcome, row.completion_tokens) == ("/v1/responses", "tide", "ok", 3)


def ended(gateway: Gateway, response_id: str) -> Response:
    """A response in the background, when it has ended."""
    until(lambda: gateway.client.responses.retrieve(response_id).status != "in_progress")
    return gateway.client.responses.retrieve(response_id)


def test_a_response_in_the_background(gateway: Gateway, world: World, agent: FakeAgent) -> None:
    agent.script = ["held"]
    headers = {"x-request-id": "mine"}
    started = gateway.client.responses.create(**ASK, background=True, extra_headers=headers)
    strict(started)
    assert (started.status, started.background, started.output) == ("in_progress", True, [])
    with pytest.raises(openai.BadRequestError, match="in progress"):
        gateway.client.responses.create(**ASK, previous_response_id=started.id)
    agent.freed.set()
    done = ended(gateway, started.id)
    strict(done)
    assert (done.status, done.output_text, done.background) == ("completed", "the tide turns", True)
    assert gateway.client.responses.cancel(started.id) == done
    gateway.client.responses.create(**ASK, previous_response_id=started.id)
    assert [each.content for each in agent.asked[-1].messages or ()] == ["hi", "the tide turns", "hi"]

    def logged() -> Any:
        with world.database.transaction() as session:
            return find_requests(session, "mine")

    until(logged)
    [row] = logged()
    assert (row.outcome, row.tenant, row.completion_tokens) == ("ok", "acme", 3)


def test_a_response_in_the_background_is_cancelled(gateway: Gateway, agent: FakeAgent) -> None:
    for stop in (gateway.client.responses.cancel, gateway.client.responses.delete):
        agent.script = ["hang later"]
        agent.dropped.clear()
        asked = len(agent.asked)
        started = gateway.client.responses.create(**ASK, background=True)
        until(lambda asked=asked: len(agent.asked) > asked)
        stopped: Any = stop(started.id)
        until(agent.dropped.is_set)
        if stopped is not None:
            assert stopped.status == gateway.client.responses.retrieve(started.id).status == "cancelled"


def test_a_response_in_the_background_fails(world: World) -> None:
    with running_gateway(world, FakeAgent(then="fail later"), stream_continuations_max=0) as gateway:
        failed = ended(gateway, gateway.client.responses.create(**ASK, background=True).id)
        strict(failed)
        assert (failed.status, failed.error and failed.error.message) == ("failed", "the worker died")


def test_a_response_in_the_background_beyond_a_limit_is_logged_as_refused(world: World) -> None:
    with world.database.transaction() as session:
        put_tenant(session, Tenant(name="acme", requests_per_minute=1))
    with running_gateway(world, FakeAgent()) as gateway:
        ended(gateway, gateway.client.responses.create(**ASK, background=True).id)
        headers = {"x-request-id": "second"}
        refused = ended(gateway, gateway.client.responses.create(**ASK, background=True, extra_headers=headers).id)
        assert (refused.status, refused.error and refused.error.code) == ("failed", "rate_limit_exceeded")

        def logged() -> list[Any]:
            with world.database.transaction() as session:
                return list(find_requests(session, "second"))

        until(logged)
        [row] = logged()
        assert (row.outcome, row.status) == ("rate_limit_exceeded", 429)


def test_a_response_whose_gateway_stops_has_failed(world: World) -> None:
    agent = FakeAgent(then="hang later")
    with running_gateway(world, agent) as gateway:
        first = gateway.client.responses.create(**ASK, background=True)
        until(lambda: agent.asked)
    with running_gateway(world, agent) as gateway:
        failed = gateway.client.responses.retrieve(first.id)
        assert (failed.status, failed.error and failed.error.code) == ("failed", "server_error")
        with world.database.transaction() as session:
            session.execute(
                text("UPDATE responses SET state = 'in_progress', heard_at = now() - interval '1 h', response = :it"),
                {"it": first.model_dump_json().encode()},
            )
        assert gateway.client.responses.retrieve(first.id).status == "failed"


def test_only_so_many_run_in_the_background(world: World) -> None:
    agent = FakeAgent("held")
    with running_gateway(world, agent, background_responses_max=1) as gateway:
        first = gateway.client.responses.create(**ASK, background=True)
        with pytest.raises(openai.RateLimitError, match="background"):
            gateway.client.responses.create(**ASK, background=True)
        agent.freed.set()
        assert ended(gateway, first.id).status == "completed"
        with ThreadPoolExecutor(1) as threads, world.database.transaction() as session:
            session.execute(text("LOCK TABLE responses IN SHARE ROW EXCLUSIVE MODE"))
            storing = threads.submit(lambda: gateway.client.responses.create(**ASK, background=True))
            until(world.is_waiting_for_a_lock)
            with pytest.raises(openai.RateLimitError, match="background"):
                gateway.client.with_options(timeout=5).responses.create(**ASK, background=True)
            session.rollback()
            assert ended(gateway, storing.result().id).status == "completed"
