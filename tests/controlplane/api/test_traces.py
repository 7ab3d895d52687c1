"""Spans of a request through gateway, agent and worker: one trace, the right parents, and none where nobody asks."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import SecretStr, ValidationError

from controlplane.policies.decisions import Route
from controlplane.serving.tracing import attempting
from controlplane.settings import Settings
from controlplane.store.tables import Role
from tests.controlplane.api.gateway import Gateway, running_gateway
from tests.controlplane.world import FakeAgent, World, until
from tests.dataplane.replay_node import KEY, instance, running_node

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE_ID = int(TRACEPARENT.split("-")[1], 16)
CALLER_SPAN = int(TRACEPARENT.split("-")[2], 16)
BODY = {"model": "tide", "prompt": "the tide", "max_tokens": 5, "seed": 1}
USERS = ("controlplane.api.tracing", "controlplane.serving.tracing")


class Collector(HTTPServer):
    """Takes what OTLP exporters send. `spans`: names, trace ids and parents."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[tuple[str, int, int]] = []

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        self.spans += [
            (span.name, int.from_bytes(span.trace_id, "big"), int.from_bytes(span.parent_span_id, "big"))
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        self.server.take(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Spans of this process, which a global provider would keep for all tests that follow."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("tests")
    for module in USERS:
        monkeypatch.setattr(f"{module}.tracer", tracer)
    monkeypatch.setattr("dataplane.runtime.tracing._tracer", tracer)
    return exporter


def _by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def _parent(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


async def _through_a_node(world: World, check: Callable[[Gateway], None], **settings: Any) -> None:
    async with running_node() as node:
        url = str(node.client.base_url).rstrip("/")
        world.join("n0", url=url)
        held = world.place("n0")
        await node.hold(1, instance(held))
        world.report("n0", held, region="us-east", url=url)
        with running_gateway(world, node_key=SecretStr(KEY), **settings) as gateway:
            await asyncio.to_thread(check, gateway)
            await node.until(node.idle)


def test_one_trace_from_the_caller_to_the_worker(
    world: World, spans: InMemorySpanExporter, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")

    def check(gateway: Gateway) -> None:
        headers = {"traceparent": TRACEPARENT, "x-request-id": "mine"}
        with gateway.http.stream("POST", "/v1/completions", json=BODY | {"stream": True}, headers=headers) as answer:
            assert "[DONE]" in answer.read().decode()
        until(lambda: "engine" in {name for name, *_ in collector.spans})

    asyncio.run(_through_a_node(world, check))
    found = _by_name(spans)
    request, attempt, node = found["POST /v1/completions"], found["attempt"], found["generate"]
    assert {span.context.trace_id for span in found.values() if span.context} == {TRACE_ID}
    assert _parent(request) == CALLER_SPAN
    assert request.context is not None
    for child in ("admission", "route", "attempt"):
        assert _parent(found[child]) == request.context.span_id, child
    assert attempt.context is not None
    assert _parent(node) == attempt.context.span_id
    assert node.context is not None
    assert ("engine", TRACE_ID, node.context.span_id) in collector.spans
    assert [event.name for event in node.events] == ["queued", "prefilled"]
    assert request.attributes is not None
    assert (request.attributes["http.response.status_code"], request.attributes["tidepool.request_id"]) == (200, "mine")
    assert node.attributes is not None
    assert str(node.attributes["tidepool.request_id"]).startswith("mine.")
    assert (node.attributes["gen_ai.usage.output_tokens"], node.attributes["tidepool.end"]) == (5, "length")


def test_the_request_log_links_the_trace(world: World, spans: InMemorySpanExporter) -> None:
    def check(gateway: Gateway) -> None:
        headers = {"traceparent": TRACEPARENT, "x-request-id": "mine"}
        assert gateway.http.post("/v1/completions", json=BODY, headers=headers).status_code == 200
        admin = {"Authorization": f"Bearer {world.key(Role.ADMIN)}"}

        def found() -> list[dict[str, Any]]:
            gateway.state.requests.write()
            return list(gateway.http.get("/admin/requests", headers=admin).json()["data"])

        until(lambda: len(found()) == 1)
        [row] = found()
        assert row["trace_id"] == f"{TRACE_ID:032x}"
        assert row["trace_url"] == f"https://traces.example/t/{TRACE_ID:032x}?from=tidepool"

    asyncio.run(_through_a_node(world, check, trace_url="https://traces.example/t/{trace_id}?from=tidepool"))
    assert spans.get_finished_spans()


@pytest.mark.parametrize("url", ["javascript:alert(1)//{trace_id}", "https://traces.example/", "/t/{trace_id}"])
def test_what_no_address_of_a_trace_is(url: str) -> None:
    with pytest.raises(ValidationError, match="trace_url"):
        Settings(trace_url=url)


def test_a_refusal_of_the_node_ends_every_span(world: World, spans: InMemorySpanExporter) -> None:
    def check(gateway: Gateway) -> None:
        answer = gateway.http.post("/v1/completions", json=BODY | {"prompt": "tide " * 5000})
        assert answer.status_code == 400

    asyncio.run(_through_a_node(world, check))
    found = _by_name(spans)
    assert {"POST /v1/completions", "attempt", "generate"} <= set(found)
    assert not found["attempt"].status.is_ok


@pytest.mark.parametrize("then", ["die later", "worker lost", "answer"])
def test_a_stream_that_breaks_is_a_failed_request(world: World, spans: InMemorySpanExporter, then: str) -> None:
    """Also when it breaks after its status, 200, was sent."""
    agent = FakeAgent(then=then)
    with running_gateway(world, agent, request_attempts_max=1, stream_continuations_max=0) as gateway:
        gateway.http.post("/v1/completions", json=BODY | {"stream": True})
        until(lambda: "POST /v1/completions" in _by_name(spans))
    request = _by_name(spans)["POST /v1/completions"]
    assert request.attributes is not None
    assert request.attributes["http.response.status_code"] == (503 if then == "worker lost" else 200)
    assert request.status.is_ok == (then == "answer")


def test_without_a_provider_nothing_is_sent_along() -> None:
    route = Route(instance_id="i1", node_id="n0", region="us-east", utilization=0.0)
    with attempting("r1", route) as headers:
        assert headers == {}
