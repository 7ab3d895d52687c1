"""The benchmark of what is expected of answers, by model and by tenant."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dataplane.protocol.tiers import Tier
from ops.bench.planner.answer_lengths import (
    CLIENTS,
    LENGTHS,
    PRIORS,
    QUEUE,
    Draw,
    Recent,
    error_of,
    errors,
    expected,
    late,
    requests,
)
from ops.simulator.kernel.requests import Request

LONG, SHORT = 900, 10


def known(*lengths: int) -> Recent:
    recent = Recent()
    for tokens in lengths:
        recent.note(tokens)
    return recent


def two_tenants(count: int) -> Iterator[Request]:
    """One with long answers, one with short ones, by turns."""
    for number in range(count):
        yield Request(
            number=number,
            arrived_s=0.5 * number,
            model="70B",
            origin=("long", "short")[number % 2],
            tier=Tier.IW_F,
            prompt_tokens=500,
            output_tokens=(LONG, SHORT)[number % 2],
        )


def test_a_tenant_begins_as_the_model_and_becomes_itself() -> None:
    everyone = known(100, 300)
    assert expected(Recent(), everyone, 4, 0) == 200
    assert expected(Recent(), everyone, 4, 100) == 200, "only the longer one goes on"
    assert expected(known(*[10] * 12), everyone, 4, 0) == (12 * 10 + 4 * 200) / 16
    assert expected(known(10), everyone, 4, 10) == (2 * 90 + 2 * 290) / 4, "its own are over by then"
    assert expected(known(10), everyone, 4, 300) is None


def test_what_tenants_know_is_told_apart() -> None:
    found = errors(two_tenants(600), 1)
    error = found["error"]
    assert (found["requests"], found["tenants"]) == (600, 2)
    assert set(error) == {"model", *(f"tenant, {prior}" for prior in PRIORS)}
    assert error["tenant, 4"]["coming"] < 0.1
    assert error["model"]["coming"] > 0.9


def test_errors_are_relative_and_longer_answers_are_made_for_longer() -> None:
    true = np.array([[10.0, 10.0], [30.0, 30.0]] * QUEUE)
    said = np.array([[20.0, 10.0], [20.0, 20.0]] * QUEUE)
    assert error_of(said, true) == {"coming": 0.5, "made": pytest.approx(7.5 / 25.0), "queue": 0.0}


def test_requests_are_of_clients_with_lengths(tmp_path: Path) -> None:
    (tmp_path / "servegen").mkdir()
    with gzip.open(tmp_path / CLIENTS, "wt") as file:
        file.write("client_chunk,timestamp_s,rate_rps,cv,arrival_pattern,param1,param2\n")
        file.writelines(f"{client},0,0.1,1,Gamma,1,1\n" for client in (7, 8))
    histograms = {"0": {"input_tokens": "{5: 1.0}", "output_tokens": "{9: 1.0}"}}
    with gzip.open(tmp_path / LENGTHS, "wt") as file:
        file.write(json.dumps({"client_chunk": 8, "windows": json.dumps(histograms)}) + "\n")
    drawn = Draw(day=0, hours=1.0, scale=1.0, seed=1)
    assert {(one.origin, one.output_tokens) for one in requests(tmp_path, drawn)} == {("8", 9)}
    assert {one.origin for one in requests(tmp_path, drawn, known=False)} == {"7", "8"}


def test_queues_that_know_more_are_compared() -> None:
    found = late(list(two_tenants(60)), 1, 1)
    assert set(found) == {"model", "true"}
    assert all(0 <= share <= 1 for share in found.values())
