"""`GET /v1/models`."""

from typing import Any

import openai
import pytest

from tests.controlplane.api.gateway import running_gateway
from tests.controlplane.world import FakeAgent, World, until


def test_models(world: World) -> None:
    world.add_model("org/llama")
    with running_gateway(world) as gateway:
        assert [model.id for model in gateway.client.models.list()] == ["org/llama", "tide"]
        assert gateway.client.models.retrieve("org/llama").owned_by == "tidepool"
        with pytest.raises(openai.NotFoundError) as caught:
            gateway.client.models.retrieve("nobody")
        assert caught.value.code == "model_not_found"
        world.add_model("new")
        assert gateway.client.models.retrieve("new").id == "new", "a name not seen yet is looked up"
        until(lambda: "new" in {model.id for model in gateway.client.models.list()})


USER = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models/nope", None),
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": USER}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
def test_a_name_that_the_key_is_not_for_is_never_looked_up(
    world: World, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any] | None
) -> None:
    """How long a look-up takes would tell which models there are."""
    with running_gateway(world, secret=world.key(models=["only-this"])) as gateway:
        asked: list[str] = []

        async def look(name: str, *_: Any) -> Any:
            asked.append(name)

        monkeypatch.setattr(gateway.state.fleet, "asked", look)
        sent = gateway.http.get(path) if body is None else gateway.http.post(path, json=body | {"model": "nope"})
        assert (sent.status_code, "The model 'nope' does not exist." in sent.text, asked) == (404, True, [])


def test_what_is_said_of_a_model(world: World) -> None:
    world.add_model("nowhere")
    with running_gateway(world, FakeAgent()) as gateway:
        until(lambda: gateway.client.models.retrieve("tide").model_extra["state"] == "ready")  # type: ignore[index]
        said = {model.id: model.model_extra or {} for model in gateway.client.models.list()}
        assert said["nowhere"]["state"] == "none"
        assert said["tide"] == {
            "task": "generate",
            "modalities": {"input": ["text"], "output": ["text"]},
            "context_tokens": 4096,
            "max_model_len": 4096,
            "state": "ready",
        }
