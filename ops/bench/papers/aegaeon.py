"""Aegaeon's Figures 11 to 15 in the simulator: `python -m ops.bench.papers.aegaeon --help`.

On the workloads of its artifact: ShareGPT lengths, Poisson arrivals, 120 s at rate 0.1 (40 models: 60 s). Published for
90 % service attainment at that rate: 70 models (paper, H800), 72 (the artifact's simulator, H100), 44 for request-level
switching (ServerlessLLM), 32 for static multiplexing (MuxServe). Six GPUs prefill and ten decode by default.
The testbed is that of `ops.bench.papers.aegaeon_testbed`.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

from ops.bench.papers.aegaeon_testbed import (
    ARTIFACT_PROFILE,
    GPUS,
    METRICS,
    POOLS,
    SYSTEMS,
    Metric,
    Row,
    Setup,
    System,
    measure,
)
from ops.bench.papers.aegaeon_times import draw_times, measure_draw, show_times, summed
from ops.bench.papers.workloads import HALF_AS_LONG, Redraws, Workload, merged, workloads_of
from ops.bench.shared import check_plot, chosen, work_folder
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.plots.lines_plot import LinesPanel, draw_lines

DURATION_S = 120.0
"""Of a workload at rate 0.1; those of 40 models last half as long."""
PUBLISHED: Mapping[System, str] = {
    "pooled": "72 (artifact, H100), 70 (paper, H800)",
    "request-level-per-gpu": "44",
    "static": "32",
    "dedicated": "16",
}
COLUMNS: Columns = {
    "system": "system",
    "models": "models",
    "rate": "rate",
    "inputs x": "scale_inputs",
    "outputs x": "scale_outputs",
    "draw": "draw",
    "SLO": "slo_scale",
    "prefill GPUs": "prefill_slots",
    "nodes": lambda row: row["nodes"] or "-",
    "service": lambda row: f"{row['service_attainment']:.2%}",
    "token": lambda row: f"{row['token_attainment']:.2%}",
    "busy": lambda row: f"{row['busy_share']:.0%}",
    "switches": "switches",
}
LIMIT_COLUMNS: Columns = {
    "setup": "setup",
    "by service": lambda row: _range(row["service"]),
    "by token": lambda row: _range(row["token"]),
}
HOPELESS = 0.7
"""With this service attainment more models are not tried."""
Drawn = Callable[[int, int], Workload]
"""The workload of so many models on a draw."""

app = typer.Typer(help=(__doc__ or "").partition("\n")[0], no_args_is_help=True, add_completion=False)
File = Annotated[Path, typer.Argument(metavar="WORKLOADS", help="Aegaeon's workloads.csv.gz.", dir_okay=False)]
Profile = Annotated[Path, typer.Option(help="A GPU profile: step times and the wire.", dir_okay=False)]
Systems = Annotated[list[str] | None, typer.Option("--system", help=f"Of {', '.join(SYSTEMS)}; all if not given.")]
Prefill = Annotated[
    list[int] | None,
    typer.Option(min=1, max=GPUS - 1, help="GPUs that prefill, of 16; the others decode. 6 if not given; repeatable."),
]
Scales = Annotated[list[float] | None, typer.Option(min=0.01, help="Of both targets, 10 s and 0.1 s.")]
Plot = Annotated[Path | None, typer.Option(help="Draw it here: .png, .svg or .pdf.", dir_okay=False)]
Least = Annotated[int, typer.Option(min=2, help="Models at least.")]
Most = Annotated[int, typer.Option(min=2, help="Models at most; for more than 80 two workloads are merged.")]
Draws = Annotated[int, typer.Option(min=0, max=100, help="Workloads drawn anew at each size; 0: the file's own.")]
ScaleInputs = Annotated[float, typer.Option(min=0.01, max=1000, help="Prompts so many times as long (Figure 12).")]
ScaleOutputs = Annotated[float, typer.Option(min=0.01, max=1000, help="Answers so many times as long (Figure 12).")]
Nodes = Annotated[
    int, typer.Option(min=0, max=GPUS, help="Nodes of pools, with 2 TB of host memory each; 0: one pool, no limit.")
]
Rate = Annotated[float, typer.Option(min=0.01, max=10, help="Requests/s of each model (0.5: Figure 11b).")]
Every = Annotated[int, typer.Option(min=2, help="Steps of so many models.")]


@app.command()
def models(
    workloads: File,
    least: Least = 16,
    most: Most = 96,
    every: Every = 4,
    system: Systems = None,
    profile: Profile = ARTIFACT_PROFILE,
    prefill_slots: Prefill = None,
    slo_scale: Scales = None,
    nodes: Nodes = 0,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Attainment by the number of models at rate 0.1, and how many keep 90 % (Figures 11a and 13)."""
    setups = _setups(system, profile, prefill_slots, slo_scale, nodes)
    found = _climb(workloads, (least, most, every), setups, plot)
    _show([asdict(row) for _, rows in found for row in rows], as_json)
    for setup, rows in found:
        _print_best(setup, rows)
    _draw("models", [(_named(setup), rows) for setup, rows in found], plot)


