"""Scaling strategies compared on one fleet: `python -m ops.bench.planner.strategies --help`.

The figures of SageServe 7.2: instance hours by purpose, hours wasted by starts, TTFT, and the duration of a burst's
effects. In a case each strategy starts with the same instances and gets the same requests. With `--frontier` strategies
are compared at equal lateness: the hours of each, and those of Reactive with the same share of late first tokens. A
strategy is a line of points then, one for each setting of its threshold or quantile.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from dataplane.scheduling.profile import ProfileError
from forecasts.importers.lines import DemandFileError
from ops.bench.commit import CommitError, commit_of
from ops.bench.marked_table import PageError
from ops.bench.planner.strategies_cases import (
    CASES,
    LOADS,
    POINTS,
    SCENARIO,
    VARIANTS,
    StrategyFigures,
    case_scenario,
    figures_of,
    thetas_of,
)
from ops.bench.planner.strategies_page import DISTANCES, NAMES, TABLE, markdown_of, spread, tail, work
from ops.bench.shared import check_plot, chosen, work_folder
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.plots.lines_plot import LinesPanel, draw_lines
from ops.simulator.run import Outcome, simulate
from ops.simulator.scenario.scenario import Scenario, ScenarioError

FRONTIER: Sequence[str] = (
    "reactive",
    "reactive-60-30",
    "reactive-50-25",
    "reactive-40-20",
    "lt-i-median",
    "lt-i-75",
    "lt-i",
    "lt-u",
    "lt-ua",
    "lt-ua-median",
    "lt-d",
    "lt-d-median",
    "lt-d-tight",
    "lt-d-wide",
    "oracle",
)
"""The variants that make the lines."""

_REACTIVE = frozenset(name for name in FRONTIER if POINTS[name][0] == "reactive")
"""The points of Reactive's line."""
DOCS = Path(__file__).parents[2] / "docs"
RUNS = DOCS / "strategies"
WRITTEN = (RUNS.name, "results.md", "images")
"""What these runs write of the documentation."""
_REFERENCES = ("reactive", "reactive-50-25")
_RANGED = ("instance_hours", "late", "ttft_p95_s")
"""The figures whose range over seeds is told."""
_WORSE_IS_MORE = ("instance_hours", "late", "slow_minutes")
Row = Mapping[str, Any]


