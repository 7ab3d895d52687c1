"""What a benchmark says, and how it takes times: ways of doing a thing take turns, so that all see the same noise."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured value and its target. `details` are what it was made of, and what else was seen."""

    name: str
    value: float
    unit: str
    bound: Literal["at most", "at least"]
    target: float
    details: Mapping[str, float] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """Whether the value keeps to the target."""
        return self.value <= self.target if self.bound == "at most" else self.value >= self.target


def interleaved(runs: Mapping[str, Callable[[], float]], *, rounds: int) -> dict[str, list[float]]:
    """The results of each run, made in turn `rounds` times after one round that does not count."""
    results: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            result = run()
            if number:
                results[name].append(result)
    return results


def medians(results: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each."""
    return {name: statistics.median(values) for name, values in results.items()}


def seconds(run: Callable[[], None], device: torch.device) -> float:
    """How long it takes until the device has done it."""
    synchronize(device)
    began_s = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - began_s


def synchronize(device: torch.device) -> None:
    """Wait until a CUDA device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