@app.command()
def limits(
    workloads: File,
    draws: Annotated[int, typer.Option(min=1, max=100, help="Workloads drawn anew, each with a limit of its own.")] = 5,
    rate: Rate = 0.1,
    scale_inputs: ScaleInputs = 1.0,
    scale_outputs: ScaleOutputs = 1.0,
    least: Least = 16,
    most: Most = 160,
    every: Every = 2,
    system: Systems = None,
    profile: Profile = ARTIFACT_PROFILE,
    prefill_slots: Prefill = None,
    slo_scale: Scales = None,
    nodes: Nodes = 0,
    as_json: AsJson = False,
) -> None:
    """How many models keep 90 % on each of several draws of 120 s, by either metric, found by bisection."""
    setups = _setups(system, profile, prefill_slots, slo_scale, nodes)
    sizes = range(least, most + 1, every)
    with work_folder() as folder:
        redraws = Redraws(workloads, folder)

        def drawn(models: int, draw: int) -> Workload:
            workload = redraws.workload(models, f"{rate:g}", draw, duration_s=DURATION_S)
            return replace(workload, scale_inputs=scale_inputs, scale_outputs=scale_outputs)

        found = [_limits(setup, drawn, draws, sizes) for setup in setups]
    if as_json:
        print_json(found)
    else:
        print_table(f"Models at 90 %, mean and range of {draws} draws, 16 GPUs", LIMIT_COLUMNS, found)


