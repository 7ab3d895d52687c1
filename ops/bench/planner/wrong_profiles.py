"""Plans from wrong profiles, with and without their correction: `python -m ops.bench.planner.wrong_profiles --help`.

Two days are served, from the same instances. What is compared is the second: on the first the correction learns. Every
profile but the right one says a multiple of what an instance does.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ops.bench.planner.strategies import digest_of
from ops.bench.planner.strategies_cases import CASES, SCENARIO, Case, case_scenario, thetas_of
from ops.bench.shared import chosen, work_folder
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.simulator.run import build_world
from ops.simulator.scenario.scenario import Scenario
from ops.simulator.world.measures import Tally
from ops.simulator.world.world import World

DAYS = ("a-day", "c-day", "azure-day")
"""Cases of a day that has another one before it to serve."""
FACTORS = (1.0, 1.5, 0.67)
_DAY_MINUTES, _DAY_S = 1440, 86_400


@dataclass(frozen=True, kw_only=True)
class DayFigures:
    """The second day. `instance_hours`: serving, warming and draining; `late`: share of IW-F's first tokens."""

    instance_hours: float
    late: float


def two_days(case: Case) -> Case:
    """The case with the day before it served too."""
    assert case.days is not None
    since, served, until = case.days
    return replace(case, days=(since, served - 1, until))


def measure(scenario: Scenario, seed: int) -> DayFigures:
    """Simulate both days."""
    world, _, _ = build_world(scenario, seed)
    second_s = scenario.planning.learn_s + _DAY_S
    before: Tally | None = None
    for now_s in world.run():
        if before is None and now_s >= second_s:
            before = urgent(world)
    assert before is not None, "the second day has requests"
    after = urgent(world)
    minutes = slice(_DAY_MINUTES, 2 * _DAY_MINUTES)
    counts = [
        column[minutes]
        for one in world.recorder.series().endpoints
        for column in (*one.serving.values(), one.warming, one.draining)
    ]
    return DayFigures(
        instance_hours=sum(map(sum, counts)) / 60,
        late=(after.ttft_violations - before.ttft_violations) / (after.ended - before.ended),
    )


def urgent(world: World) -> Tally:
    """IW-F's requests so far, those counted in blocks."""
    return Tally.of(tally for (_, tier), tally in world.tallies.items() if tier == "IW-F")


def settings_of(scenario: Scenario, factor: float, *, corrected: bool) -> list[str]:
    """Settings that make its profiles wrong by a factor."""
    wrong = [
        f"models.{index}.tokens_per_s={factor * theta:g}" for index, theta in enumerate(thetas_of(scenario).values())
    ]
    return [*wrong, f"planning.correct_profiles={str(corrected).lower()}"]


def main(
    data: Annotated[Path, typer.Option(help="Folder of the recordings.", file_okay=False, exists=True)],
    runs: Annotated[Path, typer.Option(help="Finished runs are kept here and not repeated.", file_okay=False)],
    case: Annotated[list[str] | None, typer.Option(help=f"By default a-day; of {', '.join(DAYS)}.")] = None,
    factor: Annotated[list[float] | None, typer.Option(min=0.1, max=10, help="By default 1, 1.5 and 0.67.")] = None,
    strategy: Annotated[str, typer.Option(help="Of those of the strategies' benchmark.")] = "lt-i-median",
    seed: Annotated[int, typer.Option(min=0)] = 1,
    as_json: AsJson = False,
) -> None:
    """Instance hours and late first tokens of a day, planned from profiles that are right or wrong by a factor.

    \b
    Example:
      python -m ops.bench.planner.wrong_profiles --data DATA --runs RUNS --case a-day --factor 1 --factor 1.5
    """
    runs.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with work_folder() as folder:
        for name in chosen(case, dict.fromkeys(DAYS), "--case") if case else ["a-day"]:
            days = two_days(CASES[name])
            right = case_scenario(days, strategy, data, folder, SCENARIO, ())
            for wrong in factor or FACTORS:
                for corrected in (False, True):
                    settings = settings_of(right, wrong, corrected=corrected)
                    scenario = case_scenario(days, strategy, data, folder, SCENARIO, settings)
                    path = runs / f"{name}-{strategy}-{wrong:g}-{corrected}-{seed}.json"
                    found = _kept(path, scenario) or _measured(path, scenario, seed)
                    rows.append({"case": name, "factor": wrong, "corrected": corrected, **found})
    if as_json:
        print_json(rows)
    else:
        show(rows)


def _kept(path: Path, scenario: Scenario) -> dict[str, Any] | None:
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found if found["digest"] == digest_of(scenario) else None


def _measured(path: Path, scenario: Scenario, seed: int) -> dict[str, Any]:
    notes().print(f"{path.stem}: simulating")
    document = {"digest": digest_of(scenario), **asdict(measure(scenario, seed))}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return document


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """A line for each case, factor and with or without correction."""
    columns: Columns = {
        "case": "case",
        "profile": lambda row: f"x {row['factor']:g}",
        "corrected": lambda row: "yes" if row["corrected"] else "no",
        "instance-h": lambda row: f"{row['instance_hours']:.1f}",
        "late": lambda row: f"{row['late']:.1%}",
    }
    print_table("The second day; late of IW-F", columns, rows)


if __name__ == "__main__":
    typer.run(main)
