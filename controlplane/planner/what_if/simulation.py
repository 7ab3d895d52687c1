"""A simulation as a child process: `tidepool simulate`, with bounded time and memory, and the lowest priority."""

import contextlib
import json
import os
import resource
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

_KEPT_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "TMPDIR")
"""What Python needs; not the addresses and passwords of our servers."""
_TICK_S = 1.0
_LOG_LINES = 5
_NICENESS = 19


class SimulationError(Exception):
    """The simulation has no result; the message says why, for an operator."""


class StoppedError(Exception):
    """The simulation was ended because nobody wants its result any more."""


def simulate(
    facts: Path,
    *,
    hours: int,
    strategy: str,
    time_max_s: float,
    memory_bytes_max: int,
    go_on: Callable[[float], bool],
) -> dict[str, Any]:
    """Simulate the facts in a file; returns the document of its result. `go_on` is told the share that is done about
    every second, and says whether to go on.

    Raises:
        SimulationError: it failed, or took too long.
        StoppedError: `go_on` said no.
    """
    out = facts.with_name("result.json")
    arguments = ("simulate", "run", "--from-live", "--facts", str(facts), "--hours", str(hours))
    options = ("--policy", strategy, "--json", str(out), "--progress-lines")
    log: deque[str] = deque(maxlen=_LOG_LINES)
    with _started([*arguments, *options], memory_bytes_max) as process:
        try:
            _watch(process, log, time.monotonic() + time_max_s, go_on)
        except TimeoutError:
            raise SimulationError(f"it took more than {time_max_s:g} s (what_if_time_max_s)") from None
        finally:
            process.kill()
    if process.returncode == 0:
        document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return document
    why = " ".join(log).replace(str(facts.parent) + os.sep, "").strip()
    raise SimulationError(why or f"it ended with status {process.returncode}")


def _started(arguments: Sequence[str], memory_bytes_max: int) -> subprocess.Popen[bytes]:
    """In a process group of its own, so that Ctrl-C reaches only us. Its last write of progress fails when we die."""
    environment = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
    process = subprocess.Popen(
        [sys.executable, "-m", "ops.cli.main", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "1000"},
        process_group=0,
    )
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        resource.prlimit(process.pid, resource.RLIMIT_AS, (memory_bytes_max, memory_bytes_max))
        os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
    return process


def _watch(process: subprocess.Popen[bytes], log: deque[str], until_s: float, go_on: Callable[[float], bool]) -> None:
    """Read what the process reports until it ends."""
    assert process.stderr is not None
    share = 0.0
    told_s = -_TICK_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stderr, selectors.EVENT_READ)
        rest = b""
        while True:
            if selector.select(_TICK_S):
                piece = _read(process.stderr)
                *lines, rest = (rest + piece).split(b"\n")
                share = _take(lines if piece else [rest], log, share)
                if not piece:
                    process.wait()
                    return
            if time.monotonic() >= until_s:
                raise TimeoutError
            if time.monotonic() - told_s >= _TICK_S:
                told_s = time.monotonic()
                if not go_on(share):
                    raise StoppedError


def _read(stream: IO[bytes]) -> bytes:
    return os.read(stream.fileno(), 2**16)


def _take(lines: Sequence[bytes], log: deque[str], share: float) -> float:
    """The newest share in the lines; other lines go to the log."""
    for line in lines:
        try:
            share = float(json.loads(line)["share"])
        except (ValueError, TypeError, KeyError):
            if text := line.decode(errors="replace").strip():
                log.append(text)
    return share
