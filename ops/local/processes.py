"""One supervised child: how to run it, and its current process."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ops.local.privileges import leashed

_TAIL_LINES = 15
_TAIL_BYTES = 64 * 2**10


@dataclass(frozen=True, kw_only=True)
class Child:
    """How to run one child process.

    `argv` must stay in the foreground. `env` is its whole environment, None for the supervisor's own. `ready` answers
    within about a second whether the child can serve; an exception counts as no. `after` names children that must be
    ready before this one is first started. stdout and stderr are appended to `log`, which is rotated at a start where
    it is longer than `log_bytes_max`; None: they are the supervisor's own. Without `ready` a child counts as ready when
    it has lived for `settled_s`. A child that was ready is killed and started again when `ready` has said no for
    `silence_max_s`; None: it is not asked again. `prepare` is called before each start.
    """

    name: str
    argv: tuple[str, ...]
    log: Path | None
    env: Mapping[str, str] | None = None
    prepare: Callable[[], None] | None = None
    ready: Callable[[], bool] | None = None
    ready_timeout_s: float = 60.0
    silence_max_s: float | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout_s: float = 10.0
    after: tuple[str, ...] = field(default=())
    settled_s: float = 1.0
    log_bytes_max: int = 20 * 2**20


class Process:
    """A child's current process, if any, and the history of earlier ones."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.ready = False
        self.was_ready = False
        self.unready_cause = ""
        self.failures = 0
        self.restarts = 0
        self.started_s = 0.0
        self.asked_s = 0.0
        self.heard_s = 0.0
        self.next_start_s = 0.0
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its group and session; 0 when there is none."""
        popen = self._popen
        return 0 if popen is None else popen.pid

    def launch(self, now_s: float) -> None:
        """Start the process in a session of its own."""
        child = self.child
        if child.prepare is not None:
            child.prepare()
        with _output(child) as output:
            self._popen = subprocess.Popen(
                leashed(child.argv, child.stop_signal),
                env=child.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                start_new_session=True,
            )
        self.started_s = now_s
        self.ready = False

    def has_ended(self) -> bool:
        """Whether the process is there and over."""
        return self._popen is not None and self._popen.poll() is not None

    def is_up(self) -> bool:
        """Whether the process runs and has been found ready."""
        popen = self._popen
        return self.ready and popen is not None and popen.poll() is None

    def check_ready(self, now_s: float) -> bool:
        """Ask the child's ready check, and remember a yes."""
        self.asked_s = now_s
        try:
            ready = self.child.ready() if self.child.ready else now_s - self.started_s >= self.child.settled_s
        except Exception as error:  # reported if the child never becomes ready
            ready, self.unready_cause = False, f"{type(error).__name__}: {error}"
        if ready:
            self.ready = self.was_ready = True
            self.heard_s = now_s
        return ready

    def ask_to_stop(self) -> None:
        """Send the stop signal to the process itself, which stops its own children."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, self.child.stop_signal)

    def kill(self) -> None:
        """SIGKILL to the whole process group, and wait for the process."""
        assert self._popen is not None
        self._kill_group()
        self._popen.wait()

    def reap(self) -> str:
        """Kill the rest of the group of the ended process. Returns how it ended, as text."""
        assert self._popen is not None
        self._kill_group()
        code = self._popen.wait()
        self._popen = None
        self.ready = False
        if code >= 0:
            return f"exited with code {code}"
        return f"was ended by {signal.Signals(-code).name}"

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


@contextmanager
def _output(child: Child) -> Iterator[BinaryIO | None]:
    if child.log is None:
        yield None
        return
    _rotate(child.log, child.log_bytes_max)
    with child.log.open("ab") as output:
        yield output


def log_tail(log: Path | None) -> str:
    """The last lines of a log, indented, under a line that names the file; where there is none, they were printed."""
    if log is None:
        return ""
    if not log.exists():
        return f"  ({log} does not exist)"
    with log.open("rb") as source:
        source.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = source.read().decode(errors="replace").splitlines()
    return "\n".join([f"  last lines of {log}:", *(f"    {line}" for line in lines[-_TAIL_LINES:])])


def _rotate(log: Path, bytes_max: int) -> None:
    """Rotate a log that has exceeded its limit; one old log is kept."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > bytes_max:
        log.replace(log.with_name(f"{log.name}.1"))
