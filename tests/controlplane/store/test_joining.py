"""Nodes that join and come back: what changes, what is refused, and what becomes of the instances they held."""

from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from controlplane.errors import ConflictError, NotFoundError
from controlplane.store.fleet import fleet_index, put_gpu_type
from controlplane.store.instances import add_instance, desired_of, instances_of, set_desired
from controlplane.store.joining import join_node
from controlplane.store.leases import lease_instance
from controlplane.store.tables import Desired, Instance, InstanceLease, LeaseEnd, Node, Slot
from dataplane.protocol.joining import Join, SlotSpec
from tests.controlplane.world import World

Size = int | tuple[int, int]
"""GPUs of a slot of one worker, or GPUs and workers."""


def over_hosts(gpus: int) -> tuple[SlotSpec, ...]:
    return (SlotSpec(gpus=gpus, memory_bytes=100 * gpus, hosts=2),)


def spec(size: Size) -> SlotSpec:
    gpus, workers = size if isinstance(size, tuple) else (size, 1)
    return SlotSpec(gpus=gpus, memory_bytes=100 * gpus, workers=workers, hosts=1)


def join(world: World, *sizes: Size, **changes: Any) -> tuple[int, tuple[str, ...]]:
    """Join node n1 with such slots; the fleet's index after it, and the instances that were lost by it."""
    values: dict[str, Any] = {
        "node": "n1",
        "region": "us-east",
        "gpu_type": "H800",
        "url": "http://n1",
        "slots": tuple(spec(size) for size in sizes),
        "engine": "replay",
    }
    with world.database.transaction() as session:
        lost = join_node(session, Join(**(values | changes))).lost
        return fleet_index(session), lost


def slots(world: World) -> list[tuple[int, int, int]]:
    with world.database.transaction() as session:
        rows = session.scalars(select(Slot).where(Slot.node == "n1").order_by(Slot.index))
        return [(slot.index, slot.gpus, slot.workers) for slot in rows]


def place(world: World, slot: int, gpus: int = 1) -> str:
    """An instance on a slot of n1; 0 GPUs: a pooled one."""
    with world.database.transaction() as session:
        return add_instance(
            session, model="tide", region="us-east", gpu_type="H800", node="n1", slot=slot, gpus=gpus
        ).id


def live(world: World) -> set[str]:
    with world.database.transaction() as session:
        return {instance.id for instance in instances_of(session, "n1")}


def test_joining_again(world: World) -> None:
    index, _ = join(world, 2, 2)
    assert join(world, 2, 2)[0] == index, "nothing new"
    assert join(world, 2, 2, url="http://elsewhere")[0] == index + 1
    assert join(world, 4, 2, 1, url="http://elsewhere")[0] == index + 2
    assert slots(world) == [(0, 4, 1), (1, 2, 1), (2, 1, 1)]
    assert join(world, 4, url="http://elsewhere")[0] == index + 3
    assert slots(world) == [(0, 4, 1)]
    assert join(world, 4, url="http://elsewhere")[0] == index + 3
    assert join(world, (4, 4), url="http://elsewhere")[0] == index + 4, "they serve together now"
    assert slots(world) == [(0, 4, 4)]
    assert join(world, (4, 4), url="http://elsewhere", host_bytes=9)[0] == index + 5, "plans size pools by it"
    assert join(world, (4, 4), url="http://elsewhere", host_bytes=9)[0] == index + 5


def test_a_node_that_comes_back_with_fewer_slots_loses_what_stood_on_the_others(world: World) -> None:
    """As one whose slots were known one by one, and that has learnt to say that they serve together."""
    join(world, 1, 1, 1, 1)
    here, pooled_here = place(world, 0), place(world, 0, gpus=0)
    gone, pooled_gone = place(world, 1), place(world, 3, gpus=0)
    assert join(world, (4, 4))[1] == (gone, pooled_gone)
    assert slots(world) == [(0, 4, 4)]
    assert live(world) == {here, pooled_here}
    with world.database.transaction() as session:
        node, wanted = session.get_one(Node, "n1"), desired_of(session, "n1")
        assert {one.instance_id for one in wanted.instances} == {here, pooled_here}
        assert node.generation == wanted.generation > 0, "the node is told"


