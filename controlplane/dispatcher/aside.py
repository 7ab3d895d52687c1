"""Batches that could not be moved on wait aside for a while, so that those behind them go on."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

log = structlog.get_logger()
_ASIDE_S = 60.0


class Aside:
    """What one step of one dispatcher has put aside, kept in memory alone."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def ids(self) -> frozenset[str]:
        """The batches that wait aside now."""
        now_s = time.monotonic()
        self._until_s = {batch_id: until_s for batch_id, until_s in self._until_s.items() if until_s > now_s}
        return frozenset(self._until_s)

    @contextmanager
    def on_failure(self, batch_id: str) -> Iterator[None]:
        """Put the batch aside if the block fails, whatever the reason; the exception goes on."""
        try:
            yield
        except Exception:
            self._until_s[batch_id] = time.monotonic() + _ASIDE_S
            log.warning("a batch is put aside", batch=batch_id, for_s=_ASIDE_S)
            raise
