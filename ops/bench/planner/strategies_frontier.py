"""Like with like: what each strategy costs at the quality that it gives, and what Reactive would cost at that quality.

A strategy is a line of points, one for each setting of its threshold or quantile; hours alone compare nothing.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from ops.bench.planner.strategies_cases import POINTS
from ops.client.screen import Columns, print_table
from ops.plots.lines_plot import LinesPanel, draw_lines

FRONTIER: Sequence[str] = (
    "reactive",
    "reactive-60-30",
    "reactive-50-25",
    "reactive-40-20",
    "lt-i-median",
    "lt-i-75",
    "lt-i",
    "lt-u",
    "lt-ua",
    "lt-ua-median",
    "lt-d",
    "lt-d-median",
    "lt-d-tight",
    "lt-d-wide",
    "oracle",
)
"""The variants that make the lines."""

_WORSE_IS_MORE = ("instance_hours", "late", "slow_minutes")
Row = Mapping[str, Any]


def compared(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows of one case with `beaten_by`, a strategy that is better in hours, late share and slow minutes and worse in
    none, or None; and `reactive_alike`, the hours of Reactive with this late share, between two of its points, or None.
    """
    line = sorted((row["late"], row["instance_hours"]) for row in rows if row["strategy"].startswith("reactive"))
    return [
        dict(row) | {"beaten_by": _beaten_by(row, rows), "reactive_alike": hours_at(line, row["late"])} for row in rows
    ]


def hours_at(line: Sequence[tuple[float, float]], late: float) -> float | None:
    """Hours at a late share, on straight lines between points of (late share, hours) in order; None outside."""
    for (low, hours_low), (high, hours_high) in pairwise(line):
        if low <= late <= high:
            share = (late - low) / (high - low) if high > low else 0.0
            return hours_low + share * (hours_high - hours_low)
    return None


def _beaten_by(row: Row, rows: Sequence[Row]) -> str | None:
    mine = [row[key] for key in _WORSE_IS_MORE]
    for other in sorted(rows, key=lambda each: each["instance_hours"]):
        theirs = [other[key] for key in _WORSE_IS_MORE]
        if theirs != mine and all(one <= two for one, two in zip(theirs, mine, strict=True)):
            return str(other["strategy"])
    return None


def show_frontier(rows: Sequence[Row]) -> None:
    """The cheapest first."""
    columns: Columns = {
        "case": "case",
        "strategy": "strategy",
        "instance-h": lambda row: f"{row['instance_hours']:.1f}",
        "late": lambda row: f"{row['late']:.1%}",
        "slow min": lambda row: f"{row['slow_minutes']:.0f}",
        "TTFT p95, p99": lambda row: f"{row['ttft_p95_s']:.2f}, {row['ttft_p99_s']:.2f} s",
        "Reactive as late": lambda row: _hours(row["reactive_alike"]),
        "to that": lambda row: _to(row["instance_hours"], row["reactive_alike"]),
        "beaten by": lambda row: row["beaten_by"] or "",
    }
    print_table("Like with like, IW-F", columns, sorted(rows, key=lambda row: (row["case"], row["instance_hours"])))


def draw_frontier(rows: Sequence[Row], path: Path) -> None:
    """A panel for each case: hours against how many first tokens are late, a line through each strategy's settings.

    Raises:
        ops.plots.panels.PlotError: it cannot be written there.
    """
    panels = [
        LinesPanel(
            title=case,
            x_label="instance hours",
            y_label="% of IW-F late",
            lines=_lines(list(mine)),
            shares=False,
        )
        for case, mine in groupby(sorted(rows, key=itemgetter("case")), key=itemgetter("case"))
    ]
    draw_lines(panels, "Scaling strategies: what they cost, and how well they serve", path)


def _lines(rows: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=itemgetter("instance_hours")):
        strategy, _ = POINTS[row["strategy"]]
        lines.setdefault(strategy, []).append((row["instance_hours"], 100 * row["late"]))
    return lines


def _hours(hours: float | None) -> str:
    return "-" if hours is None else f"{hours:.1f} h"


def _to(hours: float, alike: float | None) -> str:
    return "-" if alike is None else f"{hours / alike - 1:+.1%}"
