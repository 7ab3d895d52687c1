"""Requests that wait in a queue while another instance is idle: what moving them changes.

python -m ops.bench.planner.rerouting --data DATA --case burst --seed 1 --seed 2 --seed 3
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from dataplane.scheduling.profile import ProfileError
from forecasts.importers.lines import DemandFileError
from ops.bench.planner.strategies import Progress, simulated
from ops.bench.planner.strategies_cases import CASES, POINTS, SCENARIO, case_scenario
from ops.bench.shared import chosen, work_folder
from ops.client.screen import AsJson, Columns, print_json, print_table
from ops.simulator.scenario.scenario import Scenario, ScenarioError

STRATEGIES = ("reactive", "lt-i-median", "lt-d-reserve-median")
_FIGURES = ("slow_minutes", "late", "ttft_p95_s", "ttft_p99_s", "instance_hours")


def _pair(key: str, form: str) -> Any:
    """A column: without and with."""
    return lambda row: f"{row['stays'][key]:{form}} -> {row['moves'][key]:{form}}"


COLUMNS: Columns = {
    "case": "case",
    "strategy": "strategy",
    "seeds": "seeds",
    "moved": lambda row: f"{row['moves']['moved']:.2%}",
    "slow minutes": _pair("slow_minutes", ".1f"),
    "late": _pair("late", ".1%"),
    "TTFT p95, s": _pair("ttft_p95_s", ".2f"),
    "p99, s": _pair("ttft_p99_s", ".1f"),
    "instance-h": _pair("instance_hours", ".1f"),
}


def main(
    data: Annotated[Path, typer.Option(help="Folder of the recordings.", file_okay=False, exists=True)],
    case: Annotated[list[str] | None, typer.Option(help=f"By default burst; {', '.join(CASES)}.")] = None,
    strategy: Annotated[list[str] | None, typer.Option(help=f"By default {', '.join(STRATEGIES)}.")] = None,
    seed: Annotated[list[int] | None, typer.Option(min=0, help="By default 1.")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate cases of the comparison of strategies with and without moving requests, and compare first tokens.

    \b
    Example:
      python -m ops.bench.planner.rerouting --data DATA --case servegen-day --strategy lt-d-median
    """
    cases = chosen(case or ["burst"], CASES, "--case")
    strategies, seeds = chosen(strategy or STRATEGIES, POINTS, "--strategy"), seed or [1]
    progress = Progress(2 * len(cases) * len(strategies) * len(seeds))
    rows = []
    try:
        with work_folder() as folder:
            for name in cases:
                for variant in strategies:
                    scenarios = {
                        key: case_scenario(CASES[name], variant, data, folder, SCENARIO, settings)
                        for key, settings in (("stays", []), ("moves", ["policy.rerouting=true"]))
                    }
                    runs = {
                        key: list(measured(one, seeds, f"{name}, {variant}", progress))
                        for key, one in scenarios.items()
                    }
                    rows.append(row_of(name, variant, runs["stays"], runs["moves"]))
    except (ScenarioError, ProfileError, DemandFileError) as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print_json(rows)
    else:
        print_table("Waiting requests that stay -> that move to idle instances, IW-F, means over seeds", COLUMNS, rows)


def measured(scenario: Scenario, seeds: Sequence[int], name: str, progress: Progress) -> Iterator[dict[str, float]]:
    """The figures of a run with each seed."""
    for seed in seeds:
        outcome, found = simulated(scenario, seed, f"{name}, seed {seed}", progress)
        progress.over()
        moved = len(outcome.world.rerouter.moved) / found.requests
        yield {"moved": moved} | {key: float(getattr(found, key)) for key in _FIGURES}


def row_of(
    case: str, strategy: str, stays: Sequence[dict[str, float]], moves: Sequence[dict[str, float]]
) -> dict[str, Any]:
    """A line of the table: means over seeds, and the fewest and most slow minutes."""
    return {"case": case, "strategy": strategy, "seeds": len(moves), "stays": _means(stays), "moves": _means(moves)}


def _means(runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    slow = [one["slow_minutes"] for one in runs]
    return {key: fmean(one[key] for one in runs) for key in runs[0]} | {"slow_minutes_range": [min(slow), max(slow)]}


if __name__ == "__main__":
    typer.run(main)
