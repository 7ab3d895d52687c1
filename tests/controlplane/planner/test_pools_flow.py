"""The whole way on replayed nodes: a plan pools the long tail on one slot, requests are served there, and the next plan
takes a model that grew out of the pool without a moment in which nobody serves it.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import openai
import pytest
from pydantic import SecretStr

from controlplane.planner.explain import explanation_of
from controlplane.planner.plan import plan_hour
from controlplane.planner.scale import scale
from controlplane.settings import Settings
from controlplane.store import fleet
from controlplane.store.instances import desired_of, observe
from controlplane.store.joining import join_node
from controlplane.store.plans import plan_in_force
from controlplane.store.tables import Instance
from dataplane.agent.heartbeats import join_message
from dataplane.agent.settings import AgentSettings
from tests.controlplane.api.gateway import Gateway, running_gateway
from tests.controlplane.planner.pool_fleet import add_models, expect, live_rows
from tests.controlplane.world import World
from tests.dataplane.replay_node import KEY, Node, running_node
from tests.dataplane.replay_node import settings as agent_settings

MODELS = ("ebb", "flood", "neap", "surge")
TIMEOUT_S = 240.0


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"heartbeat_stale_s": 60.0})


class Fleet:
    """Nodes, and the loops that a clock would call."""

    def __init__(self, world: World, nodes: dict[str, Node], settings: Settings) -> None:
        self.world, self.nodes, self.settings = world, nodes, settings
        self.gaps: list[str] = []

    def beat(self) -> None:
        """One heartbeat of every node, and what it is told."""
        for name, node in self.nodes.items():
            heartbeat = node.agent.heartbeat()
            with self.world.database.transaction() as session:
                fleet.touch_node(session, name)
                observe(session, heartbeat)
                desired = desired_of(session, name)
            self.world.live.write_heartbeat(heartbeat, region="us-east", gpu_type="H800", url=str(node.client.base_url))
            node.agent.apply(desired)

    def turn(self, watched: str | None = None) -> None:
        """A heartbeat and a run of the scale loop. A moment in which nobody serves `watched` is a gap."""
        self.beat()
        if watched and watched not in {r.model for n in self.nodes.values() for r in n.agent.reports() if accepts(r)}:
            self.gaps.append(str([(r.model, r.state) for n in self.nodes.values() for r in n.agent.reports()]))
        scale(self.world.database, self.world.live, self.settings, now_s=time.time())

    async def until_rest(self, done: str, model: str | None = None) -> list[Instance]:
        """Turn until what is wanted is there: `done` says it as sorted `model:pooled` words of ready instances."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                self.turn(model)
                rows = live_rows(self.world)
                words = sorted(f"{row.model}:{row.pooled}" for row in rows if row.observed == "ready")
                if " ".join(words) == done and len(words) == len(rows):
                    return rows
                await asyncio.sleep(0.02)


def accepts(report: object) -> bool:
    return getattr(report, "state", None) == "ready"


@contextlib.asynccontextmanager
async def running_fleet(world: World, settings: Settings, *agents: AgentSettings) -> AsyncIterator[Fleet]:
    """The nodes of these agents, joined as they introduce themselves."""
    async with contextlib.AsyncExitStack() as stack:
        nodes = {given.node: await stack.enter_async_context(running_node(given)) for given in agents}
        for given in agents:
            url, agent = str(nodes[given.node].client.base_url).rstrip("/"), nodes[given.node].agent
            with world.database.transaction() as session:
                join_node(session, join_message(agent, url))
                fleet.touch_node(session, given.node)
        yield Fleet(world, nodes, settings)


def ask(gateway: Gateway, model: str) -> int:
    answer = gateway.client.completions.create(model=model, prompt="the tide", max_tokens=5)
    assert answer.usage is not None
    return answer.usage.completion_tokens


async def ask_on(gateway: Gateway, model: str, stopping: asyncio.Event) -> int:
    """Ask again and again; how often."""
    answers = 0
    while not stopping.is_set():
        assert await asyncio.to_thread(ask, gateway, model) == 5
        answers += 1
    return answers


@contextlib.asynccontextmanager
async def being_asked(gateway: Gateway, model: str) -> AsyncIterator[None]:
    """Meanwhile the model is asked all the time, and every request is answered."""
    stopping = asyncio.Event()
    asking = asyncio.create_task(ask_on(gateway, model, stopping))
    try:
        yield
    finally:
        stopping.set()
    assert await asking > 0, "and every one was answered"


def plan(world: World, settings: Settings, tokens_per_s: dict[str, float], *, now_s: float) -> str:
    expect(world, tokens_per_s, origin_s=int(now_s) // 60 * 60)
    assert plan_hour(world.database, settings, now_s=now_s + 60) is not None
    with world.database.transaction() as session:
        applied = plan_in_force(session)
        assert applied is not None
        return explanation_of(session, applied.id)


@contextlib.asynccontextmanager
async def sharing_a_slot(
    world: World, settings: Settings, planned: str, *, now_s: float
) -> AsyncIterator[tuple[Fleet, Gateway]]:
    """Three nodes and a gateway, when a plan that says `planned` has put all models on one slot, where each answers."""
    add_models(world, *MODELS)
    async with running_fleet(world, settings, *(agent_settings(node=name) for name in ("n1", "n2", "n3"))) as fleet:
        fleet.beat()
        words = await asyncio.to_thread(plan, world, settings, dict.fromkeys(MODELS, 20.0), now_s=now_s)
        assert planned in words
        rows = await fleet.until_rest(" ".join(f"{model}:True" for model in MODELS))
        assert len({(row.node, row.slot) for row in rows}) == 1, "they take turns on one slot"
        with running_gateway(world, node_key=SecretStr(KEY)) as gateway:
            for model in MODELS:
                assert await asyncio.to_thread(ask, gateway, model) == 5
            yield fleet, gateway


def test_a_plan_pools_the_long_tail_and_lets_go_who_grows(world: World, settings: Settings) -> None:
    planned = "H800 in us-east: 0 -> 1 GPUs for 4 endpoints (ebb, flood, neap, surge)"

    async def run() -> None:
        now_s = time.time()
        async with sharing_a_slot(world, settings, planned, now_s=now_s) as (fleet, gateway):
            await leave_the_pool(world, settings, fleet, gateway, now_s=now_s + 3600)

    asyncio.run(run())


async def leave_the_pool(world: World, settings: Settings, fleet: Fleet, gateway: Gateway, *, now_s: float) -> None:
    fleet.beat()
    demand = dict.fromkeys(MODELS, 20.0) | {"surge": 1500.0}
    words = await asyncio.to_thread(plan, world, settings, demand, now_s=now_s)
    assert "1 GPUs for 3 endpoints (ebb, flood, neap)" in words
    async with being_asked(gateway, "surge"):
        rows = await fleet.until_rest("ebb:True flood:True neap:True surge:False surge:False", "surge")
    assert not fleet.gaps
    assert len({(row.node, row.slot) for row in rows if row.model == "surge"}) == 2
    with pytest.raises(openai.NotFoundError):
        gateway.client.completions.create(model="nobody", prompt="x")
