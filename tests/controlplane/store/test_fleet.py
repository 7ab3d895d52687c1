"""The fleet's rows: joining again, shapes that are refused, and an index that rises with changes only."""

from typing import Any

import pytest
from sqlalchemy import select

from controlplane.errors import ConflictError, InvalidValueError, NotFoundError
from controlplane.store import fleet
from controlplane.store.instances import add_instance, set_desired
from controlplane.store.tables import Desired, Instance, Model, Profile, Slot
from dataplane.messages import Join, SlotSpec
from tests.controlplane.world import World


def join(world: World, *gpus: int, **changes: Any) -> int:
    """Join node n1 with slots of so many GPUs; the fleet's index after it."""
    values: dict[str, Any] = {
        "node": "n1",
        "region": "us-east",
        "gpu_type": "H800",
        "url": "http://n1",
        "slots": tuple(SlotSpec(gpus=each, memory_bytes=100) for each in gpus),
        "engine": "replay",
    }
    with world.database.transaction() as session:
        fleet.join_node(session, Join(**(values | changes)))
        return fleet.fleet_index(session)


def slots(world: World) -> list[tuple[int, int]]:
    with world.database.transaction() as session:
        return [(slot.index, slot.gpus) for slot in session.scalars(select(Slot).order_by(Slot.index))]


def test_joining_again(world: World) -> None:
    index = join(world, 2, 2)
    assert join(world, 2, 2) == index, "nothing new"
    assert join(world, 2, 2, url="http://elsewhere") == index + 1
    assert join(world, 4, 2, 1, url="http://elsewhere") == index + 2
    assert slots(world) == [(0, 4), (1, 2), (2, 1)]
    assert join(world, 4, url="http://elsewhere") == index + 3
    assert slots(world) == [(0, 4)]
    assert join(world, 4, url="http://elsewhere") == index + 3
    assert join(world, 4, url="http://elsewhere", host_bytes=9) == index + 4, "plans size pools by it"
    assert join(world, 4, url="http://elsewhere", host_bytes=9) == index + 4


def test_a_slot_with_pooled_instances_stays(world: World) -> None:
    join(world, 2, 2)
    with world.database.transaction() as session:
        add_instance(session, model="tide", region="us-east", gpu_type="H800", node="n1", slot=1, gpus=0)
    with pytest.raises(ConflictError):
        join(world, 2)
    join(world, 2, 1)


def test_slots_with_live_instances_keep_their_size(world: World) -> None:
    join(world, 2, 2)
    for _ in range(2):
        held = world.place("n1", slot=1)
    refused: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        ((2,), {}),
        ((2, 1), {}),
        ((2, 2), {"region": "us-west"}),
    ]
    for gpus, changes in refused:
        with pytest.raises(ConflictError):
            join(world, *gpus, **changes)
    assert slots(world) == [(0, 2), (1, 2)]
    join(world, 1, 2)
    with world.database.transaction() as session:
        set_desired(session, [i.id for i in session.scalars(select(Instance))], Desired.STOPPED)
    index = join(world, 1)
    assert slots(world) == [(0, 1)], f"{held} is over, and its slot is gone"
    assert join(world, 1) == index


def test_joining_where_nothing_is(world: World) -> None:
    for changes in ({"region": "mars"}, {"gpu_type": "TPU"}):
        with pytest.raises(NotFoundError) as caught:
            join(world, 1, **changes)
        assert caught.value.param in changes


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
    index = join(world, 1)
    for number, (same, other) in enumerate(calls):
        for call, risen in ((same, 0), (other, 1), (other, 0)):
            with world.database.transaction() as session:
                call(session)
            with world.database.transaction() as session:
                assert fleet.fleet_index(session) == index + risen, number
            index += risen


def test_a_model_with_live_instances_keeps_its_path(world: World) -> None:
    join(world, 1)
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
