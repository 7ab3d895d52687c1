"""`audit`: who changed what."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ops.cli.examples import examples
from ops.cli.listing import Limit, Since, newest
from ops.client.api import connected
from ops.client.screen import AsJson, Columns, print_list, same
from ops.client.times import since as parse_since
from ops.client.times import utc_text

Kind = Annotated[str | None, typer.Option(help="Only of this kind, such as model, key or node.")]


@examples("tidepool audit --since 2h", "tidepool audit --actor admin --kind model --limit 10")
def show_audit(
    context: typer.Context,
    actor: Annotated[str | None, typer.Option(help="Only by the key of this name, or a loop such as scale.")] = None,
    kind: Kind = None,
    subject: Annotated[str | None, typer.Option(help="Only of this name or id.")] = None,
    since: Since = None,
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """Show who changed what, the newest first; --json has the whole row before and after."""
    query = {"actor": actor, "kind": kind, "subject": subject}
    query["since"] = None if since is None else parse_since(since).isoformat()
    with connected(context) as api:
        rows = newest(api, "/admin/audit", limit, **query)
    columns: Columns = {
        "at": lambda row: utc_text(row["at"]),
        "by": "actor",
        **same("action", "subject"),
        "change": lambda row: change_text(row["before"], row["after"]),
    }
    print_list("Changes", columns, {"data": rows}, as_json=as_json)


def change_text(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> str:
    """The fields that differ; all fields of a row that was created or deleted."""
    if before is None or after is None:
        row = after if before is None else before
        fields = ", ".join(f"{name} {value}" for name, value in (row or {}).items() if value not in (None, "", [], {}))
        return fields if before is None else f"deleted: {fields}"
    names = [*before, *(name for name in after if name not in before)]
    return ", ".join(
        f"{name} {before.get(name)} -> {after.get(name)}" for name in names if before.get(name) != after.get(name)
    )
