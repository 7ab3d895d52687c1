"""Scaling strategies side by side on one fleet: `python -m ops.bench.planner.strategies --help`.

The figures of SageServe 7.2: instance hours and what they were for, what scaling up wastes, TTFT, and how long a burst
is felt. In a case each strategy begins with the same instances and sees the same requests.
"""

import hashlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from dataplane.scheduling.profile import ProfileError
from forecasts.importers.lines import DemandFileError
from ops.bench.planner.strategies_cases import CASES, POINTS, SCENARIO, VARIANTS, case_scenario
from ops.bench.planner.strategies_figures import StrategyFigures, figures_of
from ops.bench.planner.strategies_frontier import FRONTIER, compared, draw_frontier, show_frontier
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.plots.plot_option import check_plot
from ops.simulator.run import simulate
from ops.simulator.scenario.scenario import Scenario, ScenarioError

PUBLISHED: Mapping[str, float] = {
    "siloed": 1 / (1 - 0.345) - 1,
    "lt-i": 274.5 / 362.25 - 1,
    "lt-u": 291 / 362.25 - 1,
    "lt-ua": 277.5 / 362.25 - 1,
    "chiron": 1146 / 362.25 - 1,
}
"""Instance hours against Reactive: SageServe 4 (Siloed, a day in one region) and Figure 11 (a day, Llama-2)."""

_TELL_EVERY_S = 10.0
_PARTS = ("demand", "peak", "headroom", "minimum", "rounding", "beside")


class Progress:
    """Tells on standard error which run it is, how far it is, and when all are likely to be over."""

    def __init__(self, runs: int) -> None:
        self._runs, self._done = runs, 0
        self._began_s = self._told_s = time.monotonic()

    def tell(self, name: str, share: float) -> None:
        """So much of a run is done; it is said now and then."""
        now_s = time.monotonic()
        if now_s - self._told_s >= _TELL_EVERY_S:
            self._told_s, passed_s, done = now_s, now_s - self._began_s, self._done + share
            left = f", about {passed_s / done * (self._runs - done) / 60:,.0f} min left" if done else ""
            notes().print(f"{name}: {share:.0%}; {self._done} of {self._runs} runs done{left}")

    def over(self) -> None:
        """A run is over."""
        self._done += 1


@dataclass(frozen=True, kw_only=True)
class Run:
    """A case under a variant of a strategy. `folder`: where its figures are kept."""

    case: str
    variant: str
    seed: int
    scenario: Scenario
    folder: Path

    @property
    def path(self) -> Path:
        """The file of its figures."""
        return self.folder / f"{self.case}-{self.variant}-{self.seed}.json"

    def figures(self) -> dict[str, Any] | None:
        """Those that are kept, if they are of the same scenario, and all there."""
        if not self.path.exists():
            return None
        found: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        told = found.keys() >= {figure.name for figure in fields(StrategyFigures)}
        return found if told and found["digest"] == digest_of(self.scenario) else None

    def measure(self, progress: Progress) -> None:
        """Simulate, and keep the figures."""
        scenario, name = self.scenario, self.path.stem
        until_s, learn_s = getattr(scenario.traffic, "duration_s", None), scenario.planning.learn_s
        assert until_s is not None
        assert scenario.scaling is not None
        began_s = time.process_time()

        def told(now_s: float, _: int) -> None:
            progress.tell(name, min(1.0, max(0.0, now_s - learn_s) / (until_s - learn_s)))

        result = simulate(scenario, seed=self.seed, told=told).result
        figures = figures_of(result, thetas_of(scenario), scenario.scaling.instances_min, time.process_time() - began_s)
        document = {"digest": digest_of(scenario), **asdict(figures)}
        self.path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def thetas_of(scenario: Scenario) -> dict[str, float]:
    """What an instance serves, by model.

    Raises:
        ScenarioError: it hangs on the GPU type; what instance hours were for is not told apart then.
    """
    thetas: dict[str, float] = {}
    for index, model in enumerate(scenario.models):
        if isinstance(model.tokens_per_s, dict):
            raise ScenarioError(f"{scenario.name}: models.{index}.tokens_per_s: must be one number here")
        thetas[model.name] = model.tokens_per_s or 0.0
    return thetas


def digest_of(scenario: Scenario) -> str:
    """What tells a scenario from another, wherever its recording lies."""
    document = scenario.model_dump(mode="json")
    document["traffic"].pop("path", None)
    document["fleet"]["profile"] = Path(document["fleet"]["profile"]).name
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def row_of(case: str, variant: str, runs: Sequence[Mapping[str, Any]], reactive: float | None) -> dict[str, Any]:
    """A line of the table: means over seeds. `reactive`: its instance hours in the same case."""
    keys = [key for key, value in runs[0].items() if isinstance(value, int | float)]
    hours = [one["instance_hours"] for one in runs]
    means = {key: fmean(one[key] for one in runs) for key in keys}
    return means | {
        "case": case,
        "strategy": variant,
        "seeds": len(runs),
        "instance_hours_range": [min(hours), max(hours)],
        "to_reactive": None if reactive is None else means["instance_hours"] / reactive - 1,
        "published": PUBLISHED.get(variant),
        "parts": {part: fmean(one["parts"][part] for one in runs) for part in _PARTS},
    }


