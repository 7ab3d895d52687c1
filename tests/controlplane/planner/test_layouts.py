"""Regrouping by an operator's word: instances go elsewhere first, then their slots become others."""

import pytest
from sqlalchemy import select, text

from controlplane.settings import Settings
from controlplane.store.instances import desired_of, present_layout
from controlplane.store.tables import Desired, Instance
from tests.controlplane.planner.test_evacuation import beat
from tests.controlplane.planner.test_scale import endpoint, run
from tests.controlplane.store.test_layouts import join, want
from tests.controlplane.world import World


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"heartbeat_stale_s": 60.0, "spot_enabled": False})


def slots(world: World) -> list[tuple[int, str]]:
    """Slots of the live instances of n1, and what is wanted of these."""
    with world.database.transaction() as session:
        live = select(Instance.slot, Instance.desired).where(Instance.desired != Desired.STOPPED)
        return [(slot, desired) for slot, desired in session.execute(live.order_by(Instance.slot))]


def layout(world: World) -> tuple[int, ...]:
    with world.database.transaction() as session:
        assert desired_of(session, "n1").layout == present_layout(session, "n1")
        return present_layout(session, "n1")


def begin(world: World, settings: Settings, *sizes: int, instances: int) -> None:
    join(world, sizes, gpu_bytes=80 << 30)
    beat(world, "n1")
    endpoint(world, instances, 4)
    run(world, settings)
    beat(world, "n1")


def test_instances_move_to_other_slots_before_theirs_is_regrouped(world: World, settings: Settings) -> None:
    begin(world, settings, 1, 1, 2, instances=1)
    [(held, _)] = slots(world)
    want(world, *((2, 2) if held < 2 else (1, 1, 1, 1)))
    assert run(world, settings).changes() == {"started": 1}
    (successor,) = (slot for slot, _ in slots(world) if slot != held)
    assert run(world, settings).changes() == {}, "it waits for its successor"
    beat(world, "n1")
    assert run(world, settings).changes() == {"drained": 1}
    assert layout(world) == (1, 1, 2), "it is not empty yet"
    beat(world, "n1")
    beat(world, "n1")
    run(world, settings)
    assert layout(world) == ((2, 2) if held < 2 else (1, 1, 1, 1))
    assert slots(world) == [(successor, "running")]


def test_without_room_elsewhere_it_drains_when_it_has_waited_long_enough(world: World, settings: Settings) -> None:
    begin(world, settings, 4, instances=1)
    want(world, 1, 1, 2)
    with world.database.transaction() as session:
        session.execute(text("UPDATE nodes SET layout_at = to_timestamp(1000)"))
    early = 1000.0 + settings.regroup_patience_s
    assert run(world, settings, now_s=early).changes() == {}
    assert slots(world) == [(0, "running")]
    assert run(world, settings, now_s=early + 1).changes() == {"drained": 1}
    assert slots(world) == [(0, "draining")]
    assert run(world, settings, now_s=early + 2).changes() == {}, "it is not revived on a slot that goes"
    beat(world, "n1")
    beat(world, "n1")
    assert run(world, settings, now_s=early + 3).changes() == {"started": 1}
    assert layout(world) == (1, 1, 2)
    assert [desired for _, desired in slots(world)] == ["running"], "it starts again on a new slot"
