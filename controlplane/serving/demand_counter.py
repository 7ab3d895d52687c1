"""Counting demand: input tokens by minute, kept in memory for a second, then added to Redis."""

import threading
import time
from collections import Counter, defaultdict
from contextlib import AbstractAsyncContextManager

from controlplane.errors import UnavailableError
from controlplane.policies.facts import Endpoint
from controlplane.serving.background import flushing
from controlplane.store.redis.live import LiveStore

_FLUSH_EVERY_S = 1.0
_MINUTES_KEPT = 5  # the measuring loop reads as many


class DemandCounter:
    """Counts of this process, kept for five minutes while Redis is unavailable. `gateway`: the process receives
    interactive requests, so a minute in which it counted none had none.
    """

    def __init__(self, live: LiveStore, *, gateway: bool) -> None:
        self._live = live
        self._gateway = gateway
        self._minutes: defaultdict[int, Counter[tuple[str, Endpoint]]] = defaultdict(Counter)
        self._lock = threading.Lock()

    def count(self, kind: str, endpoint: Endpoint, tokens: int) -> None:
        """Count a request that is offered now, once for all attempts at it."""
        with self._lock:
            self._minutes[_this_minute_s()][kind, endpoint] += tokens

    def flush(self) -> None:
        """Add the counts to Redis.

        Raises:
            UnavailableError: Redis is unavailable; the counts are kept.
        """
        with self._lock:
            taken, self._minutes = self._minutes, defaultdict(Counter)
        if self._gateway:
            taken[_this_minute_s()].update(())
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
                self._minutes[minute_s].update(counts)
            while len(self._minutes) > _MINUTES_KEPT:
                self._minutes.pop(min(self._minutes))

    def flushing(self) -> AbstractAsyncContextManager[None]:
        return flushing(self.flush, _FLUSH_EVERY_S, "demand")


def _this_minute_s() -> int:
    return int(time.time()) // 60 * 60
