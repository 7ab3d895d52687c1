"""The whole way on replayed nodes: at night four models are served from the slot that they share as a reserve; in the
morning one of them has instances of its own again, without a moment in which nobody serves it, and stays in the
reserve.
"""

import asyncio
import time

import pytest

from controlplane.settings import Settings
from controlplane.store.plans import plan_in_force
from tests.controlplane.api.gateway import Gateway
from tests.controlplane.planner.test_pools_flow import MODELS, Fleet, being_asked, plan, sharing_a_slot
from tests.controlplane.world import World


@pytest.fixture
def settings(settings: Settings) -> Settings:
    changes = {"heartbeat_stale_s": 60.0, "plan_reserve": True, "pools_enabled": False}
    return settings.model_copy(update=changes)


def test_a_night_in_the_reserve_and_a_morning_beside_it(world: World, settings: Settings) -> None:
    planned = "reserve of 1 GPUs for 4 endpoints: 4 models need"

    async def run() -> None:
        now_s = time.time()
        async with sharing_a_slot(world, settings, planned, now_s=now_s) as (fleet, gateway):
            await morning(world, settings, fleet, gateway, now_s=now_s + 3600)

    asyncio.run(run())


async def morning(world: World, settings: Settings, fleet: Fleet, gateway: Gateway, *, now_s: float) -> None:
    fleet.beat()
    demand = dict.fromkeys(MODELS, 20.0) | {"surge": 1900.0}
    await asyncio.to_thread(plan, world, settings, demand, now_s=now_s)
    async with being_asked(gateway, "surge"):
        await fleet.until_rest("ebb:True flood:True neap:True surge:False surge:False surge:True", "surge")
    assert not fleet.gaps
    with world.database.transaction() as session:
        applied = plan_in_force(session)
        assert applied is not None
        [pool] = applied.pools
        assert (pool["after"], pool["reserve"]["gpus"], pool["pooled"]) == (1, 1, [])
        assert {each["model"]: each["instances"] for each in pool["reserve"]["held"]} == {
            "ebb": 0,
            "flood": 0,
            "neap": 0,
            "surge": 2,
        }
    assert {row.model for node in fleet.nodes.values() for row in node.agent.reports() if row.pooled} == set(MODELS)
