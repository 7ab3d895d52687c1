"""LoRA adapters as models: what they must share with their base, what nodes are told of them, and what they need."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from controlplane.errors import ConflictError, InUseError, InvalidValueError, NotFoundError
from controlplane.policies.fit import AdapterSize, ModelSize
from controlplane.store import fleet
from controlplane.store.adapters import served_bases
from controlplane.store.batch_ends import read_takers
from controlplane.store.instances import desired_of, set_desired
from controlplane.store.removal import delete_model
from controlplane.store.stored_view import stored_view
from controlplane.store.tables import Desired, Instance, Model, Node
from controlplane.store.weights import sizes_of
from dataplane.protocol.messages import BaseModel, DesiredInstance
from tests.controlplane.world import World, until


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


def wanted(world: World, node: str = "n1") -> dict[str, DesiredInstance]:
    """What a node shall host, by the model."""
    with world.database.transaction() as session:
        return {one.model.name: one for one in desired_of(session, node).instances}


def generation(world: World, node: str = "n1") -> int:
    with world.database.transaction() as session:
        return session.get_one(Node, node).generation


def test_the_instances_of_its_base_serve_an_adapter(world: World) -> None:
    for node in ("n1", "n2"):
        world.join(node)
    host = world.place("n1")
    before = generation(world), generation(world, "n2")
    put(world, model("a", with_base=True))
    assert (generation(world) - before[0], generation(world, "n2") - before[1]) == (1, 0), "whom it concerns"
    told = wanted(world)
    assert (told["a"].host, told["tide"].host, wanted(world, "n2")) == (host, None, {})
    assert told["a"].model.base == BaseModel(name="tide", path="/x", weights_bytes=1)
    assert (told["a"].gpus, told["a"].slot, told["a"].draining) == (told["tide"].gpus, told["tide"].slot, False)
    assert told["a"].instance_id.startswith(f"{host}+a@")
    with world.database.transaction() as session:
        assert served_bases(session) == {"a": "tide"}
        delete_model(session, "a")
    assert wanted(world).keys() == {"tide"}
    assert generation(world) == before[0] + 2
    put(world, model("a", with_base=True))
    anew = wanted(world)["a"].instance_id
    assert anew != told["a"].instance_id, "the former may still drain, and its numbers be others"
    put(world, model("a", with_base=True))
    assert wanted(world)["a"].instance_id == anew, "nothing has changed"


@pytest.mark.parametrize("desired", [Desired.DRAINING, Desired.SPOT])
def test_an_adapter_drains_with_its_host_and_is_not_lent_out(world: World, desired: Desired) -> None:
    world.join("n1")
    host = world.place("n1")
    put(world, model("a", with_base=True))
    with world.database.transaction() as session:
        set_desired(session, [host], desired)
    told = wanted(world)
    assert (told["a"].draining, told["a"].spot, told["a"].lease_id) == (True, False, None)
    assert told["tide"].spot == (desired == Desired.SPOT)


def test_a_gateway_that_starts_without_redis_tries_hosts(world: World) -> None:
    world.join("n1")
    host = world.place("n1")
    put(world, model("a", with_base=True))
    with world.database.transaction() as session:
        session.get_one(Instance, host).observed = "ready"
        (node,) = stored_view(session, heard_s=2**30).nodes.values()
    told = wanted(world)
    assert {(one.instance_id, one.model) for one in node.heartbeat.instances} == {
        (told[name].instance_id, name) for name in ("tide", "a")
    }


def test_what_an_adapter_with_its_base_cannot_have_is_refused(world: World) -> None:
    world.add_model("own")
    put(world, model("own"))
    with pytest.raises(ConflictError, match="'own' is offered by itself in us-east, us-west: delete these endpoints"):
        put(world, model("own", with_base=True))
    with pytest.raises(InvalidValueError, match="with_base: only a LoRA adapter"):
        put(world, model("tide", path="/x", weights_bytes=1, base=None, with_base=True))
    put(world, model("a", with_base=True))
    with (
        pytest.raises(ConflictError, match="'a' is served by the instances of 'tide', wherever that is offered"),
        world.database.transaction() as session,
    ):
        fleet.put_endpoint(session, model="a", region="us-east", minimum=0, maximum=1)
    put(world, model("a", path="/moved", with_base=True))
    world.join("n1")
    world.place("n1")
    with pytest.raises(ConflictError, match="'a' is served from /moved by live instances"):
        put(world, model("a", with_base=True))


def test_an_endpoint_waits_for_who_lets_the_base_serve_an_adapter(world: World) -> None:
    put(world, model("a"))

    def offer() -> None:
        with world.database.transaction() as session:
            fleet.put_endpoint(session, model="a", region="us-east", minimum=0, maximum=1)

    with ThreadPoolExecutor(1) as threads:
        with world.database.transaction() as session:
            fleet.put_model(session, model("a", with_base=True))
            offering = threads.submit(offer)
            until(world.is_waiting_for_a_lock)
        with pytest.raises(ConflictError, match="'a' is served by the instances of 'tide'"):
            offering.result()


def test_an_adapter_becomes_a_model_by_itself_again(world: World) -> None:
    world.join("n1")
    world.place("n1")
    put(world, model("a", with_base=True))
    put(world, model("a", with_base=False))
    assert wanted(world).keys() == {"tide"}
    with world.database.transaction() as session:
        fleet.put_endpoint(session, model="a", region="us-east", minimum=0, maximum=1)


def test_batches_for_an_adapter_run_on_the_instances_of_its_base(world: World) -> None:
    world.join("n1")
    host = world.place("n1")
    put(world, model("a", with_base=True))
    with world.database.transaction() as session:
        session.get_one(Instance, host).observed = "ready"
        session.flush()
        takers = read_takers(session, alive_s=2**30)
    assert takers["a"] == takers["tide"]
    assert takers["a"][0] == 1
