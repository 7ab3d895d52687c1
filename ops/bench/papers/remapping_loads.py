"""Remapping against vLLM's way by load, kind of step and seed, as tables of a page of the documentation."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from ops.bench.marked_table import MarkedTable, PageError
from ops.bench.papers.remapping_load import Recordings
from ops.bench.papers.remapping_sim import (
    AGAINST_VLLM,
    ARRIVALS,
    GROUPS,
    ONEIROS,
    TIDEPOOL,
    VLLM,
    VLLM_BY_STEP,
    WORKLOADS,
    Asked,
    Case,
    by_load,
    row_of,
    run_case,
)
from ops.client.screen import AsJson, Columns, print_json, print_table, progress_bar
from ops.reference.markdown import table

DOCS = Path(__file__).parents[2] / "docs"
PAGE, KEPT = DOCS / "results.md", DOCS / "remapping.json"
GAPS, MEANS, COSTS = (MarkedTable(f"remapping {name}") for name in ("gaps", "means", "costs"))
OF_TABLE = ("temporal", "uneven", "inputs", "spatial")


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What a step may do: `mixed` prefills beside the batch, up to `chunk_tokens`."""

    name: str
    chunk_tokens: int
    mixed: bool

    @property
    def against(self) -> tuple[str, ...]:
        """Who is compared with vLLM: with mixed steps also vLLM itself in turns that are step by step."""
        return (VLLM_BY_STEP, TIDEPOOL, ONEIROS) if self.mixed else (TIDEPOOL, ONEIROS)

    def cases(self, group: str, asked: Asked) -> Iterator[Case]:
        """The runs of a group."""
        for case in GROUPS[group](asked):
            if case.rival == VLLM and self.mixed:
                yield replace(case, rival=VLLM_BY_STEP, settings=replace(case.settings, step_by_step=True))
            if case.rival in (VLLM, *self.against):
                yield case


STEPS = (
    Steps(name="either, 512", chunk_tokens=512, mixed=False),
    Steps(name="mixed, 512", chunk_tokens=512, mixed=True),
    Steps(name="mixed, 256", chunk_tokens=256, mixed=True),
)
COSTS_AT = "mixed, 512"
NAMED = ("group", "load", "wire", "rival")
TITLES = {ONEIROS: "remapping alone"}
BY_STEP = "tbt_p99_by_step"
FIGURES = (*AGAINST_VLLM, "ttft_p99_s", "batch_mean")

Row = Mapping[str, Any]


