"""A live stack on the replay engine: requests queue on a model's one instance, then a second one becomes ready.

python -m ops.bench.gateway.rerouting --rounds 3
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import httpx2 as httpx
import typer

from ops.bench.shared import work_folder
from ops.client.api import open_api
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.faults.percentiles import percentile
from ops.local.replay_stack import GPU_TYPE, Fleet, ReplayStack
from ops.local.sample_fleet import TOKENS_PER_S, offer_model
from ops.local.stack import Wiring

_PROMPT_WORDS = 2000
_ANSWER_TOKENS = 4
WAITS_S = {"stay": "0", "move": "1"}
"""`TIDEPOOL_REROUTE_WAIT_S` of each arm."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One burst. `moved`: share of the requests; `last_s`: from the burst until the last first token."""

    arm: str
    requests: int
    moved: float
    ttft_mean_s: float
    ttft_p95_s: float
    last_s: float


async def measure(home: Path, arm: str, requests: int, replay_speed: float) -> Round:
    """Send a burst to a new stack, and ask for a second instance at the same moment.

    Raises:
        RuntimeError: a request was not answered as it should be.
    """
    fleet = Fleet(regions=1, nodes=2, models=1, instances_max=2, replay_speed=replay_speed)
    environment = {
        "TIDEPOOL_DATABASE_URL": "",
        "TIDEPOOL_REDIS_URL": "",
        "TIDEPOOL_SCALE_EVERY_S": "1",
        "TIDEPOOL_REROUTE_WAIT_S": WAITS_S[arm],
    }
    wiring = Wiring(replicas={"forecaster": 0, "dispatcher": 0})
    stack = ReplayStack(home, fleet, environment=environment, wiring=wiring)
    await asyncio.to_thread(stack.local.supervisor.start)
    try:
        await stack.register()
        await stack.wait_ready()
        answers = asyncio.create_task(_burst(stack, requests))
        await asyncio.to_thread(_second_instance, stack)
        ttft_s = sorted(await answers)
        moved = await _moved(stack)
    finally:
        await asyncio.to_thread(stack.local.stop)
    return Round(
        arm=arm,
        requests=requests,
        moved=moved / requests,
        ttft_mean_s=fmean(ttft_s),
        ttft_p95_s=percentile(ttft_s, 0.95),
        last_s=ttft_s[-1],
    )


async def _burst(stack: ReplayStack, requests: int) -> list[float]:
    """Times to first tokens."""
    headers = {"Authorization": f"Bearer {stack.local.keys['client']}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=stack.local.url, headers=headers, timeout=300, trust_env=False, limits=limits
    ) as client:
        return await asyncio.gather(*(_first_token_s(client, stack.fleet.model_names()[0], n) for n in range(requests)))


async def _first_token_s(client: httpx.AsyncClient, model: str, number: int) -> float:
    """Sent one after another, so that each is routed with those before it counted."""
    await asyncio.sleep(number / 1000)
    began_s, first_s, made = asyncio.get_running_loop().time(), None, 0
    body: dict[str, Any] = {
        "model": model,
        "prompt": f"{number} " + "tide " * _PROMPT_WORDS,
        "max_tokens": _ANSWER_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if first_s is None and any(choice["text"] for choice in chunk.get("choices", ())):
                    first_s = asyncio.get_running_loop().time() - began_s
                made = (chunk.get("usage") or {}).get("completion_tokens", made)
    if answer.status_code != httpx.codes.OK or first_s is None or made != _ANSWER_TOKENS:
        raise RuntimeError(f"request {number} was answered with {answer.status_code} and {made} tokens")
    return first_s


def _second_instance(stack: ReplayStack) -> None:
    rates = {GPU_TYPE: TOKENS_PER_S[GPU_TYPE]}
    with open_api(stack.local.url, stack.local.keys["admin"]) as api:
        offer_model(api, stack.fleet.model_names()[0], rates, stack.fleet.region_names(), 2, 2)


async def _moved(stack: ReplayStack) -> float:
    """How many requests moved, by the gateway's own count."""
    async with httpx.AsyncClient(base_url=stack.local.url, timeout=30, trust_env=False) as client:
        answer = await client.get("/metrics", headers={"Authorization": f"Bearer {stack.local.keys['admin']}"})
        answer.raise_for_status()
    lines = (line.rpartition(" ") for line in answer.text.splitlines())
    return sum(float(value) for name, _, value in lines if name.startswith("tidepool_reroutes_total{"))


def row_of(arm: str, rounds: Sequence[Round]) -> dict[str, Any]:
    """A line of the table: medians over an arm's rounds."""
    mine = [asdict(one) for one in rounds if one.arm == arm]
    return {"arm": arm} | {key: median(one[key] for one in mine) for key in mine[0] if key != "arm"}


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    requests: Annotated[int, typer.Option(min=2, help="Of a burst.")] = 60,
    replay_speed: Annotated[float, typer.Option(min=0.01, help="1: as fast as an H800.")] = 0.2,
    as_json: AsJson = False,
) -> None:
    """Measure a burst's first tokens with and without moving what waits, each round on a new stack of processes.

    \b
    Example:
      python -m ops.bench.gateway.rerouting --rounds 5 --json
    """
    found = []
    for number in range(rounds):
        for arm in WAITS_S:
            with work_folder() as home:
                found.append(one := asyncio.run(measure(home, arm, requests, replay_speed)))
            notes().print(f"round {number + 1} of {rounds}, {arm}: mean {one.ttft_mean_s:.2f} s, {one.moved:.0%} moved")
    rows = [row_of(arm, found) for arm in WAITS_S]
    if as_json:
        print_json({"rows": rows, "rounds": list(map(asdict, found))})
        return
    columns: Columns = {
        "what waits": lambda row: f"{row['arm']}s",
        "moved": lambda row: f"{row['moved']:.0%}",
        "first token, mean": lambda row: f"{row['ttft_mean_s']:.2f} s",
        "p95": lambda row: f"{row['ttft_p95_s']:.2f} s",
        "last": lambda row: f"{row['last_s']:.2f} s",
    }
    print_table(f"{requests} requests at once, a second instance starts, medians of {rounds} rounds", columns, rows)


if __name__ == "__main__":
    typer.run(main)
