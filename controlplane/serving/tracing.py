"""OpenTelemetry spans of a request and its attempts. Only OpenTelemetry's API is used: without a provider, which the
process may set up at its start, it does nothing. No span is made per token.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind, Status, StatusCode, format_trace_id

from controlplane.errors import ReroutedError, TidepoolError
from controlplane.policies.decisions import Route

tracer = trace.get_tracer("tidepool.control")


def trace_id() -> str | None:
    """The id of the trace of the current span, in hex; None where it is not recorded."""
    span = trace.get_current_span()
    return format_trace_id(span.get_span_context().trace_id) if span.is_recording() else None


def step(name: str) -> AbstractContextManager[object]:
    """A span around a part of a request's work, a child of the current span if that is recorded."""
    return tracer.start_as_current_span(name) if trace.get_current_span().is_recording() else nullcontext()


def attempting(request_id: str, route: Route) -> AbstractContextManager[dict[str, str]]:
    """A span around one attempt at an instance and its stream, a child of the current span if that is recorded. Yields
    the headers by which the node's spans become its children.
    """
    return _attempt(request_id, route) if trace.get_current_span().is_recording() else nullcontext({})


@contextmanager
def _attempt(request_id: str, route: Route) -> Iterator[dict[str, str]]:
    attributes = {
        "tidepool.request_id": request_id,
        "tidepool.instance_id": route.instance_id,
        "tidepool.node": route.node_id,
        "tidepool.region": route.region,
    }
    span = tracer.start_span("attempt", kind=SpanKind.CLIENT, attributes=attributes)
    headers: dict[str, str] = {}
    propagate.inject(headers, context=trace.set_span_in_context(span))
    try:
        yield headers
    except ReroutedError as moved:
        span.add_event("rerouted", {"tidepool.instance_id": moved.instance_id})
        raise
    except TidepoolError as error:
        span.set_status(Status(StatusCode.ERROR, f"{error.code}: {error.message}"))
        raise
    finally:
        span.end()
