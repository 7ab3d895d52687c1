"""Counting usage: requests and tokens of a gateway's answers, in memory, and written to Postgres every few seconds."""

import functools
import threading
import time
import uuid
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from sqlalchemy.exc import SQLAlchemyError

from controlplane.serving.background import flushing
from controlplane.store.session import Database
from controlplane.store.usage import Usage, UsageKey, put_usage
from dataplane.protocol.tiers import Tier

_FLUSH_EVERY_S = 15.0
_KEPT = timedelta(hours=2)


class UsageCounter:
    """Counts of this process by hour, kept while Postgres is unavailable. A process that is killed loses what it has
    counted since its last write.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._writer = uuid.uuid4().hex
        self._counts: dict[UsageKey, Usage] = {}
        self._changed: set[UsageKey] = set()
        self._lock = threading.Lock()

    def count(
        self, tenant: str, model: str, tier: Tier, *, failed: bool, input_tokens: int, output_tokens: int
    ) -> None:
        key = UsageKey(_this_hour(), tenant, model, tier.value)
        with self._lock:
            usage = self._counts.setdefault(key, Usage())
            usage.add(failed=failed, input_tokens=input_tokens, output_tokens=output_tokens)
            self._changed.add(key)

    def flush(self) -> None:
        """Write the counts that have changed, and drop those of past hours.

        Raises:
            SQLAlchemyError: Postgres is unavailable; the counts are kept.
        """
        if not self._changed:
            return
        with self._lock:
            taken = {key: replace(self._counts[key]) for key in self._changed}
            self._changed = set()
        try:
            with self._database.transaction(replicated=False) as session:
                put_usage(session, self._writer, taken)
        except SQLAlchemyError:
            with self._lock:
                self._changed |= taken.keys()
            raise
        with self._lock:
            over = [key for key in self._counts.keys() - self._changed if key.hour < _this_hour() - _KEPT]
            for key in over:
                del self._counts[key]

    def flushing(self) -> AbstractAsyncContextManager[None]:
        return flushing(self.flush, _FLUSH_EVERY_S, "usage")


def _this_hour() -> datetime:
    return _hour(int(time.time()) // 3600)


@functools.lru_cache(maxsize=2)
def _hour(number: int) -> datetime:
    """The beginning of an hour since 1970."""
    return datetime.fromtimestamp(number * 3600, UTC)
