"""`GET /v1/models`."""

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
