"""One node's slots on Aegaeon's workloads, alone, split or together: `python -m ops.bench.papers.node_slots --help`.

Alone, each model stands on one slot. They are dealt out by the requests that really come, the busiest first, each to
the slot with the fewest: no plan could know that. Split, a share of the slots prefills and the others decode. Together,
every slot does both, and an instance stands on each. Single runs on the testbed of `aegaeon_setup`, less its size.
"""

import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from forecasts.importers.lines import DemandFileError, open_csv
from ops.bench.papers.aegaeon import Setup, Workload, scenario_of, workloads_of
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.simulator.run import simulate
from ops.simulator.scenario.scenario import FleetPart

Layout = Literal["alone", "split", "together"]
RATE = "0.1"
HALF_AS_LONG = 40
"""The workload of so many models is of 60 s, not 120, and left out."""
COLUMNS: Columns = {
    "slots": "layout",
    "models": "models",
    "requests": "requests",
    "service": lambda row: f"{row['service_attainment']:.1%}",
    "token": lambda row: f"{row['token_attainment']:.1%}",
    "never fit": "unserved",
}
_HEADER = ("workload", "request_time", "model_name", "input_len", "output_len")

app = typer.Typer(help=(__doc__ or "").partition(": `")[0] + ".", add_completion=False)
File = Annotated[Path, typer.Argument(metavar="WORKLOADS", help="Aegaeon's workloads.csv.gz.", dir_okay=False)]
Models = Annotated[
    list[int] | None, typer.Option("--models", min=2, help="So many models; 36, 44 and 48 if not given.")
]
Slots = Annotated[int, typer.Option(min=2, max=64, help="Slots of the node.")]
Prefill = Annotated[int, typer.Option(min=1, max=63, help="Slots that prefill, where they are split.")]
Scale = Annotated[float, typer.Option(min=0.01, help="Of both targets, 10 s and 0.1 s.")]
Prompts = Annotated[float, typer.Option(min=0.01, help="Prompts so many times as long.")]
Zipf = Annotated[
    float, typer.Option(min=0, help="The n-th model has 1/n^ZIPF of the first one's requests; 0: as they are.")
]
LoadOf = Annotated[int | None, typer.Option(min=2, help="As many requests as so many models make, drawn by --zipf.")]
Seed = Annotated[int, typer.Option(help="Of the draw of models, where --zipf is above 0.")]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request. Its time as the file has it."""

    time: str
    model: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of a layout; shares of service and tokens in time are of all requests."""

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
    """Compare the three on requests of so many models at rate 0.1 each, or drawn anew by popularity."""
    if prefill_slots >= slots:
        raise typer.BadParameter(f"must be under the {slots} slots", param_hint="--prefill-slots")
    if load_of and not zipf:
        raise typer.BadParameter("needs --zipf: else the requests have their models", param_hint="--load-of")
    rows = []
    for count in models or (36, 44, 48):
        asked = _requests(workloads, load_of or count)
        if zipf:
            asked = drawn_anew(asked, count, zipf, random.Random(seed))
        asked = [replace(each, prompt_tokens=max(1, round(prompts * each.prompt_tokens))) for each in asked]
        for layout, parts in layouts(asked, slots, prefill_slots).items():
            rows.append(_measured(layout, count, parts, slo_scale))
            notes().print(f"{layout}, {count} models: service {rows[-1].service_attainment:.1%}")
    shown: list[Mapping[str, Any]] = [asdict(row) for row in rows]
    if as_json:
        print_json(shown)
    else:
        print_table(f"Aegaeon's workloads, a node of {slots} GPUs", COLUMNS, shown)


def drawn_anew(asked: Sequence[Asked], models: int, exponent: float, chance: random.Random) -> list[Asked]:
    """The requests, their models drawn by Zipf's law, which of them is how popular by chance."""
    ranks = list(range(models))
    chance.shuffle(ranks)
    weights = [1 / (rank + 1) ** exponent for rank in range(models)]
    return [replace(each, model=ranks[chance.choices(range(models), weights)[0]]) for each in asked]


def layouts(
    asked: Sequence[Asked], slots: int, prefill_slots: int
) -> Mapping[Layout, list[tuple[Mapping[str, int], list[Asked]]]]:
    """What serves which requests, by layout: fleets as a scenario has them."""
    alone: list[tuple[Mapping[str, int], list[Asked]]] = [({"both_slots": 1}, part) for part in dealt(asked, slots)]
    split = {"prefill_slots": prefill_slots, "decode_slots": slots - prefill_slots}
    return {"alone": alone, "split": [(split, list(asked))], "together": [({"both_slots": slots}, list(asked))]}


def dealt(asked: Sequence[Asked], slots: int) -> Iterator[list[Asked]]:
    """The requests of each slot that has any: the busiest model first, each to the slot with the fewest requests."""
    held = [0] * slots
    slot_of: dict[int, int] = {}
    for model, count in sorted(Counter(each.model for each in asked).items(), key=lambda item: (-item[1], item[0])):
        slot_of[model] = min(range(slots), key=held.__getitem__)
        held[slot_of[model]] += count
    for slot in range(slots):
        if held[slot]:
            yield [each for each in asked if slot_of[each.model] == slot]


def _requests(workloads: Path, models: int) -> list[Asked]:
    """Requests of the first so many models of the smallest workload that has them."""
    try:
        sizes = [one for one in workloads_of(workloads) if one.rate == RATE and one.models != HALF_AS_LONG]
        found = next((one for one in sizes if one.models >= models), None)
        if found is None:
            raise typer.BadParameter(f"{workloads} has no workload of {models} models at rate {RATE}")
        with open_csv(workloads) as file:
            asked = [
                Asked(
                    time=line.word("request_time"),
                    model=int(line.word("model_name").rpartition("_")[2]),
                    prompt_tokens=int(line.number("input_len")),
                    output_tokens=int(line.number("output_len")),
                )
                for line in file.lines(_HEADER)
                if line.word("workload") == found.name
            ]
    except DemandFileError as error:
        raise typer.BadParameter(str(error), param_hint="WORKLOADS") from error
    return [each for each in asked if each.model < models]


def _measured(
    layout: Layout, models: int, parts: Sequence[tuple[Mapping[str, int], list[Asked]]], slo_scale: float
) -> Row:
    results = [_result(fleet, asked, slo_scale) for fleet, asked in parts]
    requests = sum(result.requests for result in results)
    return Row(
        layout=layout,
        models=models,
        requests=requests,
        unserved=sum(sum(result.failures.values()) for result in results),
        service_attainment=sum(result.requests * result.service_attainment for result in results) / requests,
        token_attainment=sum(result.requests * result.token_attainment for result in results) / requests,
    )


def _result(fleet: Mapping[str, int], asked: Sequence[Asked], slo_scale: float) -> Any:
    with tempfile.TemporaryDirectory(prefix="tidepool-bench-") as folder:
        name, path = "node", Path(folder) / "node.csv"
        lines = [
            f"{name},{each.time},synth_model_{each.model:02d},{each.prompt_tokens},{each.output_tokens}"
            for each in asked
        ]
        path.write_text("\n".join([",".join(_HEADER), *lines]) + "\n", encoding="utf-8")
        workload = Workload(path=path, name=name, models=0, rate=RATE)
        whole = scenario_of(Setup(system="pooled-both", slo_scale=slo_scale), workload)
        fields = whole.fleet.model_dump(exclude_unset=True) | {"both_slots": 0} | dict(fleet)
        return simulate(whole.model_copy(update={"fleet": FleetPart.model_validate(fields)})).result


if __name__ == "__main__":
    app()
