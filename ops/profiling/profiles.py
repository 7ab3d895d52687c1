"""Latency models fitted to measurements of checkpoints on this machine, or to published points."""

import platform
from collections.abc import Sequence
from pathlib import Path

from dataplane.scheduling.fit import fit_latency
from ops.profiling.figures import Progress
from ops.profiling.profile_file import FittedModel, GpuFacts
from ops.profiling.published_points import PointSet, read_points
from ops.profiling.step_times import StepTimesSettings, machine_memory, measure_step_times

PUBLISHED_EFFICIENCY = 0.625
"""Share of the PCIe rate that transfers reach, if only that rate is known: beta of Aegaeon A.2."""


def measured_profile(
    folders: Sequence[Path],
    settings: StepTimesSettings,
    *,
    gpu_type: str | None,
    cost_per_hour: float,
    report: Progress,
) -> tuple[GpuFacts, list[FittedModel]]:
    """Measure steps of each checkpoint on this machine. `gpu_type` None: the name of the device.

    Raises:
        ModelLoadError: a folder holds no model that the engine runs.
        ValueError: too few points could be measured.
    """
    device, memory_bytes = machine_memory(settings.device)
    models = []
    rates_bytes_per_s = []
    for folder in folders:
        times = measure_step_times(folder, settings, report)
        rates_bytes_per_s.append(times.rate_bytes_per_s)
        models.append(
            FittedModel(
                name=folder.resolve().name,
                source=f"measured, {settings.dtype} on {device}",
                gpus=1,
                weights_bytes=times.weights_bytes,
                fit=fit_latency(times.prefill, times.decode),
                note=f"Medians of {settings.repeats} runs of steps of up to {settings.tokens_max} tokens.",
            )
        )
    gpu = GpuFacts(
        gpu_type=gpu_type or device,
        memory_bytes=memory_bytes,
        pcie_bytes_per_s=max(rates_bytes_per_s),
        transfer_efficiency=1.0,
        cost_per_hour=cost_per_hour,
        note=f"Measured on {platform.node()}, the rate to the device too. cost_per_hour: an assumption; set your own.",
    )
    return gpu, models


def published_models(file: Path, gpu_type: str | None) -> tuple[str, list[FittedModel], list[str]]:
    """The device, the fits of its sets in `file`, and the sources left out because the model's size is unknown.
    `gpu_type` None: the only device in the file.

    Raises:
        ValueError: the file cannot be read, has several devices or none of that name, or a set of too few points.
    """
    sets = read_points(file)
    devices = sorted({one.gpu_type.upper() for one in sets})
    if gpu_type is None and len(devices) > 1:
        raise ValueError(f"{file} has points of {', '.join(devices)}: say which GPU type")
    wanted = gpu_type or (devices[0] if devices else "any GPU")
    chosen = [one for one in sets if one.gpu_type.upper() == wanted.upper()]
    models = [_fitted(one, one.weights_bytes) for one in chosen if one.weights_bytes is not None]
    if not models:
        raise ValueError(f"{file} has no points of {wanted}; it has {', '.join(devices) or 'none'}")
    return chosen[0].gpu_type, models, [one.source for one in chosen if one.weights_bytes is None]


def _fitted(one: PointSet, weights_bytes: int) -> FittedModel:
    dropped = f" {one.dropped} points of more tokens than were run are left out." if one.dropped else ""
    try:
        fit = fit_latency(one.prefill, one.decode)
    except ValueError as error:
        raise ValueError(f"{one.source}: {error}") from error
    return FittedModel(
        name=one.model,
        source=one.source,
        gpus=one.gpus,
        weights_bytes=weights_bytes,
        fit=fit,
        note=f"weights_bytes: two per parameter by the name.{dropped}",
    )
