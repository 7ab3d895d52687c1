"""What benchmarks share: names given to options, a folder to work in, CPU seconds, and an engine in simulated time."""

import os
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import typer

from dataplane.engines.interface import Engine, EngineOutput, EngineRequest
from ops.plots.panels import PlotError, check_path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

NameT = TypeVar("NameT", bound=str)


def chosen(names: Sequence[str] | None, known: Iterable[NameT], option: str) -> list[NameT]:
    """The names given to an option, or all known ones if none was given.

    Raises:
        typer.BadParameter: one is not known.
    """
    by_name: dict[str, NameT] = {name: name for name in known}
    for name in names or ():
        if name not in by_name:
            raise typer.BadParameter(f"{name} is none of {', '.join(by_name)}", param_hint=option)
    return [by_name[name] for name in names or by_name]


def check_plot(plot: Path | None) -> None:
    """Check that a picture can be written, before long work is done for it.

    Raises:
        typer.BadParameter: it cannot.
    """
    try:
        if plot is not None:
            check_path(plot)
    except PlotError as error:
        raise typer.BadParameter(str(error), param_hint="--plot") from error


@contextmanager
def work_folder(kept: Path | None = None) -> Iterator[Path]:
    """A temporary folder, or the one to be kept, which is made where it is absent."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="tidepool-bench-") as folder:
        yield Path(folder).resolve()


def cpu_s(pid: int, *, but: str | None = None) -> float:
    """CPU seconds that a process, its threads and its children have used so far, ended children included. `but`: no
    children that run now whose command names it.
    """
    children = [child for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
    counted = [child for child in children if but is None or but not in _command(child)]
    ticks = sum(_ticks(pid)) + sum(sum(_ticks(child)[:2]) for child in counted)
    return ticks / _TICKS_PER_S


def _command(pid: str) -> str:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _ticks(pid: str | int) -> list[int]:
    """User and system time of a process, and both of its ended children; nothing if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except FileNotFoundError:
        return []
    return [int(field) for field in stat.rpartition(")")[2].split()[11:15]]


class SimulatedClock:
    """A clock that only sleeping moves. Called, it returns the time in seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, time_s: float) -> None:
        self.now_s += time_s


def serve(
    engine: Engine, clock: SimulatedClock, requests: Iterable[tuple[float, EngineRequest]]
) -> Iterator[tuple[float, Sequence[EngineOutput]]]:
    """Serve requests, each with its time of arrival and ordered by it, until all have ended.

    Yields:
        For each step the time at which it began, and its outputs.
    """
    coming = deque(requests)
    while coming or engine.has_work():
        if not engine.has_work():
            clock.now_s = max(clock.now_s, coming[0][0])
        while coming and coming[0][0] <= clock.now_s:
            engine.add(coming.popleft()[1])
        began_s = clock.now_s
        yield began_s, engine.step()
