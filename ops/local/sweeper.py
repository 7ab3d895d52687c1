"""Ends a supervisor's children after the supervisor was killed: a script that waits for its stdin to close.

It reads process groups from stdin, one line each: `+ PID SIGNAL TIMEOUT_S` and `- PID`. When stdin closes, or its
parent has ended, every registered group gets its stop signal and, after its own timeout, SIGKILL. On Linux the kernel
has already sent the stop signal (the parent-death signal); a second one makes some programs skip their shutdown.
"""

import os
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

_CHECK_S = 1.0
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Group:
    """A child that leads a process group of its own, and how it is stopped."""

    pid: int
    stop_signal: int
    stop_timeout_s: float

    def is_led(self) -> bool:
        """Whether the leader lives."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def send(self, number: int) -> None:
        """Signal the leader alone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to all members."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def main() -> None:
    """Keep the list until the supervisor ends, then stop the groups on it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sweep(watch(os.getppid()))


def watch(parent: int) -> list[Group]:
    """The groups that are left when stdin closes or `parent` is no longer the parent."""
    groups: dict[int, Group] = {}
    pending = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], _CHECK_S)[0]:
            continue
        chunk = os.read(0, 65536)
        if not chunk:
            break
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            note(groups, line.decode())
    return list(groups.values())


def note(groups: dict[int, Group], line: str) -> None:
    """Apply one line of the protocol to `groups`."""
    sign, pid, *how = line.split()
    if sign == "+":
        groups[int(pid)] = Group(pid=int(pid), stop_signal=int(how[0]), stop_timeout_s=float(how[1]))
    else:
        groups.pop(int(pid), None)


def sweep(groups: list[Group]) -> None:
    """Wait for each leader up to its timeout, then kill what is left of its group."""
    if sys.platform != "linux":
        for group in groups:
            group.send(group.stop_signal)
    started_s = time.monotonic()
    while groups:
        waited_s = time.monotonic() - started_s
        for group in [one for one in groups if not one.is_led() or waited_s >= one.stop_timeout_s]:
            group.kill()
            groups.remove(group)
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
