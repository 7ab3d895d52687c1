"""How one answer meets its tier's objective, and the metrics of it."""

import time

from controlplane.api.metrics import Metrics, outcome_label
from controlplane.errors import CapacityError, TidepoolError
from controlplane.policies.objectives import tokens_in_time
from controlplane.serving.fan_out import TokenUsage
from controlplane.store.objectives import Kept
from dataplane.protocol.tiers import Objective

_SERVER_ERRORS = 500
_TOO_MANY = 429


class _Pace:
    """The tokens of one choice, and the seconds from the request's arrival to the first and the last of them."""

    __slots__ = ("first_s", "last_s", "tokens")

    def __init__(self, first_s: float) -> None:
        self.first_s = self.last_s = first_s
        self.tokens = 0

    @property
    def per_token_s(self) -> float:
        """Seconds between tokens; 0 of a single one."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else 0.0


class AnswerMeasure:
    """Measures the answer to one request, which has one choice or several, from the request's arrival (`arrived_s`, by
    `time.monotonic`) to its end. `kept`: how it kept its objective, once that is known; None: it has none.
    """

    def __init__(
        self, metrics: Metrics, labels: tuple[str, str], objective: Objective | None, arrived_s: float
    ) -> None:
        self._metrics = metrics
        self._labels = labels
        self._objective = objective
        self._arrived_s = arrived_s
        self._paces: dict[int, _Pace] = {}
        self._in_time = 0
        self.kept: Kept | None = None

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request's arrival to its first token; None before that."""
        return min((pace.first_s for pace in self._paces.values()), default=None)

    def has_begun(self, choice: int) -> bool:
        """Whether a choice has tokens."""
        return choice in self._paces

    def tokens(self, count: int, choice: int = 0) -> None:
        """Record tokens of a choice that arrived together."""
        if not count:
            return
        elapsed_s = time.monotonic() - self._arrived_s
        pace = self._paces.get(choice)
        if pace is None:
            if not self._paces:
                self._metrics.series(self._metrics.first_token_s, *self._labels).observe(elapsed_s)
            pace = self._paces[choice] = _Pace(elapsed_s)
        if self._objective is not None:
            self._in_time += tokens_in_time(self._objective, first=pace.tokens, count=count, elapsed_s=elapsed_s)
        pace.last_s = elapsed_s
        pace.tokens += count

    def finished(self, usage: TokenUsage) -> None:
        """Record the end of all choices. The pace of a request is that of its slowest one."""
        metrics, labels = self._metrics, self._labels
        metrics.series(metrics.input_tokens, *labels).inc(usage.prompt_tokens)
        metrics.series(metrics.cached_input_tokens, *labels).inc(usage.cached_tokens)
        metrics.series(metrics.output_tokens, *labels).inc(usage.completion_tokens)
        metrics.series(metrics.duration_s, *labels).observe(time.monotonic() - self._arrived_s)
        paces = self._paces.values()
        ttft_s = self.first_token_s
        if ttft_s is None:
            return
        tbt_s = max(pace.per_token_s for pace in paces)
        if any(pace.tokens > 1 for pace in paces):
            metrics.series(metrics.per_token_s, *labels).observe(tbt_s)
        if self._objective is None:
            return
        tokens = sum(pace.tokens for pace in paces)
        metrics.series(metrics.slo_tokens, *labels, "true").inc(self._in_time)
        metrics.series(metrics.slo_tokens, *labels, "false").inc(tokens - self._in_time)
        kept = {"ttft": ttft_s <= self._objective.ttft_s, "tbt": tbt_s <= self._objective.tbt_s}
        self._count([name for name, met in kept.items() if not met], tokens, self._in_time)

    def failed(self, error: TidepoolError) -> None:
        """Record a failure, or a refusal for lack of capacity, or both where no instance could take the request; errors
        of the client miss no objective.
        """
        if self._objective is not None and error.status >= _SERVER_ERRORS:
            self._count(["failed"])
        if error.status == _TOO_MANY or isinstance(error, CapacityError):
            self._metrics.series(self._metrics.refusals, *self._labels, outcome_label(error.code)).inc()

    def _count(self, missed: list[str], tokens: int = 0, in_time: int = 0) -> None:
        self.kept = Kept(
            answers=1, kept=int(not missed), tokens=tokens, tokens_in_time=in_time, failed=int("failed" in missed)
        )
        for met in ("true", "false"):  # both series, also of a model that misses all: else its share is of nothing
            is_it = (met == "false") == bool(missed)
            self._metrics.series(self._metrics.slo_requests, *self._labels, met).inc(is_it)
        for objective in missed:
            self._metrics.series(self._metrics.slo_violations, *self._labels, objective).inc()
