"""The stages of a request before its first token, each measured once."""

import time

from controlplane.api.metrics import Metrics, Stage


class StageClock:
    """Measures the stages of one request, one after the other; it starts when it is made."""

    __slots__ = ("_began_s", "_metrics")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began_s = time.monotonic()

    def end(self, stage: Stage) -> None:
        """A stage has ended, and the next one begins."""
        now_s = time.monotonic()
        self._metrics.note_stage(stage, now_s - self._began_s)
        self._began_s = now_s
