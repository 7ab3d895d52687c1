"""What AIPerf and GuideLLM report of a run is read in the same terms."""

import json
from pathlib import Path
from typing import Any

import pytest

from ops.bench.independent import aiperf, guidellm
from ops.bench.independent.counts import Counts
from ops.bench.independent.tools import ToolError

SEEN = Counts(
    answered=1, errors=1, input_tokens=20, output_tokens=12, first_tokens=1, ttft_sum_s=0.03, paced=1, itl_sum_s=0.01
)


def _aiperf(folder: Path, *, usage: int = 12) -> Path:
    values = {
        "input_sequence_length": 20, "usage_prompt_tokens": 20, "output_sequence_length": 12,
        "usage_completion_tokens": usage, "time_to_first_token": 30.0, "inter_token_latency": 10.0,
    }  # fmt: skip
    whole = {"metadata": {"request_start_ns": 5_000_000_000}, "metrics": {k: {"value": v} for k, v in values.items()}}
    cancelled = {"metadata": {"request_start_ns": 4_000_000_000}, "metrics": {}, "error": {"code": 499}}
    lines = (json.dumps(each) for each in (whole, cancelled))
    (folder / "profile_export.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_aiperf_is_read(tmp_path: Path) -> None:
    [phase] = aiperf.read(_aiperf(tmp_path))
    assert (phase.seen, phase.began_s, phase.remarks) == (SEEN, 4.0, ())


def test_usage_that_aiperf_does_not_confirm_is_remarked(tmp_path: Path) -> None:
    [phase] = aiperf.read(_aiperf(tmp_path, usage=13))
    assert phase.remarks == ("1 answers whose usage is not what AIPerf counts",)


def _benchmark(strategy: dict[str, Any], *, words: int = 12) -> dict[str, Any]:
    whole = {
        "prompt_tokens": 20, "output_tokens": 12, "time_to_first_token_ms": 30.0, "inter_token_latency_ms": 10.0,
        "input_metrics": {"text_words": 20}, "output_metrics": {"text_words": words},
    }  # fmt: skip
    requests = {"successful": [whole], "errored": [], "incomplete": [{}]}
    state = {"created_requests": 3}
    return {"config": {"strategy": strategy}, "requests": requests, "start_time": 7.5, "scheduler_state": state}


def test_every_benchmark_of_guidellm_is_read(tmp_path: Path) -> None:
    strategies = [
        {"type_": "synchronous"}, {"type_": "throughput"},
        {"type_": "constant", "rate": 2.0}, {"type_": "constant", "rate": 4.0},
    ]  # fmt: skip
    (tmp_path / "report.json").write_text(json.dumps({"benchmarks": list(map(_benchmark, strategies))}))
    phases = guidellm.read(tmp_path)
    assert [phase.name for phase in phases] == ["synchronous", "throughput", "constant 2.0/s", "constant 4.0/s"]
    assert [phase.saturated for phase in phases] == [False, True, False, True]
    assert {phase.seen for phase in phases} == {SEEN}
    assert (phases[0].began_s, phases[0].remarks, phases[0].unreported) == (7.5, (), 1)


def test_usage_that_is_not_the_words_is_remarked(tmp_path: Path) -> None:
    report = {"benchmarks": [_benchmark({"type_": "poisson", "rate": 8.0}, words=11)]}
    (tmp_path / "report.json").write_text(json.dumps(report))
    [phase] = guidellm.read(tmp_path)
    assert phase.remarks == ("1 answers whose usage is not the words they have",)
    assert not phase.saturated


@pytest.mark.parametrize("reader", [aiperf.read, guidellm.read])
def test_a_report_that_is_missing_is_named(reader: Any, tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=r"exported no records|wrote no report"):
        reader(tmp_path)
