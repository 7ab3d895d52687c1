"""The workloads of Aegaeon's artifact: those of a file, others drawn as it drew them, and files in the same format."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import typer

from forecasts.importers.lines import DemandFileError, open_csv
from ops.simulator.run import number_of
from ops.simulator.traffic.traces import AEGAEON, Recorded, read_aegaeon

HALF_AS_LONG = 40
"""The workload of so many models at rate 0.1 lasts 60 s, the others 120 s."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A workload of a file. `rate`: requests per second of each model. `scale_inputs`, `scale_outputs`: prompts and
    answers are so many times as long as in the file.
    """

    path: Path
    name: str
    models: int
    rate: str
    scale_inputs: float = 1.0
    scale_outputs: float = 1.0


def workloads_of(path: Path) -> list[Workload]:
    """The workloads of a file with unscaled lengths, by number of models, then by rate.

    Raises:
        typer.BadParameter: the file cannot be read.
    """
    pattern = re.compile(r"synth-(\d+)-([0-9.]+)-1\.0-1\.0")
    try:
        with open_csv(path) as file:
            names = {line.word("workload") for line in file.lines(("workload",))}
    except DemandFileError as error:
        raise typer.BadParameter(str(error), param_hint="WORKLOADS") from error
    matches = (pattern.fullmatch(name) for name in names)
    found = [Workload(path=path, name=one[0], models=int(one[1]), rate=one[2]) for one in matches if one]
    return sorted(found, key=lambda one: (one.models, float(one.rate)))


class Redraws:
    """Workloads drawn anew, as the artifact drew its own: each model has Poisson arrivals at the rate until the end,
    but rate x duration of them at most, and every request has the prompt's and the answer's length of one of the file.

    What a model gets hangs on the draw, the rate and its number alone: a larger workload of the same draw has the
    requests of a smaller one, and those of more models.

    Raises:
        DemandFileError: the file cannot be read.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        """`folder`: where the workloads are written."""
        names = [one.name for one in workloads_of(path)]
        requests = sorted({one for name in names for one in read_aegaeon(path, name)})
        self._lengths = [(one.prompt_tokens, one.output_tokens) for one in requests]
        self._folder = folder

    def workload(self, models: int, rate: str, draw: int, *, duration_s: float) -> Workload:
        """The workload of so many models; `rate` in requests per second of each, `draw` from 1."""
        requests = [one for number in range(models) for one in self._of_model(number, rate, draw, duration_s)]
        path = self._folder / f"draw-{draw}-{models}-{rate}.csv"
        return write_workload(path, sorted(requests), models=models, rate=rate)

    def _of_model(self, number: int, rate: str, draw: int, duration_s: float) -> Iterator[Recorded]:
        rng = np.random.default_rng([draw, number, round(1000 * float(rate))])
        most = round(float(rate) * duration_s)
        times_s = np.cumsum(rng.exponential(1 / float(rate), most)).tolist()
        picked = rng.integers(len(self._lengths), size=most).tolist()
        for time_s, place in zip(times_s, picked, strict=True):
            if time_s < duration_s:
                prompt_tokens, output_tokens = self._lengths[place]
                yield Recorded(time_s, model_name(number), prompt_tokens, output_tokens)


def model_name(number: int) -> str:
    """The name of a model in the workloads, from 0."""
    return f"synth_model_{number:02d}"


def write_workload(path: Path, requests: Iterable[Recorded], *, models: int = 0, rate: str = "0.1") -> Workload:
    """Write requests as a file with one workload, named as the file."""
    lines = [",".join(AEGAEON)]
    for one in requests:
        seconds, milliseconds = divmod(round(1000 * one.time_s), 1000)
        clock = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}.{milliseconds:03d}"
        lines.append(f"{path.stem},{clock},{one.model},{one.prompt_tokens},{one.output_tokens}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Workload(path=path, name=path.stem, models=models, rate=rate)


def merged(first: Workload, second: Workload, folder: Path) -> Workload:
    """Two workloads as one, with the models of the second after those of the first; written to `folder`.

    Raises:
        DemandFileError: a file cannot be read.
    """
    requests: Sequence[Recorded] = [
        *read_aegaeon(first.path, first.name),
        *(
            one._replace(model=model_name(number_of(one.model or "") + first.models))
            for one in read_aegaeon(second.path, second.name)
        ),
    ]
    models = first.models + second.models
    path = folder / f"{models}-models.csv"
    return write_workload(path, sorted(requests, key=lambda one: one.time_s), models=models, rate=first.rate)
