"""`pin`: replica overrides, each of which fixes the number of instances of an endpoint until a given time."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from ops.cli.examples import examples
from ops.cli.ids import whole_id
from ops.cli.listing import print_pages
from ops.client.api import connected, path_to
from ops.client.screen import AsJson, Columns, print_answer, same
from ops.client.times import time_of

pins = typer.Typer(
    no_args_is_help=True,
    help="Replica overrides (pins): a fixed number of instances of an endpoint until a given time.",
)


def _minute(time: str | None) -> str | None:
    return None if time is None else datetime.fromisoformat(time).astimezone(UTC).strftime("%Y-%m-%d %H:%MZ")


@pins.command("add")
@examples('tidepool pin add llama-8b us-east --instances 4 --until 2026-11-27T18:00Z --note "launch week"')
def add_override(
    context: typer.Context,
    model: str,
    region: str,
    instances: Annotated[int, typer.Option(min=0, help="The exact number, over all GPU types.")],
    until: Annotated[datetime, typer.Option(parser=time_of, metavar="TIME", help="ISO 8601; without a zone: UTC.")],
    note: Annotated[str, typer.Option(help="The reason, shown in the list.")] = "",
    as_json: AsJson = False,
) -> None:
    """Pin an endpoint to a number of instances. Scaling follows at once, plans from the next one on."""
    body = {"model": model, "region": region, "instances": instances, "until": until.isoformat(), "note": note}
    with connected(context) as api:
        answer = api.post("/admin/pins", body)
    print_answer(
        answer,
        f"{model} in {region} is pinned to {instances} until {answer['until']} ({answer['id']})",
        as_json=as_json,
    )


@pins.command("list")
@examples("tidepool pin list --all")
def list_pins(
    context: typer.Context,
    ended: Annotated[bool, typer.Option("--all", help="Include those that have ended.")] = False,
    as_json: AsJson = False,
) -> None:
    """List pins, the oldest first."""
    columns: Columns = {
        "pin": "id",
        **same("model", "region", "instances"),
        "until": lambda row: _minute(row["until"]),
        "by": "created_by",
        "note": "note",
        "ended": lambda row: _minute(row["removed_at"]),
    }
    print_pages(context, "/admin/pins", "Pins", columns, as_json=as_json, live_only=not ended)


@pins.command("remove")
@examples("tidepool pin remove pin_0190f3c2a7b57c1e8d2f4b6a8c0e1f23")
def remove_pin(
    context: typer.Context,
    pin_id: Annotated[str, typer.Argument(metavar="PIN", help="Its id, or the first characters of it.")],
    as_json: AsJson = False,
) -> None:
    """End a pin now. The endpoint follows the plan and its limits again."""
    with connected(context) as api:
        answer = api.delete(path_to("/admin/pins", whole_id(api, "pin", pin_id)))
    print_answer(answer, f"{answer['model']} in {answer['region']} is pinned no more", as_json=as_json)
