"""Who sends the requests of a live run: a client of ours, or AIPerf, which nobody here wrote."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx

from dataplane.protocol.tiers import Tier
from ops.bench.independent import aiperf
from ops.bench.independent.aiperf import AIPERF
from ops.bench.independent.tools import Load, Target, ToolError, emptied, executable, run_tool
from ops.simulator.kernel.requests import Request

SERVICE_TIERS = {"IW-F": "priority", "IW-N": "default"}
TIMEOUT_S = 300.0
START_TIMEOUT_S = 300.0
"""AIPerf is stopped if it has not ended so long after its schedule."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One live request: seconds from when it was due to its first and to its last token."""

    request: Request
    first_s: float
    last_s: float


@dataclass(frozen=True, kw_only=True)
class Gateway:
    """Where requests go, and a client's key."""

    url: str
    key: str


Client = Callable[[Gateway, Sequence[Request]], Awaitable[list[Answer]]]
"""Sends requests at their times. Raises RuntimeError or ToolError where one has no answer."""


async def send_ourselves(gateway: Gateway, requests: Sequence[Request]) -> list[Answer]:
    """Send each request at its time, by one process with a connection for each."""
    started_s = time.monotonic()
    async with httpx.AsyncClient(
        base_url=gateway.url,
        headers={"Authorization": f"Bearer {gateway.key}"},
        timeout=TIMEOUT_S,
        limits=httpx.Limits(max_connections=500, max_keepalive_connections=100),
        trust_env=False,
    ) as http:
        return await asyncio.gather(*(_send(http, request, started_s) for request in requests))


async def _send(http: httpx.AsyncClient, request: Request, started_s: float) -> Answer:
    await asyncio.sleep(max(0.0, started_s + request.arrived_s - time.monotonic()))
    body = {
        "model": request.model,
        "prompt": [1] * request.prompt_tokens,
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "stream": True,
        "service_tier": SERVICE_TIERS[request.tier],
    }
    first_s, last_s = await _token_times(http, body)
    due_s = started_s + request.arrived_s
    return Answer(request=request, first_s=first_s - due_s, last_s=last_s - due_s)


async def _token_times(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[float, float]:
    """The times of the first and the last token, by `time.monotonic`."""
    first_s: float | None = None
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != httpx.codes.OK:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread())[:300]!r}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                last_s = time.monotonic()
                first_s = last_s if first_s is None else first_s
    if first_s is None:
        raise RuntimeError("an answer without a token")
    return first_s, last_s


@dataclass(frozen=True, kw_only=True)
class AiperfClient:
    """AIPerf, once for each model and tier, at the same time: it sends each one's requests by a fixed schedule. The
    programs start at slightly different times, so the requests of the answers are those that were really sent, at the
    times and with the lengths that AIPerf and the answers' `usage` tell.
    """

    tools: Path
    out: Path
    tokenizer: Path
    seed: int

    async def __call__(self, gateway: Gateway, requests: Sequence[Request]) -> list[Answer]:
        """Send the requests. Raises ToolError: AIPerf is not installed or failed, or a request has no whole answer."""
        program = executable(self.tools, AIPERF.name)
        parts: dict[tuple[str, Tier], list[Request]] = {}
        for request in requests:
            parts.setdefault((request.model, request.tier), []).append(request)
        folders = [emptied(self.out / f"{model}-{tier}") for model, tier in parts]
        await asyncio.gather(
            *(self._run(program, gateway, part, folder) for folder, part in zip(folders, parts.values(), strict=True))
        )
        exported = [
            (record, part[0])
            for folder, part in zip(folders, parts.values(), strict=True)
            for record in aiperf.records(folder)
        ]
        if len(exported) != len(requests):
            raise ToolError(f"AIPerf tells of {len(exported)} of {len(requests)} requests, see {self.out}")
        return answers_of(exported)

    async def _run(self, program: Path, gateway: Gateway, part: Sequence[Request], folder: Path) -> None:
        schedule = folder / "schedule.jsonl"
        schedule.write_text("".join(json.dumps(_scheduled(request)) + "\n" for request in part), encoding="utf-8")
        target = Target(url=gateway.url, key=gateway.key, model=part[0].model, tokenizer=self.tokenizer)
        options = (
            *aiperf.fixed_schedule(schedule),
            *aiperf.inputs(ignore_eos="true", service_tier=SERVICE_TIERS[part[0].tier]),
        )
        arguments = AIPERF.arguments(target, Load(seed=self.seed), options, folder)
        timeout_s = part[-1].arrived_s + TIMEOUT_S + START_TIMEOUT_S
        await run_tool(program, arguments, folder, timeout_s=timeout_s, environment=AIPERF.environment)


def _scheduled(request: Request) -> dict[str, float]:
    return {
        "timestamp": round(1e3 * request.arrived_s, 3),
        "input_length": request.prompt_tokens,
        "output_length": request.output_tokens,
    }


def answers_of(exported: Sequence[tuple[dict[str, Any], Request]]) -> list[Answer]:
    """Answers from AIPerf's records, each with a request of its model and tier; in order of arrival, from 0 s.

    Raises:
        ToolError: a request failed.
    """
    failed = [record["error"] for record, _ in exported if record.get("error") is not None]
    if failed:
        raise ToolError(f"{len(failed)} requests failed, one with {failed[0]}")
    ordered = sorted(exported, key=lambda each: each[0]["metadata"]["request_start_ns"])
    began_ns = ordered[0][0]["metadata"]["request_start_ns"]
    return [
        Answer(
            request=Request(
                number=number,
                arrived_s=(record["metadata"]["request_start_ns"] - began_ns) / 1e9,
                model=like.model,
                origin=like.origin,
                tier=like.tier,
                prompt_tokens=int(aiperf.value_of(record["metrics"], "usage_prompt_tokens")),
                output_tokens=int(aiperf.value_of(record["metrics"], "usage_completion_tokens")),
            ),
            first_s=aiperf.value_of(record["metrics"], "time_to_first_token") / 1e3,
            last_s=aiperf.value_of(record["metrics"], "request_latency") / 1e3,
        )
        for number, (record, like) in enumerate(ordered)
    ]
