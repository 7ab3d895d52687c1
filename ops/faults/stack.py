"""The stack of a fault run: replayed nodes, two of most processes, and a proxy on every link between them.

gateways, dispatchers, worker -> Postgres, Valkey       beats -> Valkey
gateways, dispatchers -> agents -> gateways
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from ops.faults.proxy import Link
from ops.local.replay_stack import Fleet, ReplayStack
from ops.local.stack import Wiring

SERVERS = ("postgres", "valkey")
REPLICAS = {"dispatcher": 2, "beat": 2, "forecaster": 0}
SKEWS_S = {"api-2": -150.0, "dispatcher-2": 300.0, "beat-2": 120.0}
"""Clock skews by process, in seconds."""
ENVIRONMENT = {
    "TIDEPOOL_DATABASE_URL": "",
    "TIDEPOOL_REDIS_URL": "",
    "TIDEPOOL_SCALE_EVERY_S": "2",
    "TIDEPOOL_EXPIRE_EVERY_S": "2",
    "TIDEPOOL_NIW_LEASE_S": "15",
    "TIDEPOOL_NIW_ATTEMPTS_MAX": "20",
    "TIDEPOOL_FIRST_TOKEN_TIMEOUT_S": "20",
    "TIDEPOOL_STREAM_IDLE_TIMEOUT_S": "10",
}


class FaultStack(ReplayStack):
    """A stack and its links. `programs`: what Python runs for some processes, else some of them with wrong clocks;
    `schema`: the revision that its database begins with.
    """

    def __init__(
        self,
        home: Path,
        fleet: Fleet,
        *,
        gateways: int = 2,
        programs: Mapping[str, tuple[str, ...]] | None = None,
        schema: str = "head",
    ) -> None:
        self.links: dict[tuple[str, str], Link] = {}
        if programs is None:
            programs = {name: ("-m", "ops.cli.skewed", str(by_s)) for name, by_s in SKEWS_S.items()}
        wiring = Wiring(replicas={**REPLICAS, "api": gateways}, between=self._between, programs=programs, schema=schema)
        super().__init__(home, fleet, environment=ENVIRONMENT, wiring=wiring)
        ports = tuple(int(url.rpartition(":")[2]) for url in self.local.urls)
        for link in self.links.values():
            if link.target_port in ports:
                link.others = ports

    def _between(self, caller: str, called: str, port: int) -> int:
        link = self.links.get((caller, called))
        if link is None:
            link = self.links[caller, called] = Link(caller, called, port)
        return link.port

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start links and processes, and stop them."""
        for link in self.links.values():
            await link.start()
        try:
            await asyncio.to_thread(self.local.supervisor.start)
            yield
        finally:
            await asyncio.to_thread(self.local.stop)
            for link in self.links.values():
                await link.stop()
