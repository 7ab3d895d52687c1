"""OpenTelemetry spans of a node: one for each request in the agent, and one in the worker that runs it.

Only OpenTelemetry's API is used, which does nothing until `start_tracing` has found an exporter's address in the
environment (OTEL_EXPORTER_OTLP_ENDPOINT). Nothing is done per token.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from dataplane.engines.interface import EngineOutput, EngineRequest
from dataplane.protocol.messages import Generate

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""The standard variables of which one turns traces on."""

_HEADER = "traceparent"
_tracer = trace.get_tracer("tidepool.node")


class TracingError(Exception):
    """Traces were asked for and cannot be made."""


def start_tracing(service: str) -> bool:
    """Export this process's spans under the name `service` (OTEL_SERVICE_NAME wins), if an address to send them to is
    set; whether it is. The process's end sends what is left.

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
    """Around a request's admission: its span, a child of the gateway's, is the current one. It goes on after that,
    until the request's measure ends it; a refusal ends it here.
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
    """What a worker must know to add to the current span: its `traceparent`; None while nothing is traced."""
    if not trace.get_current_span().is_recording():
        return None
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get(_HEADER)


class RequestSpans:
    """The spans of the requests that a worker runs. Requests without a parent have none."""

    def __init__(self) -> None:
        self._spans: dict[str, Span] = {}
        self._begun: set[str] = set()

    def begin(self, request: EngineRequest) -> None:
        """The engine takes a request."""
        if request.trace is not None:
            context = propagate.extract({_HEADER: request.trace})
            self._spans[request.request_id] = _tracer.start_span("engine", context=context)

    def hear(self, outputs: Iterable[EngineOutput]) -> None:
        """The engine made tokens."""
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
        """A request is over, or was dropped."""
        self._begun.discard(request_id)
        if (span := self._spans.pop(request_id, None)) is not None:
            span.end()
