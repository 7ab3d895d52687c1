"""A live stack on the replay engine, whose requests come by one gateway, or by several that tell each other what they
send or do not.

python -m ops.bench.gateway.gateways --rounds 3
"""

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from ops.bench.gateway.first_tokens import (
    Figures,
    client_of,
    first_token_s,
    live_stack,
    measure_rounds,
    medians_of,
    show_rounds,
)
from ops.client.screen import AsJson, Columns
from ops.faults.percentiles import percentile
from ops.local.replay_stack import Fleet

_TTFT_S = 1.0
"""The objective of priority requests."""
_REPLAY_SPEED = 0.2


@dataclass(frozen=True, kw_only=True)
class Load:
    """Priority requests at random moments, to so many instances of one model."""

    instances: int
    per_s: float
    seconds: float


async def measure(home: Path, gateways: int, load: Load, *, seed: int, told: bool = True) -> Figures:
    """Send a load to a new stack, each request by a gateway that is drawn. `refused`: with 429, `late`: that or after
    the objective, both as shares; times are those of first tokens. `told`: gateways tell each other what they send.

    Raises:
        RuntimeError: a request was not answered as it should be.
    """
    fleet = Fleet(
        regions=1,
        nodes=load.instances,
        models=1,
        instances_min=load.instances,
        instances_max=load.instances,
        replay_speed=_REPLAY_SPEED,
    )
    chance, after_s, asked = random.Random(seed), 0.0, []
    environment = {} if told else {"TIDEPOOL_SENT_SHARE_EVERY_S": "0"}
    async with live_stack(home, fleet, environment, gateways=gateways) as stack, AsyncExitStack() as clients:
        each = [await clients.enter_async_context(client_of(stack, url)) for url in stack.local.urls]
        for number in count():
            if (after_s := after_s + chance.expovariate(load.per_s)) > load.seconds:
                break
            client = chance.choice(each)
            asked.append(first_token_s(client, fleet.model_names()[0], number, after_s, "priority"))
        found = await asyncio.gather(*asked)
    ttft_s = sorted(one for one in found if one is not None)
    in_time = sum(one <= _TTFT_S for one in ttft_s)
    return {
        "refused": 1 - len(ttft_s) / len(found),
        "late": 1 - in_time / len(found),
        "ttft_mean_s": fmean(ttft_s),
        "ttft_p95_s": percentile(ttft_s, 0.95),
    }


COLUMNS: Columns = {
    "gateways": "gateways",
    "know of each other's": lambda row: "at once" if row["told"] else "by reports",
    "refused": lambda row: f"{row['refused']:.1%}",
    "late or refused": lambda row: f"{row['late']:.1%}",
    "first token, mean": lambda row: f"{row['ttft_mean_s']:.2f} s",
    "p95": lambda row: f"{row['ttft_p95_s']:.2f} s",
}


def main(
    gateways: Annotated[list[int] | None, typer.Option(min=1, help="By default 1 and 8.")] = None,
    instances: Annotated[int, typer.Option(min=2)] = 8,
    per_s: Annotated[float, typer.Option("--rate", min=0.1, help="Requests/s.")] = 26,
    seconds: Annotated[float, typer.Option(min=1)] = 30,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    as_json: AsJson = False,
) -> None:
    """Measure first tokens by how many gateways route the same requests, each round on a new stack of processes.

    \b
    Example:
      python -m ops.bench.gateway.gateways --gateways 4 --rate 12
    """
    numbers = gateways or [1, 8]
    arms = {f"gateways: {number}": (number, True) for number in numbers}
    arms |= {f"gateways: {number}, not told": (number, False) for number in numbers if number > 1}
    load = Load(instances=instances, per_s=per_s, seconds=seconds)
    seeds = {arm: count(1) for arm in arms}

    async def one(home: Path, arm: str) -> Figures:
        number, told = arms[arm]
        return await measure(home, number, load, seed=next(seeds[arm]), told=told)

    found = measure_rounds(rounds, list(arms), one)
    rows = [{"gateways": arms[arm][0], "told": arms[arm][1], **medians_of(mine)} for arm, mine in found.items()]
    title = f"{per_s:g} priority requests/s to {instances} instances, medians of {rounds} rounds"
    show_rounds(title, COLUMNS, rows, found, as_json=as_json)


if __name__ == "__main__":
    typer.run(main)
