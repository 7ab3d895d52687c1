"""Deleting parts of the fleet: what refuses it, what goes along, and what a race comes to."""

import threading
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select, update

from controlplane.errors import ConflictError, InUseError, NotFoundError
from controlplane.planner.scale import scale
from controlplane.policies.facts import Endpoint
from controlplane.policies.lifecycle import InstanceState
from controlplane.settings import Settings
from controlplane.store import removal
from controlplane.store.batch_tables import Batch, BatchModel, File
from controlplane.store.demand import IW, DemandRow, put_demand, read_demand
from controlplane.store.fleet import fleet_index
from controlplane.store.instances import desired_of, set_desired
from controlplane.store.keys import make_key, revoke_key
from controlplane.store.leases import lease_instance, return_lease
from controlplane.store.overrides import add_override, remove_override
from controlplane.store.tables import Desired, EndpointRow, GpuType, Instance, Model, Node, Profile, Region, Role
from tests.controlplane.world import MODEL, World, until

HERE = Endpoint(model=MODEL, region="us-east")


def drop_endpoints(world: World) -> None:
    with world.database.transaction() as session:
        for region in ("us-east", "us-west"):
            removal.delete_endpoint(session, model=MODEL, region=region)


def users(world: World, what: str, *arguments: str, **named: object) -> dict[str, tuple[int, tuple[str, ...]]]:
    """What refuses a deletion, by kind."""
    with world.database.transaction() as session, pytest.raises(InUseError) as refused:
        getattr(removal, f"delete_{what}")(session, *arguments, **named)
    assert refused.value.status == 409
    for use in refused.value.used_by:
        assert f"{use.count} x {use.kind} ({use.names[0]}" in refused.value.message
        assert use.then in refused.value.message
    return {use.kind: (use.count, use.names) for use in refused.value.used_by}


def open_batch(world: World) -> str:
    with world.database.transaction() as session:
        session.add(File(id="file-1", tenant="acme", filename="x", purpose="batch", bytes=1))
        session.flush()
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            tenant="acme",
            endpoint="/v1/chat/completions",
            completion_window="24h",
            state="in_progress",
            input_file_id="file-1",
            deadline_at=datetime.now(UTC) + timedelta(days=1),
        )
        session.add(batch)
        session.flush()
        session.add(BatchModel(batch_number=batch.number, model=MODEL, requests=3, tokens=9))
        return batch.id


def test_a_model_is_refused_while_endpoints_batches_or_keys_of_its_own_use_it(world: World) -> None:
    batch_id = open_batch(world)
    with world.database.transaction() as session:
        only = make_key(session, name="only", role=Role.CLIENT, tenant="a", models=[MODEL]).row.id
        make_key(session, name="both", role=Role.CLIENT, tenant="a", models=[MODEL, "other"])
        make_key(session, name="over", role=Role.CLIENT, tenant="a", models=[MODEL], lasts=timedelta(seconds=-1))
    assert users(world, "model", MODEL) == {
        "endpoint": (2, ("us-east", "us-west")),
        "open batch": (1, (batch_id,)),
        "key": (1, (only,)),
    }
    drop_endpoints(world)
    with world.database.transaction() as session:
        revoke_key(session, only)
        session.execute(update(Batch).values(ended_at=datetime.now(UTC), state="completed"))
    with world.database.transaction() as session:
        index = fleet_index(session)
        put_demand(session, [DemandRow(endpoint=HERE, kind=IW, start_s=60, tokens_per_s=5.0)])
        removal.delete_model(session, MODEL)
        assert fleet_index(session) > index, "plans made with it are stale"
    with world.database.transaction() as session:
        assert session.get(Model, MODEL) is None
        assert session.get(Profile, (MODEL, "H800")) is None
        assert read_demand(session, kind=IW, since_s=0, until_s=999, only=HERE)[HERE], "history stays"
        with pytest.raises(NotFoundError, match="is not registered"):
            removal.delete_model(session, MODEL)


