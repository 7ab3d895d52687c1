"""Lists that the API answers in pages: gathered, and printed as JSON or as a table."""

from typing import Annotated, Any

import typer

from ops.client.api import PAGE_ROWS, Api, connected
from ops.client.screen import Columns, print_list

Since = Annotated[str | None, typer.Option(metavar="TIME", help="How long ago (30m, 2h, 7d), or a time in ISO 8601.")]
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="How many at most.")]


def print_pages(
    context: typer.Context,
    path: str,
    title: str,
    columns: Columns,
    *,
    as_json: bool,
    as_client: bool = False,
    **query: Any,
) -> None:
    """Print all rows of a list."""
    with connected(context, as_client=as_client) as api:
        answer = api.pages(path, **query)
    print_list(title, columns, answer, as_json=as_json)


def newest(api: Api, path: str, limit: int, **query: Any) -> list[Any]:
    """The first `limit` rows of a list, over as many pages as that takes."""
    rows: list[Any] = []
    while len(rows) < limit:
        page = api.get(path, limit=min(PAGE_ROWS, limit - len(rows)), **query)
        rows += page["data"]
        if not page["has_more"]:
            break
        query["after"] = page["next"]
    return rows
