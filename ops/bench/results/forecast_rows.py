"""Rows of results on forecasts of hard series: see `ops.bench.planner.forecast_zoo`."""

from collections.abc import Mapping
from typing import Any

from ops.bench.results.row import DATA, ResultRow

_OUT_OF_RANGE, _TO_BEST, _TO_LAST_HOUR = ("low coverage", "high coverage"), ("best single",), ("last hour",)


def _missed(answer: Any) -> dict[str, float]:
    series = answer["series"]

    def missing(targets: tuple[str, ...]) -> float:
        return float(sum(not set(targets).isdisjoint(row["missed"]) for row in series))

    return {
        "series": float(len(series)),
        "met": float(sum(not row["missed"] for row in series)),
        "coverage": missing(_OUT_OF_RANGE),
        "to_best": missing(_TO_BEST),
        "to_last_hour": missing(_TO_LAST_HOUR),
    }


def _row(
    what: str, drawn: str, *arguments: str, text: str = "{coverage:.0f}, **{to_best:.0f}**, {to_last_hour:.0f}"
) -> ResultRow:
    """`text`: of the series that miss each target."""
    return ResultRow(
        what=f"{what}: of {{series:.0f}}, how many meet all three targets; miss the coverage of 85 to 95 %; are more"
        " than 5 % worse than the series' best single forecaster, known in hindsight only; and than the last hour's"
        " maximum",
        arguments=("-m", "ops.bench.planner.forecast_zoo", *arguments, "--json"),
        values=_missed,
        text=f"{{met:.0f}}; {text}",
        against="goal: all of them",
        drawn=drawn,
    )


FORECAST_ROWS: Mapping[str, ResultRow] = {
    "zoo": _row(
        "forecasts of hard series of 13 kinds (shifts, ramps, on and off, launches, bursts, silence)",
        "seeds 1000 to 1002 of each kind",
    ),
    "zoo-held-out": _row(
        "the same, series of 6 kinds that no setting was chosen on", "seeds 1000 to 1002 of each kind", "--held-out"
    ),
    "zoo-clients": _row(
        "the same, every fourth client of ServeGen as a series",
        "nothing",
        *("--seeds", "0", "--data", f"{DATA}/", "--every", "4"),
        text="**{coverage:.0f}, {to_best:.0f}, {to_last_hour:.0f}**",
    ),
}
