"""`region latency` and `region latencies`: how far regions are from each other."""

from typing import Annotated

import typer

from ops.cli.examples import examples
from ops.cli.listing import print_pages
from ops.client.api import connected
from ops.client.screen import AsJson, print_json


@examples("tidepool region latency us-east us-west 62")
def set_latency(
    context: typer.Context,
    origin: str,
    destination: str,
    ms: Annotated[float, typer.Argument(min=0, max=60_000, help="Milliseconds there and back.")],
    one_way: Annotated[bool, typer.Option("--one-way", help="Not for the opposite direction.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say how far a region is from another: traffic that cannot stay at home tries the nearest region first."""
    pairs = [(origin, destination)] if one_way else [(origin, destination), (destination, origin)]
    with connected(context) as api:
        answers = [
            api.put("/admin/region-latencies", {"origin": start, "destination": end, "ms": ms}) for start, end in pairs
        ]
    if as_json:
        print_json(answers)
        return
    for answer in answers:
        typer.echo(f"{answer['origin']} to {answer['destination']}: {answer['ms']:g} ms")


@examples("tidepool region latencies")
def list_latencies(context: typer.Context, as_json: AsJson = False) -> None:
    """List latencies between regions."""
    print_pages(
        context,
        "/admin/region-latencies",
        "Latencies",
        {"from": "origin", "to": "destination", "ms": "ms"},
        as_json=as_json,
    )
