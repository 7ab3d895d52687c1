"""`usage`: requests and tokens of tenants and models."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from ops.cli.examples import examples
from ops.cli.listing import Limit, newest
from ops.client.api import connected
from ops.client.screen import AsJson, Columns, print_list
from ops.client.times import since as parse_since

By = StrEnum("By", ["hour", "day", "month", "tenant", "model", "tier"])
_DEFAULT = (By.day, By.tenant, By.model)
_TIME_CHARS = {By.hour: 16, By.day: 10, By.month: 7}


@examples(
    "tidepool usage --since 30d --by month --by tenant", "tidepool usage --tenant acme --by hour --by model --by tier"
)
def show_usage(
    context: typer.Context,
    by: Annotated[
        list[By] | None, typer.Option(help="What to add up by; may be repeated. Default: day, tenant, model.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only of this tenant.")] = None,
    model: Annotated[str | None, typer.Option(help="Only of this model.")] = None,
    since: Annotated[
        str, typer.Option(metavar="TIME", help="How long ago (2h, 7d), or a time in ISO 8601; hours count whole.")
    ] = "7d",
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Before then; default: now.")] = None,
    limit: Limit = 1000,
    as_json: AsJson = False,
) -> None:
    """Show requests and tokens, the newest first. Gateways report every 15 seconds; batches count when they end."""
    dimensions = tuple(by or _DEFAULT)
    query: dict[str, Any] = {"by": [each.value for each in dimensions], "tenant": tenant, "model": model}
    query["since"] = parse_since(since).isoformat()
    query["until"] = None if until is None else parse_since(until).isoformat()
    with connected(context) as api:
        rows = newest(api, "/admin/usage", limit, **query)
    columns: Columns = {each.value: _column(each) for each in dimensions}
    counts = ("requests", "failed", "input_tokens", "output_tokens")
    numbers: Columns = {name.replace("_", " "): _number(name) for name in counts}
    print_list("Usage", {**columns, **numbers}, {"data": rows}, as_json=as_json)


def _column(dimension: By) -> Any:
    chars = _TIME_CHARS.get(dimension)
    return dimension.value if chars is None else lambda row: row[dimension][:chars].replace("T", " ")


def _number(name: str) -> Any:
    def text(row: Mapping[str, Any]) -> str:
        return f"{row[name]:,}"

    return text
