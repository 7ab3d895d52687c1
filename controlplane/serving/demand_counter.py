"""Counting demand: input tokens by minute, kept in memory for a second, then added to Redis."""

import threading
import time
from collections import Counter
from contextlib import AbstractAsyncContextManager

import anyio.to_thread
import structlog

from controlplane.errors import UnavailableError
from controlplane.policies.facts import Endpoint
from controlplane.serving.background import repeating
from controlplane.store.redis.live import LiveStore

log = structlog.get_logger()
_FLUSH_EVERY_S = 1.0
_MINUTES_KEPT = 5  # as many as the measuring looks back


class DemandCounter:
    """Counts of this process. While Redis is away they wait, for five minutes.

    `gateway`: interactive requests come through this process, so a minute in which it counted none had none.
    """

    def __init__(self, live: LiveStore, *, gateway: bool) -> None:
        self._live = live
        self._gateway = gateway
        self._minutes: dict[int, Counter[tuple[str, Endpoint]]] = {}
        self._lock = threading.Lock()

    def count(self, kind: str, endpoint: Endpoint, tokens: int) -> None:
        """Note a request that is offered now. Each counts once, however often it is tried."""
        with self._lock:
            self._minutes.setdefault(_this_minute_s(), Counter())[kind, endpoint] += tokens

    def flush(self) -> None:
        """Add what was counted to Redis.

        Raises:
            UnavailableError: Redis is away; the counts are kept.
        """
        with self._lock:
            taken, self._minutes = self._minutes, {}
        if self._gateway:
            taken.setdefault(_this_minute_s(), Counter())
        try:
            for minute_s in sorted(taken):
                counts = {key: float(tokens) for key, tokens in taken[minute_s].items()}
                self._live.count_demand(counts, minute_s=minute_s)
                del taken[minute_s]
        except UnavailableError:
            self._keep(taken)
            raise

    def _keep(self, taken: dict[int, Counter[tuple[str, Endpoint]]]) -> None:
        with self._lock:
            for minute_s, counts in taken.items():
                self._minutes.setdefault(minute_s, Counter()).update(counts)
            while len(self._minutes) > _MINUTES_KEPT:
                self._minutes.pop(min(self._minutes))

    def flushing(self) -> AbstractAsyncContextManager[None]:
        """Flush every second while the block runs, and once at its end."""
        return repeating(self._try_flush, _FLUSH_EVERY_S)

    async def _try_flush(self) -> None:
        try:
            await anyio.to_thread.run_sync(self.flush)
        except UnavailableError as error:
            log.warning("demand is not counted for now", error=error.message)


def _this_minute_s() -> int:
    return int(time.time()) // 60 * 60
