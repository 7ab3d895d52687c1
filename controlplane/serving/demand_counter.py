"""Counting demand: input tokens by minute, kept in memory, and written to Redis every second."""

import threading
import time
import uuid
from collections import Counter, defaultdict
from contextlib import AbstractAsyncContextManager

from controlplane.errors import UnavailableError
from controlplane.policies.facts import Endpoint
from controlplane.serving.background import flushing
from controlplane.store.redis.live import LiveStore

_FLUSH_EVERY_S = 1.0
_MINUTES_KEPT = 5  # the measuring loop reads as many


class DemandCounter:
    """Counts of this process in the last five minutes, which are written whole: so a repetition changes nothing.
    `gateway`: the process receives interactive requests, so a minute in which it counted none had none.
    """

    def __init__(self, live: LiveStore, *, gateway: bool) -> None:
        self._live = live
        self._gateway = gateway
        self._process = uuid.uuid4().hex
        self._minutes: defaultdict[int, Counter[tuple[str, Endpoint]]] = defaultdict(Counter)
        self._changed: defaultdict[int, set[tuple[str, Endpoint]]] = defaultdict(set)
        self._lock = threading.Lock()

    def count(self, kind: str, endpoint: Endpoint, tokens: int) -> None:
        """Count a request that is offered now, once for all attempts at it."""
        with self._lock:
            minute_s = _this_minute_s()
            self._minutes[minute_s][kind, endpoint] += tokens
            self._changed[minute_s].add((kind, endpoint))

    def flush(self) -> None:
        """Write the counts that have changed.

        Raises:
            UnavailableError: Redis is unavailable; they are written again.
        """
        with self._lock:
            if self._gateway:
                minute_s = _this_minute_s()
                self._minutes[minute_s].update(())
                self._changed[minute_s].update(())
            while len(self._minutes) > _MINUTES_KEPT:
                self._changed.pop(over := min(self._minutes), None)
                del self._minutes[over]
            changed, self._changed = self._changed, defaultdict(set)
            taken = {at_s: {key: float(self._minutes[at_s][key]) for key in keys} for at_s, keys in changed.items()}
        try:
            for minute_s in sorted(taken):
                self._live.count_demand(self._process, taken[minute_s], minute_s=minute_s)
        except UnavailableError:
            with self._lock:
                for minute_s, keys in changed.items():
                    self._changed[minute_s] |= keys
            raise

    def flushing(self) -> AbstractAsyncContextManager[None]:
        return flushing(self.flush, _FLUSH_EVERY_S, "demand")


def _this_minute_s() -> int:
    return int(time.time()) // 60 * 60
