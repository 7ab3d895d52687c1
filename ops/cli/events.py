"""`events`: what happened to instances, nodes and plans, and when terms of the primary began."""

from collections.abc import Callable, Mapping
from time import sleep
from typing import Annotated, Any, Literal

import typer

from ops.cli.examples import examples
from ops.cli.listing import Limit, Since, newest
from ops.client.api import Api, CommandError, connected
from ops.client.screen import AsJson, Columns, notes, print_list, same
from ops.client.times import since as parse_since
from ops.client.times import utc_text

POLL_S = 1.0
_LOOKED_BACK = 100


EventKind = Literal["instance", "node", "plan", "term", "rollout"]


@examples("tidepool events --what failed --since 2h", "tidepool events --model qwen3-8b --follow")
def show_events(
    context: typer.Context,
    kind: Annotated[EventKind | None, typer.Option(help="Only of this kind.")] = None,
    what: Annotated[str | None, typer.Option(help="Only this, such as failed, ready or lost.")] = None,
    subject: Annotated[str | None, typer.Option(help="Only of this instance, node, plan or term.")] = None,
    model: Annotated[str | None, typer.Option(help="Only of this model.")] = None,
    region: Annotated[str | None, typer.Option(help="Only in this region.")] = None,
    node: Annotated[str | None, typer.Option(help="Only on this node.")] = None,
    since: Since = None,
    limit: Limit = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new events until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show events of instances, nodes, plans and terms, the newest first. Changes by operators: `tidepool audit`."""
    query = {"kind": kind, "what": what, "subject": subject}
    query |= {"model": model, "region": region, "node": node}
    from_then = {"since": None if since is None else parse_since(since).isoformat()}
    with connected(context) as api:
        rows = newest(api, "/admin/events", limit, **query, **from_then)
        if follow:
            follow_events(api, rows, query)
            return
    columns: Columns = {
        "at": lambda row: utc_text(row["at"]),
        **same("kind", "what", "subject", "model", "region", "node", "message"),
    }
    print_list("Events", columns, {"data": rows}, as_json=as_json)


def follow_events(api: Api, rows: list[Any], query: Mapping[str, Any], pause: Callable[[float], None] = sleep) -> None:
    """Print a line for each event, the oldest first, until Ctrl-C. A transaction that commits later may have lower ids,
    so the last events are read again. An API that is unavailable is reported once and retried. `pause` sleeps for a
    number of seconds.
    """
    seen: set[int] = set()
    unavailable = False
    try:
        while True:
            new = [row for row in rows if row["id"] not in seen]
            for row in reversed(new):
                typer.echo(_line(row))
            seen = {row["id"] for row in new} | set(sorted(seen)[-_LOOKED_BACK * 10 :])
            pause(POLL_S)
            try:
                rows, unavailable = newest(api, "/admin/events", _LOOKED_BACK, **query), False
            except CommandError as error:
                if not unavailable:
                    notes().print(str(error), markup=False)
                rows, unavailable = [], True
    except KeyboardInterrupt:
        return


def _line(row: Mapping[str, Any]) -> str:
    about = (row["model"], row["region"], row["node"] if row["kind"] != "node" else None, row["message"])
    details = ", ".join(str(each) for each in about if each is not None)
    return f"{utc_text(row['at'])} {row['kind']} {row['subject']} {row['what']}{f' ({details})' if details else ''}"
