"""`request`: interactive requests and their outcomes."""

from typing import Annotated, Any

import typer

from ops.cli.examples import examples
from ops.client.api import connected, path_to
from ops.client.screen import AsJson, Columns, output, print_fields, print_json, print_table, same
from ops.client.times import since as since_time
from ops.client.times import utc_text

requests = typer.Typer(no_args_is_help=True, help="Interactive requests of the last day, with their outcomes.")


def _tokens(row: Any) -> str:
    return f"{row['prompt_tokens']}+{row['completion_tokens']}"


def _seconds_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


_COLUMNS: Columns = {
    "ended": lambda row: utc_text(row["ended_at"]),
    "id": "request_id",
    **same("tenant", "model", "tier", "outcome"),
    "tokens": _tokens,
    "first token": lambda row: _seconds_text(row["first_token_s"]),
    "took": lambda row: _seconds_text(row["duration_s"]),
}


@requests.command("show")
@examples("tidepool request show req_0190f3c2a7b57c1e8d2f4b6a8c0e1f23")
def show_request(
    context: typer.Context,
    request_id: Annotated[str, typer.Argument(metavar="ID", help="x-request-id of the answer.")],
    as_json: AsJson = False,
) -> None:
    """Show a request: where it was sent, how long it took, and its outcome."""
    with connected(context) as api:
        answer = api.get(path_to("/admin/requests", request_id))
    if as_json:
        print_json(answer)
        return
    for number, row in enumerate(answer["data"]):
        if number:
            output().print()
        print_fields(
            [
                ("id", row["request_id"]),
                ("ended", utc_text(row["ended_at"])),
                ("endpoint", row["endpoint"]),
                ("tenant", row["tenant"]),
                ("key", row["key_id"]),
                ("model", row["model"]),
                ("tier", row["tier"]),
                ("outcome", f"{row['outcome']} ({row['status']})"),
                ("error", row["error"]),
                ("gateway", row["gateway"]),
                ("region", row["region"]),
                ("instance", row["instance_id"]),
                ("attempts", len(row["nodes"])),
                ("nodes", row["nodes"]),
                ("continuations", row["continuations"]),
                ("prompt tokens", row["prompt_tokens"]),
                ("completion tokens", row["completion_tokens"]),
                ("on a node after", _seconds_text(row["placed_s"])),
                ("first token after", _seconds_text(row["first_token_s"])),
                ("ended after", _seconds_text(row["duration_s"])),
                ("trace", row["trace_url"] or row["trace_id"]),
            ]
        )


@requests.command("list")
@examples(
    "tidepool request list --outcome failed --since 1h", "tidepool request list --model qwen3 --tenant acme --json"
)
def list_requests(
    context: typer.Context,
    outcome: Annotated[
        str | None, typer.Option(help="ok, cancelled, failed (neither), or an error's code such as no_capacity.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Of this model only.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Of this tenant only.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME|DURATION", help="Ended since then: 2026-11-27T18:00Z, or 30m ago.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="How many at most, the newest.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List requests that ended lately, the newest first."""
    since_s = None if since is None else since_time(since).timestamp()
    with connected(context) as api:
        answer = api.get("/admin/requests", outcome=outcome, model=model, tenant=tenant, since_s=since_s, limit=limit)
    if as_json:
        print_json(answer)
        return
    print_table("Requests", _COLUMNS, answer["data"])
    if answer["has_more"]:
        output().print(f"[dim]only the newest {limit}; --limit shows more, up to 100[/]")
