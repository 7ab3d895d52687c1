"""A stack of replayed nodes with its regions, models and endpoints, for fault runs and benches."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx

from ops.local.ports import free_port
from ops.local.sample_fleet import LOAD_TIME_S, PROFILES, TOKENS_PER_S
from ops.local.stack import LocalNode, LocalStack, Wiring
from ops.local.waiting import wait_until

GPU_TYPE = "H800"
NODE_BYTES = 64 * 2**20
KV_SHARE = 0.5
WEIGHTS_BYTES = 2**20
CONTEXT_TOKENS = 4096
READY_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """How large the stack is. `replay_speed` below 1 makes streams longer, so that more faults meet one; `kv_tokens` is
    what the KV cache of a node holds.
    """

    regions: int
    nodes: int
    models: int
    replay_speed: float = 0.25
    instances_max: int = 2
    kv_tokens: int = 65_536

    def region_names(self) -> tuple[str, ...]:
        """region-1, region-2, ..."""
        return tuple(f"region-{n + 1}" for n in range(self.regions))

    def model_names(self) -> tuple[str, ...]:
        """model-01, model-02, ..."""
        return tuple(f"model-{n + 1:02}" for n in range(self.models))

    def kv_bytes_per_token(self) -> int:
        """So that a node's KV cache holds `kv_tokens`."""
        return int(NODE_BYTES * KV_SHARE) // self.kv_tokens

    def local_nodes(self) -> tuple[LocalNode, ...]:
        """The nodes, spread over the regions. Their GPUs are enough for the instances of each endpoint, and so few that
        the instances are spread too.
        """
        gpus = math.ceil(self.instances_max * self.regions * self.models / self.nodes)
        return tuple(
            LocalNode(
                name=f"n{n + 1:02}",
                region=self.region_names()[n % self.regions],
                gpu_type=GPU_TYPE,
                gpus=gpus,
                memory_bytes=NODE_BYTES,
                engine="replay",
                profile=PROFILES / f"{GPU_TYPE.lower()}.toml",
                settings={"replay_speed": self.replay_speed, "kv_share": KV_SHARE},
            )
            for n in range(self.nodes)
        )


class ReplayStack:
    """The stack, and its fleet as the admin API is told of it. `lines` are what its supervisor says."""

    def __init__(self, home: Path, fleet: Fleet, *, environment: Mapping[str, str], wiring: Wiring) -> None:
        self.fleet = fleet
        self.home = home
        self.lines: list[str] = []
        self.local = LocalStack(
            home,
            free_port(),
            fleet.local_nodes(),
            environment=environment,
            report=self.lines.append,
            wiring=wiring,
        )

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
                "kv_bytes_per_token": self.fleet.kv_bytes_per_token(),
                "context_tokens": CONTEXT_TOKENS,
            }
            await self.admin(put, f"/admin/models/{model}", json=about)
            profile = {"tokens_per_s": TOKENS_PER_S[GPU_TYPE], "gpus": 1, "load_time_s": LOAD_TIME_S}
            await self.admin(put, "/admin/profiles", json={"model": model, "gpu_type": GPU_TYPE, **profile})
            for region in self.fleet.region_names():
                limits = {"instances_min": 1, "instances_max": self.fleet.instances_max}
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
            ready |= {(row["model"], row["region"]) for row in page["data"] if row["state"] == "ready"}
            if not page["has_more"]:
                return len(ready)
            after = page["next"]
