"""The stack of a fault run: replayed nodes, two of most processes, and a proxy on every way between them.

gateways, dispatchers, worker -> Postgres, Valkey       beats -> Valkey
gateways, dispatchers -> agents -> gateways
"""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx

from ops.demo_fleet import LOAD_TIME_S, PROFILES, TOKENS_PER_S
from ops.faults.proxy import Link
from ops.faults.waiting import wait_until
from ops.local import LocalNode, LocalStack, Wiring
from ops.ports import free_port

GPU_TYPE = "H800"
REPLICAS = {"api": 2, "dispatcher": 2, "beat": 2, "forecaster": 0}
SKEWS_S = {"api-2": -150.0, "dispatcher-2": 300.0, "beat-2": 120.0}
"""Whose clocks are wrong, and by how much."""
ENVIRONMENT = {
    "TIDEPOOL_DATABASE_URL": "",
    "TIDEPOOL_REDIS_URL": "",
    "TIDEPOOL_SCALE_EVERY_S": "2",
    "TIDEPOOL_EXPIRE_EVERY_S": "2",
    "TIDEPOOL_NIW_LEASE_S": "15",
    "TIDEPOOL_NIW_ATTEMPTS_MAX": "20",
    "TIDEPOOL_FIRST_TOKEN_TIMEOUT_S": "20",
    "TIDEPOOL_STREAM_IDLE_TIMEOUT_S": "10",
}
NODE_BYTES = 64 * 2**20
WEIGHTS_BYTES = 2**20
KV_BYTES_PER_TOKEN = 512
CONTEXT_TOKENS = 4096
INSTANCES_MAX = 2
READY_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """How large the stack is. `replay_speed` below 1 makes streams longer, so that more faults meet one."""

    regions: int
    nodes: int
    models: int
    replay_speed: float = 0.25

    def region_names(self) -> tuple[str, ...]:
        """region-1, region-2, ..."""
        return tuple(f"region-{n + 1}" for n in range(self.regions))

    def model_names(self) -> tuple[str, ...]:
        """model-01, model-02, ..."""
        return tuple(f"model-{n + 1:02}" for n in range(self.models))

    def local_nodes(self) -> tuple[LocalNode, ...]:
        """The nodes, spread over the regions. Their GPUs are enough for two instances of each endpoint, and so few that
        the instances are spread too.
        """
        gpus = math.ceil(INSTANCES_MAX * self.regions * self.models / self.nodes)
        return tuple(
            LocalNode(
                name=f"n{n + 1:02}",
                region=self.region_names()[n % self.regions],
                gpu_type=GPU_TYPE,
                gpus=gpus,
                memory_bytes=NODE_BYTES,
                engine="replay",
                profile=PROFILES / f"{GPU_TYPE.lower()}.toml",
                settings={"replay_speed": self.replay_speed},
            )
            for n in range(self.nodes)
        )


class FaultStack:
    """A stack and its links. `lines` are what its supervisor says."""

    def __init__(self, home: Path, fleet: Fleet) -> None:
        self.fleet = fleet
        self.home = home
        self.links: dict[tuple[str, str], Link] = {}
        self.lines: list[str] = []
        programs = {name: ("-m", "ops.faults.skewed", str(by_s)) for name, by_s in SKEWS_S.items()}
        self.local = LocalStack(
            home,
            free_port(),
            fleet.local_nodes(),
            environment=ENVIRONMENT,
            report=self.lines.append,
            wiring=Wiring(replicas=REPLICAS, between=self._between, programs=programs),
        )
        gateways = tuple(int(url.rpartition(":")[2]) for url in self.local.urls)
        for link in self.links.values():
            if link.target_port in gateways:
                link.others = gateways

    def _between(self, caller: str, called: str, port: int) -> int:
        link = self.links.get((caller, called))
        if link is None:
            link = self.links[caller, called] = Link(caller, called, port)
        return link.port

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start links and processes, and stop them."""
        for link in self.links.values():
            await link.start()
        try:
            await asyncio.to_thread(self.local.supervisor.start)
            yield
        finally:
            await asyncio.to_thread(self.local.stop)
            for link in self.links.values():
                await link.stop()

    async def admin(self, method: str, path: str, **request: Any) -> Any:
        """Ask the admin API of the first gateway; raises httpx.HTTPError."""
        headers = {"Authorization": f"Bearer {self.local.keys['admin']}"}
        async with httpx.AsyncClient(base_url=self.local.url, headers=headers, timeout=30, trust_env=False) as client:
            answer = await client.request(method, path, **request)
            answer.raise_for_status()
            return answer.json()

    async def register(self) -> None:
        """Tell the control plane of regions, models and endpoints, one instance each."""
        put = "PUT"
        for position, region in enumerate(self.fleet.region_names()):
            await self.admin(put, f"/admin/regions/{region}", json={"position": position})
        await self.admin(put, f"/admin/gpu-types/{GPU_TYPE}", json={"memory_bytes": 80 * 2**30, "cost_per_hour": 2.0})
        for model in self.fleet.model_names():
            about = {
                "path": f"/replay/{model}",
                "architecture": "Replay",
                "weights_bytes": WEIGHTS_BYTES,
                "kv_bytes_per_token": KV_BYTES_PER_TOKEN,
                "context_tokens": CONTEXT_TOKENS,
            }
            await self.admin(put, f"/admin/models/{model}", json=about)
            profile = {"tokens_per_s": TOKENS_PER_S[GPU_TYPE], "gpus": 1, "load_time_s": LOAD_TIME_S}
            await self.admin(put, "/admin/profiles", json={"model": model, "gpu_type": GPU_TYPE, **profile})
            for region in self.fleet.region_names():
                limits = {"instances_min": 1, "instances_max": INSTANCES_MAX}
                await self.admin(put, "/admin/endpoints", json={"model": model, "region": region, **limits})

    async def wait_ready(self) -> None:
        """Until every endpoint has an instance that is ready.

        Raises:
            TimeoutError: not within five minutes.
        """

        async def are_ready() -> bool:
            return await self.ready_endpoints() >= self.fleet.regions * self.fleet.models

        if not await wait_until(are_ready, READY_TIMEOUT_S):
            raise TimeoutError(f"{await self.ready_endpoints()} endpoints are ready after {READY_TIMEOUT_S:g} s")

    async def ready_endpoints(self) -> int:
        """How many endpoints have an instance that is ready."""
        ready: set[tuple[str, str]] = set()
        after: str | None = None
        while True:
            query = {"live_only": True, "limit": 100} | ({"after": after} if after else {})
            page = await self.admin("GET", "/admin/instances", params=query)
            ready |= {(row["model"], row["region"]) for row in page["data"] if row["observed"] == "ready"}
            if not page["has_more"]:
                return len(ready)
            after = page["next"]
