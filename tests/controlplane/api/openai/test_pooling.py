"""Embeddings, scores and ranks, as the official client and clients of vLLM see them."""

import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from controlplane.serving.fan_out import POOLED_AT_ONCE
from dataplane.protocol.messages import Generate, Task
from tests.controlplane.api.gateway import Gateway, assert_error, running_gateway
from tests.controlplane.world import MODEL, FakeAgent, World

VECTORS = {"east": (1.0, 0.0), "west": (-1.0, 0.0), "north": (0.0, 1.0), "north-east": (0.5, 0.5), "": (3.0, 4.0)}
SCORES = {"rain": 0.25, "sun": 0.75, "snow": 0.5}


def vector(generate: Generate) -> tuple[float, ...]:
    return VECTORS.get(generate.prompt or "", (3.0, 4.0))


def pair_score(generate: Generate) -> tuple[float, ...]:
    assert generate.messages is not None
    assert [message.role for message in generate.messages] == ["query", "document"]
    return (SCORES[generate.messages[1].content],)


@pytest.fixture
def agents() -> list[FakeAgent]:
    return [FakeAgent(), FakeAgent()]


def started(world: World, agents: list[FakeAgent], task: Task, **changes: Any) -> Any:
    world.add_model(MODEL, task=task)
    for agent in agents:
        agent.pooled = vector if task == "embed" else pair_score
    return running_gateway(world, *agents, **changes)


@pytest.fixture
def gateway(world: World, agents: list[FakeAgent]) -> Iterator[Gateway]:
    """Before two instances of a model that embeds."""
    with started(world, agents, "embed") as gateway:
        yield gateway


@pytest.fixture
def scoring(world: World, agents: list[FakeAgent]) -> Iterator[Gateway]:
    """Before two instances of a model with a head."""
    with started(world, agents, "score") as gateway:
        yield gateway


def asked(agents: list[FakeAgent]) -> list[Generate]:
    return [generate for agent in agents for generate in agent.asked]


def post(gateway: Gateway, path: str, status: int = 200, **body: Any) -> Any:
    answer = gateway.http.post(path, json={"model": MODEL, **body})
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else assert_error(answer)


def test_the_official_client_gets_one_embedding_in_either_encoding(gateway: Gateway, agents: list[FakeAgent]) -> None:
    made = gateway.client.embeddings.create(model=MODEL, input="north")  # it asks for base64 and decodes that
    assert (made.object, made.model, made.data[0].object, made.data[0].index) == ("list", MODEL, "embedding", 0)
    assert made.data[0].embedding == [0.0, 1.0]
    assert (made.usage.prompt_tokens, made.usage.total_tokens) == (7, 7)
    plain = gateway.client.embeddings.create(model=MODEL, input="north", encoding_format="float")
    assert plain.data[0].embedding == [0.0, 1.0]
    message = asked(agents)[0]
    assert (message.prompt, message.pooling, message.dimensions, message.tier) == ("north", True, None, "IW-N")


def test_many_inputs_keep_their_order_and_run_a_few_at_a_time(gateway: Gateway, agents: list[FakeAgent]) -> None:
    names = list(VECTORS)[:4] * 30
    made = gateway.client.embeddings.create(model=MODEL, input=names, dimensions=2)
    assert [each.index for each in made.data] == list(range(len(names)))
    assert [tuple(each.embedding) for each in made.data] == [VECTORS[name] for name in names]
    assert made.usage.total_tokens == 7 * len(names)
    assert {message.dimensions for message in asked(agents)} == {2}
    assert len(names) > POOLED_AT_ONCE


def test_tokens_are_passed_on(gateway: Gateway, agents: list[FakeAgent]) -> None:
    assert len(gateway.client.embeddings.create(model=MODEL, input=[5, 6]).data) == 1
    assert len(gateway.client.embeddings.create(model=MODEL, input=[[5, 6], [7]]).data) == 2
    assert sorted(message.prompt_tokens or () for message in asked(agents)) == [(5, 6), (5, 6), (7,)]


def test_an_input_whose_node_fails_goes_elsewhere(world: World) -> None:
    agents = [FakeAgent("worker lost", "die", "no finish"), FakeAgent()]
    with started(world, agents, "embed", request_attempts_max=3) as gateway:
        made = gateway.client.embeddings.create(model=MODEL, input=["east", "west", "north"])
        assert [tuple(each.embedding) for each in made.data] == [VECTORS[name] for name in ("east", "west", "north")]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": ""}, "input.0"),
    ({"input": []}, "input"),
    ({"input": ["a", ""]}, "input.1"),
    ({"input": [[]]}, "input.0"),
    ({"input": [-1]}, "input.0.0"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": 5}, "input"),
    ({"input": ["a", 5]}, "input.1"),
    ({"input": {"a": 1}}, "input"),
    ({}, "input"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "stream": True}, "stream"),
]


def test_what_is_wrong_is_named(gateway: Gateway) -> None:
    for body, param in WRONG:
        assert post(gateway, "/v1/embeddings", 400, **body)["param"] == param, body


