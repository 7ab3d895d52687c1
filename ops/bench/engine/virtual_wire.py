"""An interconnect of any rate, in time that load on the machine does not disturb.

Time is the CPU time of the calling thread and its waits for copies. Copies are made at once and take no time; their
events finish when an interconnect of that rate would have finished them. One thread calls everything.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dataplane.engines.torch.copies.base import Copy, flat_bytes
from dataplane.memory.events import Event

POLL_S = 0.0002
"""Virtual time that a poll of an unfinished copy takes: the engine sleeps as long between two polls."""


class VirtualTime:
    """A clock that only the CPU time of its own thread and its waits move. `waited_s`: the sum of the waits."""

    def __init__(self) -> None:
        self._ahead_s = 0.0
        self.waited_s = 0.0

    def now_s(self) -> float:
        return time.thread_time() + self._ahead_s

    def undo(self, began_s: float) -> None:
        """Set the clock back to `began_s`: what was done since then takes no virtual time."""
        self._ahead_s -= self.now_s() - began_s

    def wait_until(self, due_s: float) -> None:
        """Advance to `due_s`, unless it has passed."""
        waits_s = max(0.0, due_s - self.now_s())
        self._ahead_s += waits_s
        self.waited_s += waits_s


@dataclass(eq=False, kw_only=True)
class Arrival:
    """The event of copies that finish at `due_s`."""

    time: VirtualTime
    due_s: float
    error: BaseException | None = None

    def done(self) -> bool:
        """Whether they have finished; a poll before that takes `POLL_S`."""
        if self.time.now_s() < self.due_s:
            self.time.wait_until(self.time.now_s() + POLL_S)
        return self.time.now_s() >= self.due_s

    def wait(self) -> None:
        self.time.wait_until(self.due_s)


class VirtualWire:
    """A copy stream over an interconnect of `bytes_per_s`, one submission after another."""

    def __init__(self, time: VirtualTime, bytes_per_s: float) -> None:
        self._time = time
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> Event:
        """See `CopyStream`. Copies are made at once, so the events of `after` need no wait."""
        began_s = self._time.now_s()
        for copy in copies:
            flat_bytes(copy.target).copy_(flat_bytes(copy.source))
        self._time.undo(began_s)
        size_bytes = sum(copy.source.nbytes for copy in copies)
        self._free_s = max(self._free_s, began_s) + size_bytes / self._bytes_per_s
        return Arrival(time=self._time, due_s=self._free_s)

    def close(self) -> None:
        """Do nothing: no stream is open."""


def virtual_wires(time: VirtualTime, bytes_per_s: float) -> Callable[[str], VirtualWire]:
    """An engine's copy streams by name: loads share one direction of the interconnect, KV swapped out has the other."""
    into, out = VirtualWire(time, bytes_per_s), VirtualWire(time, bytes_per_s)
    return lambda name: out if name == "kv_out" else into
