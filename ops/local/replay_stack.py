"""A stack of replayed nodes with its regions, models and endpoints, for fault runs and benches."""

import asyncio
import math
from collections import Counter
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
    what the KV cache of a node holds, `batch_max` how many sequences run in a step. `profile`: of the GPUs; None: H800.
    `heartbeat_s`: the interval of the nodes' heartbeats. `tokenizer`: the folder of every model's tokenizer; None: a
    rule of thumb counts.
    """

    regions: int
    nodes: int
    models: int
    replay_speed: float = 0.25
    instances_min: int = 1
    instances_max: int = 2
    kv_tokens: int = 65_536
    batch_max: int = 32
    profile: Path | None = None
    heartbeat_s: float = 1.0
    context_tokens: int = CONTEXT_TOKENS
    tokenizer: Path | None = None

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
                profile=self.profile or PROFILES / f"{GPU_TYPE.lower()}.toml",
                settings={
                    "replay_speed": self.replay_speed,
                    "kv_share": KV_SHARE,
                    "batch_max": self.batch_max,
                    "heartbeat_every_s": self.heartbeat_s,
                },
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
        """Register regions, models, and endpoints with their instances."""
        await asyncio.to_thread(register_replayed, self.local.url, self.local.keys["admin"], self.fleet)

    async def wait_ready(self) -> None:
        """Until every endpoint has as many instances ready as it has at least.

        Raises:
            TimeoutError: not within five minutes.
        """
        await wait_replayed(self.local.url, self.local.keys["admin"], self.fleet)

    async def wait_idle(self, timeout_s: float) -> None:
        """Until no node has a request.

        Raises:
            TimeoutError: not in time.
        """

        async def is_idle() -> bool:
            status = await self.admin("GET", "/admin/status")
            return not status["requests_running"] and not status["requests_waiting"]

        if not await wait_until(is_idle, timeout_s):
            raise TimeoutError(f"nodes still have requests after {timeout_s:g} s")


def register_replayed(url: str, admin_key: str, fleet: Fleet) -> None:
    """Register a fleet's regions, models, and endpoints with their instances."""
    regions = fleet.region_names()
    with open_api(url, admin_key) as api:
        for position, region in enumerate(regions):
            api.put(f"/admin/regions/{region}", {"position": position})
        api.put(f"/admin/gpu-types/{GPU_TYPE}", {"memory_bytes": 80 * 2**30, "cost_per_hour": 2.0})
        for model in fleet.model_names():
            about = replayed_model(model, fleet.kv_bytes_per_token())
            about["context_tokens"] = fleet.context_tokens
            if fleet.tokenizer is not None:
                about["path"] = str(fleet.tokenizer)
            api.put(f"/admin/models/{model}", about)
            limits = fleet.instances_min, fleet.instances_max
            offer_model(api, model, {GPU_TYPE: TOKENS_PER_S[GPU_TYPE]}, regions, *limits)


async def wait_replayed(url: str, admin_key: str, fleet: Fleet) -> None:
    """Until every endpoint of a fleet has as many instances ready as it has at least.

    Raises:
        TimeoutError: not within five minutes.
    """
    wanted = fleet.regions * fleet.models
    served = 0

    async def are_ready() -> bool:
        nonlocal served
        counts = await asyncio.to_thread(_ready, url, admin_key)
        served = sum(count >= fleet.instances_min for count in counts.values())
        return served >= wanted

    if not await wait_until(are_ready, READY_TIMEOUT_S):
        raise TimeoutError(f"{served} of {wanted} endpoints are ready after {READY_TIMEOUT_S:g} s")


def _ready(url: str, admin_key: str) -> Counter[tuple[str, str]]:
    """How many instances are ready, by model and region."""
    with open_api(url, admin_key) as api:
        return Counter((row["model"], row["region"]) for row in live_instances(api) if row["state"] == "ready")


def replayed_model(name: str, kv_bytes_per_token: int) -> dict[str, Any]:
    """The description of a model for the replay engine, which reads no checkpoint."""
    return {
        "path": f"/replay/{name}",
        "architecture": "Replay",
        "weights_bytes": WEIGHTS_BYTES,
        "kv_bytes_per_token": kv_bytes_per_token,
        "context_tokens": CONTEXT_TOKENS,
    }
