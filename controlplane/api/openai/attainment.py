"""How one answer meets its tier's objective, and the metrics of it."""

import time

from controlplane.api.metrics import Metrics
from controlplane.errors import TidepoolError
from controlplane.policies.objectives import tokens_in_time
from dataplane.protocol.messages import Finished
from dataplane.protocol.tiers import Objective

_SERVER_ERRORS = 500
_TOO_MANY = 429


class AnswerMeasure:
    """Measures one answer, from its request's arrival (`arrived_s`, by `time.monotonic`) to its end."""

    def __init__(
        self, metrics: Metrics, labels: tuple[str, str], objective: Objective | None, arrived_s: float
    ) -> None:
        self._metrics = metrics
        self._labels = labels
        self._objective = objective
        self._arrived_s = arrived_s
        self._first_s = self._last_s = arrived_s
        self._tokens = 0
        self._in_time = 0

    @property
    def begun(self) -> bool:
        return self._tokens > 0

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request's arrival to its first token; None before that."""
        return self._first_s - self._arrived_s if self._tokens else None

    def tokens(self, count: int) -> None:
        """Record tokens that arrived together."""
        if not count:
            return
        self._last_s = time.monotonic()
        if not self._tokens:
            self._first_s = self._last_s
            self._metrics.first_token_s.labels(*self._labels).observe(self._first_s - self._arrived_s)
        if self._objective is not None:
            elapsed_s = self._last_s - self._arrived_s
            self._in_time += tokens_in_time(self._objective, first=self._tokens, count=count, elapsed_s=elapsed_s)
        self._tokens += count

    def finished(self, end: Finished) -> None:
        metrics, labels = self._metrics, self._labels
        metrics.input_tokens.labels(*labels).inc(end.prompt_tokens)
        metrics.output_tokens.labels(*labels).inc(end.completion_tokens)
        metrics.duration_s.labels(*labels).observe(time.monotonic() - self._arrived_s)
        if not self._tokens:
            return
        ttft_s, tbt_s = self._first_s - self._arrived_s, 0.0
        if self._tokens > 1:
            tbt_s = (self._last_s - self._first_s) / (self._tokens - 1)
            metrics.per_token_s.labels(*labels).observe(tbt_s)
        if self._objective is None:
            return
        metrics.slo_tokens.labels(*labels, "true").inc(self._in_time)
        metrics.slo_tokens.labels(*labels, "false").inc(self._tokens - self._in_time)
        kept = {"ttft": ttft_s <= self._objective.ttft_s, "tbt": tbt_s <= self._objective.tbt_s}
        self._count([name for name, met in kept.items() if not met])

    def failed(self, error: TidepoolError) -> None:
        """Record a failure, or a refusal for lack of capacity; errors of the client miss no objective."""
        if self._objective is not None and error.status >= _SERVER_ERRORS:
            self._count(["failed"])
        elif error.status == _TOO_MANY:
            self._metrics.refusals.labels(*self._labels, error.code).inc()

    def _count(self, missed: list[str]) -> None:
        self._metrics.slo_requests.labels(*self._labels, "false" if missed else "true").inc()
        for objective in missed:
            self._metrics.slo_violations.labels(*self._labels, objective).inc()
