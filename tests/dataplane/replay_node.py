"""A node for tests: an agent on the replay engine with real worker processes, and its HTTP face on a free port."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import msgspec
import pytest
import uvicorn

from dataplane.agent.child_process import ChildProcess
from dataplane.agent.http import server_config
from dataplane.agent.node import Agent
from dataplane.agent.settings import AgentSettings, WorkerSettings
from dataplane.agent.worker_link import WorkerLink
from dataplane.protocol.messages import DesiredInstance, DesiredInstances, Generate, ModelSpec, Sampling
from tests.event_loop import PATIENCE_S, until

PROFILE = Path(__file__).parents[2] / "ops" / "profiles" / "h800.toml"
KEY = "node-key-for-tests"


def workers(*gpus: int) -> tuple[WorkerSettings, ...]:
    """Workers with so many GPUs each."""
    return tuple(WorkerSettings(gpus=count, memory_bytes=2 * 2**20) for count in gpus)


def settings(**changes: Any) -> AgentSettings:
    values: dict[str, Any] = {
        "node": "n1",
        "region": "us-east",
        "gpu_type": "H800",
        "slots": workers(1),
        "engine": "replay",
        "profile": PROFILE,
        "replay_speed": 20.0,
        "node_key": KEY,
        "load_retry_s": 0.3,
        "cache_bytes": 2**20,
    }
    return AgentSettings(**(values | changes))


def model(name: str = "tide", **changes: Any) -> ModelSpec:
    values: dict[str, Any] = {
        "name": name,
        "path": "/nowhere",
        "weights_bytes": 1000,
        "kv_bytes_per_token": 512,
        "context_tokens": 4096,
    }
    return ModelSpec(**(values | changes))


def desired(generation: int, *instances: DesiredInstance) -> DesiredInstances:
    return DesiredInstances(generation=generation, instances=instances)


def instance(instance_id: str = "i1", *, draining: bool = False, slot: int = 0, **changes: Any) -> DesiredInstance:
    return DesiredInstance(instance_id=instance_id, slot=slot, gpus=1, model=model(**changes), draining=draining)


def generate(request_id: str = "r1", *, max_tokens: int | None = 20, **changes: Any) -> Generate:
    values: dict[str, Any] = {
        "request_id": request_id,
        "instance_id": "i1",
        "model": "tide",
        "tier": "IW-F",
        "prompt": "the tide turns",
        "sampling": Sampling(max_tokens=max_tokens, temperature=0.0),
    }
    return Generate(**(values | changes))


def install_vllm(version: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make vLLM's version known to this process, without vLLM."""
    metadata = folder / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    monkeypatch.syspath_prepend(folder)


class OpenLink(WorkerLink):
    """A link to a worker whose reader and writer tests can use."""

    def __init__(self, child: ChildProcess) -> None:
        super().__init__(child)
        self.reader, self.writer = child.reader, child.writer


class Node:
    """A running node and a client that has its key."""

    def __init__(self, agent: Agent, client: httpx.AsyncClient) -> None:
        self.agent = agent
        self.client = client

    async def until(self, condition: Callable[[], bool]) -> None:
        await until(condition)

    def states(self) -> dict[str, str]:
        return {report.instance_id: report.state for report in self.agent.reports()}

    async def hold(self, generation: int, *instances: DesiredInstance) -> None:
        """Apply a desired state and wait until all of it is ready."""
        self.agent.apply(desired(generation, *instances))
        wanted = {one.instance_id: "ready" for one in instances}
        await self.until(lambda: self.states() == wanted)

    def idle(self) -> bool:
        """Whether nothing is in flight, and the workers say that nothing runs, waits or holds KV in any memory."""
        reports = self.agent.reports()
        pools = [worker.stats.pool for worker in self.agent.workers if worker.stats.pool is not None]
        shapes = [shape for pool in pools for shape in (*pool.kv, *pool.host_kv)]
        return (
            self.in_flight() == 0
            and all((r.running, r.waiting, r.kv_used_bytes) == (0, 0, 0) for r in reports)
            and all((shape.used_bytes, shape.moving_bytes) == (0, 0) for shape in shapes)
        )

    def in_flight(self) -> int:
        """Requests admitted and not ended."""
        return sum(len(group.dispatcher) for group in self.agent.groups)

    async def post(self, body: Generate) -> httpx.Response:
        return await self.client.post("/generate", content=msgspec.json.encode(body))


@contextlib.asynccontextmanager
async def running_node(agent_settings: AgentSettings | None = None, **parts: Any) -> AsyncIterator[Node]:
    """A running node, `parts` being those of `Agent`. On leaving, all its processes have ended."""
    agent = Agent(agent_settings or settings(), boot_id=uuid.uuid4().hex, **parts)
    config = server_config(agent)
    config.port = 0
    server = uvicorn.Server(config)
    workers = asyncio.create_task(agent.run())
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    headers = {"authorization": f"Bearer {KEY}"}
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=PATIENCE_S
        ) as client:
            yield Node(agent, client)
    finally:
        server.should_exit = True
        await serving
        workers.cancel()
        await asyncio.gather(workers, return_exceptions=True)
