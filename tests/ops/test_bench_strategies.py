"""The comparison of scaling strategies, on a run of minutes."""

import gzip
import json
from pathlib import Path

from typer import Typer
from typer.testing import CliRunner

from ops.bench.strategies import main

SCENARIO = Path(__file__).parents[2] / "ops" / "scenarios" / "strategies.toml"
QUICK = ["--set", "traffic.until_s=1800", "--set", "planning.learn_s=1200", "--set", "traffic.scale=1.0"]


def app() -> Typer:
    commands = Typer()
    commands.command()(main)
    return commands


def test_strategies_run_on_one_model_of_a_recording(tmp_path: Path) -> None:
    week, out = tmp_path / "week.csv.gz", tmp_path / "out.json"
    lines = ["minute,model,workload,prompt_tokens_per_min"]
    lines += [f"{minute},{model},prod,60000" for minute in range(40) for model in ("A", "B")]
    week.write_bytes(gzip.compress("\n".join(lines).encode()))
    trace = ["--trace", f"sageserve:{week}", "--model", "A"]
    chosen = ["--strategy", "reactive", "--strategy", "lt-ua"]
    result = CliRunner().invoke(app(), [str(SCENARIO), *trace, *QUICK, *chosen, "--json", str(out)])
    assert result.exit_code == 0, result.output
    reactive, planned = json.loads(out.read_text())
    assert (reactive["strategy"], planned["strategy"]) == ("reactive", "lt-ua")
    assert reactive["requests"] == planned["requests"] > 100
    assert reactive["instance_hours"] > reactive["warming_hours"] >= 0
    assert "reactive:" in result.output
    wrong = CliRunner().invoke(app(), [str(SCENARIO), "--trace", f"sageserve:{week}", "--model", "C"])
    assert wrong.exit_code == 2
