"""A scenario in several variants and seeds, one after the other: what each holds, and how late its first tokens are.

python -m ops.bench.planner.variants SCENARIO --variant planning.pools=true --variant planning.pools=false
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dataplane.protocol.tiers import IW_F
from dataplane.scheduling.profile import ProfileError
from forecasts.importers.lines import DemandFileError
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.simulator.results.results import Result, held_hours
from ops.simulator.run import simulate
from ops.simulator.scenario.scenario import ScenarioError, load_scenario

COLUMNS: Columns = {
    "variant": "variant",
    "seed": "seed",
    "requests": "requests",
    "failed": "failed",
    "instance-h": lambda row: f"{row['instance_hours']:.1f}",
    "GPU-h": lambda row: f"{row['gpu_hours']:.1f}",
    "late": lambda row: f"{row['late']:.1%}",
    "TTFT p95": lambda row: f"{row['ttft_p95_s']:.2f} s",
}


def main(
    scenario: Annotated[Path, typer.Argument(help="A scenario with scaling.", dir_okay=False, exists=True)],
    variant: Annotated[list[str], typer.Option(metavar="KEY=VALUE", help="A key that is set in one run; repeatable.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A key that is set in all; repeatable.")
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option(min=0, help="Run every variant with it; repeatable. By default the scenario's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a scenario in several variants, and compare instance hours, GPU hours and interactive-fast TTFT."""
    rows = []
    for each in variant:
        for one in seed or (None,):
            rows.append(row := measure(scenario, each, settings or (), one))
            notes().print(f"{each}, seed {row['seed']}: {row['instance_hours']:.1f} instance hours", markup=False)
    if as_json:
        print_json(rows)
    else:
        print_table(f"{scenario.name}, {', '.join(settings or ('as it is',))}", COLUMNS, rows)


def measure(scenario: Path, variant: str, settings: Iterable[str], seed: int | None) -> dict[str, Any]:
    """The figures of one variant. `seed` None: the scenario's.

    Raises:
        typer.BadParameter: it cannot be simulated, or says nothing of hours or interactive-fast requests.
    """
    try:
        varied = load_scenario(scenario, settings=[*settings, variant])
        result = simulate(varied, seed=seed).result
    except (ScenarioError, ProfileError, DemandFileError) as error:
        raise typer.BadParameter(f"{variant}: {error}", param_hint="--variant") from error
    return {"variant": variant, "seed": varied.seed if seed is None else seed, **figures(result)}


def figures(result: Result) -> Mapping[str, float]:
    """Hours held, and how late interactive-fast first tokens are.

    Raises:
        typer.BadParameter: nothing is scaled, or no interactive-fast request ended.
    """
    fast = next((row for row in result.tiers if row.tier == IW_F), None)
    if result.strategy is None or fast is None or fast.ttft_s is None:
        raise typer.BadParameter("needs [scaling], and IW-F requests that end", param_hint="SCENARIO")
    return {
        "requests": result.requests,
        "failed": sum(result.failures.values()),
        "instance_hours": sum(map(held_hours, result.totals.instance_hours.values())),
        "gpu_hours": held_hours(result.totals.gpu_hours),
        "late": fast.ttft_violations,
        "ttft_p95_s": fast.ttft_s.p95,
    }


if __name__ == "__main__":
    typer.run(main)
