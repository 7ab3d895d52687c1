"""`node bench`: how fast a pooled slot switches and decodes on this machine."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ops.cli.examples import examples
from ops.cli.node_check import Device, Dtype
from ops.client.api import CommandError
from ops.client.screen import notes, print_json, print_table

if TYPE_CHECKING:
    from ops.profiling.figures import Figure


@examples("tidepool node bench", "tidepool node bench --device cuda --dtype bfloat16 --models 7B,14B --json")
def bench_node(
    device: Annotated[Device, typer.Option(help="Where to run.")] = "cpu",
    dtype: Annotated[Dtype, typer.Option(help="What to compute in.")] = "float32",
    models: Annotated[str, typer.Option(help="Parameters of each model; at least two.")] = "90M,90M",
    figures: Annotated[
        str, typer.Option(help="Which to measure.")
    ] = "switch,prefetch,layerwise,balanced,control,decode,fragmentation",
    rounds: Annotated[int, typer.Option(min=1, help="How often each is measured; the median counts.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Threads that compute, here and in what is compared.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, and nothing else.")] = False,
) -> None:
    """Measure switches, prefetch, layer-wise start, decoding and the KV cache, each against what it must beat.

    \b
    Models of several architectures are made up with random weights, in a temporary folder. What is compared takes
    turns in one run, so that both see the same noise. The status is 0 whether targets are met or not.
    """
    from transformers.utils.logging import disable_progress_bar

    from ops.profiling.checkpoints import parameters_of
    from ops.profiling.table import BenchSettings, measure_figures

    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        settings = BenchSettings(
            device=device,
            dtype=dtype,
            parameters=[parameters_of(text.strip()) for text in models.split(",")],
            names=[name.strip() for name in figures.split(",")],
            rounds=rounds,
            threads=threads,
        )
        with notes().status("") as status:
            found = measure_figures(settings, lambda doing, done, total: status.update(f"{done}/{total} {doing}"))
    except ValueError as error:
        raise CommandError(str(error)) from error
    if as_json:
        print_json({"settings": asdict(settings), "figures": [{**asdict(one), "met": one.met} for one in found]})
    else:
        _show(f"Pooled slot, {settings.dtype} on {settings.device}, {threads} threads, medians of {rounds}", found)


def _show(title: str, figures: "list[Figure]") -> None:
    rows = [
        {
            "figure": figure.name,
            "value": f"{figure.value:.4g} {figure.unit}".strip(),
            "target": f"{figure.bound} {figure.target:g} {figure.unit}".strip(),
            "met": figure.met,
            "details": ", ".join(f"{name} {value:.4g}" for name, value in figure.details.items()),
        }
        for figure in figures
    ]
    print_table(title, {name: name for name in rows[0]}, rows)
