"""The live side of `live_vs_simulated`: a stack of real processes, its one node, and requests in time."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

from ops.client.api import Api, open_api
from ops.local.ports import free_port
from ops.local.sample_fleet import live_instances
from ops.local.stack import LocalNode, LocalStack
from ops.local.waiting import wait_until
from ops.simulator.kernel.requests import Request
from ops.simulator.scenario.scenario import PROFILES

REGION, GPU_TYPE, NODE = "here", "H800", "n1"
PROFILE = PROFILES / f"{GPU_TYPE.lower()}.toml"
MEMORY_BYTES, KV_SHARE = 80 * 10**9, 0.25
BATCH_MAX = 32
MODELS = {"13b": (27_793_336_320, 819_200), "7b": (15_231_233_024, 57_344), "14b": (28_334_581_760, 819_200)}
"""Weights, and KV of a token, in bytes."""
SERVICE_TIERS = {"IW-F": "priority", "IW-N": "default"}
READY_TIMEOUT_S, TIMEOUT_S, LOOK_EVERY_S = 300.0, 300.0, 0.25
PATIENT = dict.fromkeys(("TIDEPOOL_SLO_IW_F_TTFT_S", "TIDEPOOL_SLO_IW_N_TTFT_S"), "600")
"""Nobody is refused: the simulated world refuses nobody."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One live request: seconds from when it was due to its first and to its last token."""

    request: Request
    first_s: float
    last_s: float


@dataclass(kw_only=True)
class Watch:
    """What the node's slot has done: turns as they end, and how often it switched."""

    busy_s: float = 0.0
    switches: int = 0
    _last: list[tuple[Any, ...]] = field(default_factory=list)
    _switches_before: int | None = None

    def look(self, slot: dict[str, Any]) -> None:
        """Take the newest turns. Those of the last look are known by their lengths, which do not change."""
        if self._switches_before is None:
            self._switches_before = slot["switches_total"]
        self.switches = slot["switches_total"] - self._switches_before
        turns = [] if slot["pool"] is None else slot["pool"]["turns"]
        new = [
            (turn["kind"], turn["model"], turn["tokens"], round(turn["started_age_s"] - turn["ended_age_s"], 6))
            for turn in turns
        ]
        known = next((size for size in range(len(new), 0, -1) if self._last[-size:] == new[:size]), 0)
        self.busy_s += sum(turn[-1] for turn in new[known:])
        self._last = new or self._last


class _Live:
    """A running stack, and its one node."""

    def __init__(self, stack: LocalStack, admin: Api) -> None:
        headers = {"Authorization": f"Bearer {stack.keys['client']}"}
        limits = httpx.Limits(max_connections=500, max_keepalive_connections=100)
        self._http = httpx.AsyncClient(
            base_url=stack.url, headers=headers, timeout=TIMEOUT_S, limits=limits, trust_env=False
        )
        self._node = httpx.AsyncClient(
            base_url=admin.get(f"/admin/nodes/{NODE}")["url"],
            headers={"Authorization": f"Bearer {stack.keys['node']}"},
            timeout=TIMEOUT_S,
            trust_env=False,
        )
        self.watch = Watch()

    async def run(self, requests: Sequence[Request]) -> tuple[list[Answer], float]:
        """Send each at its time; answers, and seconds until the last one ended."""
        async with self._http, self._node:
            over = asyncio.Event()
            watching = asyncio.create_task(self._watch(over))
            for model in MODELS:
                await self._answer(self._body(model, 20, 2, "IW-N"))
            await self._look()
            self.watch.busy_s, started_s = 0.0, time.monotonic()
            answers = await asyncio.gather(*(self._send(request, started_s) for request in requests))
            took_s = time.monotonic() - started_s
            over.set()
            await watching
            await self._look()
        return answers, took_s

    async def _send(self, request: Request, started_s: float) -> Answer:
        await asyncio.sleep(max(0.0, started_s + request.arrived_s - time.monotonic()))
        body = self._body(request.model, request.prompt_tokens, request.output_tokens, request.tier)
        first_s, last_s = await self._answer(body)
        due_s = started_s + request.arrived_s
        return Answer(request=request, first_s=first_s - due_s, last_s=last_s - due_s)

    @staticmethod
    def _body(model: str, prompt_tokens: int, output_tokens: int, tier: str) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": [1] * prompt_tokens,
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "stream": True,
            "service_tier": SERVICE_TIERS[tier],
        }

    async def _answer(self, body: dict[str, Any]) -> tuple[float, float]:
        """When the first and the last token came, on `time.monotonic`."""
        first_s: float | None = None
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                raise RuntimeError(f"{answer.status_code}: {(await answer.aread())[:300]!r}")
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    last_s = time.monotonic()
                    first_s = last_s if first_s is None else first_s
        if first_s is None:
            raise RuntimeError("an answer without a token")
        return first_s, last_s

    async def _watch(self, over: asyncio.Event) -> None:
        while not over.is_set():
            await self._look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look(self) -> None:
        self.watch.look((await self._node.get("/state")).raise_for_status().json()["slots"][0])


def register(admin: Api) -> None:
    """Tell the control plane of the fleet: one instance of each model."""
    admin.put(f"/admin/regions/{REGION}", {"position": 0})
    admin.put(f"/admin/gpu-types/{GPU_TYPE}", {"memory_bytes": 80 * 2**30, "cost_per_hour": 2.5})
    for name, (weights, kv) in MODELS.items():
        about = {"path": f"/replay/{name}", "architecture": "Replay", "weights_bytes": weights}
        admin.put(f"/admin/models/{name}", about | {"kv_bytes_per_token": kv, "context_tokens": 8192})
        profile = {"model": name, "gpu_type": GPU_TYPE, "tokens_per_s": 2500.0, "gpus": 1, "load_time_s": 10.0}
        admin.put("/admin/profiles", profile)
        admin.put("/admin/endpoints", {"model": name, "region": REGION, "instances_min": 1, "instances_max": 1})


async def live(home: Path, requests: Sequence[Request], speed: float) -> tuple[list[Answer], float, Watch]:
    """Start a stack, send the requests, stop it."""
    node = LocalNode(
        name=NODE,
        region=REGION,
        gpu_type=GPU_TYPE,
        gpus=len(MODELS),
        memory_bytes=MEMORY_BYTES,
        engine="replay",
        profile=PROFILE,
        settings={"kv_share": KV_SHARE, "batch_max": BATCH_MAX, "replay_speed": speed},
    )
    environment = {"TIDEPOOL_DATABASE_URL": "", "TIDEPOOL_REDIS_URL": "", "TIDEPOOL_SCALE_EVERY_S": "2", **PATIENT}
    stack = LocalStack(home, free_port(), (node,), environment=environment)
    await asyncio.to_thread(stack.supervisor.start)
    try:
        with open_api(stack.url, stack.keys["admin"]) as admin:
            await asyncio.to_thread(register, admin)

            async def is_ready() -> bool:
                rows = await asyncio.to_thread(live_instances, admin)
                return len([row for row in rows if row["state"] == "ready"]) == len(MODELS)

            if not await wait_until(is_ready, READY_TIMEOUT_S):
                raise TimeoutError(f"not every instance was ready after {READY_TIMEOUT_S:g} s")
            running = _Live(stack, admin)
            answers, took_s = await running.run(requests)
            return answers, took_s, running.watch
    finally:
        await asyncio.to_thread(stack.stop)
