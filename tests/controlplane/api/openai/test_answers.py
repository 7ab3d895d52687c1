"""What applications ask of answers, as the official client sees it: tools, log probabilities, choices, usage."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types import CompletionUsage

from tests.controlplane.api.gateway import Gateway, running_gateway
from tests.controlplane.world import FakeAgent, World

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent()


@pytest.fixture
def gateway(world: World, agent: FakeAgent) -> Iterator[Gateway]:
    with running_gateway(world, agent) as gateway:
        yield gateway


def create(gateway: Gateway, **changes: Any) -> Any:
    return gateway.client.chat.completions.create(**{"model": "tide", "messages": ASKED} | changes)


def assert_usage(usage: CompletionUsage | None, prompt: int, completion: int, cached: int, reasoning: int) -> None:
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, completion)
    assert usage.total_tokens == prompt + completion
    assert usage.prompt_tokens_details is not None
    assert usage.completion_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == cached
    assert usage.completion_tokens_details.reasoning_tokens == reasoning


def test_tool_calls_go_there_and_back(gateway: Gateway, agent: FakeAgent) -> None:
    agent.script = ["tools"]
    answer = create(gateway, tools=[TOOL, TIME], parallel_tool_calls=True)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.reasoning_content == "it asks for weather"
    calls = [(call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert calls == [("function", "weather", '{"city":"Paris"}'), ("function", "time", "{}")]
    assert_usage(answer.usage, 7, 7, 0, 2)
    asked = agent.asked[0].tools
    assert asked is not None
    assert [(tool.name, tool.strict) for tool in asked.tools] == [("weather", True), ("time", False)]
    assert (asked.choice, asked.parallel) == ("auto", True)

    results = [{"role": "tool", "tool_call_id": call.id, "content": "20 C"} for call in choice.message.tool_calls]
    create(gateway, tools=[TOOL, TIME], messages=[*ASKED, choice.message.model_dump(), *results])
    told = agent.asked[1].messages or ()
    assert [(call.name, call.arguments) for call in told[1].tool_calls] == [
        ("weather", '{"city":"Paris"}'),
        ("time", "{}"),
    ]
    assert [message.tool_call_id for message in told[2:]] == [call.id for call in told[1].tool_calls]
    assert told[1].reasoning == "it asks for weather"


def test_tool_calls_are_streamed_in_pieces(gateway: Gateway, agent: FakeAgent) -> None:
    agent.then = "tools"
    with gateway.client.chat.completions.stream(model="tide", messages=ASKED, tools=[TOOL, TIME]) as stream:  # type: ignore[list-item]
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [(event.name, event.arguments) for event in done] == [("weather", '{"city":"Paris"}'), ("time", "{}")]
    assert final.choices[0].finish_reason == "tool_calls"
    again: dict[int, tuple[str, str]] = {}
    reasoning = ""
    for chunk in create(gateway, tools=[TOOL, TIME], stream=True):
        delta = chunk.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or ():
            assert (call.id is None) == (call.index in again), "the id comes once"
            call_id, arguments = again.get(call.index, (call.id, ""))
            again[call.index] = call_id, arguments + call.function.arguments
    assert reasoning == "it asks for weather"
    assert [arguments for _, arguments in again.values()] == ['{"city":"Paris"}', "{}"]
    assert len({call_id for call_id, _ in again.values()}) == 2


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("required", ("required", None, ["weather", "time"])),
        ("none", ("none", None, ["weather", "time"])),
        ({"type": "function", "function": {"name": "time"}}, ("named", "time", ["weather", "time"])),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TIME]}},
            ("required", None, ["time"]),
        ),
    ],
)
def test_tool_choices(gateway: Gateway, agent: FakeAgent, choice: Any, expected: Any) -> None:
    create(gateway, tools=[TOOL, TIME], tool_choice=choice, parallel_tool_calls=False)
    asked = agent.asked[0].tools
    assert asked is not None
    assert (asked.choice, asked.name, [tool.name for tool in asked.tools]) == expected
    assert not asked.parallel


def test_several_choices_of_a_chat(gateway: Gateway, agent: FakeAgent) -> None:
    agent.cached_tokens = 5
    answer = create(gateway, n=3, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {"the tide turns"}
    assert_usage(answer.usage, 7, 9, 5, 0)
    assert len({asked.sampling.seed for asked in agent.asked}) == 3
    texts, ends = ["", "", ""], 0
    for chunk in create(gateway, n=3, stream=True, stream_options={"include_usage": True}):
        if not chunk.choices:
            assert_usage(chunk.usage, 7, 9, 5, 0)
            break
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        ends += choice.finish_reason == "stop"
    assert (texts, ends) == (["the tide turns"] * 3, 3)


def test_tools_called_by_several_choices_have_ids_of_their_own(gateway: Gateway, agent: FakeAgent) -> None:
    agent.then = "tools"
    answer = create(gateway, n=2, tools=[TOOL, TIME])
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 4


def test_log_probabilities_of_a_chat(gateway: Gateway) -> None:
    answer = create(gateway, logprobs=True, top_logprobs=2, seed=0)
    content = answer.choices[0].logprobs.content
    assert [each.token for each in content] == ["the ", "tide ", "turns"]
    assert bytes(byte for each in content for byte in each.bytes).decode() == answer.choices[0].message.content
    assert [top.token for top in content[0].top_logprobs] == ["w0", "w1"]
    assert content[0].logprob == -0.5
    streamed = []
    for chunk in create(gateway, logprobs=True, top_logprobs=2, seed=0, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == content
    assert create(gateway, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert create(gateway).choices[0].logprobs is None


def test_log_probabilities_of_a_completion(gateway: Gateway) -> None:
    answer = gateway.client.completions.create(model="tide", prompt="x", logprobs=1, seed=0)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens == ["the ", "tide ", "turns"]
    assert found.text_offset == [0, 4, 9]
    assert found.token_logprobs == [-0.5] * 3
    assert found.top_logprobs == [{"w0": -1.0}] * 3
    offsets: list[int] = []
    for chunk in gateway.client.completions.create(model="tide", prompt="x", logprobs=1, stream=True):
        if chunk.choices[0].logprobs is not None:
            offsets += chunk.choices[0].logprobs.text_offset or []
    assert offsets == [0, 4, 9]


def test_prompts_and_the_best_of_several_answers(gateway: Gateway, agent: FakeAgent) -> None:
    answer = gateway.client.completions.create(model="tide", prompt=["a", "b"], n=2, best_of=3, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.logprobs for choice in answer.choices} == {None}, "they were asked for by the gateway alone"
    assert_usage(answer.usage, 14, 18, 0, 0)
    assert sorted((asked.prompt, asked.sampling.logprobs) for asked in agent.asked) == [("a", 0)] * 3 + [("b", 0)] * 3
    best = gateway.client.completions.create(model="tide", prompt="a", best_of=4, logprobs=0, seed=7)
    assert best.choices[0].logprobs is not None
    assert best.choices[0].logprobs.token_logprobs is not None
    likeliest = max(-0.5 - (asked.sampling.seed or 0) % 7 for asked in agent.asked[6:])
    assert best.choices[0].logprobs.token_logprobs == [likeliest] * 3


def test_prompts_are_echoed(gateway: Gateway) -> None:
    answer = gateway.client.completions.create(model="tide", prompt=["a: ", "b: "], echo=True)
    assert [choice.text for choice in answer.choices] == ["a: the tide turns", "b: the tide turns"]
    texts = {0: "", 1: ""}
    for chunk in gateway.client.completions.create(model="tide", prompt=["a: ", "b: "], echo=True, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == ["a: the tide turns", "b: the tide turns"]


def test_token_prompts(gateway: Gateway, agent: FakeAgent) -> None:
    gateway.client.completions.create(model="tide", prompt=[[1, 2], [3]])
    assert sorted(asked.prompt_tokens or () for asked in agent.asked) == [(1, 2), (3,)]


def test_sampling_reaches_the_node(gateway: Gateway, agent: FakeAgent) -> None:
    extra = {"top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1, "min_tokens": 2, "cache_salt": "pepper"}
    create(gateway, frequency_penalty=0.5, presence_penalty=-0.5, logit_bias={"5": 1, "7": -100}, extra_body=extra)
    sampling = agent.asked[0].sampling
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.1)
    assert (sampling.top_k, sampling.min_p, sampling.min_tokens) == (40, 0.05, 2)
    assert sampling.logit_bias == ((5, 1.0), (7, -100.0))
    assert agent.asked[0].cache_salt


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, ("json_object", "")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
            ("json_schema", '{"type":"object"}'),
        ),
        ({"structured_outputs": {"json": '{"type": "array"}'}}, ("json_schema", '{"type":"array"}')),
        ({"structured_outputs": {"choice": ["a", "b"]}}, ("choice", '["a","b"]')),
        ({"structured_outputs": {"regex": "[a-z]+"}}, ("regex", "[a-z]+")),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, ("grammar", 'start: "a"')),
        ({"structured_outputs": {"json_object": True}}, ("json_object", "")),
        ({"guided_json": {"type": "object"}}, ("json_schema", '{"type":"object"}')),
        ({"guided_choice": ["a"]}, ("choice", '["a"]')),
    ],
)
def test_constraints_reach_the_node(gateway: Gateway, agent: FakeAgent, fields: Any, expected: Any) -> None:
    gateway.chat(**fields)
    asked = agent.asked[0].constraint
    assert asked is not None
    assert (asked.kind, asked.definition) == expected


def test_variables_of_the_template_reach_the_node(gateway: Gateway, agent: FakeAgent) -> None:
    gateway.chat(reasoning_effort="none", chat_template_kwargs={"style": "brief"})
    assert agent.asked[0].template == {"reasoning_effort": "none", "enable_thinking": False, "style": "brief"}


def test_several_choices_count_as_one_request(gateway: Gateway, agent: FakeAgent) -> None:
    create(gateway, n=3)
    metrics = gateway.state.metrics
    labels = ("tide", "IW-N")
    assert metrics.requests.labels(*labels, "us-east", "ok")._value.get() == 1
    assert metrics.input_tokens.labels(*labels)._value.get() == 7
    assert metrics.output_tokens.labels(*labels)._value.get() == 9
    assert math.isclose(sum(metrics.slo_requests.labels(*labels, kept)._value.get() for kept in ("true", "false")), 1)


def test_a_choice_that_fails_fails_the_request(world: World) -> None:
    agent = FakeAgent("answer", "too long", then="hang")
    with running_gateway(world, agent) as gateway:
        refused = gateway.chat(400, n=2).json()["error"]
        assert refused["code"] == "context_length_exceeded"
    agent = FakeAgent("answer", "too long", then="hang")
    with running_gateway(world, agent) as gateway:
        text = gateway.chat(n=2, stream=True).text
        assert '"context_length_exceeded"' in text
        assert "[DONE]" not in text