def runs(recordings: Recordings, requests: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The figures of each load, kind of step, rival and seed."""
    wanted = [
        (steps, seed, case)
        for name in OF_TABLE
        for steps in STEPS
        for seed in seeds
        for case in steps.cases(name, Asked(requests=requests, seed=seed))
    ]
    found = []
    with progress_bar("runs") as report:
        for done, (steps, seed, case) in enumerate(wanted):
            report(f"{case.title}, {steps.name}", done, len(wanted))
            row = row_of(case, run_case(case, recordings, steps.chunk_tokens, mixed=steps.mixed))
            found.append({"steps": steps.name, "seed": seed} | {key: row[key] for key in (*NAMED, *FIGURES)})
        report("made", len(wanted), len(wanted))
    return found


def compared(found: Sequence[Row]) -> list[dict[str, Any]]:
    """A row for each load and kind of step: vLLM's means over seeds, and for each other rival its means and the changes
    in percent, as mean, least and most over seeds.
    """
    rows = []
    for group, load in dict.fromkeys((row["group"], row["load"]) for row in found):
        for steps in STEPS:
            mine = [row for row in found if (row["group"], row["load"], row["steps"]) == (group, load, steps.name)]
            seeds = dict.fromkeys(row["seed"] for row in mine)
            against = [row for seed in seeds for row in by_load([row for row in mine if row["seed"] == seed])]
            changes = {name: {key: _spread(against, name, key) for key in AGAINST_VLLM} for name in steps.against}
            if steps.mixed:
                changes[TIDEPOOL][BY_STEP] = _spread_by_step(mine)
            rivals = {name: _means(mine, name) | {"change": changes[name]} for name in steps.against}
            rows.append({"load": f"{group}, {load}", "steps": steps.name, VLLM: _means(mine, VLLM)} | rivals)
    return rows


def _means(rows: Sequence[Row], rival: str) -> dict[str, float]:
    return {key: fmean(row[key] for row in rows if row["rival"] == rival) for key in FIGURES}


def _spread(against: Sequence[Row], rival: str, figure: str) -> tuple[float, float, float]:
    percents = [row[figure] for row in against if row["rival"] == rival]
    return fmean(percents), min(percents), max(percents)


def _spread_by_step(rows: Sequence[Row]) -> tuple[float, float, float]:
    """P99 between tokens of Tidepool against vLLM step by step."""
    own, other = (
        {row["seed"]: row["tbt_p99_s"] for row in rows if row["rival"] == name} for name in (TIDEPOOL, VLLM_BY_STEP)
    )
    percents = [100 * (own[seed] / other[seed] - 1) for seed in own]
    return fmean(percents), min(percents), max(percents)


def change(row: Row, rival: str, figure: str) -> str:
    """A change in whole percents, with its range if it has one."""
    mean, low, high = (f"{round(percent):+d}" for percent in row[rival]["change"][figure])
    return f"{mean} %" if low == high else f"{mean} % ({low} to {high})"


def _bold_if_worse(row: Row, rival: str, figure: str) -> str:
    text, percent = change(row, rival, figure), round(row[rival]["change"][figure][0])
    worse = percent < 0 if figure == "tokens_per_s" else percent > 0
    return f"**{text}**" if worse else text


def gaps_of(rows: Sequence[Row]) -> str:
    """P99 between tokens: vLLM's in ms, and the others' against it, for each kind of step."""
    head = [
        cell
        for steps in STEPS
        for cell in (f"{steps.name}: vLLM, ms", *(TITLES.get(name, name) for name in steps.against))
    ]
    against = {steps.name: steps.against for steps in STEPS}
    lines = []
    for load in dict.fromkeys(row["load"] for row in rows):
        cells = [load]
        for row in (row for row in rows if row["load"] == load):
            cells.append(f"{1000 * row[VLLM]['tbt_p99_s']:.0f}")
            cells += [_bold_if_worse(row, name, "tbt_p99_s") for name in against[row["steps"]]]
        lines.append(cells)
    return table(("load, requests/s", *head), lines)


def means_of(rows: Sequence[Row]) -> str:
    """Tidepool's P99 of requests' mean time between tokens and of normalized latency against vLLM's, for each kind of
    step.
    """
    figures = {"mean between tokens": "tpot_p99_s", "normalized latency": "normalized_p99_s"}
    head = [f"{what}, {steps.name}" for what in figures for steps in STEPS]
    at = {(row["load"], row["steps"]): row for row in rows}
    lines = [
        [load]
        + [_bold_if_worse(at[load, steps.name], TIDEPOOL, figure) for figure in figures.values() for steps in STEPS]
        for load in dict.fromkeys(row["load"] for row in rows)
    ]
    return table(("load, requests/s", *head), lines)


def costs_of(rows: Sequence[Row]) -> str:
    """The other figures of Tidepool against vLLM, with mixed steps of 512."""
    head = ("P99 between tokens against vLLM step by step", "tokens/s")
    both = ("P99 TTFT, s: vLLM; Tidepool; Tidepool if steps do either", "mean batch: vLLM; Tidepool")
    at = {(row["load"], row["steps"]): row for row in rows}
    lines = []
    for (load, steps), row in at.items():
        if steps != COSTS_AT:
            continue
        first_tokens = (row[VLLM], row[TIDEPOOL], at[load, STEPS[0].name][TIDEPOOL])
        lines.append(
            [
                load,
                *(_bold_if_worse(row, TIDEPOOL, figure) for figure in (BY_STEP, "tokens_per_s")),
                "; ".join(f"{each['ttft_p99_s']:.1f}" for each in first_tokens),
                "; ".join(f"{row[name]['batch_mean']:.1f}" for name in (VLLM, TIDEPOOL)),
            ]
        )
    return table(("load, requests/s", *head, *both), lines)


COLUMNS: Columns = {
    "load": "load",
    "steps": "steps",
    "vLLM P99, ms": lambda row: f"{1000 * row[VLLM]['tbt_p99_s']:.0f}",
    "Tidepool": lambda row: change(row, TIDEPOOL, "tbt_p99_s"),
    "remapping alone": lambda row: change(row, ONEIROS, "tbt_p99_s"),
    "tokens/s, Tidepool": lambda row: change(row, TIDEPOOL, "tokens_per_s"),
}


def main(
    data: Annotated[
        Path | None, typer.Option(help=f"The folder with {ARRIVALS} and {WORKLOADS}; else the kept runs are taken.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many, from 0 on; 3 if not given.")] = None,
    requests: Annotated[int | None, typer.Option(min=10, help="Requests of each run; 200 if not given.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Keep the runs, and write the page of results.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare remapping with vLLM's way on every load of two sets of models, whatever a step may do.

    \b
    Example:
      python -m ops.bench.papers.remapping_loads --data ../data --seeds 3 --write
      python -m ops.bench.papers.remapping_loads --write
    """
    if data is None and (seeds is not None or requests is not None):
        raise typer.BadParameter("need --data: the kept runs have their own", param_hint="--seeds, --requests")
    try:
        for place in (GAPS, MEANS, COSTS) if write else ():
            place.split(PAGE)
    except PageError as error:
        raise typer.BadParameter(str(error), param_hint="--write") from error
    if data is None:
        found = json.loads(KEPT.read_text(encoding="utf-8"))
    else:
        found = runs(Recordings(azure=data / ARRIVALS, aegaeon=data / WORKLOADS), requests or 200, range(seeds or 3))
    rows = compared(found)
    if write:
        KEPT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        GAPS.write(PAGE, gaps_of(rows))
        MEANS.write(PAGE, means_of(rows))
        COSTS.write(PAGE, costs_of(rows))
    if as_json:
        print_json({"runs": found, "loads": rows})
        return
    print_table("P99 between tokens against vLLM, by load", COLUMNS, rows)


if __name__ == "__main__":
    typer.run(main)
