"""Profile files from fits: the TOML that `scheduling.profile` reads, with the quality of each fit as comments."""

import json
from dataclasses import dataclass, fields
from pathlib import Path

from dataplane.scheduling.costs import LatencyModel
from dataplane.scheduling.fit import LatencyFit
from dataplane.scheduling.profile import ProfileError, load_gpu_profile


@dataclass(frozen=True, kw_only=True)
class FittedModel:
    """A fit of a model. `note`: the origin of its figures, on one line."""

    name: str
    source: str
    gpus: int
    weights_bytes: int
    fit: LatencyFit
    note: str


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """The fields of a profile that describe the GPU type (or machine)."""

    gpu_type: str
    memory_bytes: int
    pcie_bytes_per_s: float
    transfer_efficiency: float
    cost_per_hour: float
    note: str


def write_profile(path: Path, gpu: GpuFacts, models: list[FittedModel]) -> None:
    """Write a profile, and replace an existing one.

    Raises:
        dataplane.scheduling.profile.ProfileError: the result is no valid profile; nothing is written.
        OSError: the file cannot be written.
    """
    lines = [
        f"# {gpu.note}",
        f"gpu_type = {json.dumps(gpu.gpu_type)}",
        f"memory_bytes = {gpu.memory_bytes:_}",
        f"pcie_bytes_per_s = {gpu.pcie_bytes_per_s:.4g}",
        f"transfer_efficiency = {gpu.transfer_efficiency:g}",
        f"cost_per_hour = {gpu.cost_per_hour:g}",
    ]
    _replace(path, "\n".join(lines) + "\n" + "".join(map(_entry, models)))


def append_models(path: Path, gpu_type: str, models: list[FittedModel]) -> None:
    """Add models to an existing profile.

    Raises:
        dataplane.scheduling.profile.ProfileError: the file is no valid profile, or one of another GPU type.
        OSError: the file cannot be written.
    """
    present = load_gpu_profile(path).gpu_type
    if present.upper() != gpu_type.upper():
        raise ProfileError(f"{path}: is of {present}, not of {gpu_type}")
    _replace(path, path.read_text(encoding="utf-8").rstrip("\n") + "\n" + "".join(map(_entry, models)))


def _entry(model: FittedModel) -> str:
    fit = model.fit
    coefficients = [f"{field.name} = {getattr(fit.latency, field.name):.4e}" for field in fields(LatencyModel)]
    lines = [
        "",
        f"# {model.note}",
        f"# prefill: R^2 {fit.prefill_r2:.4f}, mean error {fit.prefill_mape:.1%}, {fit.prefill_points} points",
        f"# decode: R^2 {fit.decode_r2:.4f}, mean error {fit.decode_mape:.1%}, {fit.decode_points} points",
        "[[models]]",
        f"name = {json.dumps(model.name)}",
        f"source = {json.dumps(model.source)}",
        f"gpus = {model.gpus}",
        f"weights_bytes = {model.weights_bytes:_}",
        *coefficients,
    ]
    return "\n".join(lines) + "\n"


def _replace(path: Path, text: str) -> None:
    """Write to a temporary file, check that it can be read, and rename it."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        load_gpu_profile(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
