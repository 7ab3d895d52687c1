"""The fleet's rows, and an index that rises with changes only."""

from typing import Any

import pytest

from controlplane.errors import ConflictError, InvalidValueError
from controlplane.store import fleet
from controlplane.store.joining import join_node
from controlplane.store.tables import Model, Profile
from dataplane.protocol.joining import Join, SlotSpec
from tests.controlplane.world import World


def join(world: World) -> int:
    """Join node n1; the fleet's index after it."""
    said = Join(
        node="n1",
        region="us-east",
        gpu_type="H800",
        url="http://n1",
        slots=(SlotSpec(gpus=1, memory_bytes=100),),
        engine="replay",
    )
    with world.database.transaction() as session:
        join_node(session, said)
        return fleet.fleet_index(session)


def test_the_index_rises_with_changes_only(world: World) -> None:
    def model(**changes: Any) -> Model:
        values: dict[str, Any] = {
            "name": "tide",
            "path": "/x",
            "architecture": "Llama",
            "weights_bytes": 1,
            "kv_bytes_per_token": 512,
            "context_tokens": 4096,
        }
        return Model(**(values | changes))

    def profile(tokens_per_s: float) -> Profile:
        return Profile(model="tide", gpu_type="H800", tokens_per_s=tokens_per_s, gpus=1, load_time_s=30.0)

    calls: list[tuple[Any, Any]] = [
        (
            lambda s: fleet.put_region(s, name="us-east", position=None),
            lambda s: fleet.put_region(s, name="us-east", position=7),
        ),
        (
            lambda s: fleet.put_region(s, name="us-east", position=7),
            lambda s: fleet.put_region(s, name="new", position=None),
        ),
        (
            lambda s: fleet.put_gpu_type(s, name="H800", memory_bytes=80 << 30, cost_per_hour=2.0),
            lambda s: fleet.put_gpu_type(s, name="H800", memory_bytes=80 << 30, cost_per_hour=3.0),
        ),
        (lambda s: fleet.put_model(s, model()), lambda s: fleet.put_model(s, model(path="/y"))),
        (lambda s: fleet.put_profile(s, profile(1000.0)), lambda s: fleet.put_profile(s, profile(1001.0))),
        (
            lambda s: fleet.put_endpoint(s, model="tide", region="us-east", minimum=0, maximum=4),
            lambda s: fleet.put_endpoint(s, model="tide", region="us-east", minimum=0, maximum=5),
        ),
        (
            lambda s: fleet.set_node_draining(s, "n1", draining=False),
            lambda s: fleet.set_node_draining(s, "n1", draining=True),
        ),
    ]
    index = join(world)
    for number, (same, other) in enumerate(calls):
        for call, risen in ((same, 0), (other, 1), (other, 0)):
            with world.database.transaction() as session:
                call(session)
            with world.database.transaction() as session:
                assert fleet.fleet_index(session) == index + risen, number
            index += risen


def test_a_model_with_live_instances_keeps_its_path(world: World) -> None:
    join(world)
    world.place("n1")
    moved = Model(name="tide", path="/y", architecture="L", weights_bytes=1, kv_bytes_per_token=1, context_tokens=9)
    with pytest.raises(ConflictError), world.database.transaction() as session:
        fleet.put_model(session, moved)


def test_limits_of_an_endpoint(world: World) -> None:
    with pytest.raises(InvalidValueError) as caught, world.database.transaction() as session:
        fleet.put_endpoint(session, model="tide", region="us-east", minimum=3, maximum=2)
    assert caught.value.param == "instances_min"


def test_regions_are_in_order(world: World) -> None:
    with world.database.transaction() as session:
        fleet.put_region(session, name="a-new-one", position=None)
        fleet.put_region(session, name="us-east", position=9)
    with world.database.transaction() as session:
        assert fleet.load_catalog(session).regions == ("us-west", "a-new-one", "us-east")