@pytest.mark.parametrize(
    ("before", "held", "after", "kept"),
    [
        ((4,), (2, 1, 1), (3,), 2),  # the newest has no place
        ((4,), (2, 2), (3,), 1),
        ((4,), (2, 1), ((4, 4),), 1),  # no worker has two GPUs
        ((4,), (1, 1, 1, 1), ((4, 2),), 4),
        ((4,), (0, 4), (1,), 1),  # a pooled one takes turns on what there is
        ((4,), (4,), (8,), 1),
    ],
)
def test_a_slot_that_changes_keeps_what_fits(
    world: World, before: tuple[Size, ...], held: tuple[int, ...], after: tuple[Size, ...], kept: int
) -> None:
    join(world, *before)
    ids = [place(world, 0, gpus) for gpus in held]
    slot = spec(after[0])
    fits = [name for name, gpus in zip(ids, held, strict=True) if gpus <= slot.gpus // slot.workers][:kept]
    assert set(join(world, *after)[1]) == set(ids) - set(fits)
    assert live(world) == set(fits)
    assert len(fits) == kept


def test_what_is_lost_is_stopped_with_its_lease(world: World) -> None:
    join(world, 2)
    name = place(world, 0, 2)
    with world.database.transaction() as session:
        session.get_one(Instance, name).observed = "spot"
        set_desired(session, [name], Desired.SPOT)
        session.flush()
        lease_instance(session, name, holder="them", created_by="me", duration_s=60)
    assert join(world, 1)[1] == (name,)
    with world.database.transaction() as session:
        instance, lease = session.get_one(Instance, name), session.scalars(select(InstanceLease)).one()
        assert (instance.desired, instance.observed, instance.spot_at) == (Desired.STOPPED, "stopped", None)
        assert (lease.end_reason, lease.ended_at is None) == (LeaseEnd.LOST, False)


def test_a_node_with_instances_stays_in_its_region(world: World) -> None:
    join(world, 2, 2)
    place(world, 1)
    with world.database.transaction() as session:
        put_gpu_type(session, name="A100", memory_bytes=80 << 30, cost_per_hour=1.0)
    for changes in ({"region": "us-west"}, {"gpu_type": "A100"}):
        with pytest.raises(ConflictError, match="drain it before it joins"):
            join(world, 2, 2, **changes)
    with world.database.transaction() as session:
        set_desired(session, [i.id for i in session.scalars(select(Instance))], Desired.STOPPED)
    join(world, 1, region="us-west")
    assert slots(world) == [(0, 1, 1)], "what is over is gone with its slot"


def test_joining_where_nothing_is(world: World) -> None:
    for changes in ({"region": "mars"}, {"gpu_type": "TPU"}):
        with pytest.raises(NotFoundError) as caught:
            join(world, 1, **changes)
        assert caught.value.param in changes


@pytest.mark.parametrize("workers", [0, 3])
def test_workers_share_the_gpus_equally(world: World, workers: int) -> None:
    join(world, 4)
    with pytest.raises(IntegrityError, match="workers_share_gpus"), world.database.transaction() as session:
        session.add(Slot(node="n1", index=1, gpus=4, workers=workers, memory_bytes=100))


def test_slots_of_several_hosts_have_a_gpu_type_of_their_own(world: World) -> None:
    refused = "slots of several hosts need a GPU type of their own, on which all have as many GPUs: 'H800' has other"
    join(world, 1)
    with pytest.raises(ConflictError, match=f"{refused} slots on node 'n1'"):
        join(world, node="n2", slots=over_hosts(4))
    join(world, slots=over_hosts(4))
    with world.database.transaction() as session:
        assert session.scalars(select(Slot.hosts)).all() == [2]
    join(world, node="n2", slots=over_hosts(4))
    for slots in (over_hosts(8), (spec(1),), (*over_hosts(4), spec(1))):
        with pytest.raises(ConflictError, match=refused):
            join(world, node="n3", slots=slots)


def test_slots_of_older_agents_refuse_nobody_and_are_refused_by_nobody(world: World) -> None:
    """They do not say of how many hosts they are: two nodes with slots of two hosts are upgraded one by one."""
    older = (SlotSpec(gpus=4, memory_bytes=400),)
    for node in ("n1", "n2"):
        join(world, node=node, slots=older)
    join(world, slots=over_hosts(4))
    join(world, node="n2", slots=older, url="http://another")
    join(world, node="n2", slots=over_hosts(4))
    with world.database.transaction() as session:
        assert session.scalars(select(Slot.hosts)).all() == [2, 2]


def test_a_slot_that_gets_several_hosts_keeps_instances_of_its_size_alone(world: World) -> None:
    join(world, 4, 4)
    whole, part = place(world, 0, 4), place(world, 1, 2)
    assert join(world, slots=over_hosts(4) * 2)[1] == (part,)
    assert live(world) == {whole}
