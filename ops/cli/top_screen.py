"""The fleet at a glance, live: what `tidepool top` reads from the admin API, and how it is drawn."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ops.client.api import Api, CommandError
from ops.client.health import health_causes, loops_text
from ops.client.screen import unplaced_text

STATES = ("ready", "pending", "loading", "draining", "spot", "failed", "lost")
BUSY, FULL = 0.5, 0.7
"""Utilization from which an endpoint is shown yellow, and red: where routing prefers other regions."""
ROWS_MAX = 30
"""Endpoints shown in a pipe or a log."""
_ROWS_MIN = 3
_UNPLACED_MAX = 3
_DROPPED_FIRST = ("load", "tokens left")
"""Columns that a narrow terminal goes without."""
_STYLES = {"ok": "green", "degraded": "yellow", "unavailable": "red"}


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The API's answers at one moment. `away`: the parts that are unavailable, and why."""

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
    """Read all parts; an unavailable part is None, and `away` has the reason. A refused key is an error.

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
        ready=ask("readiness", lambda: api.probe("/readyz")),
        status=ask("fleet", lambda: api.get("/admin/status")),
        live=ask("endpoints", lambda: api.get("/admin/status/live")),
        away=away,
    )


def screen(snapshot: Snapshot, *, width: int, height: int | None = None) -> RenderableType:
    """All parts in `width` columns; unavailable ones are marked. Regions, endpoints and queues share the `height` lines
    that the other parts leave, and their titles count hidden rows. None: as many lines as needed.
    """
    head = _head(snapshot)
    head += [Text(f"{part}: {why}", style="red") for part, why in snapshot.away.items()]
    if snapshot.live is not None and not snapshot.live["view_fresh"]:
        head.append(Text("the live view is old: Redis is unavailable; the last copy is shown", style="red"))
    if snapshot.status is not None:
        head += [_loops(snapshot.status), *_plan(snapshot.status), *_unplaced(snapshot.status)]
    rows = _rows(snapshot, None if height is None else height - len(head))
    tables: list[Table] = []
    if snapshot.status is not None:
        tables.append(_regions(snapshot.status, rows.regions))
    if snapshot.live is not None:
        tables += [
            _objectives(snapshot.live),
            _endpoints(snapshot.live, rows.endpoints, width),
            _queues(snapshot.live["queues"], rows.queues, snapshot.at_s),
        ]
    return Group(*head, *(part for table in tables if table.rows for part in (Text(), table)))


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """How many of each are shown."""

    regions: int
    endpoints: int
    queues: int


def _rows(snapshot: Snapshot, lines: int | None) -> _Rows:
    """Share `lines`. A table also takes a blank line and a header; the endpoints get the lines that regions and queues
    do not use.
    """
    regions = len((snapshot.status or {}).get("regions", ()))
    live = snapshot.live or {}
    endpoints, queues, tiers = (len(live.get(part, ())) for part in ("endpoints", "queues", "objectives"))
    if lines is None:
        return _Rows(regions=regions, endpoints=min(endpoints, ROWS_MAX), queues=queues)
    free = lines - tiers - sum(2 for count in (regions, endpoints, queues, tiers) if count)
    few = max(_ROWS_MIN, free // 4)
    regions, queues = min(regions, few), min(queues, few)
    return _Rows(regions=regions, endpoints=max(1, min(endpoints, free - regions - queues)), queues=queues)


def _head(snapshot: Snapshot) -> list[Text]:
    at = time.strftime("%H:%M:%S", time.gmtime(snapshot.at_s))
    words = Text(f"tidepool {snapshot.url}  {at}Z  ", style="bold")
    if snapshot.ready is None:
        return [words.append("health unknown", style="red")]
    style = _STYLES[snapshot.ready["status"]]
    lines = [words.append(snapshot.ready["status"], style=style)]
    return [*lines, _line(causes, style)] if (causes := health_causes(snapshot.ready)) else lines


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _table(texts: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    """An empty table without lines: columns of texts, then columns of numbers. A row is one line."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold reverse")
    for header in texts:
        table.add_column(header, no_wrap=True)
    for header in numbers:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def _loops(status: Mapping[str, Any]) -> Text:
    late = any(loop["late"] for loop in status["loops"])
    return _line(f"last success: {loops_text(status['loops'])}", "red" if late else "")


