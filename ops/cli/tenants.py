"""`tenant`: tenants and their limits."""

from typing import Annotated, Any

import typer

from ops.cli.examples import examples
from ops.cli.listing import print_pages
from ops.client.api import connected, path_to
from ops.client.screen import AsJson, Columns, print_answer, print_json, print_table, same

tenants = typer.Typer(no_args_is_help=True, help="Tenants and their limits.")

LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent_max",
    "queued_batch_tokens_max",
    "tokens_per_day",
    "tokens_per_month",
    "tokens_total",
)
_COLUMNS: Columns = {
    "tenant": "name",
    "requests/min": "requests_per_minute",
    "tokens/min": "tokens_per_minute",
    "at once": "concurrent_max",
    "queued batch tokens": "queued_batch_tokens_max",
    "tokens/day": "tokens_per_day",
    "tokens/month": "tokens_per_month",
    "tokens ever": "tokens_total",
}
_SHARES: Columns = {
    name: name.replace(" ", "_") for name in ("limit", "region", "share", "held", "floor", "demand", "ends at")
}


def _limit(text: str) -> int | None:
    """A number, or none.

    Raises:
        typer.BadParameter: it is neither.
    """
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"'{text}' is neither a number nor 'none'") from None


def _option(words: str) -> Any:
    return typer.Option(metavar="NUMBER|none", help=f"{words}; none: without limit. Default: unchanged.")


@tenants.command("list")
@examples("tidepool tenant list")
def list_tenants(context: typer.Context, as_json: AsJson = False) -> None:
    """List the tenants that have limits of their own."""
    print_pages(context, "/admin/tenants", "Tenants", _COLUMNS, as_json=as_json)


@tenants.command("show")
@examples("tidepool tenant show team-a")
def show_tenant(context: typer.Context, name: str, as_json: AsJson = False) -> None:
    """Show a tenant's limits, its shares of them by region, and the tokens that its batches have queued."""
    with connected(context) as api:
        answer = api.get(path_to("/admin/tenants", name))
    if as_json:
        print_json(answer)
        return
    title = f"Tenant {name}" + (" (default limits)" if answer["is_default"] else "")
    print_table(title, {**_COLUMNS, "queued now": "queued_batch_tokens"}, [answer])
    if answer["tokens_reserved"]:
        reserved = [{"budget": name, "reserved": count} for name, count in answer["tokens_reserved"].items()]
        print_table("Tokens used or held of its budgets", same("budget", "reserved"), reserved)
    if answer["shares"]:
        print_table("Shares of its limits by region", _SHARES, answer["shares"])


@tenants.command("set")
@examples("tidepool tenant set team-a --requests-per-minute 600 --tokens-per-minute 200000 --concurrent-max none")
def set_tenant(
    context: typer.Context,
    name: str,
    requests_per_minute: Annotated[
        str | None, _option("Interactive requests, uploads and new batches a minute")
    ] = None,
    tokens_per_minute: Annotated[str | None, _option("Prompt and completion tokens a minute")] = None,
    concurrent_max: Annotated[str | None, _option("Interactive requests at once")] = None,
    queued_batch_tokens_max: Annotated[str | None, _option("Tokens of batch requests that have not ended")] = None,
    tokens_per_day: Annotated[str | None, _option("Budget of tokens for a day in UTC")] = None,
    tokens_per_month: Annotated[str | None, _option("Budget of tokens for a month in UTC")] = None,
    tokens_total: Annotated[str | None, _option("Budget of tokens for ever")] = None,
    as_json: AsJson = False,
) -> None:
    """Set a tenant's limits and budgets. All gateways apply them within seconds."""
    given = (
        requests_per_minute,
        tokens_per_minute,
        concurrent_max,
        queued_batch_tokens_max,
        tokens_per_day,
        tokens_per_month,
        tokens_total,
    )
    changes = {limit: _limit(text) for limit, text in zip(LIMITS, given, strict=True) if text is not None}
    with connected(context) as api:
        present = api.get(path_to("/admin/tenants", name))
        answer = api.put(path_to("/admin/tenants", name), {limit: present[limit] for limit in LIMITS} | changes)
    if as_json:
        print_json(answer)
        return
    print_table(f"Tenant {name}", _COLUMNS, [answer])


@tenants.command("reset")
@examples("tidepool tenant reset team-a")
def reset_tenant(context: typer.Context, name: str, as_json: AsJson = False) -> None:
    """Reset a tenant to the default limits."""
    with connected(context) as api:
        answer = api.delete(path_to("/admin/tenants", name))
    print_answer(answer, f"tenant {name} has the default limits", as_json=as_json)
