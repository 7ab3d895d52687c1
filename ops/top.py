"""The fleet at a glance, live: what `tidepool top` reads from the admin API, and how it looks in a terminal."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ops.commands.api import Api, CommandError

STATES = ("ready", "loading", "draining", "spot", "failed")
BUSY, FULL = 0.5, 0.7
"""Utilization from which an endpoint is shown yellow, and red: where routing prefers other regions."""
ROWS_MAX = 30


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What the API said at one moment. `away`: which parts it could not tell, and why."""

    at_s: float
    url: str
    status: Mapping[str, Any] | None
    live: Mapping[str, Any] | None
    ready: Mapping[str, Any] | None
    away: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        return {"at_s": self.at_s, "status": self.status, "live": self.live, "ready": self.ready, "away": self.away}


def take_snapshot(api: Api, url: str) -> Snapshot:
    """Ask for everything; what cannot be had is None, and `away` says why. A refused key is an error.

    Raises:
        CommandError: the key is missing, wrong, or may not read.
    """
    away: dict[str, str] = {}

    def ask(part: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except CommandError as error:
            if error.status in {401, 403}:
                raise
            away[part] = str(error)
            return None

    return Snapshot(
        at_s=time.time(),
        url=url,
        ready=ask("readiness", lambda: api.get("/readyz")),
        status=ask("fleet", lambda: api.get("/admin/status")),
        live=ask("endpoints", lambda: api.get("/admin/status/live")),
        away=away,
    )


def screen(snapshot: Snapshot) -> RenderableType:
    """The whole picture; parts that are away say so."""
    parts: list[RenderableType] = [_head(snapshot)]
    parts += [Text(f"{part}: {why}", style="red") for part, why in snapshot.away.items()]
    if snapshot.status is not None:
        parts += [_regions(snapshot.status), _plan(snapshot.status)]
    if snapshot.live is not None:
        if not snapshot.live["view_fresh"]:
            parts.append(Text("the live view is old: Redis is away; the last copy is shown", style="red"))
        parts += [_objectives(snapshot.live), _endpoints(snapshot.live), _queues(snapshot)]
    return Group(*parts)


def _head(snapshot: Snapshot) -> Text:
    at = time.strftime("%H:%M:%S", time.gmtime(snapshot.at_s))
    words = Text(f"tidepool {snapshot.url}  {at}Z  ", style="bold")
    return words.append("ready" if snapshot.ready else "not ready", style="green" if snapshot.ready else "red")


def _table(title: str, texts: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    """An empty table: columns of texts, then columns of numbers."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for header in texts:
        table.add_column(header, overflow="fold")
    for header in numbers:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def _regions(status: Mapping[str, Any]) -> Table:
    table = _table("Regions", ("region",), ("nodes alive", "GPUs", "instances ready"))
    for row in status["regions"]:
        dead = row["nodes_alive"] < row["nodes"]
        nodes = Text(f"{row['nodes_alive']} of {row['nodes']}", style="red" if dead else "")
        ready = f"{row['instances_ready']} of {row['instances']}"
        table.add_row(escape(row["name"]), nodes, str(row["gpus"]), ready)
    return table


def _plan(status: Mapping[str, Any]) -> Text:
    plan = status["plan"]
    batches = ", ".join(f"{count} {state}" for state, count in sorted(status["batches"].items())) or "none"
    running = f"{status['requests_waiting']} requests waiting, {status['requests_running']} running"
    words = "none" if plan is None else f"{plan['id']} ({plan['status']}), {plan['reason']}"
    return Text(f"plan in force: {words}\nbatches: {batches}; {running}")


def _objectives(live: Mapping[str, Any]) -> Table:
    table = _table("Objectives (this gateway)", ("tier",), ("answers", "kept", "tokens in time"))
    for row in live["objectives"]:
        kept, in_time = _share(row["kept"], row["answers"]), _share(row["tokens_in_time"], row["tokens"])
        table.add_row(row["tier"], str(row["answers"]), kept, in_time)
    return table


def _endpoints(live: Mapping[str, Any]) -> Table:
    rows = sorted(live["endpoints"], key=_urgency)
    left_out = len(rows) - ROWS_MAX
    title = "Endpoints, those that cannot serve and the busiest first" + (
        f" ({left_out} more are not shown)" if left_out > 0 else ""
    )
    table = _table(title, ("model", "region"), ("utilization", "tokens left", "load", *STATES))
    for row in rows[:ROWS_MAX]:
        states = row["instances"]
        table.add_row(
            escape(row["model"]),
            escape(row["region"]),
            _utilization(row["utilization"]),
            "-" if row["remaining_tokens"] is None else f"{row['remaining_tokens']:,}",
            "-" if row["load"] is None else f"{row['load']:.2f}",
            *(str(states[state]) if state in states else "" for state in STATES),
        )
    return table


def _urgency(row: Mapping[str, Any]) -> tuple[float, float, str, str]:
    """What sorts what needs a look before the rest."""
    utilization = 2.0 if row["utilization"] is None else row["utilization"]
    return -utilization, -(row["remaining_tokens"] or 0), row["model"], row["region"]


def _queues(snapshot: Snapshot) -> Table:
    table = _table("NIW queue", ("model",), ("tokens waiting", "nearest deadline in"))
    for row in snapshot.live["queues"] if snapshot.live is not None else ():
        left_s = row["due_s"] - snapshot.at_s
        due = Text(_duration(left_s), style="red" if left_s <= 0 else "")
        more = " or more" if row["at_least"] else ""
        table.add_row(escape(row["model"]), f"{row['tokens']:,.0f}{more}", due)
    return table


def _utilization(share: float | None) -> Text:
    if share is None:
        return Text("nothing usable", style="red")
    style = "red" if share >= FULL else "yellow" if share >= BUSY else "green"
    return Text(f"{share:.0%}", style=style)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _duration(seconds: float) -> str:
    """Hours and minutes; minutes and seconds under an hour."""
    sign, left = ("-" if seconds < 0 else ""), abs(int(seconds))
    minutes, hours = left // 60, left // 3600
    return f"{sign}{hours} h {minutes % 60:02} min" if hours else f"{sign}{minutes} min {left % 60:02} s"