def test_an_endpoint_is_refused_while_it_has_instances_leases_or_a_pin(world: World) -> None:
    world.join("n1")
    serving, spot = world.place("n1"), world.place("n1", desired=Desired.SPOT)
    world.place("n1", desired=Desired.STOPPED)
    with world.database.transaction() as session:
        session.get_one(Instance, spot).observed = InstanceState.SPOT
        lease_instance(session, spot, holder="lab", duration_s=600, created_by="x")
        tomorrow = datetime.now(UTC) + timedelta(days=1)
        override = add_override(session, endpoint=HERE, instances=1, until=tomorrow, note="", created_by="x").id
    assert users(world, "endpoint", model=MODEL, region="us-east") == {
        "instance": (1, (serving,)),
        "leased spot instance": (1, (spot,)),
        "pin": (1, (override,)),
    }
    with world.database.transaction() as session:
        remove_override(session, override)
        return_lease(session, spot)
        set_desired(session, [serving], Desired.STOPPED)
        generation = session.get_one(Node, "n1").generation
        removal.delete_endpoint(session, model=MODEL, region="us-east")
        session.expire_all()
        assert session.get_one(Node, "n1").generation > generation, "its node lets go of the donated instance"
        assert desired_of(session, "n1").instances == ()
        assert list(session.scalars(select(Instance.id))) == []


def test_regions_gpu_types_and_nodes(world: World) -> None:
    world.join("n1")
    assert users(world, "region", "us-east") == {"node": (1, ("n1",)), "endpoint": (1, (MODEL,))}
    assert users(world, "gpu_type", "H800") == {"node": (1, ("n1",))}
    instance = world.place("n1")
    assert users(world, "node", "n1", alive_s=0.0) == {"instance": (1, (instance,))}
    with world.database.transaction() as session:
        set_desired(session, [instance], Desired.STOPPED)
        made = make_key(session, name="n1", role=Role.NODE, tenant="a", node="n1").row
        other = make_key(session, name="n2", role=Role.NODE, tenant="a", node="n2").row
        with pytest.raises(ConflictError, match="stop its agent first"):
            removal.delete_node(session, "n1", alive_s=60.0)
        node, keys = removal.delete_node(session, "n1", alive_s=0.0)
        assert (node.name, [key.id for key in keys]) == ("n1", [made.id])
        assert made.revoked_at is not None, "an agent of that name needs a new key"
        assert other.revoked_at is None
    drop_endpoints(world)
    with world.database.transaction() as session:
        removal.delete_region(session, "us-east")
        removal.delete_gpu_type(session, "H800")
    with world.database.transaction() as session:
        assert (session.get(Region, "us-east"), session.get(GpuType, "H800")) == (None, None)
        assert session.get(Profile, (MODEL, "H800")) is None
        assert session.get(Model, MODEL) is not None


def test_the_foreign_key_refuses_what_the_look_did_not_see(world: World) -> None:
    """An endpoint is written past the fleet's lock while its model is deleted."""
    drop_endpoints(world)
    refused: list[str] = []

    def work() -> None:
        with world.database.transaction() as session, pytest.raises(InUseError) as error:
            removal.delete_model(session, MODEL)
        refused.append(error.value.message)

    deleting = threading.Thread(target=work)
    with world.database.transaction() as session:
        session.add(EndpointRow(model=MODEL, region="us-east", instances_min=0, instances_max=1))
        session.flush()
        deleting.start()
        until(world.is_waiting_for_a_lock)
    deleting.join()
    assert len(refused) == 1
    assert "1 x endpoint (us-east)" in refused[0]


def test_scaling_goes_on_under_a_plan_that_names_what_is_gone(world: World, settings: Settings) -> None:
    world.add_model("other", minimum=1)
    world.join("n1")
    world.report("n1", "none", region="us-east", url="http://127.0.0.1:9")
    pool = {"region": "us-east", "gpu_type": "H800", "before": 0, "after": 2}
    pooled = [{"model": MODEL, "occupancy": 0.2, "before": False, "reason": ""}]
    world.in_force([(MODEL, "us-east", 2), ("other", "us-east", 2)], pools=[pool | {"pooled": pooled}])
    drop_endpoints(world)
    with world.database.transaction() as session:
        removal.delete_model(session, MODEL)
    assert scale(world.database, world.live, settings, now_s=1000.0).started == 2
    with world.database.transaction() as session:
        assert {row.model for row in session.scalars(select(Instance))} == {"other"}


def test_scaling_goes_on_under_a_plan_whose_gpu_type_is_gone(world: World, settings: Settings) -> None:
    world.in_force([(MODEL, "us-east", 2)])
    with world.database.transaction() as session:
        removal.delete_gpu_type(session, "H800")
    assert scale(world.database, world.live, settings, now_s=1000.0).started == 0