def compared(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows of one case with `beaten_by`, a strategy that is better in hours, late share and slow minutes and worse in
    none, or None; `reactive_alike`, the hours of Reactive with this late share, between two of its points, or None;
    `late_beyond_idle`, the late share without that of idle instances, or None; and `distances`, by a strategy of
    `_REFERENCES`, the hours to its own, those with what both take after the end (None: not known), and whether no more
    first tokens are late.
    """
    idle = next((row["late"] for row in rows if row["strategy"] == "idle"), None)
    references = {row["strategy"]: row for row in rows if row["strategy"] in _REFERENCES}
    line = sorted((row["late"], row["instance_hours"]) for row in rows if row["strategy"] in _REACTIVE)
    return [
        dict(row)
        | {
            "beaten_by": _beaten_by(row, rows),
            "reactive_alike": hours_at(line, row["late"]),
            "late_beyond_idle": None if idle is None else row["late"] - idle,
            "distances": {name: _distance(row, other) for name, other in references.items()},
        }
        for row in rows
    ]


def _distance(row: Row, reference: Row) -> dict[str, Any]:
    hours = row["instance_hours"] / reference["instance_hours"] - 1
    ours, theirs = _all_hours(row), _all_hours(reference)
    to_the_end = None if ours is None or theirs is None else ours / theirs - 1
    return {"hours": hours, "all_hours": to_the_end, "no_later": row["late"] <= reference["late"]}


def _all_hours(row: Row) -> float | None:
    """With those after the last request; None if not known."""
    return None if row["tail_hours"] is None else float(row["instance_hours"] + row["tail_hours"])


def hours_at(line: Sequence[tuple[float, float]], late: float) -> float | None:
    """Hours at a late share, on straight lines between points of (late share, hours) in order; None outside."""
    for (low, hours_low), (high, hours_high) in pairwise(line):
        if low <= late <= high:
            share = (late - low) / (high - low) if high > low else 0.0
            return hours_low + share * (hours_high - hours_low)
    return None


def _beaten_by(row: Row, rows: Sequence[Row]) -> str | None:
    mine = [row[key] for key in _WORSE_IS_MORE]
    for other in sorted(rows, key=lambda each: each["instance_hours"]):
        theirs = [other[key] for key in _WORSE_IS_MORE]
        if theirs != mine and all(one <= two for one, two in zip(theirs, mine, strict=True)):
            return str(other["strategy"])
    return None


def show_frontier(rows: Sequence[Row]) -> None:
    """The cheapest first."""
    columns: Columns = {
        "case": "case",
        "strategy": "strategy",
        "instance-h": lambda row: f"{row['instance_hours']:.1f}",
        "late": lambda row: f"{row['late']:.1%}",
        "slow min": lambda row: f"{row['slow_minutes']:.0f}",
        "TTFT p95, p99": lambda row: f"{row['ttft_p95_s']:.2f}, {row['ttft_p99_s']:.2f} s",
        "Reactive as late": lambda row: _hours(row["reactive_alike"]),
        "to that": lambda row: _to(row["instance_hours"], row["reactive_alike"]),
        "beaten by": lambda row: row["beaten_by"] or "",
    }
    print_table("Like with like, IW-F", columns, sorted(rows, key=lambda row: (row["case"], row["instance_hours"])))


def draw_frontier(rows: Sequence[Row], path: Path) -> None:
    """A panel for each case: hours against how many first tokens are late, a line through each strategy's settings.

    Raises:
        ops.plots.panels.PlotError: it cannot be written there.
    """
    panels = [
        LinesPanel(
            title=case,
            x_label="instance hours",
            y_label="% of IW-F late",
            lines=_lines(list(mine)),
            shares=False,
        )
        for case, mine in groupby(sorted(rows, key=itemgetter("case")), key=itemgetter("case"))
    ]
    draw_lines(panels, "Scaling strategies: what they cost, and how well they serve", path)


def _lines(rows: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=itemgetter("instance_hours")):
        strategy, _ = POINTS[row["strategy"]]
        lines.setdefault(strategy, []).append((row["instance_hours"], 100 * row["late"]))
    return {name: lines[name] for name in sorted(lines)}  # in each panel in the same order, so of the same colour


def _hours(hours: float | None) -> str:
    return "-" if hours is None else f"{hours:.1f} h"


def _to(hours: float, alike: float | None) -> str:
    return "-" if alike is None else f"{hours / alike - 1:+.1%}"


PUBLISHED: Mapping[str, float] = {
    "siloed": 1 / (1 - 0.345) - 1,
    "lt-i": 274.5 / 362.25 - 1,
    "lt-u": 291 / 362.25 - 1,
    "lt-ua": 277.5 / 362.25 - 1,
    "chiron": 1146 / 362.25 - 1,
}
"""Instance hours against Reactive: SageServe 4 (Siloed, a day in one region) and Figure 11 (a day, Llama-2)."""

_PRINT_EVERY_S = 10.0
_PARTS = ("demand", "peak", "headroom", "minimum", "rounding", "beside")


class Progress:
    """Prints on standard error which run it is, its progress, and the estimated time left."""

    def __init__(self, runs: int) -> None:
        self._runs, self._done = runs, 0
        self._began_s = self._printed_s = time.monotonic()

    def show(self, name: str, share: float) -> None:
        """Print the progress of a run, at most every `_PRINT_EVERY_S`."""
        now_s = time.monotonic()
        if now_s - self._printed_s >= _PRINT_EVERY_S:
            self._printed_s, passed_s, done = now_s, now_s - self._began_s, self._done + share
            left = f", about {passed_s / done * (self._runs - done) / 60:,.0f} min left" if done else ""
            notes().print(f"{name}: {share:.0%}; {self._done} of {self._runs} runs done{left}")

    def over(self) -> None:
        self._done += 1


@dataclass(frozen=True, kw_only=True)
class Run:
    """A case under a variant of a strategy. `folder`: of its stored figures."""

    case: str
    variant: str
    seed: int
    scenario: Scenario
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / f"{self.case}-{self.variant}-{self.seed}.json"

    def figures(self) -> dict[str, Any] | None:
        """The stored figures, if they are complete and of the same scenario."""
        if not self.path.exists():
            return None
        found: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        complete = found.keys() >= {figure.name for figure in fields(StrategyFigures) if figure.default is MISSING}
        return found if complete and found["digest"] == digest_of(self.scenario) else None

    def measure(self, progress: Progress) -> None:
        """Simulate, and store the figures."""
        load = LOADS.get(self.variant, 1.0)
        _, figures = simulated(self.scenario, self.seed, self.path.stem, progress, load=load)
        named = {"case": self.case, "variant": self.variant, "seed": self.seed}
        digest, commit = digest_of(self.scenario), commit_of(DOCS, WRITTEN)
        document = named | {"digest": digest, "commit": commit, **asdict(figures)}
        self.path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def simulated(
    scenario: Scenario, seed: int, name: str, progress: Progress, *, load: float = 1.0
) -> tuple[Outcome, StrategyFigures]:
    """A run of a case, and its figures. Its progress is printed under a name. `load`: of LOADS."""
    until_s, learn_s = getattr(scenario.traffic, "duration_s", None), scenario.planning.learn_s
    assert until_s is not None
    assert scenario.scaling is not None
    began_s = time.process_time()

    def report(now_s: float, _: int) -> None:
        progress.show(name, min(1.0, max(0.0, now_s - learn_s) / (until_s - learn_s)))

    outcome = simulate(scenario, seed=seed, report=report)
    cpu_s, least = time.process_time() - began_s, scenario.scaling.instances_min
    return outcome, figures_of(outcome.result, thetas_of(scenario), least, cpu_s, until_s - learn_s, load)


def digest_of(scenario: Scenario) -> str:
    """A digest of what a scenario sets, which does not depend on where its recording is, nor on keys that it leaves as
    they are.
    """
    document = scenario.model_dump(mode="json", exclude_defaults=True)
    for traffic in (document["traffic"], *document["traffic"].get("parts", ())):
        traffic.pop("path", None)
    document["fleet"]["profile"] = Path(document["fleet"]["profile"]).name
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def row_of(case: str, variant: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A line of the table: means over seeds, and ranges of some. `instance_hours` are those while requests came, and
    `tail_hours` beside them, None where they are not known and counted in; `work_hours` None where not known.
    """
    runs = [one | {"instance_hours": one["instance_hours"] - (one.get("tail_hours") or 0.0)} for one in runs]
    keys = [key for key in runs[0] if all(isinstance(one.get(key), int | float) for one in runs)]
    means = {key: fmean(one[key] for one in runs) for key in keys}
    return (
        {"tail_hours": None, "work_hours": None}
        | means
        | {
            "case": case,
            "strategy": variant,
            "seeds": len(runs),
            **{f"{key}_range": [choose(one[key] for one in runs) for choose in (min, max)] for key in _RANGED},
            "published": PUBLISHED.get(variant),
            "parts": {part: fmean(one["parts"][part] for one in runs) for part in _PARTS},
        }
    )


def main(
    data: Annotated[Path, typer.Option(help="Folder of the recordings.", file_okay=False, exists=True)],
    runs: Annotated[Path, typer.Option(help="Finished runs are kept here and not repeated.", file_okay=False)] = RUNS,
    case: Annotated[list[str] | None, typer.Option(help=f"By default all: {', '.join(CASES)}.")] = None,
    strategy: Annotated[list[str] | None, typer.Option(help=f"By default all: {', '.join(VARIANTS)}.")] = None,
    seed: Annotated[list[int] | None, typer.Option(min=0, help="By default 1.")] = None,
    scenario: Annotated[Path, typer.Option(help="The fleet.", dir_okay=False, exists=True)] = SCENARIO,
    frontier: Annotated[bool, typer.Option("--frontier", help=f"By default {', '.join(FRONTIER)}.")] = False,
    setting: Annotated[list[str] | None, typer.Option("--set", help="A key, as planning.epsilon=1.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw hours against lateness, a panel for each case.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table of all finished runs in this page.")] = None,
    kept: Annotated[bool, typer.Option("--kept", help="Simulate nothing: show the finished runs.")] = False,
    as_json: AsJson = False,
) -> None:
    """Instance hours, wasted starts and TTFT of scaling strategies, on days and weeks of recordings and on a burst.

    A run that was broken off begins anew, those that were finished are kept. Several of these commands can share the
    work and the folder of the runs, each with cases or strategies of its own.

    \b
    Example:
      python -m ops.bench.planner.strategies --data DATA --case a-day --case c-day --seed 1 --seed 2
      python -m ops.bench.planner.strategies --data DATA --case a-day --frontier --plot a-day.png
    """
    cases = chosen(case, CASES, "--case")
    variants = chosen(strategy, POINTS, "--strategy") if strategy else list(FRONTIER if frontier else VARIANTS)
    check_plot(plot)
    check_page(markdown)
    check_runs(runs, changed=bool(setting) or scenario != SCENARIO)
    runs.mkdir(parents=True, exist_ok=True)
    try:
        with work_folder() as folder:
            wanted = [
                Run(case=name, variant=variant, seed=number, scenario=loaded, folder=runs)
                for name in cases
                for variant in variants
                for loaded in [case_scenario(CASES[name], variant, data, folder, scenario, setting or ())]
                for number in seed or [1]
            ]
            if kept:
                wanted = [one for one in wanted if one.figures() is not None]
            measure_missing(wanted)
    except (ScenarioError, ProfileError, DemandFileError, CommitError) as error:
        raise typer.BadParameter(str(error)) from error
    rows = [row for name in cases for row in compared([*_rows(name, [one for one in wanted if one.case == name])])]
    if as_json:
        print_json(rows)
    else:
        show(rows)
        show_frontier(rows)
    if plot is not None:
        draw_frontier(rows, plot)
    if markdown is not None:
        TABLE.write(markdown, markdown_of(kept_rows(runs)))


def measure_missing(wanted: Sequence[Run]) -> None:
    """Simulate the runs that are not finished."""
    missing = [one for one in wanted if one.figures() is None]
    progress = Progress(len(missing))
    for one in missing:
        one.measure(progress)
        progress.over()


def check_runs(runs: Path, *, changed: bool) -> None:
    """Refuse to put figures of another scenario in the place of those that the page of results shows.

    Raises:
        typer.BadParameter: the folder is that of the page, and the scenario is another.
    """
    if changed and runs.resolve() == RUNS.resolve():
        raise typer.BadParameter(
            "with --set or --scenario, name another folder: this is the page's", param_hint="--runs"
        )


def check_page(page: Path | None) -> None:
    """Check that a page has a place for the table, before long work is done for it.

    Raises:
        typer.BadParameter: it has none.
    """
    try:
        if page is not None:
            TABLE.split(page)
    except PageError as error:
        raise typer.BadParameter(str(error), param_hint="--markdown") from error


def _rows(case: str, runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for one in runs:
        found.setdefault(one.variant, []).append(one.figures() or {})
    for variant, ones in found.items():
        yield row_of(case, variant, ones)


def kept_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of all finished runs in a folder, cases and strategies in the order in which they are told.

    Raises:
        typer.BadParameter: a file is of an older form, which does not name its run.
    """
    runs = []
    for file in folder.glob("*.json"):
        runs.append(json.loads(file.read_text(encoding="utf-8")))
        if not runs[-1].keys() >= {"case", "variant", "seed"}:
            raise typer.BadParameter(f"{file} does not name its case, variant and seed", param_hint="--runs")
    cases, variants = list(CASES), [*NAMES, *(name for name in POINTS if name not in NAMES)]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {(case, name): [] for case in cases for name in variants}
    for one in sorted(runs, key=itemgetter("seed")):
        found[one["case"], one["variant"]].append(one)
    rows = {each: row_of(*each, ones) for each, ones in found.items() if ones}
    return [row for name in cases for row in compared([each for (case, _), each in rows.items() if case == name])]


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Two tables: what it comes to, hours to those of Reactive in brackets where more is late than with that, and what
    the hours were for.
    """
    first: Columns = {"case": "case", "strategy": "strategy", "seeds": "seeds"}
    figures: Columns = {
        "instance-h": lambda row: spread(row["instance_hours"], row["instance_hours_range"], ".1f"),
        "after the end": tail,
        **DISTANCES,
        "published": lambda row: _percent(row["published"]),
        "warming h": lambda row: f"{row['warming_hours']:.2f}",
        "outs": lambda row: f"{row['scale_outs']:.0f}",
        "displacing": lambda row: f"{row['redeploys']:.0f}",
        "TTFT p95, p99": lambda row: f"{row['ttft_p95_s']:.2f}, {row['ttft_p99_s']:.2f} s",
        "late": lambda row: f"{row['late']:.1%}",
        "slow min": lambda row: f"{row['slow_minutes']:.0f} ({row['slow_longest']:.0f} on end)",
        "over 70 %": lambda row: f"{row['high_minutes']:.0f} ({row['high_longest']:.0f} on end)",
        "failed IW, NIW": lambda row: f"{row['iw_failed']:.1%}, {row['niw_failed']:.1%}",
    }
    print_table("Strategies; late and TTFT of IW-F", {**first, **figures}, rows)
    parts: Columns = {"work": work, **{part: _part(part) for part in _PARTS}}
    print_table("What the instance hours were for", {**first, **parts}, rows)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:+.1%}"


def _part(name: str) -> Any:
    return lambda row: f"{row['parts'][name]:.1f}"


if __name__ == "__main__":
    typer.run(main)
