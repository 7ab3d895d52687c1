"""LoRA adapters against as many whole models on shared GPUs, simulated: `python -m ops.bench.planner.adapters --help`.

The scenario is `ops/scenarios/simulate-adapters.toml`: a base and 16 adapters of it get the same traffic each. Once
they are adapters, and once models of the base's size. Steps with several adapters take longer, by the scenario's table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from ops.client.screen import AsJson, Columns, print_json, print_table
from ops.simulator.run import simulate
from ops.simulator.scenario.scenario import Scenario, load_scenario

SCENARIO = Path(__file__).parents[2] / "scenarios" / "simulate-adapters.toml"
GPUS = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class AdapterFigures:
    """A run. `kept`: models of which 90 % of the requests were served within their objectives; `late`: share of all
    requests that were not; `weights_gb`: of all models, in host memory.
    """

    gpus: int
    models: str
    kept: int
    late: float
    switches: int
    busy_share: float
    weights_gb: float


def as_whole(scenario: Scenario) -> Scenario:
    """The same with a model of its base's size in the place of each adapter."""
    whole = [
        model.model_copy(update={"base": None, "weights_bytes": scenario.checkpoint_of(model).weights_bytes})
        for model in scenario.models
    ]
    return scenario.model_copy(update={"models": whole})


def with_gpus(scenario: Scenario, gpus: int) -> Scenario:
    """The same on so many GPUs."""
    return scenario.model_copy(update={"fleet": scenario.fleet.model_copy(update={"both_slots": gpus})})


def measure(scenario: Scenario, models: str, seed: int) -> AdapterFigures:
    """Simulate a scenario."""
    result = simulate(scenario, seed=seed).result
    asked: dict[str, list[tuple[int, float]]] = {}
    for row in result.rows:
        if row.model is not None:
            asked.setdefault(row.model, []).append((row.requests, row.service_attainment))
    shares = [sum(count * share for count, share in mine) / sum(count for count, _ in mine) for mine in asked.values()]
    return AdapterFigures(
        gpus=scenario.fleet.both_slots,
        models=models,
        kept=sum(share >= 0.9 for share in shares),
        late=1 - result.service_attainment,
        switches=result.totals.switches,
        busy_share=result.busy_share,
        weights_gb=sum(model.weights_bytes for model in scenario.models) / 1e9,
    )


def compared(scenario: Scenario, gpus: Sequence[int], seed: int) -> Iterator[AdapterFigures]:
    """Adapters and whole models on each number of GPUs."""
    for count in gpus:
        there = with_gpus(scenario, count)
        yield measure(there, "adapters", seed)
        yield measure(as_whole(there), "whole", seed)


def main(
    gpus: Annotated[list[int] | None, typer.Option(min=1, max=64, help="By default 1, 2, 4 and 8.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.01, help="Requests/s of all; by default the scenario's.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 1,
    as_json: AsJson = False,
) -> None:
    """Switches, models kept and late requests of adapters and of whole models.

    \b
    Example:
      python -m ops.bench.planner.adapters --gpus 2 --rate 1.7
    """
    scenario = load_scenario(SCENARIO, settings=[] if rate is None else [f"traffic.rate_per_s={rate}"])
    found = list(compared(scenario, gpus or GPUS, seed))
    if as_json:
        print_json([asdict(one) for one in found])
    else:
        show(found)


def show(found: Sequence[AdapterFigures]) -> None:
    """A line for each run."""
    columns: Columns = {
        "GPUs": "gpus",
        "models": "models",
        "kept": "kept",
        "late": lambda row: f"{row['late']:.1%}",
        "switches": "switches",
        "busy": lambda row: f"{row['busy_share']:.0%}",
        "weights": lambda row: f"{row['weights_gb']:.0f} GB",
    }
    print_table("A base and its adapters", columns, [asdict(one) for one in found])


if __name__ == "__main__":
    typer.run(main)
