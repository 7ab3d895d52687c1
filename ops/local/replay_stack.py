"""A stack of replayed nodes with its regions, models and endpoints, for fault runs and benches."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx

from ops.client.api import open_api
from ops.local.ports import free_port
from ops.local.sample_fleet import PROFILES, TOKENS_PER_S, live_instances, offer_model
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
        """The size of a token at which a node's KV cache holds `kv_tokens`."""
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
    """The stack, and its fleet at the admin API. `lines` are the reports of its supervisor."""

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
        """Register regions, models, and endpoints with one instance each."""
        await asyncio.to_thread(self._register)

    def _register(self) -> None:
        regions = self.fleet.region_names()
        with open_api(self.local.url, self.local.keys["admin"]) as api:
            for position, region in enumerate(regions):
                api.put(f"/admin/regions/{region}", {"position": position})
            api.put(f"/admin/gpu-types/{GPU_TYPE}", {"memory_bytes": 80 * 2**30, "cost_per_hour": 2.0})
            for model in self.fleet.model_names():
                api.put(f"/admin/models/{model}", replayed_model(model, self.fleet.kv_bytes_per_token()))
                offer_model(api, model, {GPU_TYPE: TOKENS_PER_S[GPU_TYPE]}, regions, 1, self.fleet.instances_max)

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
        rows = await asyncio.to_thread(self._live_instances)
        return len({(row["model"], row["region"]) for row in rows if row["state"] == "ready"})

    def _live_instances(self) -> list[dict[str, Any]]:
        with open_api(self.local.url, self.local.keys["admin"]) as api:
            return live_instances(api)


def replayed_model(name: str, kv_bytes_per_token: int) -> dict[str, Any]:
    """The description of a model for the replay engine, which reads no checkpoint."""
    return {
        "path": f"/replay/{name}",
        "architecture": "Replay",
        "weights_bytes": WEIGHTS_BYTES,
        "kv_bytes_per_token": kv_bytes_per_token,
        "context_tokens": CONTEXT_TOKENS,
    }
