"""A live stack on the replay engine, streams of it whose first tokens are timed, and rounds of such measurements."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx2 as httpx

from ops.bench.shared import work_folder
from ops.client.screen import Columns, notes, print_json, print_table
from ops.local.replay_stack import Fleet, ReplayStack
from ops.local.stack import Wiring

_PROMPT_WORDS = 2000
_ANSWER_TOKENS = 4


@asynccontextmanager
async def live_stack(
    home: Path, fleet: Fleet, environment: Mapping[str, str], *, gateways: int = 1
) -> AsyncIterator[ReplayStack]:
    """A ready stack with servers of its own, without forecasts and batches; it is stopped in the end."""
    own = {"TIDEPOOL_DATABASE_URL": "", "TIDEPOOL_REDIS_URL": ""}
    wiring = Wiring(replicas={"api": gateways, "forecaster": 0, "dispatcher": 0})
    stack = ReplayStack(home, fleet, environment={**own, **environment}, wiring=wiring)
    await asyncio.to_thread(stack.local.supervisor.start)
    try:
        await stack.register()
        await stack.wait_ready()
        yield stack
    finally:
        await asyncio.to_thread(stack.local.stop)


def client_of(stack: ReplayStack, url: str | None = None) -> httpx.AsyncClient:
    """A client, of the gateway with that address or the first, that may have any number of requests in flight."""
    return httpx.AsyncClient(
        base_url=url or stack.local.url,
        headers={"Authorization": f"Bearer {stack.local.keys['client']}"},
        timeout=300,
        trust_env=False,
        limits=httpx.Limits(max_connections=None),
    )


async def first_token_s(
    client: httpx.AsyncClient, model: str, number: int, after_s: float, tier: str = "default"
) -> float | None:
    """The time to the first token of a request that is sent after so long, with a prompt of its own. None: it was
    refused with 429.

    Raises:
        RuntimeError: it was not answered as it should be.
    """
    await asyncio.sleep(after_s)
    began_s, first_s, made = asyncio.get_running_loop().time(), None, 0
    body: dict[str, Any] = {
        "model": model,
        "prompt": f"{number} " + "tide " * _PROMPT_WORDS,
        "max_tokens": _ANSWER_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "service_tier": tier,
    }
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if first_s is None and any(choice["text"] for choice in chunk.get("choices", ())):
                    first_s = asyncio.get_running_loop().time() - began_s
                made = (chunk.get("usage") or {}).get("completion_tokens", made)
    if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
        return None
    if answer.status_code != httpx.codes.OK or first_s is None or made != _ANSWER_TOKENS:
        raise RuntimeError(f"request {number} was answered with {answer.status_code} and {made} tokens")
    return first_s


Figures = Mapping[str, float | None]


def measure_rounds(
    rounds: int, arms: Sequence[str], measure: Callable[[Path, str], Awaitable[Figures]]
) -> dict[str, list[Figures]]:
    """The figures of each arm, a round of all arms after the other, each on a new stack in a folder of its own."""
    found: dict[str, list[Figures]] = {arm: [] for arm in arms}
    for number in range(rounds):
        for arm in arms:
            with work_folder() as home:
                found[arm].append(figures := asyncio.run(_awaited(measure(home, arm))))
            told = ", ".join(f"{key} {value:.2f}" for key, value in figures.items() if value is not None)
            notes().print(f"round {number + 1} of {rounds}, {arm}: {told}")
    return found


def medians_of(rounds: Sequence[Figures]) -> dict[str, float | None]:
    """Of each figure the median over the rounds that have it."""
    known = {key: [value for one in rounds if (value := one[key]) is not None] for key in rounds[0]}
    return {key: median(values) if values else None for key, values in known.items()}


def show_rounds(
    title: str, columns: Columns, rows: Sequence[Mapping[str, Any]], rounds: Mapping[str, Any], *, as_json: bool
) -> None:
    """Print a row of medians for each arm; as JSON with the rounds they are of."""
    if as_json:
        print_json({"rows": rows, "rounds": rounds})
    else:
        print_table(title, columns, rows)


async def _awaited(figures: Awaitable[Figures]) -> Figures:
    return await figures
