"""A live stack on the replay engine: priority requests come while others queue on the only instance of their model.

python -m ops.bench.gateway.orders --rounds 3
"""

import asyncio
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, get_args

import typer

from dataplane.scheduling.ordering import Order
from ops.bench.gateway.first_tokens import (
    Figures,
    client_of,
    first_token_s,
    live_stack,
    measure_rounds,
    medians_of,
    show_rounds,
)
from ops.bench.shared import chosen
from ops.client.screen import AsJson, Columns
from ops.local.replay_stack import Fleet

_PRIORITY = 10
_EVERY_S = 0.6
"""Priority requests, and how often one comes: as long as others wait."""


async def measure(home: Path, order: str, requests: int, replay_speed: float) -> Figures:
    """Send so many requests at once to a new stack, and priority requests while they wait. `refused`: priority requests
    with 429; times to first tokens of the others, and of those that are not urgent.

    Raises:
        RuntimeError: a request was not answered as it should be.
    """
    fleet = Fleet(regions=1, nodes=1, models=1, instances_max=1, replay_speed=replay_speed)
    async with live_stack(home, fleet, {"TIDEPOOL_AGENT_ORDER": order}) as stack, client_of(stack) as client:
        model = fleet.model_names()[0]
        default = [first_token_s(client, model, number, number / 1000) for number in range(requests)]
        urgent = [
            first_token_s(client, model, requests + number, 1.5 + number * _EVERY_S, "priority")
            for number in range(_PRIORITY)
        ]
        found = await asyncio.gather(*default, *urgent)
    waited_s = [ttft_s for ttft_s in found[:requests] if ttft_s is not None]
    soon_s = [ttft_s for ttft_s in found[requests:] if ttft_s is not None]
    return {
        "refused": _PRIORITY - len(soon_s),
        "priority_mean_s": fmean(soon_s) if soon_s else None,
        "priority_most_s": max(soon_s, default=None),
        "default_mean_s": fmean(waited_s),
    }


def _seconds(key: str) -> Any:
    return lambda row: "-" if row[key] is None else f"{row[key]:.2f} s"


COLUMNS: Columns = {
    "order": "order",
    f"refused, of {_PRIORITY}": lambda row: f"{row['refused']:g}",
    "priority: first token, mean": _seconds("priority_mean_s"),
    "most": _seconds("priority_most_s"),
    "others: first token, mean": _seconds("default_mean_s"),
}


def main(
    order: Annotated[list[str] | None, typer.Option(help="By default fcfs and edf.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    requests: Annotated[int, typer.Option(min=1, help="That are not urgent, at once.")] = 60,
    replay_speed: Annotated[float, typer.Option(min=0.01, help="1: as fast as an H800.")] = 0.2,
    as_json: AsJson = False,
) -> None:
    """Measure priority requests' first tokens under orders of service, each round on a new stack of processes.

    \b
    Example:
      python -m ops.bench.gateway.orders --order edf --order pf --json
    """
    orders = chosen(order or ["fcfs", "edf"], get_args(Order), "--order")
    found = measure_rounds(rounds, orders, lambda home, each: measure(home, each, requests, replay_speed))
    rows = [{"order": each, **medians_of(mine)} for each, mine in found.items()]
    title = f"{_PRIORITY} priority requests while {requests} others queue, medians of {rounds} rounds"
    show_rounds(title, COLUMNS, rows, found, as_json=as_json)


if __name__ == "__main__":
    typer.run(main)
