"""What is measured of a request: each histogram's count and sum, and each end counted once."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import Span, TracerProvider
from prometheus_client import CollectorRegistry, generate_latest

from dataplane.agent.measures import EndReason, RequestMeasure, RequestMeasures


class Clock:
    now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def test_a_request_is_measured_by_vllms_names() -> None:
    registry, clock = CollectorRegistry(), Clock()
    measures = RequestMeasures(registry)
    measure = RequestMeasure(measures, "tide", 5, clock)
    for now_s, tokens in ((12.0, 1), (12.5, 1), (12.75, 0), (13.5, 2)):
        clock.now_s = now_s
        measure.made(tokens)
    clock.now_s = 14.0
    measure.ended("length")
    measure.ended("abort")
    RequestMeasure(measures, "tide", 1, clock).ended("error")

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"vllm:{name}", {"model_name": "tide"} | labels)

    assert (value("prompt_tokens_total"), value("generation_tokens_total")) == (6.0, 4.0)
    expected = {
        "time_to_first_token": (1.0, 2.0),
        "inter_token_latency": (3.0, 1.5),
        "request_time_per_output_token": (1.0, 0.5),
        "e2e_request_latency": (1.0, 4.0),
    }
    seen = {name: (value(f"{name}_seconds_count"), value(f"{name}_seconds_sum")) for name in expected}
    assert seen == expected
    ends = {reason: value("request_success_total", finished_reason=reason) for reason in ("length", "error", "abort")}
    assert ends == {"length": 1.0, "error": 1.0, "abort": None}


def test_the_series_of_a_model_that_is_gone_end() -> None:
    registry, clock = CollectorRegistry(), Clock()
    measures = RequestMeasures(registry)
    for model in ("stays", "gone"):
        measures.expect(model)
    late = RequestMeasure(measures, "gone", 5, clock)
    for _ in range(2):
        ended = RequestMeasure(measures, "gone", 5, clock)
        ended.made(2)
        ended.made(2)
        ended.ended("stop")
    assert 'model_name="gone"' in generate_latest(registry).decode()
    for end in (None, late.ended):
        if end is not None:
            end("stop")
        measures.drop({"stays"})
        text = generate_latest(registry).decode()
        assert ('model_name="gone"' in text, 'model_name="stays"' in text) == (False, True)


@pytest.mark.parametrize("reason", ["error", "abort", "stop"])
def test_the_span_of_an_answer_that_fails_says_so(reason: EndReason) -> None:
    span = TracerProvider().get_tracer("tests").start_span("generate")
    assert isinstance(span, Span)
    with trace.use_span(span):
        measure = RequestMeasure(RequestMeasures(CollectorRegistry()), "tide", 5, Clock())
    measure.ended(reason)
    assert (span.status.is_ok, span.end_time is not None) == (reason != "error", True)
