"""Results of benchmarks, and how they measure times: compared variants alternate, so that all see the same noise."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

Progress = Callable[[str, int, int], None]
"""Called with what is being measured, how much of it is done, and how much there is."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured value and its target. `details`: the values that it is computed from, and others."""

    name: str
    value: float
    unit: str
    bound: Literal["at most", "at least"]
    target: float
    details: Mapping[str, float] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        return self.value <= self.target if self.bound == "at most" else self.value >= self.target


def interleaved(runs: Mapping[str, Callable[[], float]], *, rounds: int) -> dict[str, list[float]]:
    """The results of each run over `rounds` rounds, after a warm-up round. A round calls each once, in order."""
    results: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            result = run()
            if number:
                results[name].append(result)
    return results


def medians(results: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each list."""
    return {name: statistics.median(values) for name, values in results.items()}


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds until `run` returned and the device completed its work."""
    synchronize(device)
    began_s = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - began_s


def synchronize(device: torch.device) -> None:
    """Wait until a CUDA device has completed all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
