"""`--latency` of `model add` and `model profile`: step and switch times from GPU profiles, or by guess."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dataplane.scheduling.costs import switch_s
from dataplane.scheduling.profile import ProfileError, load_gpu_profile
from ops.client.api import CommandError
from ops.profiling.cards import CARDS
from ops.profiling.guess import guess_times

AUTO = "auto"
LatencyFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--latency",
        metavar="FILE",
        help="GPU profile (TOML, as in ops/profiles): the step times of the model nearest in size, so that plans may"
        " pool this one on that GPU type. May be repeated. auto: a guess by the size of the model and the card's data"
        " sheet, for every GPU type without a file.",
    ),
]
Sizes = Mapping[str, Any]
"""`weights_bytes`, `kv_bytes_per_token` and, where known, `parameters` of a model, as the API has them."""


def latencies_of(files: Sequence[Path], gpu_types: Sequence[str], sizes: Sizes, *, gpus: int) -> dict[str, Any]:
    """Step and switch times by GPU type.

    Raises:
        CommandError: a file cannot be read.
        typer.BadParameter: it is of a GPU type that is not asked for, or a guess is asked for that nobody can make.
    """
    found = {}
    for file in files:
        if str(file) != AUTO:
            gpu_type, latency = _measured(file, gpu_types, sizes["weights_bytes"], gpus)
            found[gpu_type] = latency
    if AUTO in map(str, files):
        found |= {gpu_type: _guessed(gpu_type, sizes, gpus) for gpu_type in gpu_types if gpu_type not in found}
    return found


def _measured(file: Path, gpu_types: Sequence[str], weights_bytes: int, gpus: int) -> tuple[str, dict[str, Any]]:
    """The GPU type of a profile, and the times of its model that is nearest in size."""
    try:
        profile = load_gpu_profile(file)
    except ProfileError as error:
        raise CommandError(str(error)) from error
    if profile.gpu_type not in gpu_types:
        raise typer.BadParameter(f"--latency {file} is of {profile.gpu_type}, which --tokens-per-s does not name")
    nearest = profile.nearest_model(weights_bytes, gpus)
    return profile.gpu_type, asdict(nearest.latency) | {
        "switch_s": switch_s(weights_bytes, profile.pcie_bytes_per_s * gpus, profile.transfer_efficiency),
        "source": f"{nearest.name} on {nearest.gpus} {profile.gpu_type}: {nearest.source}",
    }


def _guessed(gpu_type: str, sizes: Sizes, gpus: int) -> dict[str, Any]:
    if gpu_type not in CARDS:
        known = ", ".join(sorted(CARDS))
        raise typer.BadParameter(f"--latency auto does not know the GPU type {gpu_type}, only {known}: give a profile")
    card, parameters = CARDS[gpu_type], sizes.get("parameters")
    times = guess_times(sizes["weights_bytes"], sizes["kv_bytes_per_token"], card, parameters, gpus=gpus)
    return asdict(times.latency) | {"switch_s": times.switch_s, "source": times.source}
