"""What is measured where GPUs cannot keep up, and which models are calm."""

import json
from pathlib import Path

from typer import Typer
from typer.testing import CliRunner

from ops.bench.papers import overload
from ops.bench.papers.aegaeon_testbed import Setup, scenario_of
from ops.bench.papers.workloads import Redraws
from ops.simulator.traffic.traces import read_aegaeon
from tests.ops.bench.papers.test_aegaeon import written


def test_one_model_is_hot_and_the_others_are_as_without(tmp_path: Path) -> None:
    redraws = Redraws(written(tmp_path), tmp_path)
    workload = overload.workload_of(redraws, tmp_path, 4, 0.1, 10.0, 1)
    requests = [one.model for one in read_aegaeon(workload.path, workload.name)]
    assert set(requests) == {f"synth_model_{number:02d}" for number in range(4)}
    assert requests.count("synth_model_00") > 5 * max(requests.count(f"synth_model_{n:02d}") for n in range(1, 4))


def test_a_system_has_the_gpus_that_are_asked_for(tmp_path: Path) -> None:
    workload = overload.workload_of(Redraws(written(tmp_path), tmp_path), tmp_path, 4, 0.1, 1.0, 1)
    fleets = [overload.on_gpus(scenario_of(Setup(system=system), workload), 3).fleet for system in overload.OVERLOADED]
    assert [(fleet.both_slots, fleet.gpus) for fleet in fleets] == [(3, 0), (3, 0), (0, 3)]


def test_calm_models_are_told_apart_from_the_hot_one(tmp_path: Path) -> None:
    command = [str(written(tmp_path)), "--models", "4", "--rate", "0.1", "--hot", "4", "--gpus", "2", "--draws", "1"]
    app = Typer()
    app.command()(overload.main)
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [(row["system"], row["of"]) for row in rows] == [
        (s, o) for s in overload.OVERLOADED for o in ("calm", "hot")
    ]
    assert all(row["requests"] > 0 and 0 <= row["tokens"] <= 1 for row in rows)
