"""Keeps a set of child processes running: starts them in dependency order, restarts them, and leaves none behind.

All processes are started from one thread, which lives as long as
they do: the kernel's parent-death signal fires when the *thread* that forked ends. That thread ticks every 0.2 s; a
tick never waits, apart from the `ready` checks, which should answer within a second.

A child is stopped by its own signal to it alone, then its process group is killed. Should the supervisor itself be
killed, the kernel signals the children (`privileges`) and the sweeper kills what does not follow (`sweeper`).
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Self

from ops.local.processes import Child, Process, log_tail

__all__ = ["Child", "Supervisor", "SupervisorError"]

TICK_S = 0.2
START_ATTEMPTS_MAX = 3
BACKOFF_FIRST_S = 0.25
BACKOFF_MAX_S = 10.0
_CHECKS_OF_SILENCE = 4
STEADY_S = 30.0
"""A child that has been up for so long starts its next restarts without delay again."""


class SupervisorError(Exception):
    """The children cannot be started. The message ends with the last lines of the log of the one at fault."""


class Supervisor:
    """Runs children until it is stopped. Use `run()`, or `start()` and `stop()`, or a with-statement.

    Raises:
        ValueError: two children share a name, or `after` names an unknown child or forms a ring.
    """

    def __init__(self, children: Sequence[Child], *, report: Callable[[str], None] | None = None) -> None:
        _check(children)
        self._report = report or _to_stderr
        self._processes = {child.name: Process(child) for child in children}
        self._sweeper: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._up = threading.Event()
        self._stopping = threading.Event()
        self._signals = 0
        self._kill = False
        self._failure: Exception | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start all children and return when each has been ready once, or when it is stopped meanwhile.

        Raises:
            SupervisorError: a child did not get ready; all others are stopped again.
        """
        assert self._thread is None, "a supervisor starts once"
        self._thread = threading.Thread(target=self._main, name="supervisor", daemon=True)
        self._thread.start()
        try:
            self._up.wait()
        except BaseException:
            self.stop()
            raise
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def stop(self) -> None:
        """Stop all children, dependents first. Returns when no process is left."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def kill(self) -> None:
        """Kill all children at once, as when their machine loses its power. Returns when no process is left."""
        self._kill = True
        self.stop()

    def run(self, on_ready: Callable[[], None] | None = None) -> None:
        """Start, call `on_ready`, and block until SIGTERM, SIGINT or SIGHUP; then stop. Main thread only.

        A second signal kills at once instead of waiting for children to end.

        Raises:
            SupervisorError: as `start`; also when watching ends by an unforeseen error.
        """
        with self._signals_stop():
            self.start()
            assert self._thread is not None
            try:
                if on_ready is not None and not self._signals and not self._stopping.is_set():
                    on_ready()
                while self._thread.is_alive():
                    self._thread.join(TICK_S)
            finally:
                self.stop()
        if self._failure is not None:
            raise self._failure

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every child is up and ready, for instance after one was killed.

        Raises:
            TimeoutError: the message names those that are not, with the last lines of the first one's log.
        """
        deadline_s = time.monotonic() + timeout_s
        while late := [process.child for process in self._processes.values() if not process.is_up()]:
            if time.monotonic() > deadline_s:
                names = ", ".join(child.name for child in late)
                raise TimeoutError(f"not ready within {timeout_s:g} s: {names}\n{log_tail(late[0].log)}")
            time.sleep(TICK_S / 4)

    def pids(self) -> dict[str, int]:
        """The pid of every child that runs now, by name."""
        return {name: pid for name, process in self._processes.items() if (pid := process.pid)}

    def restarts(self) -> dict[str, int]:
        """How often each child was started again after it had ended by itself, by name."""
        return {name: process.restarts for name, process in self._processes.items()}

    def _main(self) -> None:
        """The thread that owns the children."""
        try:
            while not self._stopping.is_set() and not self._signals:
                self._tick(time.monotonic())
                if all(process.was_ready for process in self._processes.values()):
                    self._up.set()
                self._stopping.wait(TICK_S if self._up.is_set() else TICK_S / 4)
        except Exception as error:  # handed to the caller of `start` or `run`
            self._failure = error
        finally:
            self._stopping.set()
            self._stop_all()
            self._dismiss_sweeper()
            self._up.set()

    def _tick(self, now_s: float) -> None:
        self._keep_sweeper()
        for process in self._processes.values():
            if process.pid and process.has_ended():
                self._reap(process, now_s)
            if not process.pid:
                if now_s >= process.next_start_s and self._may_start(process.child):
                    process.launch(now_s)
                    self._register_with_sweeper(process)
            elif not process.ready:
                self._check_ready(process, now_s)
            else:
                self._check_answers(process, now_s)

    def _may_start(self, child: Child) -> bool:
        """Dependencies matter at the first start only: a running child tolerates their short absence."""
        return self._processes[child.name].was_ready or all(self._processes[name].ready for name in child.after)

    def _reap(self, process: Process, now_s: float) -> None:
        """Reap a child that ended by itself, and schedule its restart."""
        name, pid = process.child.name, process.pid
        cause = process.reap()
        self._write_sweeper(f"- {pid}\n")
        if now_s - process.started_s >= STEADY_S:
            process.failures = 0
        process.failures += 1
        if not process.was_ready and process.failures >= START_ATTEMPTS_MAX:
            tail = log_tail(process.child.log)
            raise SupervisorError(f"{name} did not start in {START_ATTEMPTS_MAX} attempts: it {cause}\n{tail}")
        delay_s = min(BACKOFF_FIRST_S * 2 ** (process.failures - 1), BACKOFF_MAX_S)
        process.next_start_s = now_s + delay_s
        process.restarts += 1
        self._report(f"{name} (pid {pid}) {cause}; restart {process.restarts} in {delay_s:g} s")

    def _check_ready(self, process: Process, now_s: float) -> None:
        child = process.child
        if process.check_ready(now_s):
            if process.restarts:
                self._report(f"{child.name} is up again (pid {process.pid})")
        elif now_s - process.started_s > child.ready_timeout_s:
            why = f" ({process.unready_cause})" if process.unready_cause else ""
            if not process.was_ready:
                raise SupervisorError(
                    f"{child.name} was not ready within {child.ready_timeout_s:g} s{why}\n{log_tail(child.log)}"
                )
            self._report(f"{child.name} is not ready {child.ready_timeout_s:g} s after its restart{why}; killing it")
            process.kill()

    def _check_answers(self, process: Process, now_s: float) -> None:
        """Kill a child that hangs, which the next tick starts again. It is asked several times before."""
        silence_max_s = process.child.silence_max_s
        if silence_max_s is None or now_s - process.asked_s < silence_max_s / _CHECKS_OF_SILENCE:
            return
        if not process.check_ready(now_s) and now_s - process.heard_s >= silence_max_s:
            why = f" ({process.unready_cause})" if process.unready_cause else ""
            self._report(
                f"{process.child.name} (pid {process.pid}) has not answered for {silence_max_s:g} s{why}; killing it"
            )
            process.kill()

    def _stop_all(self) -> None:
        """Stop in waves: those that no running child depends on, all at once, then the next; or kill all."""
        left = {name: process for name, process in self._processes.items() if process.pid}
        while left:
            needed = set() if self._kill else {name for process in left.values() for name in process.child.after}
            wave = [left.pop(name) for name in list(left) if name not in needed]
            assert wave, "the dependencies form no ring"
            started_s = time.monotonic()
            for process in wave if not self._kill else ():
                process.ask_to_stop()
            while wave:
                waited_s = time.monotonic() - started_s
                for process in [one for one in wave if self._is_over(one, waited_s)]:
                    pid = process.pid
                    process.reap()
                    self._write_sweeper(f"- {pid}\n")
                    wave.remove(process)
                time.sleep(TICK_S / 10)

    def _is_over(self, process: Process, waited_s: float) -> bool:
        """Whether a stopping child has ended, by itself or, past its time, by SIGKILL."""
        if process.has_ended():
            return True
        if self._kill:
            process.kill()
            return True
        if waited_s >= process.child.stop_timeout_s or self._signals > 1:
            self._report(f"{process.child.name} (pid {process.pid}) did not stop within {waited_s:.1f} s; killing it")
            process.kill()
            return True
        return False

    @contextmanager
    def _signals_stop(self) -> Iterator[None]:
        def on_signal(_number: int, _frame: FrameType | None) -> None:
            self._signals += 1  # an Event's lock may be held by the very code that is interrupted

        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup it stays ignored
            numbers.append(signal.SIGHUP)
        before = [signal.signal(number, on_signal) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _keep_sweeper(self) -> None:
        """Start the sweeper, again if it was killed, and register all children with it."""
        if self._sweeper is not None and self._sweeper.poll() is None:
            return
        was_killed = self._sweeper is not None
        self._dismiss_sweeper()
        script = str(Path(__file__).with_name("sweeper.py"))
        self._sweeper = subprocess.Popen(
            [sys.executable, "-I", "-S", script], stdin=subprocess.PIPE, start_new_session=True, bufsize=0
        )
        for process in self._processes.values():
            if process.pid:
                self._register_with_sweeper(process)
        if was_killed:
            self._report("the sweeper was killed; another has taken over")

    def _register_with_sweeper(self, process: Process) -> None:
        child = process.child
        self._write_sweeper(f"+ {process.pid} {int(child.stop_signal)} {child.stop_timeout_s}\n")

    def _write_sweeper(self, line: str) -> None:
        """Write a line; if the sweeper has ended, the next tick starts another with all children."""
        assert self._sweeper is not None
        assert self._sweeper.stdin is not None
        try:
            self._sweeper.stdin.write(line.encode())
        except BrokenPipeError:
            self._sweeper.wait()

    def _dismiss_sweeper(self) -> None:
        if self._sweeper is not None and self._sweeper.stdin is not None:
            self._sweeper.stdin.close()
            self._sweeper.wait()


def _check(children: Iterable[Child]) -> None:
    known: set[str] = set()
    left = list(children)
    if len({child.name for child in left}) < len(left):
        raise ValueError("two children share a name")
    while left:
        free = [child for child in left if known.issuperset(child.after)]
        if not free:
            raise ValueError(f"these children wait for unknown ones or for each other: {[one.name for one in left]}")
        known.update(child.name for child in free)
        left = [child for child in left if child.name not in known]


def _to_stderr(line: str) -> None:
    with suppress(OSError):  # a terminal that was closed must not end the watch
        print(f"supervisor: {line}", file=sys.stderr, flush=True)
