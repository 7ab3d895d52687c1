"""Pins: one live one for each endpoint, with an end, and plans made without it are stale."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from controlplane.errors import ConflictError, NotFoundError
from controlplane.policies.facts import Endpoint
from controlplane.store.fleet import fleet_index
from controlplane.store.overrides import add_override, get_override, list_overrides, overrides_in_force, remove_override
from tests.controlplane.world import World, at_once

EAST = Endpoint(model="tide", region="us-east")
NOW = datetime.now(UTC)


def override(world: World, endpoint: Endpoint = EAST, *, instances: int = 3, hours: float = 2.0) -> str:
    with world.database.transaction() as session:
        until = NOW + timedelta(hours=hours)
        row = add_override(
            session, endpoint=endpoint, instances=instances, until=until, note="launch", created_by="ann"
        )
        return row.id


def in_force(world: World, hours: float = 0.0) -> dict[Endpoint, int]:
    with world.database.transaction() as session:
        return dict(overrides_in_force(session, NOW.timestamp() + 3600 * hours))


def index_of(world: World) -> int:
    with world.database.transaction() as session:
        return fleet_index(session)


def test_a_pin_holds_until_its_end(world: World) -> None:
    index = index_of(world)
    override(world)
    assert index_of(world) == index + 1, "a plan made without it is stale"
    assert in_force(world) == {EAST: 3}
    assert in_force(world, hours=1.99) == {EAST: 3}
    assert in_force(world, hours=2.0) == {}


def test_a_pin_that_is_removed_is_no_more_but_kept_on_record(world: World) -> None:
    pin_id = override(world)
    index = index_of(world)
    for _ in range(2):
        with world.database.transaction() as session:
            assert remove_override(session, pin_id).removed_at is not None
    assert index_of(world) == index + 1
    assert in_force(world) == {}
    with world.database.transaction() as session:
        assert list_overrides(session, after=None, limit=10, live_only=True).rows == []
        assert [row.id for row in list_overrides(session, after=None, limit=10, live_only=False).rows] == [pin_id]
        assert get_override(session, pin_id).note == "launch"
        with pytest.raises(NotFoundError):
            remove_override(session, "pin_none")


def test_one_live_pin_for_each_endpoint(world: World) -> None:
    first = override(world)
    with pytest.raises(ConflictError, match="pinned to 3 instances until"):
        override(world, instances=5)
    override(world, Endpoint(model="tide", region="us-west"), instances=0)
    with pytest.raises(NotFoundError):
        override(world, Endpoint(model="tide", region="mars"))
    with pytest.raises(IntegrityError), world.database.transaction() as session:
        session.execute(text("INSERT INTO pins SELECT 'x', model, region, 1, until, '', 'ann', now(), NULL FROM pins"))
    with world.database.transaction() as session:
        session.execute(text("UPDATE pins SET until = now() - interval '1 second' WHERE id = :id"), {"id": first})
    second = override(world, instances=5)
    assert in_force(world)[EAST] == 5, "one that ended makes room"
    with world.database.transaction() as session:
        ended = get_override(session, first)
        assert ended.removed_at == ended.until
        assert get_override(session, second).removed_at is None


def test_two_at_once_make_one_pin(world: World) -> None:
    ends = at_once(*[lambda: override(world)] * 3)
    assert ends.count("conflict") == 2
