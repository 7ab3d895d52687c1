"""Counting how objectives were kept by a gateway's answers: in memory, and added to Postgres every few seconds."""

import threading
import time
from contextlib import AbstractAsyncContextManager

from sqlalchemy.exc import SQLAlchemyError

from controlplane.serving.background import flushing
from controlplane.store.objectives import BUCKET_S, Kept, ObjectiveKey, add_objectives
from controlplane.store.session import Database

_FLUSH_EVERY_S = 15.0
_KEEP_S = 86_400
"""Counts of longer ago than this are dropped where Postgres is away for so long."""


class ObjectiveCounter:
    """Counts of this process since they were last added to those in Postgres; they stay while it is unavailable. A
    process that is killed loses them.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._counts: dict[ObjectiveKey, Kept] = {}
        self._lock = threading.Lock()

    def count(self, model: str, region: str, tier: str, kept: Kept) -> None:
        """Count an answer that has an objective."""
        key = ObjectiveKey(model, _bucket_s(), region, tier)
        with self._lock:
            counted = self._counts.get(key)
            if counted is None:
                counted = self._counts[key] = Kept()
            counted.add(kept)

    def flush(self) -> None:
        """Add what was counted since the last time.

        Raises:
            SQLAlchemyError: Postgres is unavailable; the counts are kept.
        """
        with self._lock:
            taken, self._counts = self._counts, {}
        if not taken:
            return
        try:
            with self._database.transaction(replicated=False) as session:
                add_objectives(session, taken)
        except SQLAlchemyError:
            oldest_s = _bucket_s() - _KEEP_S
            with self._lock:
                for key, kept in taken.items():
                    if key.start_s >= oldest_s:
                        self._counts.setdefault(key, Kept()).add(kept)
            raise

    def flushing(self) -> AbstractAsyncContextManager[None]:
        return flushing(self.flush, _FLUSH_EVERY_S, "objectives")


def _bucket_s() -> int:
    return int(time.time()) // BUCKET_S * BUCKET_S
