"""`python -m ops.bench.regions.delays`, small."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_distance_between_regions_is_measured() -> None:
    options = ("--delays-ms", "0,50", "--rounds", "3", "--lines", "20", "--requests", "20", "--json")
    command = [sys.executable, "-m", "ops.bench.regions.delays", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    near, far, near_delayed, far_delayed = found["delays"]
    assert near_delayed["batch_accepted_ms"] > 50
    assert near["lines_per_s"] > 0
    assert far_delayed["batch_accepted_ms"] > far["batch_accepted_ms"]
    assert [row["primary"] for row in found["interactive"]] == ["there", "gone"]
