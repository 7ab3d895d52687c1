"""Layouts of one node's slots on Aegaeon's workloads: `python -m ops.bench.papers.node_slots --help`.

`alone`: each model is on one slot; models are assigned by their true number of requests, the busiest first, each to the
slot with the fewest, which no plan could know. `split`: disaggregated, a share of the slots prefills and the others
decode. `together`: aggregated, every slot does both for all models. Single runs on the testbed of
`ops.bench.papers.aegaeon_testbed`, less its size.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from ops.bench.papers.aegaeon_testbed import Setup, scenario_of
from ops.bench.papers.workloads import HALF_AS_LONG, model_name, workloads_of, write_workload
from ops.bench.shared import work_folder
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.simulator.results.results import Result
from ops.simulator.run import simulate
from ops.simulator.scenario.scenario import FleetPart
from ops.simulator.traffic.traces import Recorded, read_aegaeon

Layout = Literal["alone", "split", "together"]
RATE = "0.1"
COLUMNS: Columns = {
    "slots": "layout",
    "models": "models",
    "requests": "requests",
    "service": lambda row: f"{row['service_attainment']:.1%}",
    "token": lambda row: f"{row['token_attainment']:.1%}",
    "never fit": "unserved",
}

app = typer.Typer(help=(__doc__ or "").partition(": `")[0] + ".", add_completion=False)
File = Annotated[Path, typer.Argument(metavar="WORKLOADS", help="Aegaeon's workloads.csv.gz.", dir_okay=False)]
Models = Annotated[
    list[int] | None, typer.Option("--models", min=2, help="So many models; 36, 44 and 48 if not given.")
]
Slots = Annotated[int, typer.Option(min=2, max=64, help="Slots of the node.")]
Prefill = Annotated[int, typer.Option(min=1, max=63, help="Slots that prefill, where they are disaggregated.")]
Scale = Annotated[float, typer.Option(min=0.01, help="Of both targets, 10 s and 0.1 s.")]
Prompts = Annotated[float, typer.Option(min=0.01, help="Prompts so many times as long.")]
Zipf = Annotated[
    float, typer.Option(min=0, help="The n-th model has 1/n^ZIPF of the first one's requests; 0: as they are.")
]
LoadOf = Annotated[int | None, typer.Option(min=2, help="As many requests as so many models make, drawn by --zipf.")]
Seed = Annotated[int, typer.Option(help="Of the draw of models, where --zipf is above 0.")]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Figures of a layout; attainments are of all requests."""

    layout: Layout
    models: int
    requests: int
    unserved: int
    service_attainment: float
    token_attainment: float


@app.command()
def node_slots(
    workloads: File,
    models: Models = None,
    slots: Slots = 8,
    prefill_slots: Prefill = 3,
    slo_scale: Scale = 1.0,
    prompts: Prompts = 1.0,
    zipf: Zipf = 0.0,
    load_of: LoadOf = None,
    seed: Seed = 7,
    as_json: AsJson = False,
) -> None:
    """Compare the layouts on requests of so many models at rate 0.1 each, or with models drawn by popularity."""
    if prefill_slots >= slots:
        raise typer.BadParameter(f"must be under the {slots} slots", param_hint="--prefill-slots")
    if load_of and not zipf:
        raise typer.BadParameter("needs --zipf: else the requests have their models", param_hint="--load-of")
    rows = []
    for count in models or (36, 44, 48):
        requests = _requests(workloads, load_of or count)
        if zipf:
            requests = drawn_anew(requests, count, zipf, random.Random(seed))
        requests = [one.scaled(prompts, 1.0) for one in requests]
        for layout, parts in layouts(requests, slots, prefill_slots).items():
            rows.append(_measured(layout, count, parts, slo_scale))
            notes().print(f"{layout}, {count} models: service {rows[-1].service_attainment:.1%}")
    shown = [asdict(row) for row in rows]
    if as_json:
        print_json(shown)
    else:
        print_table(f"Aegaeon's workloads, a node of {slots} GPUs", COLUMNS, shown)


def drawn_anew(requests: Sequence[Recorded], models: int, exponent: float, chance: random.Random) -> list[Recorded]:
    """The requests with models drawn by Zipf's law; the ranks of models are random."""
    ranks = list(range(models))
    chance.shuffle(ranks)
    weights = [1 / (rank + 1) ** exponent for rank in range(models)]
    return [one._replace(model=model_name(ranks[chance.choices(range(models), weights)[0]])) for one in requests]


def layouts(
    requests: Sequence[Recorded], slots: int, prefill_slots: int
) -> Mapping[Layout, list[tuple[Mapping[str, int], list[Recorded]]]]:
    """Fleets, as keys of a scenario, and their requests by layout."""
    split = {"prefill_slots": prefill_slots, "decode_slots": slots - prefill_slots}
    return {
        "alone": [({"both_slots": 1}, own) for own in dealt(requests, slots)],
        "split": [(split, list(requests))],
        "together": [({"both_slots": slots}, list(requests))],
    }


def dealt(requests: Sequence[Recorded], slots: int) -> Iterator[list[Recorded]]:
    """The requests of each slot that has any: the busiest model first, each to the slot with the fewest requests."""
    assigned = [0] * slots
    slot_of: dict[str | None, int] = {}
    for model, count in sorted(Counter(one.model for one in requests).items(), key=lambda item: (-item[1], item[0])):
        slot_of[model] = min(range(slots), key=assigned.__getitem__)
        assigned[slot_of[model]] += count
    for slot in range(slots):
        if assigned[slot]:
            yield [one for one in requests if slot_of[one.model] == slot]


def _requests(workloads: Path, models: int) -> list[Recorded]:
    """Requests of the first so many models of the smallest workload that has them."""
    sizes = [one for one in workloads_of(workloads) if one.rate == RATE and one.models != HALF_AS_LONG]
    found = next((one for one in sizes if one.models >= models), None)
    if found is None:
        raise typer.BadParameter(f"{workloads} has no workload of {models} models at rate {RATE}")
    names = {model_name(number) for number in range(models)}
    return [one for one in read_aegaeon(workloads, found.name) if one.model in names]


def _measured(
    layout: Layout, models: int, parts: Sequence[tuple[Mapping[str, int], list[Recorded]]], slo_scale: float
) -> Row:
    results = [_result(fleet, own, slo_scale) for fleet, own in parts]
    requests = sum(result.requests for result in results)
    return Row(
        layout=layout,
        models=models,
        requests=requests,
        unserved=sum(sum(result.failures.values()) for result in results),
        service_attainment=sum(result.requests * result.service_attainment for result in results) / requests,
        token_attainment=sum(result.requests * result.token_attainment for result in results) / requests,
    )


def _result(fleet: Mapping[str, int], requests: Sequence[Recorded], slo_scale: float) -> Result:
    with work_folder() as folder:
        workload = write_workload(folder / "node.csv", requests)
        whole = scenario_of(Setup(system="pooled-both", slo_scale=slo_scale), workload)
        fields = whole.fleet.model_dump(exclude_unset=True) | {"both_slots": 0} | dict(fleet)
        return simulate(whole.model_copy(update={"fleet": FleetPart.model_validate(fields)})).result


if __name__ == "__main__":
    app()
