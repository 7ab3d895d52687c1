"""OpenTelemetry spans of a node: one per request in the agent, and one in the worker that runs it.

OpenTelemetry's API does nothing until `start_tracing` finds the address of an exporter in the environment
(OTEL_EXPORTER_OTLP_ENDPOINT). No work is done per token.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from dataplane.engines.interface import EngineOutput, EngineRequest
from dataplane.protocol.messages import Generate

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Either variable enables traces."""

_HEADER = "traceparent"
_tracer = trace.get_tracer("tidepool.node")


class TracingError(Exception):
    """Traces are enabled but cannot be exported."""


def start_tracing(service: str) -> bool:
    """Export this process's spans as service `service` (or OTEL_SERVICE_NAME) if an address is set. Returns whether it
    is. Spans still buffered are sent when the process exits.

    Raises:
        TracingError: an address is set, but the extra `traces` is not installed.
    """
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return False
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - an extra
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise TracingError(
            f"{' or '.join(ENDPOINTS)} is set, which needs the extra: pip install tidepool[traces]"
        ) from error
    named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": service}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return True


@contextmanager
def admitting(headers: Mapping[str, str], generate: Generate) -> Iterator[None]:
    """For the admission of a request: its span, a child of the gateway's, is the current one. The span ends here only
    if the request is refused; otherwise the request's metrics end it.
    """
    span = _tracer.start_span("generate", context=propagate.extract(headers), kind=SpanKind.SERVER)
    if span.is_recording():
        span.set_attributes(
            {
                "tidepool.request_id": generate.request_id,
                "tidepool.instance_id": generate.instance_id,
                "tidepool.tier": generate.tier,
                "gen_ai.request.model": generate.model,
                "tidepool.tokens_before": len(generate.generated),
            }
        )
    try:
        with trace.use_span(span, record_exception=False):
            yield
    except BaseException:
        span.end()
        raise
    span.add_event("queued")


def current_parent() -> str | None:
    """The `traceparent` of the current span for a worker; None without tracing."""
    if not trace.get_current_span().is_recording():
        return None
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get(_HEADER)


class RequestSpans:
    """Spans of the requests that a worker runs. Requests without a parent span have none."""

    def __init__(self) -> None:
        self._spans: dict[str, Span] = {}
        self._begun: set[str] = set()

    def begin(self, request: EngineRequest) -> None:
        if request.trace is not None:
            context = propagate.extract({_HEADER: request.trace})
            self._spans[request.request_id] = _tracer.start_span("engine", context=context)

    def record(self, outputs: Iterable[EngineOutput]) -> None:
        for output in outputs if self._spans else ():
            span = self._spans.get(output.request_id)
            if span is None:
                continue
            if output.request_id not in self._begun:
                self._begun.add(output.request_id)
                span.add_event("prefilled")
            if output.error is not None:
                span.set_status(Status(StatusCode.ERROR, output.error))
            if output.error is not None or output.finish_reason is not None or output.kv is not None:
                self.end(output.request_id)

    def end(self, request_id: str) -> None:
        self._begun.discard(request_id)
        if (span := self._spans.pop(request_id, None)) is not None:
            span.end()
