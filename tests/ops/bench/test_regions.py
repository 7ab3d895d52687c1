"""`python -m ops.bench.regions.delays`, small."""

import json
import subprocess
import sys

import pytest

from ops.bench.regions.delays import ratios


@pytest.mark.slow
def test_a_distance_between_regions_is_measured() -> None:
    options = ("--delays-ms", "0,50", "--rounds", "3", "--lines", "20", "--requests", "20", "--losses", "2", "--json")
    command = [sys.executable, "-m", "ops.bench.regions.delays", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    near, _, near_delayed, far_delayed = found["delays"]
    assert near_delayed["batch_accepted_ms"] > 50
    assert near["lines_per_s"] > 0
    assert far_delayed["batch_accepted_ms"] > 2 * 50, "a file and a batch each cross at least once"
    assert [(row["loss"], row["primary"]) for row in found["interactive"]] == [
        (1, "there"),
        (1, "gone"),
        (2, "there"),
        (2, "gone"),
    ]
    assert all(row["requests"] == 20 for row in found["interactive"])


def test_ratios_are_of_what_belongs_together() -> None:
    times = [("there", 10.0, 20.0), ("gone", 20.0, 20.0), ("there", 10.0, 10.0), ("gone", 10.0, 30.0)]
    rows = [{"primary": primary, "p50_ms": p50, "p99_ms": p99} for primary, p50, p99 in times]
    assert ratios(rows) == {
        "p50": {"median": 1.5, "least": 1.0, "greatest": 2.0},
        "p99": {"median": 2.0, "least": 1.0, "greatest": 3.0},
    }
