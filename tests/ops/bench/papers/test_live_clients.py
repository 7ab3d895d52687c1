"""What AIPerf says of a live run, as requests and answers."""

from typing import Any

import pytest

from dataplane.protocol.tiers import Tier
from ops.bench.independent.tools import ToolError
from ops.bench.papers.live_clients import answers_of
from ops.simulator.kernel.requests import Request


def _asked(model: str) -> Request:
    return Request(
        number=7, arrived_s=50.0, model=model, origin="here", tier=Tier.IW_F, prompt_tokens=1, output_tokens=1
    )


def _record(start_s: float, **more: Any) -> dict[str, Any]:
    values = {
        "time_to_first_token": 30.0,
        "request_latency": 130.0,
        "usage_prompt_tokens": 20,
        "usage_completion_tokens": 5,
    }
    metrics = {name: {"value": value} for name, value in values.items()}
    return {"metadata": {"request_start_ns": int(start_s * 1e9)}, "metrics": metrics} | more


def test_answers_are_of_what_was_really_sent() -> None:
    first, second = answers_of([(_record(105.5), _asked("b")), (_record(104.0), _asked("a"))])
    assert [answer.request.model for answer in (first, second)] == ["a", "b"]
    assert [answer.request.number for answer in (first, second)] == [0, 1]
    assert [answer.request.arrived_s for answer in (first, second)] == [0.0, pytest.approx(1.5)]
    assert (second.request.prompt_tokens, second.request.output_tokens, second.request.tier) == (20, 5, Tier.IW_F)
    assert (second.first_s, second.last_s) == (pytest.approx(0.03), pytest.approx(0.13))


def test_a_request_that_failed_ends_the_comparison() -> None:
    with pytest.raises(ToolError, match=r"1 requests failed, one with .*503"):
        answers_of([(_record(104.0), _asked("a")), (_record(105.0, error={"code": 503}), _asked("a"))])
