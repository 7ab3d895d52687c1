"""Rows of results on the placement of large fleets: see `ops.bench.planner.placement`."""

from collections.abc import Mapping
from typing import Any

from ops.bench.results.row import ResultRow

_OURS, _PLAIN = "ours, by prices", "plain, HiGHS"


def _solving(answer: Any) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, solver in (("ours", _OURS), ("plain", _PLAIN)):
        row = next(
            each
            for each in answer["medians"]
            if (each["shape"], each["wanted_gap"], each["solver"]) == ("20 x 20 x 5", 0.001, solver)
        )
        figures |= {f"{name}_{key}": row[key] for key in ("reached", "cpu_s", "cpu_most_s")}
    return figures


def _large(answer: Any) -> dict[str, float]:
    row = answer["large"][-1]
    return {key: row[key] for key in ("gap", "cpu_s", "peak_mb")}


PLACEMENT_ROWS: Mapping[str, ResultRow] = {
    "placement": ResultRow(
        what="placements of 20 models in 20 regions on 5 GPU types, proven within 0.1 % of the best, of 10 problems;"
        " CPU seconds of one core, in the median and at most",
        arguments=("-m", "ops.bench.planner.placement", "--no-cbc", "--no-large", "--no-pools", "--json"),
        values=_solving,
        text="{ours_reached:.0f}; {ours_cpu_s:.1f}, {ours_cpu_most_s:.1f}",
        against="the plain integer program by HiGHS, stopped after 60 s: {plain_reached:.0f}; {plain_cpu_s:.0f},"
        " {plain_cpu_most_s:.0f}",
        drawn="problems 1 to 10; timed",
        tolerance=0.5,
    ),
    "placement-large": ResultRow(
        what="a placement of 1,000 models in 60 regions on 8 GPU types: proven gap, of 0.5 % asked; CPU seconds of one"
        " core; memory",
        arguments=(*("-m", "ops.bench.planner.placement", "--seeds", "0", "--no-cbc", "--no-pools", "--json"),),
        values=_large,
        text="{gap:.2%}; {cpu_s:.0f}; {peak_mb:.0f} MB",
        against="goal 5 minutes, 1 GB",
        drawn="one problem; timed",
        tolerance=0.5,
    ),
}
