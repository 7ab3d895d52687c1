"""The stack of such a run: every connection that crosses a region's border goes through a link.

The address of an agent is the same for all callers, so its link finds out from which region it is called.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ops.faults.proxy import Fault, Link
from ops.faults.regional.callers import holds, sockets_between
from ops.faults.regional.clocks import shift_library, shifted, skews_s
from ops.faults.stack import ENVIRONMENT
from ops.local.patroni_cluster import PatroniCluster
from ops.local.ports import free_port
from ops.local.postgres_cluster import PostgresCluster
from ops.local.regional_stack import RegionalStack
from ops.local.replay_stack import Fleet
from ops.local.stack import Wiring

_ANYONE = "*"


class BorderedStack:
    """A regional stack of replayed nodes, of which a region can be killed, or cut off from the others (on Linux).
    `skew_s`: by how much the clocks of its second and third region are ahead and behind. `environment`: more settings.
    `patroni`: the Python of Patroni's environment, which then decides who is the primary; None: an operator.
    """

    def __init__(
        self,
        home: Path,
        fleet: Fleet,
        *,
        skew_s: float = 0.0,
        environment: Mapping[str, str] | None = None,
        patroni: Path | None = None,
    ) -> None:
        self.fleet = fleet
        self.skews_s = skews_s(fleet.region_names(), skew_s) if skew_s else dict.fromkeys(fleet.region_names(), 0.0)
        self._library = shift_library()
        self.lines: list[str] = []
        self._links: dict[tuple[str, str], Link] = {}
        self._callers: dict[tuple[int, int], str | None] = {}
        self.regional = RegionalStack(
            home,
            free_port(),
            fleet.local_nodes(),
            environment={**ENVIRONMENT, **(environment or {})},
            report=self.lines.append,
            wiring=self._wiring,
            reach=self._reach,
            fsync=False,
            make_cluster=PostgresCluster if patroni is None else partial(PatroniCluster, python=patroni),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start links and processes, and stop them."""
        for link in self._links.values():
            await link.start()
        try:
            await asyncio.to_thread(self.regional.start)
            yield
        finally:
            await asyncio.to_thread(self.regional.stop)
            for link in self._links.values():
                await link.stop()

    def clocks(self) -> dict[str, Any]:
        """By how much each region's clocks are wrong, for a report, and which of its processes have wrong ones."""
        where = "Tidepool and its servers" if self._library else "Tidepool alone: libfaketime is not installed"
        return {"wrong_s": self.skews_s, "of": where}

    def server_skew_s(self, region: str) -> float:
        """By how much the clock of a region's Postgres is ahead."""
        return self.skews_s[region] if self._library else 0.0

    def cut(self, region: str) -> None:
        """Let no byte cross the region's border until `heal`."""
        self._callers.clear()
        for (caller, called), link in self._links.items():
            inside = called.partition("/")[0] == region
            if caller == _ANYONE:
                link.spares = self._same_side(region, link.port, inside=inside)
                link.fail(Fault.BLACK_HOLE)
            elif inside or caller == region:
                link.fail(Fault.BLACK_HOLE)

    def delay(self, round_trip_s: float) -> None:
        """Have each round trip between regions take so much longer until `heal`; calls of nodes are not delayed."""
        for (caller, _), link in self._links.items():
            if caller != _ANYONE and round_trip_s > 0:
                link.fail(Fault.LATENCY, delay_s=round_trip_s / 2)

    def heal(self) -> None:
        """Let all bytes pass."""
        for link in self._links.values():
            link.heal()

    def signal_postgres(self, region: str, number: signal.Signals) -> None:
        """Send a signal to every process of a region's Postgres."""
        for pid in list(self.regional.cluster.members[region].processes()):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _wiring(self, region: str) -> Wiring:
        return Wiring(
            replicas={"forecaster": 0},
            between=self._between(region),
            command=shifted(self.skews_s[region], self._library),
        )

    def _reach(self, caller: str, called: str, port: int) -> int:
        return port if caller == called else self._link(caller, f"{called}/postgres", port)

    def _between(self, region: str) -> Callable[[str, str, int], int]:
        def reach(caller: str, called: str, port: int) -> int:
            return self._link(_ANYONE, f"{region}/{called}", port) if caller == _ANYONE else port

        return reach

    def _link(self, caller: str, called: str, port: int) -> int:
        link = self._links.setdefault((caller, called), Link(caller, called, port))
        link.target_port = port  # a region that was started again has other ports
        return link.port

    def _same_side(self, region: str, called: int, *, inside: bool) -> Callable[[int], bool]:
        """Whether a caller of that port is in the region that is cut off, as what it calls is, or both are not."""
        return lambda port: (self._region_of(port, called) == region) == inside

    def _region_of(self, port: int, called: int) -> str | None:
        """The region of the process that is connected from one port to another."""
        if (port, called) not in self._callers:
            sockets = sockets_between(port, called)
            self._callers[port, called] = next(
                (
                    region
                    for region, stack in self.regional.stacks.items()
                    if any(holds(pid, sockets) for pid in stack.supervisor.pids().values())
                ),
                None,
            )
        return self._callers[port, called]