def main(
    data: Annotated[Path, typer.Option(help="Folder of the recordings.", file_okay=False, exists=True)],
    runs: Annotated[Path, typer.Option(help="Finished runs are kept here and not repeated.", file_okay=False)],
    case: Annotated[list[str] | None, typer.Option(help=f"By default all: {', '.join(CASES)}.")] = None,
    strategy: Annotated[list[str] | None, typer.Option(help=f"By default all: {', '.join(VARIANTS)}.")] = None,
    seed: Annotated[list[int] | None, typer.Option(min=0, help="By default 1.")] = None,
    scenario: Annotated[Path, typer.Option(help="The fleet.", dir_okay=False, exists=True)] = SCENARIO,
    frontier: Annotated[bool, typer.Option("--frontier", help=f"By default {', '.join(FRONTIER)}.")] = False,
    setting: Annotated[list[str] | None, typer.Option("--set", help="A key, as planning.epsilon=1.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw hours against lateness, a panel for each case.")] = None,
    as_json: AsJson = False,
) -> None:
    """Instance hours, wasted starts and TTFT of scaling strategies, on days and weeks of recordings and on a burst.

    A run that was broken off begins anew, those that were finished are kept. Several of these commands can share the
    work and the folder of the runs, each with cases or strategies of its own.

    \b
    Example:
      python -m ops.bench.planner.strategies --data DATA --runs RUNS --case a-day --case c-day --seed 1 --seed 2
      python -m ops.bench.planner.strategies --data DATA --runs RUNS --case a-day --frontier
    """
    cases = _chosen(case, CASES, "--case") or list(CASES)
    variants = _chosen(strategy, POINTS, "--strategy") or list(FRONTIER if frontier else VARIANTS)
    check_plot(plot)
    runs.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="tidepool-bench-") as folder:
            wanted = [
                Run(case=name, variant=variant, seed=number, scenario=loaded, folder=runs)
                for name in cases
                for variant in variants
                for loaded in [case_scenario(CASES[name], variant, data, Path(folder), scenario, setting or ())]
                for number in seed or [1]
            ]
            missing = [one for one in wanted if one.figures() is None]
            progress = Progress(len(missing))
            for one in missing:
                one.measure(progress)
                progress.over()
    except (ScenarioError, ProfileError, DemandFileError) as error:
        raise typer.BadParameter(str(error)) from error
    rows = [row for name in cases for row in compared([*_rows(name, [one for one in wanted if one.case == name])])]
    if as_json:
        print_json(rows)
    else:
        show(rows)
        show_frontier(rows)
    if plot is not None:
        draw_frontier(rows, plot)


def _rows(case: str, runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for one in runs:
        found.setdefault(one.variant, []).append(one.figures() or {})
    reactive = fmean(one["instance_hours"] for one in found["reactive"]) if "reactive" in found else None
    for variant, ones in found.items():
        yield row_of(case, variant, ones, reactive)


def _chosen(names: list[str] | None, known: Mapping[str, object], option: str) -> Sequence[str]:
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint=option)
    return names or ()


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Two tables: what it comes to, and what the hours were for."""
    first: Columns = {"case": "case", "strategy": "strategy", "seeds": "seeds"}
    figures: Columns = {
        "instance-h": lambda row: f"{row['instance_hours']:.1f}",
        "to Reactive": lambda row: _percent(row["to_reactive"]),
        "published": lambda row: _percent(row["published"]),
        "warming h": lambda row: f"{row['warming_hours']:.2f}",
        "outs": lambda row: f"{row['scale_outs']:.0f}",
        "TTFT p95, p99": lambda row: f"{row['ttft_p95_s']:.2f}, {row['ttft_p99_s']:.2f} s",
        "late": lambda row: f"{row['late']:.1%}",
        "slow min": lambda row: f"{row['slow_minutes']:.0f} ({row['slow_longest']:.0f} on end)",
        "over 70 %": lambda row: f"{row['high_minutes']:.0f} ({row['high_longest']:.0f} on end)",
        "failed IW, NIW": lambda row: f"{row['iw_failed']:.1%}, {row['niw_failed']:.1%}",
    }
    print_table("Strategies; late and TTFT of IW-F", {**first, **figures}, rows)
    parts: Columns = {part: _part(part) for part in _PARTS}
    print_table("What the instance hours were for", {**first, **parts}, rows)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:+.1%}"


def _part(name: str) -> Any:
    return lambda row: f"{row['parts'][name]:.1f}"


if __name__ == "__main__":
    typer.run(main)
