"""All figures of `tidepool node bench` in one run, with generated checkpoints in a temporary folder."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ops.profiling.checkpoints import BenchModel, DtypeName, Shape, build_checkpoints, shape_of
from ops.profiling.decode import measure_decode
from ops.profiling.figures import Figure, Progress
from ops.profiling.fragmentation import simulate_fragmentation
from ops.profiling.layerwise import measure_layerwise
from ops.profiling.switch import measure_control, measure_prefetch, measure_switch

FRAGMENTATION_MAX = 0.2
FRAGMENTATION_STEPS = 1500
CONTROL_SHAPE = Shape(hidden=256, layers=32, head_dim=64)
"""The cost of a switch without its bytes depends on the number of tensors, not on their size."""

NAMES = ("switch", "prefetch", "layerwise", "balanced", "control", "decode", "fragmentation")


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What to measure. `parameters`: of each model, at least two; `names`: the figures; `rounds`: of each figure."""

    device: str
    dtype: DtypeName
    parameters: Sequence[int]
    names: Sequence[str] = NAMES
    rounds: int = 5
    threads: int = 1


def measure_figures(settings: BenchSettings, report: Progress) -> list[Figure]:
    """The figures of `settings.names`, in the order of `NAMES`.

    Raises:
        ValueError: fewer than two models, an unknown figure, or no such device.
    """
    unknown = [name for name in settings.names if name not in NAMES]
    if unknown:
        raise ValueError(f"unknown figure {unknown[0]}; there are {', '.join(NAMES)}")
    if len(settings.parameters) < 2:
        raise ValueError("at least two models are needed")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device can be used here")
    torch.set_num_threads(settings.threads)
    wanted = [name for name in NAMES if name in settings.names]
    figures = []
    with tempfile.TemporaryDirectory(prefix="tidepool-bench-") as folder:
        report("making checkpoints", 0, len(wanted))
        shapes = [shape_of(parameters) for parameters in settings.parameters]
        models = build_checkpoints(Path(folder) / "models", shapes, settings.dtype, device=settings.device)
        deep = build_checkpoints(Path(folder) / "deep", [CONTROL_SHAPE] * 2, settings.dtype, device=settings.device)
        for number, name in enumerate(wanted):
            report(name, number, len(wanted))
            figures.append(_measure(name, models, deep, settings))
    return figures


def _measure(name: str, models: list[BenchModel], deep: list[BenchModel], settings: BenchSettings) -> Figure:
    if name == "fragmentation":
        return _fragmentation()
    measures: dict[str, Callable[..., Figure]] = {
        "switch": measure_switch,
        "prefetch": measure_prefetch,
        "layerwise": measure_layerwise,
        "balanced": partial(measure_layerwise, balanced=True),
        "control": measure_control,
        "decode": measure_decode,
    }
    used = deep if name == "control" else models
    return measures[name](used, device=settings.device, dtype=settings.dtype, rounds=settings.rounds)


def _fragmentation() -> Figure:
    found = simulate_fragmentation(seed=0, steps=FRAGMENTATION_STEPS)
    return Figure(
        name="fragmentation of the KV cache, four shapes",
        value=found.overall,
        unit="",
        bound="at most",
        target=FRAGMENTATION_MAX,
        details={"peak": found.peak, "load": found.load},
    )
