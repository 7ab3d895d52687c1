"""A server's metrics, read twice a second while a load generator runs."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2 as httpx

from dataplane.protocol.tiers import Tier
from ops.bench.independent.counts import Counts, counted, streams
from ops.local.waiting import wait_until

_EVERY_S = 0.5
_SETTLE_S = 60.0


class MetricsWatch:
    """What a server has counted of a tier, by Unix time."""

    def __init__(self, http: httpx.AsyncClient, url: str, tier: Tier) -> None:
        self._http = http
        self._url = url
        self._tier = tier
        self._found: list[tuple[float, Counts]] = []

    def between(self, start_s: float, end_s: float | None) -> Counts:
        """What was counted from one Unix time to another; None: to the end. Nothing must be in flight at either."""
        last = self._found[-1][1] if end_s is None else self._before(end_s)
        return last.since(self._before(start_s))

    def _before(self, at_s: float) -> Counts:
        """The last ones read before a time, or the first of all."""
        return next((counts for read_s, counts in reversed(self._found) if read_s < at_s), self._found[0][1])

    async def look(self) -> bool:
        """Read the metrics; whether nothing is in flight."""
        answer = await self._http.get(self._url)
        answer.raise_for_status()
        self._found.append((time.time(), counted(answer.text, self._tier)))
        return not streams(answer.text)

    async def keep_looking(self) -> None:
        """Read them again and again, until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.look()


@asynccontextmanager
async def watching(url: str, tier: Tier) -> AsyncIterator[MetricsWatch]:
    """Watch a server within the block, and until it has answered what was in flight at its end.

    Raises:
        TimeoutError: it had not, a minute later.
        httpx2.HTTPError: its metrics cannot be read.
    """
    async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
        watch = MetricsWatch(http, f"{url}/metrics", tier)
        await watch.look()
        task = asyncio.create_task(watch.keep_looking())
        try:
            yield watch
        finally:
            task.cancel()
        if not await wait_until(watch.look, _SETTLE_S):
            raise TimeoutError(f"requests were still being answered {_SETTLE_S:g} s after the load had ended")
