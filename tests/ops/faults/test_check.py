"""A fault run is worth what its checks find: each must see the break that it is for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ops.faults.check import attainment, difference, marked, outcomes, stream_findings
from ops.faults.injector import children_of
from ops.faults.load import Outcome, Streamed
from ops.faults.losses import FaultTimes, kind_of_process, stream_losses

ANSWERS = {("m", 0): {"0 content": "one two three four", "1 logprobs": "one -0.5, "}}
REST = {"1 logprobs": "one -0.5, "}


def streamed(text: str = "", outcome: Outcome = "whole", **changes: object) -> Streamed:
    fields = {
        "model": "m",
        "prompt": 0,
        "tier": "priority",
        "started_s": 0.0,
        "ended_s": 1.0,
        "first_token_s": 0.2,
        "attempts": 1,
        "outcome": outcome,
        "reason": "",
        "parts": {"0 content": text, **REST},
    }
    return Streamed(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("one two three", "whole"),  # a token is missing at the end
        ("one three four", "whole"),  # in the middle
        ("one two two three four", "whole"),  # one came twice
        ("one two three four four", "whole"),
        ("one two two", "broken"),
        ("two three", "error"),
    ],
)
def test_a_missing_or_doubled_token_is_found(text: str, outcome: Outcome) -> None:
    (finding,) = stream_findings([streamed(text, outcome)], ANSWERS)
    assert "m prompt 0" in finding


def test_every_channel_is_checked() -> None:
    stream = streamed("", parts={"0 content": "one two three four", "1 logprobs": "one -0.6, ", "0 call 0": "look"})
    findings = stream_findings([stream], ANSWERS)
    assert ["logprobs" in finding for finding in findings] == [False, True]


def test_what_is_right_is_no_finding() -> None:
    streams = [streamed("one two three four"), streamed("one two th", "broken"), streamed("", "refused")]
    assert stream_findings(streams, ANSWERS) == []


def test_differences_in_words() -> None:
    assert difference("one two two three", "one two three four") == "word 2 is 'two' for 'three'; 4 words for 4"
    assert difference("one two", "one two three") == "2 words for 3"


def test_outcomes_are_counted_with_their_reasons() -> None:
    streams = [streamed("", "whole"), streamed("", "error", reason="node_error"), streamed("", "whole")]
    assert outcomes(streams) == {"whole": 2, "error: node_error": 1}


def test_attainment_counts_failures_as_misses() -> None:
    streams = [
        streamed("x"),
        streamed("x", first_token_s=1.4),
        streamed("x", "broken"),
        streamed("", "refused", first_token_s=None),
        streamed("x", tier="default", first_token_s=30.0),
    ]
    fast, normal = attainment(streams)
    assert (fast.tier, fast.requests, fast.share) == ("priority", 4, 0.25)
    assert (normal.tier, normal.requests, normal.share) == ("default", 1, 1.0)
    assert attainment([])[0].share is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of other processes")
def test_processes_of_a_home_are_found(tmp_path: Path) -> None:
    assert marked(tmp_path) == []
    environment = {**os.environ, "TIDEPOOL_HOME": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment) as process:
        assert marked(tmp_path) == [process.pid]
        assert process.pid in children_of(os.getpid())
        process.communicate(b"\n")
    assert marked(tmp_path) == []


def test_losses_are_laid_to_the_fault_before_them() -> None:
    faults = [
        FaultTimes(what="kill api", began_s=10.0, ended_s=10.0),
        FaultTimes(what="pause agent", began_s=20.0, ended_s=30.0),
    ]
    streams = [
        streamed("one", "broken", started_s=9.0, ended_s=11.0),
        streamed("", "refused", started_s=24.0, ended_s=25.0),
        streamed("", "refused", started_s=44.0, ended_s=46.0),
        streamed("", "error", started_s=100.0, ended_s=101.0),
        streamed("one two three four", attempts=2),
        streamed("one two three four", attempts=1),
    ]
    assert stream_losses(streams, faults) == {
        "lost_by_fault": {
            "kill api: broken": 1,
            "pause agent: refused": 2,
            "no fault near: error": 1,
        },
        "saved_by_another_gateway": 1,
    }


@pytest.mark.parametrize(
    ("victim", "kind"),
    [
        ("api", "api"),
        ("api-2", "api"),
        ("worker of agent-east-1", "worker of agent"),
        ("agent-east-1>api-2", "agent>api"),
        ("*>agent-east-1", "*>agent"),
    ],
)
def test_victims_of_a_kind(victim: str, kind: str) -> None:
    assert kind_of_process(victim) == kind
