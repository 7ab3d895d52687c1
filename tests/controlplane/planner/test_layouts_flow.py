"""Plans regroup replayed nodes: by day their GPUs are slots of one for small models, by night four of them are one slot
for a large model, and in the morning they are taken apart again.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import pytest

from controlplane.planner.explain import explanation_of
from controlplane.planner.plan import plan_hour
from controlplane.settings import Settings
from controlplane.store import fleet
from controlplane.store.instances import present_layout
from controlplane.store.tables import Profile
from dataplane.agent.settings import AgentSettings
from tests.controlplane.planner.pool_fleet import add_models, expect, live_rows
from tests.controlplane.planner.test_pools_flow import Fleet, running_fleet
from tests.controlplane.world import World
from tests.dataplane.replay_node import settings as agent_settings
from tests.dataplane.replay_node import workers

TIMEOUT_S = 240.0
DAY = {"ebb": 2500.0, "flood": 2500.0, "spring": 0.0}
NIGHT = {"ebb": 500.0, "flood": 500.0, "spring": 900.0}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """The plans of three hours are made within a minute. The last one's hour begins 59 to 118 minutes after the clock's
    time of the regrouping before it, whose layout a longer hold would keep.
    """
    changes = {"heartbeat_stale_s": 60.0, "spot_enabled": False, "plan_layouts": True, "regroup_patience_s": 1.0}
    return settings.model_copy(update=changes | {"plan_layout_hold_s": 3000.0})


def agent(name: str) -> AgentSettings:
    return agent_settings(node=name, regroup=True, slots=workers(1, 1, 1, 1))


def plan(world: World, settings: Settings, hour_s: int, tokens_per_s: dict[str, float]) -> str:
    """Plan an hour for these forecasts."""
    expect(world, tokens_per_s, origin_s=hour_s - 600)
    plan_id = plan_hour(world.database, settings, now_s=hour_s - 120)
    assert plan_id is not None
    return plan_id


def layouts(world: World) -> list[tuple[int, ...]]:
    with world.database.transaction() as session:
        return sorted(present_layout(session, name) for name in ("n1", "n2"))


def ready(world: World) -> Counter[str]:
    return Counter(row.model for row in live_rows(world) if row.observed == "ready" and row.desired == "running")


async def until(running: Fleet, holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not holds():
            running.turn()
            await asyncio.sleep(0.02)


@pytest.mark.slow
def test_the_layouts_follow_day_and_night(world: World, settings: Settings) -> None:
    asyncio.run(_the_layouts_follow_day_and_night(world, settings))


async def _the_layouts_follow_day_and_night(world: World, settings: Settings) -> None:
    add_models(world, "ebb", "flood", "spring", latency=None)
    with world.database.transaction() as session:
        four = Profile(model="spring", gpu_type="H800", tokens_per_s=1000.0, gpus=4, load_time_s=30.0)
        fleet.put_profile(session, four)
    hour_s = int(time.time()) // 3600 * 3600
    async with running_fleet(world, settings, agent("n1"), agent("n2")) as running:
        plan(world, settings, hour_s, DAY)
        await until(running, lambda: ready(world) == {"ebb": 3, "flood": 3})
        assert layouts(world) == [(1, 1, 1, 1), (1, 1, 1, 1)]

        night = plan(world, settings, hour_s + 3600, NIGHT)
        await until(running, lambda: ready(world) == {"ebb": 1, "flood": 1, "spring": 1})
        assert layouts(world) == [(1, 1, 1, 1), (4,)]
        with world.database.transaction() as session:
            text = explanation_of(session, night)
        assert "1,1,1,1 -> 4; lacking: slots of 4 GPUs for 4.00 GPUs of demand" in text

        plan(world, settings, hour_s + 7200, DAY)
        await until(running, lambda: ready(world) == {"ebb": 3, "flood": 3})
        assert layouts(world) == [(1, 1, 1, 1), (1, 1, 1, 1)]
