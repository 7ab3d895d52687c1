"""The load generators' programs: where they are, how they are run, and what they are asked to do."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from dataplane.protocol.tiers import Tier
from forecasts.importers.listings import AZURE
from ops.bench.independent.scenarios import KINDS, runs
from ops.bench.independent.schedule import Schedule, write_schedule
from ops.bench.independent.tools import Load, ToolError, emptied, executable, run_tool

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:00:00.0000000,100,10
2023-11-16 18:30:00.0000000,900,200
2023-11-16 18:45:00.0000000,200,20
2023-11-16 18:59:00.0000000,300,30
2023-11-16 19:00:01.0000000,400,40
"""


def _run(folder: Path, program: str, *, timeout_s: float = 60.0) -> None:
    asyncio.run(run_tool(Path(sys.executable), ["-c", program], folder, timeout_s=timeout_s, environment={"OWN": "7"}))


def test_a_tool_that_is_not_installed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=r"aiperf is not installed in .*`make bench-independent` installs it"):
        executable(tmp_path, "aiperf")


def test_a_tool_runs_in_its_folder_with_its_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = emptied(tmp_path / "run")
    _run(folder, "import json, os; open('seen.json', 'w').write(json.dumps(dict(os.environ)))")
    seen = json.loads((folder / "seen.json").read_text())
    assert (seen["HOME"], seen["OWN"]) == (str(folder), "7")
    assert "HF_HUB_OFFLINE" not in seen
    assert not any(emptied(folder).iterdir())


def test_a_tool_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=r"ended with status 3\nno such model"):
        _run(tmp_path, "print('no such model'); raise SystemExit(3)")


def test_a_tool_that_does_not_end_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="had not ended after"):
        _run(tmp_path, "import time; time.sleep(3600)", timeout_s=0.2)


def _trace(folder: Path) -> Path:
    path = folder / "trace.csv"
    path.write_text(TRACE)
    return path


def test_an_hour_of_a_trace_is_compressed_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    made = write_schedule(_trace(tmp_path), AZURE, path, seconds=60.0, requests_max=None, context_tokens=1000)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["timestamp"] for line in lines] == [0.0, 45_000.0, 59_000.0]
    assert [(line["input_length"], line["output_length"]) for line in lines] == [(100, 10), (200, 20), (300, 30)]
    assert (made.requests, made.tokens_max) == (3, 330)


def test_a_thinned_trace_covers_the_same_hour(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    made = write_schedule(_trace(tmp_path), AZURE, path, seconds=3600.0, requests_max=2, context_tokens=4000)
    assert made.requests == 2
    assert [json.loads(line)["timestamp"] for line in path.read_text().splitlines()] == [0.0, 2_700_000.0]


def test_a_trace_beyond_the_context_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no request of at most 50 tokens"):
        write_schedule(_trace(tmp_path), AZURE, tmp_path / "s", seconds=60.0, requests_max=None, context_tokens=50)


def test_every_run_has_its_bare_run_before_it() -> None:
    schedule = Schedule(path=Path("schedule.jsonl"), requests=9, tokens_max=99)
    plan = runs(KINDS, Load(), rates=(4.0, 16.0, 8.0), seconds=10.0, schedule=(schedule, 60.0))
    for number, run in enumerate(plan):
        assert run.bare or any(each.bare and each.baseline == run.baseline for each in plan[:number])
    assert [run.name for run in plan if run.tool.name == "aiperf" and not run.bare] == [
        "poisson 4/s", "poisson 16/s", "poisson 8/s", "flex", "cancelled", "limited", "trace of 9",
    ]  # fmt: skip
    flex = next(run for run in plan if run.name == "flex")
    assert flex.tier == Tier.NIW
    assert "service_tier:flex" in flex.options


def test_without_a_schedule_the_trace_is_left_out() -> None:
    assert runs(["trace"], Load(), rates=(4.0,), seconds=10.0, schedule=None) == []
