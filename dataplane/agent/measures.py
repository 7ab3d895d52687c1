"""Latencies and token counts of requests: histograms and counters by model, under vLLM's names."""

from bisect import bisect_left
from collections.abc import Callable, Container, Iterator
from itertools import accumulate
from typing import Literal, get_args

from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

_FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
_REQUEST_BUCKETS_S = (0.1, 0.3, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 900.0, 3600.0, 86_400.0)

EndReason = Literal["stop", "length", "tool_calls", "abort", "error"]
"""How a request ended. abort: its client disconnected."""
_END_REASONS: tuple[EndReason, ...] = get_args(EndReason)


class ModelTokens:
    """The tokens of one model's answers, and the times between them by bucket. Of one thread, so that no lock is taken
    for a token.
    """

    def __init__(self) -> None:
        self.count = 0
        self.gaps = [0] * (len(_TOKEN_BUCKETS_S) + 1)
        self.gaps_s = 0.0

    def add(self, tokens: int, gap_s: float | None) -> None:
        """Count tokens, each of them `gap_s` after the one before it; None for an answer's first ones."""
        self.count += tokens
        if gap_s is not None:
            self.gaps[bisect_left(_TOKEN_BUCKETS_S, gap_s)] += tokens
            self.gaps_s += tokens * gap_s


class TokenMeasures(Collector):
    """The metrics of single tokens."""

    def __init__(self) -> None:
        self._models: dict[str, ModelTokens] = {}

    def of(self, model: str) -> ModelTokens:
        return self._models.setdefault(model, ModelTokens())

    def drop(self, present: Container[str]) -> list[str]:
        """Forget other models; which these were."""
        gone = [model for model in self._models if model not in present]
        for model in gone:
            del self._models[model]
        return gone

    def collect(self) -> Iterator[Metric]:
        count = CounterMetricFamily("vllm:generation_tokens", "Tokens streamed", labels=["model_name"])
        gaps = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "From a token to the next", labels=["model_name"]
        )
        bounds = [*map(str, _TOKEN_BUCKETS_S), "+Inf"]
        for model, tokens in self._models.items():
            count.add_metric([model], tokens.count)
            buckets = list(zip(bounds, accumulate(tokens.gaps), strict=True))
            gaps.add_metric([model], buckets=buckets, sum_value=tokens.gaps_s)
        yield count
        yield gaps


class RequestMeasures:
    """The metrics of a node's requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        model = ["model_name"]
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens admitted", model, registry=registry)
        self.tokens = TokenMeasures()
        registry.register(self.tokens)
        self.success = Counter(
            "vllm:request_success", "Requests ended, by how", [*model, "finished_reason"], registry=registry
        )
        histograms = (
            ("time_to_first_token", "From admission to the first token", _FIRST_TOKEN_BUCKETS_S),
            ("request_time_per_output_token", "Mean time of a request's tokens after the first", _TOKEN_BUCKETS_S),
            ("e2e_request_latency", "From admission to the last token", _REQUEST_BUCKETS_S),
        )
        self.first_token, self.per_token, self.whole = (
            Histogram(f"vllm:{name}_seconds", about, model, buckets=buckets, registry=registry)
            for name, about, buckets in histograms
        )

    def expect(self, model: str) -> None:
        """Begin the counters of a model at 0, as vLLM does: the request that a series begins with is in no rate."""
        self.prompt_tokens.labels(model)
        self.tokens.of(model)
        for reason in _END_REASONS:
            self.success.labels(model, reason)

    def drop(self, present: Container[str]) -> None:
        """Drop the series of other models: each would stay for as long as the agent runs."""
        for model in self.tokens.drop(present):
            for family in (self.prompt_tokens, self.first_token, self.per_token, self.whole):
                family.remove(model)
            for reason in _END_REASONS:
                self.success.remove(model, reason)


class RequestMeasure:
    """Records one request from its admission on, and ends the span that is current then. `clock` gives seconds."""

    def __init__(self, measures: RequestMeasures, model: str, prompt_tokens: int, clock: Callable[[], float]) -> None:
        self._measures = measures
        self._model = model
        self._clock = clock
        self._arrived_s = clock()
        self._first_s = self._last_s = self._arrived_s
        self._tokens = 0
        self._all_tokens = measures.tokens.of(model)
        self._ended = False
        self._span = trace.get_current_span()
        measures.prompt_tokens.labels(model).inc(prompt_tokens)

    def made(self, tokens: int) -> None:
        """Record new tokens. Those of one output count as evenly spaced."""
        if tokens == 0:
            return
        now_s = self._clock()
        if self._tokens == 0:
            self._first_s = now_s
            self._span.add_event("prefilled")
            self._measures.first_token.labels(self._model).observe(now_s - self._arrived_s)
            self._all_tokens.add(tokens, None)
        else:
            self._all_tokens.add(tokens, (now_s - self._last_s) / tokens)
        self._last_s = now_s
        self._tokens += tokens

    def ended(self, reason: EndReason) -> None:
        """Record the end. Only the first one counts."""
        if self._ended:
            return
        self._ended = True
        self._measures.tokens.of(self._model)  # where it was dropped meanwhile, it is again when this was read
        self._measures.success.labels(self._model, reason).inc()
        self._span.set_attributes({"gen_ai.usage.output_tokens": self._tokens, "tidepool.end": reason})
        if reason == "error":
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()
        if reason not in ("abort", "error"):
            self._measures.whole.labels(self._model).observe(self._clock() - self._arrived_s)
            if self._tokens > 1:
                seconds = (self._last_s - self._first_s) / (self._tokens - 1)
                self._measures.per_token.labels(self._model).observe(seconds)
