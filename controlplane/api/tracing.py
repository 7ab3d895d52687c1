"""A span for every request to this process, the parent of all others. Off unless the process exports spans."""

from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind, Status, StatusCode
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane.serving.tracing import tracer
from controlplane.store.request_log import RequestRecord

_SERVER_ERRORS = 500


class Traces:
    """Wraps the app. A caller's `traceparent` makes its span the parent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        parent = dict(scope["headers"]).get(b"traceparent")
        context = None if parent is None else propagate.extract({"traceparent": parent.decode("latin-1")})
        span = tracer.start_span(scope["method"], context=context, kind=SpanKind.SERVER)
        if not span.is_recording():
            await self._app(scope, receive, send)
            return
        span.set_attribute("tidepool.request_id", scope["state"]["request_id"])

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                if (route := scope.get("route")) is not None:
                    span.update_name(f"{scope['method']} {route.path}")
                status = message["status"]
                span.set_attribute("http.response.status_code", status)
                if status >= _SERVER_ERRORS:
                    span.set_status(Status(StatusCode.ERROR))
            await send(message)

        with trace.use_span(span, end_on_exit=True):
            await self._app(scope, receive, noted)
            record: RequestRecord | None = scope["state"].get("record")
            if record is not None and record.status >= _SERVER_ERRORS:  # a stream may break after its status was sent
                span.set_status(Status(StatusCode.ERROR, record.outcome))
