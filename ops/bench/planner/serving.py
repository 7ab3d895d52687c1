"""What the order on an instance and the choice of an instance change for scaling strategies: first tokens under
SageServe's serving, and with each of ours in addition.

python -m ops.bench.planner.serving --data DATA --case burst --seed 1 --seed 2 --seed 3
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from dataplane.protocol.tiers import Tier
from dataplane.scheduling.profile import ProfileError
from forecasts.importers.lines import DemandFileError
from ops.bench.planner.strategies import Progress, simulated
from ops.bench.planner.strategies_cases import CASES, POINTS, SCENARIO, case_scenario
from ops.bench.shared import chosen, work_folder
from ops.client.screen import AsJson, Columns, print_json, print_table
from ops.simulator.scenario.scenario import Scenario, ScenarioError

STRATEGIES = ("reactive", "lt-i-median", "lt-d-reserve-median")
_EDF = ("policy.order=edf",)
_TIMELY = (*_EDF, "policy.timely_share=0.5")
SERVINGS: Mapping[str, tuple[str, ...]] = {
    "paper": (),
    "edf": _EDF,
    "edf-timely": _TIMELY,
    "edf-timely-moves": (*_TIMELY, "policy.rerouting=true"),
}
"""First come, first served, and the shortest queue in time (6.1, 6.2); earliest deadline first; who is well in time
goes before others; and waiting requests move to idle instances.
"""
_FIGURES = ("slow_minutes", "late", "ttft_p95_s", "ttft_p99_s", "instance_hours", "tail_hours")

COLUMNS: Columns = {
    "case": "case",
    "strategy": "strategy",
    "serving": "serving",
    "seeds": "seeds",
    "slow minutes": lambda row: f"{row['slow_minutes']:.1f}",
    "late": lambda row: f"{row['late']:.1%}",
    "TTFT p95": lambda row: f"{row['ttft_p95_s']:.2f} s",
    "p99": lambda row: f"{row['ttft_p99_s']:.1f} s",
    "IW-N late": lambda row: f"{row['normal_late']:.2%}",
    "instance-h": lambda row: f"{row['instance_hours']:.1f}",
    "moved": lambda row: f"{row['moved']:.2%}",
}


def main(
    data: Annotated[Path, typer.Option(help="Folder of the recordings.", file_okay=False, exists=True)],
    case: Annotated[list[str] | None, typer.Option(help=f"By default burst; {', '.join(CASES)}.")] = None,
    strategy: Annotated[list[str] | None, typer.Option(help=f"By default {', '.join(STRATEGIES)}.")] = None,
    serving: Annotated[list[str] | None, typer.Option(help=f"By default all: {', '.join(SERVINGS)}.")] = None,
    seed: Annotated[list[int] | None, typer.Option(min=0, help="By default 1.")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate cases of the comparison of strategies under several ways of serving, and compare first tokens.

    \b
    Example:
      python -m ops.bench.planner.serving --data DATA --case servegen-day --strategy lt-d-median --serving paper
    """
    cases, seeds = chosen(case or ["burst"], CASES, "--case"), seed or [1]
    strategies = chosen(strategy or STRATEGIES, POINTS, "--strategy")
    servings = chosen(serving or list(SERVINGS), SERVINGS, "--serving")
    progress = Progress(len(servings) * len(cases) * len(strategies) * len(seeds))
    rows = []
    try:
        with work_folder() as folder:
            for name in cases:
                for variant in strategies:
                    for way in servings:
                        scenario = case_scenario(CASES[name], variant, data, folder, SCENARIO, SERVINGS[way])
                        runs = list(measured(scenario, seeds, f"{name}, {variant}, {way}", progress))
                        rows.append(row_of({"case": name, "strategy": variant, "serving": way}, runs))
    except (ScenarioError, ProfileError, DemandFileError) as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print_json(rows)
    else:
        print_table("First tokens of IW-F by the way of serving, means over seeds", COLUMNS, rows)


def measured(scenario: Scenario, seeds: Sequence[int], name: str, progress: Progress) -> Iterator[dict[str, float]]:
    """The figures of a run with each seed."""
    for seed in seeds:
        outcome, found = simulated(scenario, seed, f"{name}, seed {seed}", progress)
        progress.over()
        normal = next((row for row in outcome.result.tiers if row.tier == Tier.IW_N), None)
        yield {key: float(getattr(found, key)) for key in _FIGURES} | {
            "normal_late": normal.ttft_violations if normal else 0.0,
            "moved": len(outcome.world.rerouter.moved) / found.requests,
        }


def row_of(named: Mapping[str, str], runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """A line of the table: means over seeds, the fewest and most slow minutes, the least and most late."""
    means = {key: fmean(one[key] for one in runs) for key in runs[0]}
    ranges = {
        f"{key}_range": [choose(one[key] for one in runs) for choose in (min, max)] for key in ("slow_minutes", "late")
    }
    return {**named, "seeds": len(runs), **means, **ranges}


if __name__ == "__main__":
    typer.run(main)
