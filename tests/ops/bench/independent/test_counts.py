"""What a gateway's metrics say of a tier, and when the two sides of a run do not agree."""

from dataclasses import replace

import pytest

from controlplane.api.metrics import Metrics
from controlplane.policies.limits import Limit
from dataplane.protocol.tiers import Tier
from ops.bench.independent.compare import Row, faults
from ops.bench.independent.counts import Counts, counted, streams


def _metrics() -> Metrics:
    metrics = Metrics()
    for tier, first_s in ((Tier.IW_N, 0.25), (Tier.IW_N, 0.75), (Tier.NIW, 5.0)):
        labels = ("tide", tier.value)
        metrics.requests.labels(*labels, "here", "ok").inc()
        metrics.input_tokens.labels(*labels).inc(100)
        metrics.output_tokens.labels(*labels).inc(10)
        metrics.first_token_s.labels(*labels).observe(first_s)
        metrics.per_token_s.labels(*labels).observe(0.01)
    metrics.requests.labels("tide", "IW-N", "", "cancelled").inc()
    return metrics


def test_counts_are_of_one_tier() -> None:
    metrics = _metrics()
    found = counted(metrics.render().decode(), Tier.IW_N)
    assert (found.answered, found.errors) == (2, 1)
    assert (found.input_tokens, found.output_tokens) == (200, 20)
    assert found.ttft_s == pytest.approx(0.5)
    assert found.itl_s == pytest.approx(0.01)
    assert counted(metrics.render().decode(), Tier.IW_F) == Counts()


def test_a_refusal_by_a_limit_is_an_error() -> None:
    metrics = _metrics()
    before = counted(metrics.render().decode(), Tier.IW_N)
    metrics.note_limit_refusal(Limit.REQUESTS, model="tide", input_tokens=7)
    assert counted(metrics.render().decode(), Tier.IW_N).since(before) == Counts(errors=1)


def test_what_is_in_flight_is_read() -> None:
    metrics = Metrics()
    assert streams(metrics.render().decode()) == 0
    metrics.streams.inc()
    assert streams(metrics.render().decode()) == 1


ALIKE = Counts(
    answered=4, errors=1, input_tokens=40, output_tokens=8, first_tokens=4, ttft_sum_s=0.4, paced=4, itl_sum_s=0.04
)


def _row(**client: float) -> Row:
    return Row(run="x", client=replace(ALIKE, **client), server=ALIKE, overhead_s=0.003)


def test_sides_that_agree_have_no_faults() -> None:
    assert faults(_row(ttft_sum_s=0.4 + 4 * 0.0045)) == []
    assert faults(replace(_row(ttft_sum_s=0.9), saturated=True)) == []


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("answered", 5, "answered: the client saw 5, the server counted 4"),
        ("errors", 0, "errors: the client saw 0, the server counted 1"),
        ("input_tokens", 41, "input_tokens"),
        ("output_tokens", 7, "output_tokens"),
        ("ttft_sum_s", 0.4 + 4 * 0.0055, "TTFT: +2.5 ms"),
        ("ttft_sum_s", 0.4, "TTFT: -3.0 ms"),
        ("itl_sum_s", 0.04 + 4 * 0.0025, "time between tokens: +2.5 ms"),
    ],
)
def test_each_disagreement_is_named(name: str, value: float, named: str) -> None:
    [fault] = [each for each in faults(_row(**{name: value})) if named in each]
    assert fault.startswith(named.partition(":")[0])


def test_first_tokens_of_other_requests_are_not_compared() -> None:
    row = _row(first_tokens=3, ttft_sum_s=9.0)
    assert row.ttft_apart_s is None
    assert faults(row) == []


def test_a_run_that_answered_nothing_agrees_on_nothing() -> None:
    assert faults(Row(run="x", client=Counts(), server=Counts())) == ["nothing was answered"]


def test_of_requests_that_a_client_does_not_report_only_the_number_is_compared() -> None:
    seen = replace(ALIKE, answered=3, input_tokens=30, first_tokens=3)
    assert faults(Row(run="x", client=seen, server=ALIKE, overhead_s=0.0, unreported=1)) == []
    [fault] = faults(Row(run="x", client=seen, server=ALIKE, overhead_s=0.0, unreported=2))
    assert fault == "requests: the client sent 6, the server counted 5"
