"""The table of strategies on a page of the documentation."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from ops.bench.marked_table import MarkedTable
from ops.client.screen import Columns
from ops.reference.markdown import table

TABLE = MarkedTable("strategies")

NAMES: Mapping[str, str] = {
    "reactive": "Reactive 70/30, as the paper prints",
    "reactive-50-25": "Reactive 50/25, as its authors' code",
    "reactive-clairvoyant": "Reactive 70/30, lengths of answers known",
    "lt-i-median": "LT-I, median: the paper's setting",
    "lt-i": "LT-I, 0.9: ours",
    "lt-d-median": "LT-D, median",
    "lt-d": "LT-D, 0.9",
    "lt-i-reserve": "LT-I, shared reserve, 0.9",
    "lt-i-reserve-median": "LT-I, shared reserve, median",
    "lt-d-reserve": "LT-D, shared reserve, 0.9",
    "lt-d-reserve-median": "LT-D, shared reserve, median",
    "lt-d-reserve-busy": "LT-D, shared reserve, median, tight, at 1.33 theta",
    "oracle": "oracle: LT-I with the hour's true demand",
    "idle": "20 idle instances in each region",
}
"""What the table calls the strategies that are not named by themselves."""

Row = Mapping[str, Any]


def markdown_of(rows: Sequence[Row]) -> str:
    """A line for each case and strategy; what costs more than Reactive 70/30 is bold."""
    lines = []
    for case, mine in groupby(rows, key=itemgetter("case")):
        for place, row in enumerate(mine):
            hours = spread(row["instance_hours"], row["instance_hours_range"], ".1f")
            dearer = (row["distances"].get("reactive") or {"hours": 0.0})["hours"] > 0
            cells = [
                f"`{case}`" if not place else "",
                NAMES.get(row["strategy"], row["strategy"]),
                f"{row['seeds']}",
                f"**{hours}**" if dearer else hours,
                tail(row),
                work(row),
                distance(row, "reactive"),
                distance(row, "reactive-50-25"),
                to_the_end(row, "reactive"),
                spread(100 * row["late"], [100 * each for each in row["late_range"]], ".1f"),
                "-" if row["late_beyond_idle"] is None else f"{100 * row['late_beyond_idle']:.1f}",
                spread(row["ttft_p95_s"], row["ttft_p95_s_range"], ".2f"),
                f"{row['slow_minutes']:.0f}",
                f"{row['scale_outs']:.0f}",
                f"{row['redeploys']:.0f}",
            ]
            lines.append(cells)
    cost = ("instance hours", "after the end", "work", "to 70/30", "to 50/25", "to 70/30, all to the end")
    service = ("late, %", "beyond idle's", "TTFT p95, s", "slow minutes", "starts", "displacing")
    return table(("case", "strategy", "seeds", *cost, *service), lines)


def spread(mean: float, ends: Sequence[float], form: str) -> str:
    """A mean over seeds, and its range if it has one."""
    low, high = (format(end, form) for end in ends)
    return format(mean, form) if low == high else f"{mean:{form}} ({low} to {high})"


def tail(row: Row) -> str:
    """Instance hours after the last request came."""
    return "-" if row["tail_hours"] is None else f"{row['tail_hours']:.1f}"


def work(row: Row) -> str:
    """Instance hours that all requests ask for at theta."""
    return "-" if row["work_hours"] is None else f"{row['work_hours']:.1f}"


def distance(row: Row, reference: str) -> str:
    """Hours to those of a strategy, in brackets if more first tokens are late than with it."""
    found = row["distances"].get(reference)
    if found is None:
        return "-"
    return f"{found['hours']:+.1%}" if found["no_later"] else f"({found['hours']:+.1%})"


def to_the_end(row: Row, reference: str) -> str:
    """Hours until all work is done to those of a strategy."""
    found = row["distances"].get(reference)
    return "-" if found is None or found["all_hours"] is None else f"{found['all_hours']:+.1%}"


DISTANCES: Columns = {
    "to 70/30": lambda row: distance(row, "reactive"),
    "to 50/25": lambda row: distance(row, "reactive-50-25"),
    "to 70/30, all to the end": lambda row: to_the_end(row, "reactive"),
}