def test_a_nodes_refusal_names_the_input(world: World) -> None:
    agents = [FakeAgent(then="too long prompt")]
    with started(world, agents, "embed") as gateway:
        for given, param in (("a", "input"), (["a", "b"], "input.0")):
            with pytest.raises(openai.BadRequestError) as caught:
                gateway.client.embeddings.create(model=MODEL, input=given)
            assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)


def test_a_nodes_refusal_names_the_field_of_text_too(world: World) -> None:
    with started(world, [FakeAgent(then="too long prompt")], "generate") as gateway:
        for path, field, given, param in (
            ("/v1/completions", "prompt", "a", "prompt"),
            ("/v1/completions", "prompt", [5], "prompt"),
            ("/v1/completions", "prompt", ["a", "b"], "prompt.0"),
            ("/v1/responses", "input", "a", "input"),
        ):
            error = post(gateway, path, 400, **{field: given})
            assert (error["code"], error["param"]) == ("context_length_exceeded", param), given


def test_a_model_answers_with_what_it_is_for(gateway: Gateway, world: World) -> None:
    refused = gateway.chat(400).json()["error"]
    assert (refused["code"], refused["param"]) == ("model_not_supported", "model")
    assert "answers with embeddings, not with text" in refused["message"]
    world.add_model("writer")
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ):
        error = post(gateway, path, 400, **body, model="writer")
        assert (error["code"], error["param"]) == ("model_not_supported", "model")


def test_a_model_with_a_head_has_no_embeddings(scoring: Gateway) -> None:
    with pytest.raises(openai.BadRequestError, match="answers with scores, not with embeddings"):
        scoring.client.embeddings.create(model=MODEL, input="a")


def test_scores_of_embeddings_are_cosines_and_each_text_is_embedded_once(
    gateway: Gateway, agents: list[FakeAgent]
) -> None:
    one = post(gateway, "/v1/score", text_1="east", text_2=["west", "north", "north-east", "west"])
    assert [each["score"] for each in one["data"]] == pytest.approx([-1, 0, math.sqrt(0.5), -1])
    assert [(each["index"], each["object"]) for each in one["data"]] == [(n, "score") for n in range(4)]
    assert (one["object"], one["model"], one["usage"]) == ("list", MODEL, {"prompt_tokens": 28, "total_tokens": 28})
    assert sorted(message.prompt or "" for message in asked(agents)) == ["east", "north", "north-east", "west"]
    several = post(gateway, "/v1/score", text_1=["east", "north"], text_2=["east", "west"])
    assert [each["score"] for each in several["data"]] == pytest.approx([1, 0])


def test_scores_of_a_head_are_its_own(scoring: Gateway, agents: list[FakeAgent]) -> None:
    made = post(scoring, "/v1/score", text_1="weather", text_2=["rain", "sun"])
    assert [each["score"] for each in made["data"]] == [0.25, 0.75]
    assert {message.messages[0].content for message in asked(agents) if message.messages} == {"weather"}
    long, many = "a" * 34_000, ["b"] * 1000
    for path, field, body in (
        ("/v1/score", "text_1", {"text_1": long, "text_2": many}),
        ("/v1/rerank", "query", {"query": long, "documents": many}),
    ):
        assert post(scoring, path, 400, **body)["param"] == field, "it would be sent with each of the others"
    refused = post(scoring, "/v1/score", 400, text_1=["a", "b"], text_2=["c"])
    assert refused["param"] == "text_1"
    assert "one text or as many as text_2 has" in refused["message"]


@pytest.mark.parametrize("task", ["embed", "score"])
def test_documents_are_ranked(task: Task, world: World, agents: list[FakeAgent]) -> None:
    query, documents, best = ("east", ["west", "north", "north-east"], 2)
    if task == "score":
        query, documents, best = ("weather", ["rain", "sun", "snow"], 1)
    with started(world, agents, task) as gateway:
        ranked = post(gateway, "/v1/rerank", query=query, documents=documents)
        order = [each["index"] for each in ranked["results"]]
        assert (order[0], order[-1]) == (best, 0)
        scores = [each["relevance_score"] for each in ranked["results"]]
        assert scores == sorted(scores, reverse=True)
        assert [each["document"]["text"] for each in ranked["results"]] == [documents[index] for index in order]
        assert ranked["usage"]["total_tokens"] == 7 * (4 if task == "embed" else 3)
        mixed = [documents[0], {"text": documents[1], "title": "x"}, documents[2]]
        top = post(gateway, "/v1/rerank", query=query, documents=mixed, top_n=1, return_documents=False)
        assert [set(each) for each in top["results"]] == [{"index", "relevance_score"}]
        assert top["results"][0]["index"] == best
        assert post(gateway, "/v1/rerank", 400, query="", documents=documents)["param"] == "query"
        assert post(gateway, "/v1/rerank", 400, query="a", documents=[])["param"] == "documents"
