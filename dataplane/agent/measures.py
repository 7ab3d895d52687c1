"""Latencies and token counts of requests: histograms and counters by model, under vLLM's names."""

from collections.abc import Callable
from typing import Literal

from opentelemetry import trace
from prometheus_client import CollectorRegistry, Counter, Histogram

_FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
_REQUEST_BUCKETS_S = (0.1, 0.3, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 900.0, 3600.0, 86_400.0)

EndReason = Literal["stop", "length", "tool_calls", "abort", "error"]
"""How a request ended. abort: its client disconnected."""


class RequestMeasures:
    """The metrics of a node's requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        model = ["model_name"]
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens admitted", model, registry=registry)
        self.generation_tokens = Counter("vllm:generation_tokens", "Tokens streamed", model, registry=registry)
        self.success = Counter(
            "vllm:request_success", "Requests ended, by how", [*model, "finished_reason"], registry=registry
        )
        histograms = (
            ("time_to_first_token", "From admission to the first token", _FIRST_TOKEN_BUCKETS_S),
            ("inter_token_latency", "From a token to the next", _TOKEN_BUCKETS_S),
            ("request_time_per_output_token", "Mean time of a request's tokens after the first", _TOKEN_BUCKETS_S),
            ("e2e_request_latency", "From admission to the last token", _REQUEST_BUCKETS_S),
        )
        self.first_token, self.inter_token, self.per_token, self.whole = (
            Histogram(f"vllm:{name}_seconds", about, model, buckets=buckets, registry=registry)
            for name, about, buckets in histograms
        )


class RequestMeasure:
    """Records one request from its admission on, and ends the span that is current then. `clock` gives seconds."""

    def __init__(self, measures: RequestMeasures, model: str, prompt_tokens: int, clock: Callable[[], float]) -> None:
        self._measures = measures
        self._model = model
        self._clock = clock
        self._arrived_s = clock()
        self._first_s = self._last_s = self._arrived_s
        self._tokens = 0
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
        else:
            for _ in range(tokens):
                self._measures.inter_token.labels(self._model).observe((now_s - self._last_s) / tokens)
        self._last_s = now_s
        self._tokens += tokens
        self._measures.generation_tokens.labels(self._model).inc(tokens)

    def ended(self, reason: EndReason) -> None:
        """Record the end. Only the first one counts."""
        if self._ended:
            return
        self._ended = True
        self._measures.success.labels(self._model, reason).inc()
        self._span.set_attributes({"gen_ai.usage.output_tokens": self._tokens, "tidepool.end": reason})
        self._span.end()
        if reason not in ("abort", "error"):
            self._measures.whole.labels(self._model).observe(self._clock() - self._arrived_s)
            if self._tokens > 1:
                seconds = (self._last_s - self._first_s) / (self._tokens - 1)
                self._measures.per_token.labels(self._model).observe(seconds)
