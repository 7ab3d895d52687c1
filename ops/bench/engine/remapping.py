"""Four ways out when KV has no room, in the torch engine itself: layers given up, KV swapped, computed anew, refused.

A burst of requests overflows the KV of a slot that holds one, two or three models (`remapping_run`). A CPU computes
slowly and copies fast, so the wire is a slow one (`remapping_run`): what counts is how long a layer's load takes beside
the computing of a layer. At a full batch a GPU reads as much KV as weights, so that this is about half of its memory
bandwidth over that of the wire. Prefills cost a CPU more, beside decode steps, than they cost a GPU: computing anew
looks worse here than there; and a step of more sequences takes longer, which on a GPU it hardly does.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from ops.bench.engine.remapping_run import GROUPS, SHAPE, Case, Layer, Load, Served, cases, measure_layer, serve_case
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.profiling.checkpoints import BenchModel, build_checkpoints


def main(
    group: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(GROUPS)}; all if not given.")] = None,
    wire: Annotated[list[str] | None, typer.Option(help="Only these wires, e.g. 'PCIe 5'.")] = None,
    way: Annotated[list[str] | None, typer.Option(help="Only these ways, e.g. swap.")] = None,
    sharing: Annotated[list[str] | None, typer.Option(help="Only these sharings, e.g. spatial.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    requests: Annotated[int, typer.Option(min=2)] = 12,
    tokens: Annotated[int, typer.Option(min=2, help="Each answer's.")] = 20,
    kv_requests: Annotated[int, typer.Option(min=1, help="How many requests KV has room for.")] = 4,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    as_json: AsJson = False,
) -> None:
    """Measure the ways out of KV pressure; each figure is the median of its rounds.

    \b
    Examples:
      python -m ops.bench.engine.remapping
      python -m ops.bench.engine.remapping --group ways --wire "PCIe 5" --way remap --way swap --rounds 1 --json
    """
    load = Load(requests=requests, tokens=tokens, kv_requests=kv_requests)
    chosen = choose_cases(load, group, wire=wire, way=way, sharing=sharing)
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(prefix="tidepool-bench-") as folder:
        models = build_checkpoints(Path(folder), [SHAPE] * max(case.models for case in chosen), "float32")
        layer = measure_layer(models, SHAPE, load)
        notes().print(f"a layer of {layer.size_bytes / 1e6:.1f} MB computes for {layer.compute_s * 1000:.2f} ms")
        rows = list(measure(models, load, chosen, layer, rounds=rounds))
    if as_json:
        print_json({"layer": asdict(layer), "load": asdict(load), "rounds": rounds, "rows": rows})
        return
    for name, members in groupby(rows, key=lambda row: row["group"]):
        print_table(f"{name}: {requests} requests where {kv_requests} have room", COLUMNS, members)


def choose_cases(load: Load, groups: Sequence[str] | None, **only: Sequence[str] | None) -> list[Case]:
    """The cases of the groups, all if not given, that have one of each attribute's `only` values.

    Raises:
        typer.BadParameter: a group or a value that no case has.
    """
    _check("group", groups, GROUPS)
    chosen = [case for name in GROUPS if not groups or name in groups for case in cases(name, load)]
    for attribute, values in only.items():
        _check(attribute, values, dict.fromkeys(getattr(case, attribute) for case in chosen))
        chosen = [case for case in chosen if not values or getattr(case, attribute) in values]
    if not chosen:
        raise typer.BadParameter("no case has all of that", param_hint="--group")
    return chosen


def _check(name: str, given: Sequence[str] | None, known: dict[str, Any]) -> None:
    unknown = [value for value in given or () if value not in known]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]} is none of {', '.join(known)}", param_hint=f"--{name}")


def measure(
    models: Sequence[BenchModel], load: Load, chosen: Sequence[Case], layer: Layer, *, rounds: int
) -> Iterator[dict[str, Any]]:
    """A row for each case. Within a group cases take turns, so that all see the same noise."""
    for name, members in groupby(chosen, key=lambda case: case.group):
        of_group = list(members)
        found: list[list[Served]] = [[] for _ in of_group]
        for number in range(rounds):
            for case, served in zip(of_group, found, strict=True):
                notes().print(f"{name}, round {number + 1} of {rounds}: {case.sharing}, {case.wire}, {case.way}")
                served.append(serve_case(models, SHAPE, load, case, layer))
        for case, served in zip(of_group, found, strict=True):
            named = {"group": name, "sharing": case.sharing, "wire": case.wire, "ratio": case.ratio, "way": case.way}
            yield named | medians(served)


def medians(rounds: Sequence[Served]) -> dict[str, float]:
    """Of each figure."""
    rows = [asdict(served) for served in rounds]
    return {name: median(row[name] for row in rows) for name in rows[0]}


COLUMNS: Columns = {
    "sharing": "sharing",
    "wire": "wire",
    "way": "way",
    "batch": lambda row: f"{row['batch']:.0f}",
    "tokens/s": lambda row: f"{row['tokens_per_s']:.0f}",
    "TBT p50/p99 ms": lambda row: f"{row['tbt_p50_s'] * 1000:.0f} / {row['tbt_p99_s'] * 1000:.0f}",
    "step p99 ms": lambda row: f"{row['step_p99_s'] * 1000:.0f}",
    "wire %": lambda row: f"{row['wire_share'] * 100:.0f}",
    "TTFT p99 s": lambda row: f"{row['ttft_p99_s']:.2f}",
    "other's s": lambda row: f"{row['other_ttft_s']:.2f}",
    "off peak ms": lambda row: f"{row['off_peak_tbt_s'] * 1000:.0f}",
    "lent/out/anew": lambda row: f"{row['layers_lent']:.0f}/{row['swapped']:.0f}/{row['recomputed']:.0f}",
}

if __name__ == "__main__":
    typer.run(main)
