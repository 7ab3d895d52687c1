"""Scaling keeps an endpoint with a replica override at its count, whatever plan, load and limits are, until it ends."""

from datetime import UTC, datetime

import pytest

from controlplane.policies.facts import Endpoint
from controlplane.settings import Settings
from controlplane.store.overrides import add_override, remove_override
from tests.controlplane.planner.test_scale import endpoint, follow, node, ready, run, wanted
from tests.controlplane.world import World

EAST = Endpoint(model="tide", region="us-east")
NOW_S = 1000.0


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"heartbeat_stale_s": 60.0})


def override(world: World, instances: int, *, until_s: float = NOW_S + 60) -> str:
    until = datetime.fromtimestamp(until_s, UTC)
    with world.database.transaction() as session:
        return add_override(session, endpoint=EAST, instances=instances, until=until, note="", created_by="ann").id


@pytest.mark.parametrize("strategy", ["lt-i", "reactive"])
def test_a_pin_stands_above_limits_and_plan(world: World, settings: Settings, strategy: str) -> None:
    settings = settings.model_copy(update={"scale_strategy": strategy, "scale_cooldown_s": 0.0})
    node(world)
    endpoint(world, 0, 2)
    follow(world, 1)
    override(world, 3)
    assert run(world, settings, now_s=NOW_S).started == 3
    ready(world, "n1")
    assert wanted(world) == {"running": 3}
    run(world, settings, now_s=NOW_S + 59)
    assert wanted(world) == {"running": 3}, "an idle endpoint, but overridden"
    for second in range(61, 70):
        run(world, settings, now_s=NOW_S + second)
    assert wanted(world).get("running", 0) <= 2, "the override is over, and its limits apply again"


def test_a_pin_of_none_drains_all(world: World, settings: Settings) -> None:
    node(world)
    endpoint(world, 1, 4)
    run(world, settings)
    ready(world, "n1")
    pin_id = override(world, 0)
    run(world, settings)
    assert "running" not in wanted(world), "an override goes before a minimum"
    with world.database.transaction() as session:
        remove_override(session, pin_id)
    run(world, settings)
    assert wanted(world).get("running") == 1, "and holds again without it"
