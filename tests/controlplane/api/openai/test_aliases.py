"""Aliases as clients see them: the model that answers is named, and a conversation keeps it."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import openai
import pytest

from controlplane.store.aliases import put_alias
from tests.controlplane.api.gateway import Gateway, running_gateway
from tests.controlplane.world import FakeAgent, World, served, until


@pytest.fixture
def gateway(world: World) -> Iterator[Gateway]:
    """A gateway, and an instance of tide and of tide-2 each on its own node."""
    world.add_model("tide-2")
    second = FakeAgent()
    with served(second.app) as url, running_gateway(world, FakeAgent()) as gateway:
        second.url = url
        world.serve("m0", url, model="tide-2")
        until(lambda: states(gateway) == {"tide": "ready", "tide-2": "ready"})
        yield gateway


def states(gateway: Gateway) -> dict[str, str]:
    return {model.id: (model.model_extra or {})["state"] for model in gateway.client.models.list()}


def put(gateway: Gateway, name: str, weights: Mapping[str, int]) -> None:
    with gateway.world.database.transaction() as session:
        put_alias(session, name, weights)
    until(lambda: gateway.state.fleet.aliases().get(name) == weights)


def asked(gateway: Gateway, model: str, text: str, **changes: Any) -> str:
    """The model that the answer to a first message names."""
    return str(gateway.chat(model=model, messages=[{"role": "user", "content": text}], **changes).json()["model"])


def test_the_answer_names_the_model_and_a_conversation_keeps_it(gateway: Gateway) -> None:
    put(gateway, "chat", {"tide": 1, "tide-2": 1})
    got = {text: asked(gateway, "chat", text) for text in (f"question {number}" for number in range(24))}
    assert set(got.values()) == {"tide", "tide-2"}
    first = {"role": "user", "content": "question 0"}
    later = [first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and then?"}]
    assert gateway.chat(model="chat", messages=later).json()["model"] == got["question 0"]
    keyed = {asked(gateway, "chat", f"question {n}", prompt_cache_key="one") for n in range(6)}
    assert len(keyed) == 1, "the client's name of the conversation decides"


def test_weights_decide_and_a_model_may_share_its_own_name(gateway: Gateway) -> None:
    assert asked(gateway, "tide", "a") == "tide"
    put(gateway, "tide", {"tide": 0, "tide-2": 1})
    assert {asked(gateway, "tide", f"{number}") for number in range(5)} == {"tide-2"}
    put(gateway, "tide", {"tide": 9, "tide-2": 1})
    counted = Counter(asked(gateway, "tide", f"{number}") for number in range(60))
    assert counted["tide"] > counted["tide-2"]


def test_a_model_without_an_instance_gets_nothing_while_another_has_one(gateway: Gateway) -> None:
    gateway.world.add_model("nowhere")
    put(gateway, "chat", {"tide": 1, "nowhere": 99})
    assert {asked(gateway, "chat", f"{number}") for number in range(5)} == {"tide"}
    put(gateway, "chat", {"nowhere": 1})
    gateway.chat(503, model="chat")


def test_every_endpoint_takes_an_alias(gateway: Gateway) -> None:
    put(gateway, "chat", {"tide-2": 1})
    client = gateway.client
    assert client.completions.create(model="chat", prompt="hi").model == "tide-2"
    assert client.responses.create(model="chat", input="hi").model == "tide-2"
    stream = client.chat.completions.create(model="chat", messages=[{"role": "user", "content": "a"}], stream=True)
    assert {chunk.model for chunk in stream} == {"tide-2"}
    message = {"model": "chat", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    assert gateway.http.post("/v1/messages", json=message).json()["model"] == "tide-2"
    assert gateway.http.post("/tokenize", json={"model": "chat", "prompt": "hi"}).status_code == 200
    metrics = gateway.http.get("/metrics", headers={}).text
    assert 'tidepool_alias_requests_total{alias="chat",model="tide-2"}' in metrics


def test_an_alias_is_listed_as_a_model(gateway: Gateway) -> None:
    put(gateway, "chat", {"tide": 1, "tide-2": 1})
    assert [model.id for model in gateway.client.models.list()] == ["chat", "tide", "tide-2"]
    assert (gateway.client.models.retrieve("chat").model_extra or {})["state"] == "ready"


def test_a_key_for_an_alias_needs_none_of_its_models(gateway: Gateway) -> None:
    put(gateway, "chat", {"tide-2": 1})
    only = gateway.client_of(gateway.world.key(models=["chat"]))
    assert [model.id for model in only.models.list()] == ["chat"]
    assert only.completions.create(model="chat", prompt="hi").model == "tide-2"
    for refused in ("tide", "tide-2"):
        with pytest.raises(openai.NotFoundError):
            only.completions.create(model=refused, prompt="hi")
    other = gateway.client_of(gateway.world.key(models=["tide-2"]))
    with pytest.raises(openai.NotFoundError):
        other.completions.create(model="chat", prompt="hi")
