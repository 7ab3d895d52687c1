"""The data plane's spans: off unless an address is set, and a worker's live as long as its requests."""

import asyncio
import sys

import httpx2 as httpx
import msgspec
import pytest
import structlog
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dataplane.agent.answers import Answer
from dataplane.agent.http import make_app
from dataplane.agent.node import Agent
from dataplane.engines.interface import EngineOutput, EngineRequest, KvHandle
from dataplane.protocol.errors import UnknownInstanceError
from dataplane.protocol.messages import Generate
from dataplane.runtime import tracing
from dataplane.runtime.tracing import ENDPOINTS, RequestSpans, TracingError, current_parent, start_tracing
from tests.dataplane.replay_node import KEY, generate, settings

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_tracer", provider.get_tracer("tests"))
    return exporter


def _request(request_id: str, trace: str | None = TRACEPARENT) -> EngineRequest:
    return EngineRequest(request_id=request_id, instance_id="i", tier="IW-F", prompt=(1,), max_tokens=3, trace=trace)


def _names(exporter: InMemorySpanExporter) -> list[list[str]]:
    return [[event.name for event in span.events] for span in exporter.get_finished_spans()]


def test_nothing_is_traced_unless_an_address_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert not start_tracing("test")
    assert current_parent() is None


def test_an_address_without_the_extra_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINTS[0], "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(TracingError, match=r"tidepool\[traces\]"):
        start_tracing("test")


def test_a_span_begins_with_its_request_and_ends_with_its_last_output(exporter: InMemorySpanExporter) -> None:
    spans = RequestSpans()
    spans.begin(_request("r1"))
    spans.record([EngineOutput(request_id="r1", token_ids=(1,)), EngineOutput(request_id="r1", token_ids=(2,))])
    assert _names(exporter) == []
    spans.record([EngineOutput(request_id="r1", token_ids=(3,), finish_reason="length")])
    assert _names(exporter) == [["prefilled"]]


@pytest.mark.parametrize(
    "last",
    [
        EngineOutput(request_id="r1", error="no room"),
        EngineOutput(
            request_id="r1",
            token_ids=(1,),
            kv=KvHandle(file="f", slab_bytes=1, shape=(1, 1, 1, 1, 1), blocks=(), tokens=1),
        ),
    ],
)
def test_a_failure_and_a_handover_end_it_too(exporter: InMemorySpanExporter, last: EngineOutput) -> None:
    spans = RequestSpans()
    spans.begin(_request("r1"))
    spans.record([last])
    (span,) = exporter.get_finished_spans()
    assert span.status.is_ok == (last.error is None)


def test_a_dropped_request_ends_its_span_once(exporter: InMemorySpanExporter) -> None:
    spans = RequestSpans()
    spans.begin(_request("r1"))
    spans.end("r1")
    spans.end("r1")
    spans.record([EngineOutput(request_id="r1", token_ids=(1,))])
    assert _names(exporter) == [[]]


def test_requests_without_a_parent_have_no_span(exporter: InMemorySpanExporter) -> None:
    spans = RequestSpans()
    spans.begin(_request("r1", trace=None))
    spans.record([EngineOutput(request_id="r1", token_ids=(1,), finish_reason="stop")])
    assert _names(exporter) == []


def test_the_agent_logs_with_the_gateways_request_id(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    async def admit(_: Agent, message: Generate) -> Answer:
        seen.append(structlog.contextvars.get_contextvars()["request_id"])
        raise UnknownInstanceError("none here")

    async def ask() -> int:
        app = make_app(Agent(settings(), boot_id="b"))
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node") as client:
            body = msgspec.json.encode(generate("req_7.ab"))
            return (await client.post("/generate", content=body, headers=headers)).status_code

    monkeypatch.setattr(Agent, "admit", admit)
    assert asyncio.run(ask()) == 409
    assert seen == ["req_7.ab"]
    assert [span.name for span in exporter.get_finished_spans()] == ["generate"]
    assert structlog.contextvars.get_contextvars() == {}
