"""`node profile`: how long steps of models take on this machine, or in published measurements, as a profile file."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dataplane.protocol.errors import ModelLoadError
from dataplane.scheduling.profile import load_gpu_profile
from ops.cli.examples import examples
from ops.cli.node_check import Device, Dtype
from ops.client.api import CommandError
from ops.client.screen import Columns, notes, print_json, print_table, progress_bar

if TYPE_CHECKING:
    from ops.profiling.profile_file import FittedModel, GpuFacts

    Profile = tuple[GpuFacts, list[FittedModel]]


@examples(
    "tidepool node profile models/qwen3-0.6b --out here.toml",
    "tidepool node profile --from latency_profiles.csv.gz --gpu-type H800 --memory-gib 80 --out h800.toml",
)
def profile_node(
    model_dirs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[MODEL_DIR]...", exists=True, file_okay=False, help="Hugging Face checkpoints."),
    ] = None,
    points: Annotated[
        Path | None, typer.Option("--from", exists=True, dir_okay=False, help="Fit the points of a CSV file instead.")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where to measure.")] = "cpu",
    dtype: Annotated[Dtype, typer.Option(help="What to compute in.")] = "float32",
    tokens_max: Annotated[int, typer.Option(min=16, help="Tokens of the largest step.")] = 4096,
    seconds: Annotated[float, typer.Option(min=0, help="No new point of a model's kind of step after this.")] = 60.0,
    gpu_type: Annotated[
        str | None, typer.Option(help="Name of the profile; of a CSV file, the device to take.")
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option(min=0.001, max=1_000_000, help="Memory of one GPU; measured unless --from.")
    ] = None,
    pcie_gb_per_s: Annotated[
        float, typer.Option(min=0.001, help="Rate of the host link (PCIe); measured unless --from.")
    ] = 55.6,
    cost_per_hour: Annotated[float, typer.Option(min=0.001, help="What one costs for an hour: your own figure.")] = 1.0,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="The profile file to write.")] = None,
    append: Annotated[bool, typer.Option(help="Add the models to the file instead of replacing it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the fits as JSON, and nothing else.")] = False,
) -> None:
    """Measure prefill and decode steps of models on this machine, and fit the latency model to them.

    \b
    With --from, points that others measured are fitted instead, a model for each set of the file. Its columns are
    set, model, device, tp, input_len, batch_size, prefill_avg_s and decode_avg_s; .gz is read too. Prefills above
    4,096 tokens are left out where only 4,096 were run.
    """
    if (points is None) == (not model_dirs):
        raise CommandError("give either checkpoints to measure, or --from with points to fit")
    if append and out is None:
        raise CommandError("--append needs --out")
    if points is not None and out is not None and not append and memory_gib is None:
        raise CommandError("--from with --out needs --memory-gib, which the points do not contain")
    try:
        if append and out is not None:
            load_gpu_profile(out)
        if points is None:
            settings = {"device": device, "dtype": dtype, "tokens_max": tokens_max, "seconds_max": seconds}
            gpu, models = _measured(model_dirs or [], settings, gpu_type, cost_per_hour)
        else:
            gpu, models = _published(points, gpu_type, memory_gib or 1.0, pcie_gb_per_s * 1e9, cost_per_hour)
        _write(out, gpu, models, append=append)
    except (ModelLoadError, OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    _show(gpu, models, as_json=as_json)


def _published(
    points: Path, gpu_type: str | None, memory_gib: float, pcie_bytes_per_s: float, cost_per_hour: float
) -> "Profile":
    from ops.profiling.profile_file import GpuFacts
    from ops.profiling.profiles import PUBLISHED_EFFICIENCY, published_models

    device, models, left_out = published_models(points, gpu_type)
    for source in left_out:
        notes().print(f"left out {source}: its name does not say how many parameters it has", markup=False)
    gpu = GpuFacts(
        gpu_type=device,
        memory_bytes=round(memory_gib * 2**30),
        pcie_bytes_per_s=pcie_bytes_per_s,
        transfer_efficiency=PUBLISHED_EFFICIENCY,
        cost_per_hour=cost_per_hour,
        note=f"Fitted to the points of {points.name}. cost_per_hour: an assumption; set your own.",
    )
    return gpu, models


def _measured(
    folders: list[Path], settings: Mapping[str, Any], gpu_type: str | None, cost_per_hour: float
) -> "Profile":
    from ops.profiling.profiles import measured_profile
    from ops.profiling.step_times import StepTimesSettings

    with progress_bar("reading the model") as report_progress:
        return measured_profile(
            folders,
            StepTimesSettings(**settings),
            gpu_type=gpu_type,
            cost_per_hour=cost_per_hour,
            report=report_progress,
        )


def _write(out: Path | None, gpu: "GpuFacts", models: "list[FittedModel]", *, append: bool) -> None:
    from ops.profiling.profile_file import append_models, write_profile

    if out is None:
        return
    if append:
        append_models(out, gpu.gpu_type, models)
    else:
        write_profile(out, gpu, models)
    notes().print(f"{out}: {len(models)} models of {gpu.gpu_type}", markup=False)


def _show(gpu: "GpuFacts", models: "list[FittedModel]", *, as_json: bool) -> None:
    if as_json:
        print_json({"gpu": asdict(gpu), "models": [asdict(model) for model in models]})
        return
    columns: Columns = {
        "source": "source",
        "prefill points": lambda row: row["fit"]["prefill_points"],
        "prefill R^2": lambda row: f"{row['fit']['prefill_r2']:.4f}",
        "mean error": lambda row: f"{row['fit']['prefill_mape']:.1%}",
        "decode points": lambda row: row["fit"]["decode_points"],
        "decode R^2": lambda row: f"{row['fit']['decode_r2']:.4f}",
        "mean error of decode": lambda row: f"{row['fit']['decode_mape']:.1%}",
    }
    print_table(f"Latency models, {gpu.gpu_type}", {"model": "name", **columns}, [asdict(model) for model in models])
