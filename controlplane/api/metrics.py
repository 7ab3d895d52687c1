"""What a gateway measures, by Prometheus and OpenTelemetry names that dashboards know."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """One registry for a process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        labels = ("model", "tier")
        self.requests = Counter(
            "tidepool_requests", "Requests by how they ended.", (*labels, "region", "outcome"), registry=self._registry
        )
        self.first_token_s = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            labels,
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.per_token_s = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time between a request's tokens.",
            labels,
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.input_tokens = Counter("tidepool_input_tokens", "Prompt tokens served.", labels, registry=self._registry)
        self.output_tokens = Counter(
            "tidepool_output_tokens", "Completion tokens served.", labels, registry=self._registry
        )
        self.streams = Gauge("tidepool_streams", "Requests being answered right now.", registry=self._registry)

    def render(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)