def _titled(title: str, count: int, shown: int) -> str:
    return f"{title} ({count - shown} more)" if count > shown else title


def _regions(status: Mapping[str, Any], shown: int) -> Table:
    rows = sorted(status["regions"], key=lambda row: row["nodes_alive"] >= row["nodes"])
    table = _table((_titled("region", len(rows), shown),), ("nodes alive", "GPUs", "instances ready"))
    for row in rows[:shown]:
        dead = row["nodes_alive"] < row["nodes"]
        nodes = Text(f"{row['nodes_alive']} of {row['nodes']}", style="red" if dead else "")
        ready = f"{row['instances_ready']} of {row['instances']}"
        table.add_row(escape(row["name"]), nodes, str(row["gpus"]), ready)
    return table


def _plan(status: Mapping[str, Any]) -> list[Text]:
    plan = status["plan"]
    batches = ", ".join(f"{count} {state}" for state, count in sorted(status["batches"].items())) or "none"
    running = f"{status['requests_waiting']} requests waiting, {status['requests_running']} running"
    words = "none" if plan is None else f"{plan['id']} ({plan['status']}), {plan['reason']}"
    lines = (f"plan in force: {words}", f"batches: {batches}; {running}")
    return [_line(line) for line in lines]


def _unplaced(status: Mapping[str, Any]) -> list[Text]:
    """A line for each endpoint with unplaced instances, `_UNPLACED_MAX` lines at most."""
    rows = status["unplaced"]
    words = [f"not placed: {row['model']} in {row['region']}: {unplaced_text(row)}" for row in rows[:_UNPLACED_MAX]]
    if len(rows) > _UNPLACED_MAX:
        words.append(f"not placed: {len(rows) - _UNPLACED_MAX} more, see tidepool status")
    return [_line(line, "red") for line in words]


def _objectives(live: Mapping[str, Any]) -> Table:
    table = _table(("objectives of this gateway",), ("answers", "kept", "tokens in time"))
    for row in live["objectives"]:
        kept, in_time = _share(row["kept"], row["answers"]), _share(row["tokens_in_time"], row["tokens"])
        table.add_row(row["tier"], str(row["answers"]), kept, in_time)
    return table


def _endpoints(live: Mapping[str, Any], shown: int, width: int) -> Table:
    """Endpoints that cannot serve first, then the busiest."""
    rows = sorted(live["endpoints"], key=_urgency)
    columns: dict[str, Callable[[Mapping[str, Any]], Text]] = {
        _titled("endpoint", len(rows), shown): lambda row: Text(row["model"]),
        "region": lambda row: Text(row["region"]),
        "instances": lambda row: Text(_states(row["instances"])),
        "busy": lambda row: _utilization(row["utilization"]),
        "tokens left": lambda row: Text("-" if row["remaining_tokens"] is None else f"{row['remaining_tokens']:,}"),
        "load": lambda row: Text("-" if row["load"] is None else f"{row['load']:.2f}"),
    }
    cells = {header: [of(row) for row in rows[:shown]] for header, of in columns.items()}
    for header in _DROPPED_FIRST:
        if sum(max(len(header), *map(len, texts)) + 1 for header, texts in cells.items() if texts) > width:
            del cells[header]
    table = _table(tuple(cells)[:3], tuple(cells)[3:])
    for texts in zip(*cells.values(), strict=True):
        table.add_row(*texts)
    return table


def _states(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[state]} {state}" for state in STATES if counts.get(state)) or "none"


def _urgency(row: Mapping[str, Any]) -> tuple[float, float, str, str]:
    """A sort key: unusable endpoints first, then the busiest."""
    utilization = 2.0 if row["utilization"] is None else row["utilization"]
    return -utilization, -(row["remaining_tokens"] or 0), row["model"], row["region"]


def _queues(queues: Sequence[Mapping[str, Any]], shown: int, at_s: float) -> Table:
    """Those with the nearest deadline first."""
    rows = sorted(queues, key=lambda row: (row["due_s"], row["model"]))
    table = _table((_titled("NIW queue", len(rows), shown),), ("tokens waiting", "nearest deadline in"))
    for row in rows[:shown]:
        left_s = row["due_s"] - at_s
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
