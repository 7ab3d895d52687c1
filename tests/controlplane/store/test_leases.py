"""Leases of spot instances: one at a time, with an end, and never of what is not spot."""

from datetime import timedelta
from functools import partial

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from controlplane.errors import ConflictError, NotFoundError
from controlplane.policies.lifecycle import InstanceState
from controlplane.store import fleet, leases
from controlplane.store.tables import Desired, Instance, InstanceLease
from tests.controlplane.world import World, at_once


@pytest.fixture
def instance_id(world: World) -> str:
    """A donated instance."""
    world.join("n1")
    held = world.place("n1", desired=Desired.SPOT)
    observed(world, held, InstanceState.SPOT)
    return held


def observed(world: World, instance_id: str, state: InstanceState) -> None:
    with world.database.transaction() as session:
        session.get_one(Instance, instance_id).observed = state


def lease(world: World, instance_id: str, *, holder: str = "lab", duration_s: float = 600) -> InstanceLease:
    with world.database.transaction() as session:
        return leases.lease_instance(session, instance_id, holder=holder, duration_s=duration_s, created_by="test")


def notice(world: World, *ids: str, notice_s: float = 30) -> list[InstanceLease]:
    with world.database.transaction() as session:
        return leases.give_notice(session, ids, notice_s=notice_s)


def ended(world: World, *, after_s: int = 0) -> list[tuple[str, str | None]]:
    """Which leases end when so much time has passed, and why."""
    with world.database.transaction() as session:
        for column in ("created_at", "expires_at", "reclaim_at"):
            session.execute(text(f"UPDATE spot_leases SET {column} = {column} - interval '{after_s} s'"))
        return [(each.node, each.lease.end_reason) for each in leases.end_due_leases(session)]


def test_a_lease_ends_when_its_time_is_over(world: World, instance_id: str) -> None:
    made = lease(world, instance_id, duration_s=600)
    assert made.expires_at - made.created_at == timedelta(seconds=600)
    assert ended(world, after_s=400) == []
    assert ended(world, after_s=200) == [("n1", "expired")]
    assert ended(world) == [], "once"


def test_notice_shortens_a_lease_and_is_given_once(world: World, instance_id: str) -> None:
    made = lease(world, instance_id, duration_s=600)
    (noticed,) = notice(world, instance_id, notice_s=300)
    assert noticed.reclaim_at is not None
    assert noticed.reclaim_at - made.created_at >= timedelta(seconds=300)
    assert notice(world, instance_id, notice_s=1) == [], "the promise of five minutes stands"
    assert ended(world, after_s=100) == []
    assert ended(world, after_s=200) == [("n1", "reclaimed")]
    assert notice(world, instance_id) == [], "nobody leases it any more"


def test_a_lease_that_ends_sooner_keeps_its_end(world: World, instance_id: str) -> None:
    made = lease(world, instance_id, duration_s=300)
    (noticed,) = notice(world, instance_id, notice_s=600)
    assert noticed.reclaim_at == made.expires_at
    assert ended(world, after_s=300) == [("n1", "expired")]


@pytest.mark.parametrize("desired", [Desired.RUNNING, Desired.DRAINING, Desired.STOPPED])
def test_what_is_not_spot_is_not_leased(world: World, instance_id: str, desired: Desired) -> None:
    other = world.place("n1", desired=desired)
    with pytest.raises(ConflictError, match=f"is {desired}, not spot"):
        lease(world, other)
    with pytest.raises(NotFoundError, match="does not exist"):
        lease(world, "inst_none")


def test_what_is_not_loaded_or_on_a_draining_node_is_not_leased(world: World, instance_id: str) -> None:
    observed(world, instance_id, InstanceState.LOADING)
    with pytest.raises(ConflictError, match="is loading on its node"):
        lease(world, instance_id)
    observed(world, instance_id, InstanceState.SPOT)
    with world.database.transaction() as session:
        fleet.set_node_draining(session, "n1", draining=True)
    with pytest.raises(ConflictError, match="'n1' is being drained"):
        lease(world, instance_id)


def test_one_lease_at_a_time(world: World, instance_id: str) -> None:
    lease(world, instance_id, holder="lab")
    with pytest.raises(ConflictError, match="is leased by 'lab' until 20"):
        lease(world, instance_id, holder="other")
    with pytest.raises(IntegrityError, match="uq_spot_leases_active"), world.database.transaction() as session:
        session.execute(
            text(
                "INSERT INTO spot_leases (id, instance_id, holder, created_by, expires_at)"
                f" VALUES ('l', '{instance_id}', 'x', 'x', now() + interval '1 h')"
            )
        )
    with world.database.transaction() as session:
        assert leases.return_lease(session, instance_id).end_reason == "returned"
    lease(world, instance_id, holder="other")


def test_of_many_at_once_one_gets_it(world: World, instance_id: str) -> None:
    ends = at_once(*[partial(lease, world, instance_id, holder=f"lab-{n}") for n in range(4)])
    assert ends.count("conflict") == 3


def test_returning_what_nobody_leases(world: World, instance_id: str) -> None:
    for name, message in ((instance_id, "nobody leases"), ("inst_none", "does not exist")):
        with world.database.transaction() as session, pytest.raises(NotFoundError, match=message):
            leases.return_lease(session, name)


def test_leases_of_a_node_are_its_own(world: World, instance_id: str) -> None:
    made = lease(world, instance_id)
    with world.database.transaction() as session:
        assert {i: each.id for i, each in leases.active_leases(session, node="n1").items()} == {instance_id: made.id}
        assert leases.active_leases(session, node="n2") == {}
        assert set(leases.active_leases(session)) == {instance_id}


@pytest.mark.parametrize(
    "change",
    ["desired = 'running'", "spot_at = NULL", "donate = true", "kind = 'both'"],
)
def test_a_spot_instance_is_whole(world: World, instance_id: str, change: str) -> None:
    with pytest.raises(IntegrityError, match="ck_instances_"), world.database.transaction() as session:
        session.execute(text(f"UPDATE instances SET {change}"))
