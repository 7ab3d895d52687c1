"""A wire of any rate beside a computation, in time that a crowded machine does not disturb.

The time is the CPU time of the calling thread, and what it has waited for the wire. Copies are made at once and cost
nothing; their event passes when a wire of that rate would be done. One thread calls everything.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dataplane.engines.torch.copies.base import Copy, flat_bytes
from dataplane.memory.events import Event

POLL_S = 0.0002
"""What it costs to ask whether a copy is over that is not: the engine sleeps as long between two looks."""


class VirtualTime:
    """A clock that only its own thread's work and waits move. `waited_s`: the waits together."""

    def __init__(self) -> None:
        self._ahead_s = 0.0
        self.waited_s = 0.0

    def now_s(self) -> float:
        """Seconds since some moment."""
        return time.thread_time() + self._ahead_s

    def undo(self, began_s: float) -> None:
        """What was done since `began_s` cost nothing."""
        self._ahead_s -= self.now_s() - began_s

    def wait_until(self, due_s: float) -> None:
        """Let it be `due_s`, if it is not later already."""
        waits_s = max(0.0, due_s - self.now_s())
        self._ahead_s += waits_s
        self.waited_s += waits_s


@dataclass(eq=False, kw_only=True)
class Arrival:
    """The event of copies that are over at `due_s`."""

    time: VirtualTime
    due_s: float
    error: BaseException | None = None

    def done(self) -> bool:
        """Whether they are over; a look before costs `POLL_S`."""
        if self.time.now_s() < self.due_s:
            self.time.wait_until(self.time.now_s() + POLL_S)
        return self.time.now_s() >= self.due_s

    def wait(self) -> None:
        """Let it be `due_s`."""
        self.time.wait_until(self.due_s)


class VirtualWire:
    """A copy stream over a wire of `bytes_per_s`, one submission after another."""

    def __init__(self, time: VirtualTime, bytes_per_s: float) -> None:
        self._time = time
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> Event:
        """See `CopyStream`. What `after` names is over: copies are made at once, and one wire keeps their order."""
        began_s = self._time.now_s()
        for copy in copies:
            flat_bytes(copy.target).copy_(flat_bytes(copy.source))
        self._time.undo(began_s)
        size_bytes = sum(copy.source.nbytes for copy in copies)
        self._free_s = max(self._free_s, began_s) + size_bytes / self._bytes_per_s
        return Arrival(time=self._time, due_s=self._free_s)

    def close(self) -> None:
        """Nothing is open."""


def virtual_wires(time: VirtualTime, bytes_per_s: float) -> Callable[[str], VirtualWire]:
    """An engine's copy streams by name: what comes in shares one way of the wire, KV that goes out has the other."""
    into, out = VirtualWire(time, bytes_per_s), VirtualWire(time, bytes_per_s)
    return lambda name: out if name == "kv_out" else into
