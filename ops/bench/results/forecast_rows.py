"""Rows of results on forecasts of hard series: see `ops.bench.planner.forecast_zoo`."""

from collections.abc import Mapping
from typing import Any

from ops.bench.results.row import DATA, ResultRow


def _missed(answer: Any) -> dict[str, float]:
    """Sums over kinds. A series misses its coverage in one way only."""

    def total(*keys: str) -> float:
        return float(sum(kind[key] for kind in answer["kinds"] for key in keys))

    return {
        "series": total("series"),
        "met": total("met"),
        "coverage": total("low", "high"),
        "to_best": total("best"),
        "to_last_hour": total("last_hour"),
        "errors_met": total("errors_met"),
        "rival": total("rival_errors_met"),
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
        against="goal: all of them; both targets of errors are met by {errors_met:.0f}, and by {rival:.0f} if each hour"
        " has the single method with the least error until then",
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
        "the same, every client of two models of ServeGen as a series of its own",
        "nothing",
        *("--seeds", "0", "--data", f"{DATA}/"),
        text="**{coverage:.0f}, {to_best:.0f}, {to_last_hour:.0f}**",
    ),
}
