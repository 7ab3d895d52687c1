"""A live stack on the replay engine: requests queue on a model's one instance, then a second one becomes ready.

python -m ops.bench.gateway.rerouting --rounds 3
"""

import asyncio
from pathlib import Path
from statistics import fmean
from typing import Annotated

import httpx2 as httpx
import typer

from ops.bench.gateway.first_tokens import (
    client_of,
    first_token_s,
    live_stack,
    measure_rounds,
    medians_of,
    show_rounds,
)
from ops.client.api import open_api
from ops.client.screen import AsJson, Columns
from ops.faults.percentiles import percentile
from ops.local.replay_stack import GPU_TYPE, Fleet, ReplayStack
from ops.local.sample_fleet import TOKENS_PER_S, offer_model

WAITS_S = {"stay": "0", "move": "1"}
"""`TIDEPOOL_REROUTE_WAIT_S` of each arm."""


async def measure(home: Path, arm: str, requests: int, replay_speed: float) -> dict[str, float]:
    """Send a burst to a new stack, and ask for a second instance at the same moment. `moved`: share of the requests;
    `last_s`: from the burst until the last first token.

    Raises:
        RuntimeError: a request was not answered as it should be.
    """
    fleet = Fleet(regions=1, nodes=2, models=1, instances_max=2, replay_speed=replay_speed)
    environment = {"TIDEPOOL_SCALE_EVERY_S": "1", "TIDEPOOL_REROUTE_WAIT_S": WAITS_S[arm]}
    async with live_stack(home, fleet, environment) as stack:
        answers = asyncio.create_task(_burst(stack, requests))
        await asyncio.to_thread(_second_instance, stack)
        ttft_s = sorted(await answers)
        moved = await _moved(stack)
    return {
        "moved": moved / requests,
        "ttft_mean_s": fmean(ttft_s),
        "ttft_p95_s": percentile(ttft_s, 0.95),
        "last_s": ttft_s[-1],
    }


async def _burst(stack: ReplayStack, requests: int) -> list[float]:
    """Times to first tokens."""
    async with client_of(stack) as client:
        model = stack.fleet.model_names()[0]
        found = await asyncio.gather(
            *(first_token_s(client, model, number, number / 1000) for number in range(requests))
        )
    if None in found:
        raise RuntimeError("a request of the burst was refused")
    return [ttft_s for ttft_s in found if ttft_s is not None]


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
    found = measure_rounds(rounds, list(WAITS_S), lambda home, arm: measure(home, arm, requests, replay_speed))
    rows = [{"arm": arm, **medians_of(mine)} for arm, mine in found.items()]
    columns: Columns = {
        "what waits": lambda row: f"{row['arm']}s",
        "moved": lambda row: f"{row['moved']:.0%}",
        "first token, mean": lambda row: f"{row['ttft_mean_s']:.2f} s",
        "p95": lambda row: f"{row['ttft_p95_s']:.2f} s",
        "last": lambda row: f"{row['last_s']:.2f} s",
    }
    title = f"{requests} requests at once, a second instance starts, medians of {rounds} rounds"
    show_rounds(title, columns, rows, found, as_json=as_json)


if __name__ == "__main__":
    typer.run(main)
