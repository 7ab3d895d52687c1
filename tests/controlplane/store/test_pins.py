"""Pins: one live one for each endpoint, with an end, and plans made without it are stale."""

import threading
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from controlplane.errors import ConflictError, NotFoundError
from controlplane.policies.facts import Endpoint
from controlplane.store.fleet import fleet_index
from controlplane.store.pins import add_pin, get_pin, list_pins, pins_in_force, remove_pin
from tests.controlplane.world import World

EAST = Endpoint(model="tide", region="us-east")
NOW = datetime.now(UTC)


def pin(world: World, endpoint: Endpoint = EAST, *, instances: int = 3, hours: float = 2.0) -> str:
    with world.database.transaction() as session:
        until = NOW + timedelta(hours=hours)
        row = add_pin(session, endpoint=endpoint, instances=instances, until=until, note="launch", created_by="ann")
        return row.id


def in_force(world: World, hours: float = 0.0) -> dict[Endpoint, int]:
    with world.database.transaction() as session:
        return dict(pins_in_force(session, NOW.timestamp() + 3600 * hours))


def index_of(world: World) -> int:
    with world.database.transaction() as session:
        return fleet_index(session)


def test_a_pin_holds_until_its_end(world: World) -> None:
    index = index_of(world)
    pin(world)
    assert index_of(world) == index + 1, "a plan made without it is stale"
    assert in_force(world) == {EAST: 3}
    assert in_force(world, hours=1.99) == {EAST: 3}
    assert in_force(world, hours=2.0) == {}


def test_a_pin_that_is_removed_is_no_more_but_kept_on_record(world: World) -> None:
    pin_id = pin(world)
    index = index_of(world)
    for _ in range(2):
        with world.database.transaction() as session:
            assert remove_pin(session, pin_id).removed_at is not None
    assert index_of(world) == index + 1
    assert in_force(world) == {}
    with world.database.transaction() as session:
        assert list_pins(session, after=None, limit=10, live_only=True).rows == []
        assert [row.id for row in list_pins(session, after=None, limit=10, live_only=False).rows] == [pin_id]
        assert get_pin(session, pin_id).note == "launch"
        with pytest.raises(NotFoundError):
            remove_pin(session, "pin_none")


def test_one_live_pin_for_each_endpoint(world: World) -> None:
    first = pin(world)
    with pytest.raises(ConflictError, match="pinned to 3 instances until"):
        pin(world, instances=5)
    pin(world, Endpoint(model="tide", region="us-west"), instances=0)
    with pytest.raises(NotFoundError):
        pin(world, Endpoint(model="tide", region="mars"))
    with pytest.raises(IntegrityError), world.database.transaction() as session:
        session.execute(text("INSERT INTO pins SELECT 'x', model, region, 1, until, '', 'ann', now(), NULL FROM pins"))
    with world.database.transaction() as session:
        session.execute(text("UPDATE pins SET until = now() - interval '1 second' WHERE id = :id"), {"id": first})
    second = pin(world, instances=5)
    assert in_force(world)[EAST] == 5, "one that ended makes room"
    with world.database.transaction() as session:
        ended = get_pin(session, first)
        assert ended.removed_at == ended.until
        assert get_pin(session, second).removed_at is None


def test_two_at_once_make_one_pin(world: World) -> None:
    ends: list[str] = []
    start = threading.Barrier(3)

    def work() -> None:
        start.wait()
        try:
            pin(world)
            ends.append("pinned")
        except ConflictError:
            ends.append("refused")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ends) == ["pinned", "refused", "refused"]
