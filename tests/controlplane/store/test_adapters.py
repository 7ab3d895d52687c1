"""LoRA adapters as models: what they must share with their base, what nodes are told of them, and what they need."""

from typing import Any

import pytest

from controlplane.errors import ConflictError, InUseError, InvalidValueError, NotFoundError
from controlplane.policies.fit import AdapterSize, ModelSize
from controlplane.store import fleet
from controlplane.store.instances import desired_of
from controlplane.store.removal import delete_model
from controlplane.store.tables import Model
from controlplane.store.weights import sizes_of
from dataplane.protocol.messages import BaseModel
from tests.controlplane.world import World


def model(name: str, **changes: Any) -> Model:
    values: dict[str, Any] = {
        "name": name,
        "path": f"/{name}",
        "architecture": "Llama",
        "weights_bytes": 7,
        "kv_bytes_per_token": 512,
        "context_tokens": 4096,
        "task": "generate",
        "base": "tide",
    }
    return Model(**(values | changes))


def put(world: World, made: Model) -> None:
    with world.database.transaction() as session:
        fleet.put_model(session, made)


def test_a_node_is_told_of_an_adapter_with_its_base(world: World) -> None:
    world.add_model("a")
    put(world, model("a"))
    world.join("n1")
    ids = {world.place("n1", model=name): name for name in ("a", "tide")}
    with world.database.transaction() as session:
        told = {ids[one.instance_id]: one.model for one in desired_of(session, "n1").instances}
    assert told["a"].base == BaseModel(name="tide", path="/x", weights_bytes=1)
    assert (told["a"].path, told["a"].weights_bytes) == ("/a", 7)
    assert told["a"].checkpoint == told["tide"]
    assert told["tide"].base is None
    assert told["tide"].checkpoint is told["tide"]


def test_its_size_is_that_of_its_base_and_its_own(world: World) -> None:
    put(world, model("a", parameters=3))
    with world.database.transaction() as session:
        sizes = sizes_of(fleet.load_catalog(session).models.values())
    adapter = AdapterSize(base="tide", weights_bytes=7)
    assert sizes["a"] == ModelSize(weights_bytes=1, adapter=adapter)
    assert sizes["tide"] == ModelSize(weights_bytes=1)


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"context_tokens": 1}, "context_tokens", "context_tokens must be that of the base 'tide', 4096, not 1"),
        ({"kv_bytes_per_token": 1}, "kv_bytes_per_token", "must be that of the base 'tide', 512, not 1"),
        ({"architecture": "Qwen"}, "architecture", "must be that of the base 'tide', Llama, not Qwen"),
        ({"task": "embed"}, "task", "must be that of the base 'tide', generate, not embed"),
        ({"path": "hf://org/adapter"}, "path", "remote ones are not supported"),
        ({"base": "first"}, "base", "'first' is a LoRA adapter itself"),
        ({"name": "tide"}, "base", "'tide' is a LoRA adapter itself, or this model"),
    ],
)
def test_what_is_no_adapter_of_its_base_is_refused(
    world: World, changes: dict[str, Any], param: str, message: str
) -> None:
    put(world, model("first"))
    with pytest.raises(InvalidValueError, match=message) as caught:
        put(world, model(**{"name": "a", **changes}))
    assert caught.value.param == param


def test_a_base_that_is_not_registered_is_refused(world: World) -> None:
    with pytest.raises(NotFoundError, match="'ebb'"):
        put(world, model("a", base="ebb"))


def test_a_base_stays_what_its_adapters_need(world: World) -> None:
    world.add_model("a")
    put(world, model("a"))
    with pytest.raises(ConflictError, match="'a' is an adapter of 'tide' with its present context_tokens"):
        put(world, model("tide", path="/x", base=None, context_tokens=8))
    with pytest.raises(ConflictError, match="'a' is an adapter of 'tide' with its present task"):
        put(world, model("tide", path="/x", base=None, task="embed"))
    world.add_model("other")
    with pytest.raises(InvalidValueError, match="'tide' is the base of adapters"):
        put(world, model("tide", path="/x", base="other"))
    world.join("n1")
    world.place("n1", model="a")
    with pytest.raises(ConflictError, match="its adapter 'a' has live instances on /x"):
        put(world, model("tide", path="/moved", base=None, weights_bytes=1))
    with pytest.raises(ConflictError, match="'a' has live instances on base 'tide'"):
        put(world, model("a", base="other"))
    with pytest.raises(InUseError, match="adapter"), world.database.transaction() as session:
        delete_model(session, "tide")
