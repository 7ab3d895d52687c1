"""A short run of the benchmark with independent load generators: what they saw is what the gateway counted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ops.bench.independent.run import LIMITED_PER_MINUTE
from ops.bench.independent.scenarios import CANCELLED_PERCENT
from tests.clients.conftest import INSTALLED, NOT_HERE, ROOT

REQUESTS, SECONDS = 24, 6
PATIENCE_S = 900.0
COUNTS = ("answered", "errors", "input_tokens", "output_tokens")


def _trace(folder: Path) -> Path:
    """Requests of an hour, in the format of Azure's trace."""
    path = folder / "trace.csv"
    times = (f"2023-11-16 18:{minute:02}:00.0000000,{100 + minute},{8 + minute}" for minute in range(0, 60, 4))
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *times]) + "\n")
    return path


def test_independent_load_generators_agree_with_the_gateway(tmp_path: Path) -> None:
    if not {"aiperf", "guidellm"} <= set(INSTALLED):
        pytest.skip(NOT_HERE)
    options = ("--per-s", str(REQUESTS / SECONDS), "--seconds", str(SECONDS), "--trace-seconds", str(SECONDS))
    files = ("--trace", str(_trace(tmp_path)), "--out", str(tmp_path / "out"), "--tools", str(ROOT / ".clients"))
    finished = subprocess.run(
        [sys.executable, "-m", "ops.bench.independent.run", "--json", *options, *files],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert finished.returncode in {0, 1}, finished.stderr  # 1: times that a busy machine moved apart
    results = json.loads(finished.stdout)
    assert results == json.loads((tmp_path / "out" / "results.json").read_text())
    rows = {row["run"]: row for row in results["rows"]}
    for name, row in rows.items():
        assert row["client"]["answered"] + row["client"]["errors"] + row["unreported"] == (
            row["server"]["answered"] + row["server"]["errors"]
        ), name
        if row["unreported"]:  # a busy machine makes GuideLLM forget its last request
            continue
        assert [row["client"][count] for count in COUNTS] == [row["server"][count] for count in COUNTS], name
        assert not row["remarks"], name
        assert row["saturated"] or row["ttft_apart_s"] is not None or row["client"]["errors"], name
    assert rows["aiperf poisson 4/s"]["server"]["answered"] == REQUESTS
    assert rows["aiperf flex"]["server"]["answered"] == REQUESTS
    assert rows["aiperf trace of 15"]["server"]["input_tokens"] == sum(100 + minute for minute in range(0, 60, 4))
    cancelled = rows["aiperf cancelled"]["server"]
    assert cancelled["answered"] + cancelled["errors"] == REQUESTS
    assert 0 < cancelled["errors"] <= REQUESTS * CANCELLED_PERCENT / 50
    limited = rows["aiperf limited"]["server"]
    assert limited["answered"] + limited["errors"] == REQUESTS
    assert limited["answered"] >= LIMITED_PER_MINUTE
    assert limited["errors"] > 0
    sweep = [row for name, row in rows.items() if name.startswith("guidellm sweep")]
    assert [row["server"]["answered"] for row in sweep] == [REQUESTS] * 4