@app.command()
def rates(
    workloads: File,
    draws: Draws = 0,
    rate: Annotated[list[str] | None, typer.Option(help="Of the file's rates, such as 0.7; all if not given.")] = None,
    scale_inputs: ScaleInputs = 1.0,
    scale_outputs: ScaleOutputs = 1.0,
    system: Systems = None,
    profile: Profile = ARTIFACT_PROFILE,
    prefill_slots: Prefill = None,
    slo_scale: Scales = None,
    nodes: Nodes = 0,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """40 models at rates from 0.05 to 0.7 each (Figure 11c)."""
    check_plot(plot)
    setups = _setups(system, profile, prefill_slots, slo_scale, nodes)
    with work_folder() as folder:
        own = {each.rate: each for each in workloads_of(workloads) if each.models == HALF_AS_LONG}
        sizes = [(0, own[each]) for each in chosen(rate, own, "--rate")]
        if draws:
            redraws = Redraws(workloads, folder)
            sizes = [
                (draw, redraws.workload(HALF_AS_LONG, each.rate, draw, duration_s=DURATION_S / 2))
                for _, each in sizes
                for draw in range(1, draws + 1)
            ]
        scaled = [(draw, replace(each, scale_inputs=scale_inputs, scale_outputs=scale_outputs)) for draw, each in sizes]
        found = [(setup, [_measured(setup, each, draw) for draw, each in scaled]) for setup in setups]
    _show([asdict(row) for _, rows in found for row in rows], as_json)
    _draw("rate", [(_named(setup), rows) for setup, rows in found], plot)


@app.command()
def where_time_goes(
    workloads: File,
    models: Annotated[list[int] | None, typer.Option(min=2, help="So many; 20, 40, 70 and 94 if not given.")] = None,
    rate: Rate = 0.1,
    draws: Annotated[int, typer.Option(min=1, max=100, help="Workloads drawn anew, each served by itself.")] = 3,
    system: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(POOLS)}; all if not given.")] = None,
    profile: Profile = ARTIFACT_PROFILE,
    prefill_slots: Prefill = None,
    slo_scale: Scales = None,
    nodes: Nodes = 0,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Shares of the time of requests and slots, times of switches and of KV transfers (Figures 14 and 15)."""
    check_plot(plot)
    setups = _setups(chosen(system, POOLS, "--system"), profile, prefill_slots, slo_scale, nodes)
    rows = []
    with work_folder() as folder:
        redraws = Redraws(workloads, folder)
        for setup in setups:
            for count in models or (20, 40, 70, 94):
                drawn = [
                    redraws.workload(count, f"{rate:g}", draw, duration_s=DURATION_S) for draw in range(1, draws + 1)
                ]
                rows.append(summed(_named(setup), drawn[0], [measure_draw(setup, each) for each in drawn]))
                notes().print(f"{_named(setup)}: {count} models at {rate:g}")
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        show_times(rows)
    if plot is not None:
        draw_times(rows, plot)


def _limits(setup: Setup, drawn: Drawn, draws: int, sizes: Sequence[int]) -> dict[str, Any]:
    """The limits of a setup on each draw, by metric, and their means."""
    rows = [_rows_of(setup, drawn, draw) for draw in range(1, draws + 1)]
    found = {metric: [_limit(row_of, metric, sizes) for row_of in rows] for metric in METRICS}
    return {"setup": _named(setup)} | {name: {"mean": mean(limits), "draws": limits} for name, limits in found.items()}


def _rows_of(setup: Setup, drawn: Drawn, draw: int) -> Callable[[int], Row]:
    """The row of each number of models on a draw; each is measured once."""

    @cache
    def row_of(models: int) -> Row:
        return _measured(setup, drawn(models, draw), draw)

    return row_of


def _limit(row_of: Callable[[int], Row], metric: Metric, sizes: Sequence[int]) -> int:
    """The largest of the sizes that keeps 90 %, as if all smaller ones did too; 0: not even the first does."""
    place = bisect_left(sizes, True, key=lambda models: not row_of(models).keeps(metric))
    return sizes[place - 1] if place else 0


def _range(limit: Mapping[str, Any]) -> str:
    return f"{limit['mean']:.1f} ({min(limit['draws'])} to {max(limit['draws'])})"


def _climb(
    workloads: Path, steps: tuple[int, int, int], setups: Sequence[Setup], plot: Path | None
) -> list[tuple[Setup, list[Row]]]:
    """Measure each setup with more and more models, until its attainment is hopeless."""
    check_plot(plot)
    found: list[tuple[Setup, list[Row]]] = []
    with _sizes(workloads, *steps) as sizes:
        for setup in setups:
            rows: list[Row] = []
            for each in sizes:
                rows.append(_measured(setup, each))
                if rows[-1].service_attainment < HOPELESS:
                    break
            found.append((setup, rows))
    return found


@contextmanager
def _sizes(workloads: Path, least: int, most: int, every: int) -> Iterator[list[Workload]]:
    """The workloads at rate 0.1; those of the size of two different ones together are merged of these. That of 40
    models is half as long as the others, and left out.
    """
    single = {
        each.models: each for each in workloads_of(workloads) if each.rate == "0.1" and each.models != HALF_AS_LONG
    }
    largest = max(single, default=0)
    with work_folder() as folder:
        sizes = []
        for models in range(least, most + 1, every):
            halves = [
                (one, models - one) for one in range(models // 2 - 1, 0, -1) if {one, models - one} <= set(single)
            ]
            if models in single:
                sizes.append(single[models])
            elif models > largest and halves:
                first, second = halves[0]
                sizes.append(merged(single[first], single[second], folder))
        if not sizes:
            raise typer.BadParameter(f"{workloads} has no workload of {least} to {most} models at rate 0.1")
        yield sizes


def _measured(setup: Setup, workload: Workload, draw: int = 0) -> Row:
    row = measure(setup, workload, draw)
    notes().print(
        f"{row.system} {row.models} models at {row.rate}, draw {row.draw}, SLO x {row.slo_scale:g}: service"
        f" {row.service_attainment:.2%}, token {row.token_attainment:.2%}, {row.requests} requests"
        f" in {row.seconds:.1f} s"
    )
    return row


def _setups(
    systems: list[str] | None,
    profile: Path,
    prefill_slots: list[int] | None,
    scales: list[float] | None,
    nodes: int = 0,
) -> list[Setup]:
    """The setups that options name.

    Raises:
        typer.BadParameter: a system is not known, or one that is no pool, or whose GPUs cannot be shared out evenly, is
            to be on nodes.
    """
    setups = [
        Setup(system=one, profile=profile, prefill_slots=slots, slo_scale=scale, nodes=nodes)
        for scale in scales or [1.0]
        for one in chosen(systems, SYSTEMS, "--system")
        for slots in prefill_slots or [6]
    ]
    for setup in setups if nodes else ():
        fleet = SYSTEMS[setup.system].fleet(setup.prefill_slots)
        if setup.system not in POOLS or any(count % nodes for count in fleet.values()):
            raise typer.BadParameter(
                f"{_named(setup)} cannot be on {nodes} nodes: only {' and '.join(POOLS)}, with equal numbers of GPUs",
                param_hint="--nodes",
            )
    return setups


def _named(setup: Setup) -> str:
    split = "" if setup.prefill_slots == 6 else f", {setup.prefill_slots} + {GPUS - setup.prefill_slots} GPUs"
    nodes = f", {setup.nodes} nodes" if setup.nodes else ""
    return f"{setup.system}, SLO x {setup.slo_scale:g}{split}{nodes}"


def _show(rows: Iterable[Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(list(rows))
    else:
        print_table("Aegaeon's workloads, 16 GPUs", COLUMNS, rows)


def _print_best(setup: Setup, rows: Sequence[Row]) -> None:
    best = {metric: max((row.models for row in rows if row.keeps(metric)), default=0) for metric in METRICS}
    published = PUBLISHED.get(setup.system) if setup.slo_scale == 1.0 else None
    against = f"; published: {published}" if published else ""
    notes().print(
        f"{_named(setup)}: {best['service']} models at 90 % service attainment, {best['token']} at 90 % of tokens in"
        f" time{against}"
    )


def _draw(against: str, lines: Sequence[tuple[str, Sequence[Row]]], plot: Path | None) -> None:
    if plot is None:
        return
    panels = [
        LinesPanel(
            title=f"{metric} attainment",
            x_label="models" if against == "models" else "requests/s of each of 40 models",
            y_label="share",
            lines={
                name: [(float(getattr(row, against)), row.attainment(metric)) for row in rows] for name, rows in lines
            },
            kept=0.9,
        )
        for metric in METRICS
    ]
    draw_lines(panels, "Aegaeon's workloads on 16 GPUs", plot)


if __name__ == "__main__":
    app()
