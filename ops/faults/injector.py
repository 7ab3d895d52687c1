"""Injects faults at intervals: a random kind, on a random victim, for a random time."""

import asyncio
import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ops.faults.losses import FaultTimes, kind_of_process
from ops.faults.proxy import Fault
from ops.faults.stack import SERVERS, FaultStack

PAUSE_MIN_S, PAUSE_MAX_S = 1.0, 12.0
LATENCY_MIN_S, LATENCY_MAX_S = 0.05, 0.8


class Kind(StrEnum):
    """A kind of fault. `kill` is SIGKILL, `terminate` SIGTERM, as at a planned restart; `restart` is a
    server's SIGKILL.
    """

    KILL = "kill"
    KILL_WORKER = "kill_worker"
    TERMINATE = "terminate"
    PAUSE = "pause"
    LATENCY = "latency"
    RESET = "reset"
    BLACK_HOLE = "black_hole"
    RESTART = "restart"


LINK_FAULTS = {Kind.LATENCY: Fault.LATENCY, Kind.RESET: Fault.RESET, Kind.BLACK_HOLE: Fault.BLACK_HOLE}


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """An injected fault: `at_s` after the start of the run, for `lasted_s`."""

    kind: str
    victim: str
    at_s: float
    lasted_s: float


class FaultSource:
    """What makes faults in a run, and when it `made` each."""

    def __init__(self) -> None:
        self.made: list[InjectedFault] = []
        self._started_s = 0.0

    def times(self) -> list[FaultTimes]:
        """When each fault was, on `time.monotonic`."""
        return [
            FaultTimes(
                what=f"{made.kind} {kind_of_process(made.victim)}",
                began_s=self._started_s + made.at_s,
                ended_s=self._started_s + made.at_s + made.lasted_s,
            )
            for made in self.made
        ]

    def as_json(self) -> list[dict[str, Any]]:
        """The faults so far, for a report."""
        return [asdict(made) for made in self.made]


class FaultInjector(FaultSource):
    """Injects faults into a stack. The same seed draws the same kinds and victims in the same order."""

    def __init__(self, stack: FaultStack, kinds: tuple[Kind, ...], seed: int) -> None:
        super().__init__()
        self._stack = stack
        self._kinds = kinds
        self._random = random.Random(seed)
        self._lasting: set[asyncio.Task[None]] = set()

    async def run(self, every_s: float, until: asyncio.Event) -> None:
        """Inject a fault every `every_s` until the event, then wait until the last is over."""
        self._started_s = time.monotonic()
        while not until.is_set():
            task = asyncio.create_task(self._one(self._random.choice(self._kinds)))
            self._lasting.add(task)
            task.add_done_callback(self._lasting.discard)
            with suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), every_s)
        await asyncio.gather(*self._lasting)

    async def _one(self, kind: Kind) -> None:
        at_s = time.monotonic() - self._started_s
        lasts_s = self._random.uniform(PAUSE_MIN_S, PAUSE_MAX_S)
        if kind in LINK_FAULTS:
            victim = await self._cut(LINK_FAULTS[kind], lasts_s)
        elif kind == Kind.PAUSE:
            victim = await self._pause(lasts_s)
        else:
            victim, lasts_s = self._kill(kind), 0.0
        self.made.append(InjectedFault(kind=kind, victim=victim, at_s=round(at_s, 1), lasted_s=round(lasts_s, 1)))

    async def _cut(self, fault: Fault, lasts_s: float) -> str:
        links = list(self._stack.links.values())
        link = self._random.choice([link for link in links if link.connections] or links)
        link.fail(fault, delay_s=self._random.uniform(LATENCY_MIN_S, LATENCY_MAX_S) if fault == Fault.LATENCY else 0.0)
        await asyncio.sleep(lasts_s)
        link.heal()
        return link.name

    async def _pause(self, lasts_s: float) -> str:
        name, pid = self._random.choice(list(self._stack.local.supervisor.pids().items()))
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(lasts_s)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGCONT)
        return name

    def _kill(self, kind: Kind) -> str:
        pids = self._stack.local.supervisor.pids()
        servers = kind == Kind.RESTART
        victims = [(name, pid) for name, pid in pids.items() if (name in SERVERS) == servers]
        if kind == Kind.KILL_WORKER:
            agents = [name for name in pids if name.startswith("agent-")]
            victims = [(f"worker of {name}", pid) for name in agents for pid in children_of(pids[name])]
        if not victims:
            return "no victim"
        name, pid = self._random.choice(victims)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM if kind == Kind.TERMINATE else signal.SIGKILL)
        return name


def children_of(parent: int) -> list[int]:
    """The child processes of a process (on Linux; none elsewhere)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found.append(int(folder.name))
    return found
