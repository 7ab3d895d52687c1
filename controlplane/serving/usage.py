"""Counting usage: what a gateway's answers took, kept in memory and written to Postgres every few seconds."""

import threading
import uuid
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import anyio.to_thread
import structlog
from sqlalchemy.exc import SQLAlchemyError

from controlplane.serving.background import repeating
from controlplane.store.session import Database
from controlplane.store.usage import Usage, UsageKey, put_usage
from dataplane.protocol.tiers import Tier

log = structlog.get_logger()
_FLUSH_EVERY_S = 15.0
_KEPT = timedelta(hours=2)


class UsageCounter:
    """Counts of this process by hour. While Postgres is away they wait; a process that is killed loses what it counted
    since it last wrote.
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
        """Note a request that has just ended."""
        key = UsageKey(_this_hour(), tenant, model, tier.value)
        with self._lock:
            usage = self._counts.setdefault(key, Usage())
            usage.add(failed=failed, input_tokens=input_tokens, output_tokens=output_tokens)
            self._changed.add(key)

    def flush(self) -> None:
        """Write the counts that have changed, and drop those of hours that are over.

        Raises:
            SQLAlchemyError: Postgres is away; the counts are kept.
        """
        with self._lock:
            taken = {key: replace(self._counts[key]) for key in self._changed}
            self._changed = set()
        try:
            with self._database.transaction() as session:
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
        """Flush every few seconds while the block runs, and once at its end."""
        return repeating(self._try_flush, _FLUSH_EVERY_S)

    async def _try_flush(self) -> None:
        if not self._changed:
            return
        try:
            await anyio.to_thread.run_sync(self.flush)
        except SQLAlchemyError as error:
            log.warning("usage waits for Postgres", error=str(error).splitlines()[0])


def _this_hour() -> datetime:
    return datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
