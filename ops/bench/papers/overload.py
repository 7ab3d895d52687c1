"""More traffic than GPUs keep up with, in the simulator: `python -m ops.bench.papers.overload --help`.

`--hot` makes one model hot: it gets so many times the rate of each of the others, and the figures of the calm ones
stand by themselves. Workloads are drawn as those of `ops.bench.papers.aegaeon limits`, on its testbed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from ops.bench.papers.aegaeon_testbed import GPUS, Setup, System, scenario_of
from ops.bench.papers.workloads import Redraws, Workload, merged, model_name
from ops.bench.shared import chosen, work_folder
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.simulator.run import simulate
from ops.simulator.scenario.scenario import Scenario
from ops.simulator.world.measures import Tally

OVERLOADED: tuple[System, ...] = ("pooled-both", "pooled-both-deadlines", "request-level-prefetch")
DURATION_S = 120.0
Of = Literal["all", "calm", "hot"]
COLUMNS: Columns = {
    "system": "system",
    "models": "of",
    "requests": "requests",
    "service": lambda row: f"{row['service']:.1%}",
    "tokens": lambda row: f"{row['tokens']:.1%}",
    "TTFT mean": lambda row: f"{row['ttft_mean_s']:.1f} s",
    "p95": lambda row: f"{row['ttft_p95_s']:.1f} s",
    "p99": lambda row: f"{row['ttft_p99_s']:.1f} s",
    "most": lambda row: f"{row['ttft_most_s']:.1f} s",
}


@dataclass(frozen=True, kw_only=True)
class Overloaded:
    """What the requests of some models got on all draws together. `service`, `tokens`: attainment by either metric."""

    system: System
    of: Of
    requests: int
    service: float
    tokens: float
    ttft_mean_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    ttft_most_s: float


def workload_of(redraws: Redraws, folder: Path, models: int, rate: float, hot: float, draw: int) -> Workload:
    """So many models at a rate; the first at `hot` times it, unless that is 1."""
    if hot == 1.0:
        return redraws.workload(models, f"{rate:g}", draw, duration_s=DURATION_S)
    first = redraws.workload(1, f"{hot * rate:g}", draw, duration_s=DURATION_S)
    return merged(first, redraws.workload(models - 1, f"{rate:g}", draw, duration_s=DURATION_S), folder)


def on_gpus(scenario: Scenario, gpus: int) -> Scenario:
    """The scenario of a system whose GPUs are all of one kind, with so many of them."""
    key = "both_slots" if scenario.fleet.both_slots else "gpus"
    return scenario.model_copy(update={"fleet": scenario.fleet.model_copy(update={key: gpus})})


def measure_system(system: System, workloads: Iterable[Workload], *, gpus: int, hot: bool) -> list[Overloaded]:
    """Serve each workload to its end."""
    tallies: dict[Of, list[Tally]] = {}
    for workload in workloads:
        world = simulate(on_gpus(scenario_of(Setup(system=system), workload), gpus)).world
        for (model, _), tally in world.tallies.items():
            of: Of = "all" if not hot else "hot" if model == model_name(0) else "calm"
            tallies.setdefault(of, []).append(tally)
        notes().print(f"{system}: {workload.name}")
    return [_summed(system, of, some) for of, some in sorted(tallies.items())]


def _summed(system: System, of: Of, tallies: Sequence[Tally]) -> Overloaded:
    whole = Tally.of(tallies)
    return Overloaded(
        system=system,
        of=of,
        requests=whole.requests,
        service=whole.service_attainment,
        tokens=whole.token_attainment,
        ttft_mean_s=whole.ttft.sum_s / whole.ttft.count,
        ttft_p95_s=whole.ttft.quantile(0.95),
        ttft_p99_s=whole.ttft.quantile(0.99),
        ttft_most_s=whole.ttft.max_s,
    )


def main(
    workloads: Annotated[Path, typer.Argument(metavar="WORKLOADS", help="Aegaeon's workloads.csv.gz.", dir_okay=False)],
    models: Annotated[int, typer.Option(min=2, help="So many.")] = 40,
    rate: Annotated[float, typer.Option(min=0.01, max=10, help="Requests/s of each.")] = 1.0,
    hot: Annotated[float, typer.Option(min=1, max=1000, help="The first model gets so many times the rate.")] = 1.0,
    gpus: Annotated[int, typer.Option(min=1, max=GPUS, help="They prefill and decode.")] = GPUS,
    draws: Annotated[int, typer.Option(min=1, max=100, help="Workloads drawn anew.")] = 3,
    system: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(OVERLOADED)}; all if not given.")] = None,
    as_json: AsJson = False,
) -> None:
    """First tokens, and both kinds of attainment, where GPUs cannot keep up or a model is hot.

    \b
    Example:
      python -m ops.bench.papers.overload WORKLOADS --models 11 --rate 0.3 --hot 10 --gpus 3
    """
    with work_folder() as folder:
        redraws = Redraws(workloads, folder)
        drawn = [workload_of(redraws, folder, models, rate, hot, draw) for draw in range(1, draws + 1)]
        rows: list[Mapping[str, object]] = [
            asdict(row)
            for one in chosen(system, OVERLOADED, "--system")
            for row in measure_system(one, drawn, gpus=gpus, hot=hot > 1)
        ]
    if as_json:
        print_json(rows)
    else:
        print_table(f"{models} models at {rate:g} requests/s each, {gpus} GPUs, {draws} draws", COLUMNS, rows)


if __name__ == "__main__":
    typer.run(main)
