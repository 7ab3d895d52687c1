"""The whole way on a replayed node whose slots serve together: it joins as one slot, a plan gives that to a pool, and
requests of one endpoint are served by several of its workers.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic import SecretStr

from controlplane.policies.facts import Endpoint
from controlplane.policies.routing import utilization_of
from controlplane.settings import Settings
from controlplane.store.redis.live import instance_facts
from dataplane.agent.settings import WorkerSettings
from tests.controlplane.api.gateway import running_gateway
from tests.controlplane.planner.pool_fleet import add_models, live_rows
from tests.controlplane.planner.test_pools_flow import MODELS, TIMEOUT_S, Fleet, ask, plan, running_fleet
from tests.controlplane.world import World
from tests.dataplane.replay_node import KEY, Node
from tests.dataplane.replay_node import settings as agent_settings

WORKERS = 3
SURGE = Endpoint(model="surge", region="us-east")


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"heartbeat_stale_s": 60.0})


def test_a_together_node_is_one_slot_of_the_pool(world: World, settings: Settings) -> None:
    add_models(world, *MODELS)
    slots = tuple(WorkerSettings(gpus=1, memory_bytes=2 * 2**20) for _ in range(WORKERS))
    agent = agent_settings(node="n1", slots=slots, together=True)

    async def run() -> None:
        async with running_fleet(world, settings, agent) as fleet:
            fleet.beat()
            demand = dict.fromkeys(MODELS, 20.0) | {SURGE.model: 1500.0}
            words = await asyncio.to_thread(plan, world, settings, demand, now_s=time.time())
            assert "H800 in us-east: 0 -> 3 GPUs for 4 endpoints (ebb, flood, neap, surge)" in words, "the slot whole"
            rows = await fleet.until_rest(" ".join(f"{model}:True" for model in MODELS))
            assert {(row.node, row.slot) for row in rows} == {("n1", 0)}
            node = fleet.nodes["n1"]
            await node.until(lambda: stands_everywhere(node))
            loop = asyncio.get_running_loop()
            with running_gateway(world, node_key=SecretStr(KEY)) as gateway, ThreadPoolExecutor() as clients:
                async with asyncio.timeout(TIMEOUT_S):
                    while len(workers_of(node, SURGE.model)) < 2:
                        asked = [loop.run_in_executor(clients, ask, gateway, SURGE.model) for _ in range(2 * WORKERS)]
                        assert await asyncio.gather(*asked) == [5] * (2 * WORKERS)
            check_views(fleet)

    asyncio.run(run())


def stands_everywhere(node: Node) -> bool:
    """Whether each instance is on every worker, and the workers said so."""
    held = [report.instance_id for report in node.agent.reports()]
    return all(worker.instance_stats(each) is not None for worker in node.agent.workers for each in held)


def workers_of(node: Node, model: str) -> set[int]:
    """Workers that had turns of a model."""
    pools = {worker.index: worker.stats.pool for worker in node.agent.workers}
    return {
        index
        for index, pool in pools.items()
        if pool is not None and model in {turn.model for turn in pool.time_slices}
    }


def check_views(fleet: Fleet) -> None:
    """Each endpoint sees the KV of the whole pool, and sees it once."""
    fleet.beat()
    workers = fleet.nodes["n1"].agent.workers
    whole_bytes = sum(max(each.kv_capacity_bytes for each in slot.stats.instances) for slot in workers)
    facts = instance_facts(fleet.world.live.read_view())
    assert {each.endpoint.model: each.kv_capacity_bytes for each in facts} == dict.fromkeys(MODELS, whole_bytes)
    assert utilization_of(each for each in facts if each.endpoint == SURGE) < 1
    assert {row.slot for row in live_rows(fleet.world)} == {0}
