"""Request-level switching, the dispatcher on trial, and the command of the table."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from ops.simulator import aegaeon
from ops.simulator.costs import InstanceSettings, ModelCosts
from ops.simulator.events import Events, Kind
from ops.simulator.request_level import RequestLevelCluster
from ops.simulator.requests import Request, Served, Target
from ops.simulator.run import simulate
from tests.ops.simulator.replayed import LATENCY

SWITCH_S = 2.0


def cluster_times(gpus: int, requests: Sequence[tuple[float, str]]) -> tuple[list[Served], int]:
    """Those served, by number, and the switches."""
    events = Events()
    ended: list[Served] = []
    models = {
        name: ModelCosts(name=name, latency=LATENCY, weights_bytes=20, kv_bytes_per_token=1, bytes_per_s=20 / SWITCH_S)
        for name in "abc"
    }
    cluster = RequestLevelCluster(
        "c",
        "r",
        gpus,
        models,
        InstanceSettings(kv_bytes=10**6),
        gpu_type="g",
        events=events,
        ended=ended.append,
    )

    def come(number: int, model: str) -> None:
        request = Request(
            number=number,
            arrived_s=events.now_s,
            model=model,
            origin="r",
            tier="IW-F",
            prompt_tokens=10,
            output_tokens=100,
        )
        cluster.submit(Served(request=request, target=Target(ttft_s=10.0, tbt_s=0.1)))

    for number, (arrived_s, model) in enumerate(requests):
        events.at(arrived_s, Kind.ARRIVAL, lambda n=number, m=model: come(n, m))
    while events.run_next():
        pass
    assert cluster.busy_s <= gpus * events.now_s
    return sorted(ended, key=lambda served: served.request.number), cluster.switches


def test_a_gpu_switches_when_nothing_of_its_model_is_left() -> None:
    (first, second, joins), switches = cluster_times(1, [(0.0, "a"), (0.1, "b"), (0.2, "a")])
    assert switches == 2
    assert first.first_s > SWITCH_S
    assert joins.first_s == pytest.approx(first.first_s, abs=0.1)  # its model is coming: it does not wait for "b"
    assert second.first_s > max(first.last_s, joins.last_s) + SWITCH_S


def test_a_model_that_is_there_costs_no_switch() -> None:
    (first, later), switches = cluster_times(2, [(0.0, "a"), (60.0, "a")])
    assert switches == 1
    assert later.ttft_s < first.ttft_s - SWITCH_S * 0.99


def workloads_of(folder: Path, output: int = 60) -> Path:
    lines = ["workload,request_time,model_name,input_len,output_len"]
    for models in (4, 6):
        for number in range(40):
            at = f"00:00:{number // 2:02d}.{500 * (number % 2):03d}"
            lines.append(f"synth-{models}-0.1-1.0-1.0,{at},synth_model_{number % models:02d},{100 + number},{output}")
    path = folder / "workloads.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_joining_a_slot_that_decodes_the_model_spares_switches(tmp_path: Path) -> None:
    switches = {}
    for decode_slot in ("live", "join"):
        setup = aegaeon.Setup(workloads=workloads_of(tmp_path, 400), prefill_slots=13, decode_slot=decode_slot)
        world = simulate(aegaeon.scenario_of(setup, "synth-6-0.1-1.0-1.0", "pooled")).world
        assert sum(tally.ended for tally in world.tallies.values()) == 40
        switches[decode_slot] = sum(server.switches for server in world.servers)
    assert switches["join"] < switches["live"]


def test_the_table(tmp_path: Path) -> None:
    command = Typer()
    command.command()(aegaeon.main)
    out = tmp_path / "rows.json"
    arguments = [str(workloads_of(tmp_path)), "--least", "1", "--json", str(out)]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())
    assert [(row["serving"], row["models"]) for row in rows] == [
        ("pooled", 4),
        ("pooled", 6),
        ("request-level", 4),
        ("request-level", 6),
    ]
    assert "pooled: 6 models at 90 % service attainment" in result.stdout
    assert CliRunner().invoke(command, [*arguments, "--rate", "9"]).exit_code == 2
