"""The command of the table, and the workloads that it serves."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from typer.testing import CliRunner

from ops.bench.papers import aegaeon, aegaeon_testbed, workloads
from ops.simulator.scenario.formats import traffic_of


def written(folder: Path, sizes: Sequence[int] = (4, 6)) -> Path:
    lines = ["workload,request_time,model_name,input_len,output_len"]
    for models in sizes:
        for number in range(40):
            at = f"00:00:{number // 2:02d}.{500 * (number % 2):03d}"
            lines.append(f"synth-{models}-0.1-1.0-1.0,{at},synth_model_{number % models:02d},{100 + number},60")
    path = folder / "workloads.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_gpu_keeps_as_many_models_as_it_holds_and_nobody_serves_the_others(tmp_path: Path) -> None:
    one_each, more, most = workloads.workloads_of(written(tmp_path, (16, 22, 34)))
    assert aegaeon_testbed.measure(aegaeon_testbed.Setup(system="dedicated"), one_each).keeps("service")
    alone = aegaeon_testbed.measure(aegaeon_testbed.Setup(system="dedicated"), more)
    assert 0 < alone.unserved < alone.requests
    assert not alone.keeps("service")
    assert aegaeon_testbed.measure(aegaeon_testbed.Setup(system="static"), more).keeps("service")
    assert aegaeon_testbed.measure(aegaeon_testbed.Setup(system="static"), most).unserved > 0


def test_pools_share_their_time_by_deadlines_or_in_rounds(tmp_path: Path) -> None:
    workload = workloads.workloads_of(written(tmp_path))[0]
    setups = [
        aegaeon_testbed.Setup(system=system)
        for system in ("pooled", "pooled-both", "pooled-deadlines", "pooled-both-deadlines")
    ]
    scenarios = [aegaeon_testbed.scenario_of(setup, workload) for setup in setups]
    assert [one.policy.time_slices for one in scenarios] == ["rounds", "rounds", "deadlines", "deadlines"]
    assert [one.fleet.both_slots for one in scenarios] == [0, 16, 0, 16]
    assert {one.fleet.serving for one in scenarios} == {"pooled"}


def test_workloads_merged_have_the_requests_of_both(tmp_path: Path) -> None:
    one, other = workloads.workloads_of(written(tmp_path))
    whole = workloads.merged(one, other, tmp_path)
    rows = [line.split(",") for line in whole.path.read_text().splitlines()[1:]]
    assert len(rows) == 80
    assert {row[2] for row in rows} == {f"synth_model_{n:02d}" for n in range(10)}
    assert [row[1] for row in rows] == sorted(row[1] for row in rows)


def test_a_redrawn_workload_has_what_its_smaller_ones_have(tmp_path: Path) -> None:
    path = written(tmp_path)
    redraws = workloads.Redraws(path, tmp_path)
    lengths = {tuple(line.split(",")[3:]) for line in path.read_text().splitlines()[1:]}
    drawn = {}
    for models, draw in ((4, 1), (6, 1), (4, 2)):
        workload = redraws.workload(models, "0.1", draw, duration_s=120.0)
        assert workload.models == models
        drawn[models, draw] = [line.split(",")[1:] for line in workload.path.read_text().splitlines()[1:]]
        times = [row[0] for row in drawn[models, draw]]
        assert times == sorted(times)
        assert times[-1] < "00:02:00"
    of_six, of_four = drawn[6, 1], drawn[4, 1]
    assert [row for row in of_six if row[1] in {"synth_model_00", "synth_model_01"}] == [
        row for row in of_four if row[1] in {"synth_model_00", "synth_model_01"}
    ]
    assert max(Counter(row[1] for row in of_six).values()) <= 12
    assert {(row[2], row[3]) for row in of_six} <= lengths
    assert drawn[4, 2] != of_four


def test_limits_are_those_of_each_draw_by_either_metric(tmp_path: Path) -> None:
    """A GPU for each model: sixteen keep their service and their tokens on every draw, and no more are served."""
    arguments = ["limits", str(written(tmp_path)), "--draws", "2", "--system", "dedicated", "--most", "22", "--json"]
    result = CliRunner().invoke(aegaeon.app, arguments)
    assert result.exit_code == 0, result.output
    limit = {"mean": 16, "draws": [16, 16]}
    assert json.loads(result.stdout) == [{"setup": "dedicated, SLO x 1", "service": limit, "token": limit}]
    result = CliRunner().invoke(aegaeon.app, [*arguments[:-1], "--least", "18"])
    assert "0.0 (0 to 0)" in result.stdout


def test_rates_are_measured_on_each_draw(tmp_path: Path) -> None:
    arguments = ["rates", str(written(tmp_path, (40,))), "--system", "dedicated", "--json"]
    rows = json.loads(CliRunner().invoke(aegaeon.app, [*arguments, "--draws", "2"]).stdout)
    assert [(row["draw"], row["rate"]) for row in rows] == [(1, "0.1"), (2, "0.1")]
    assert rows[0]["event_log_hash"] != rows[1]["event_log_hash"]
    [own] = json.loads(CliRunner().invoke(aegaeon.app, arguments).stdout)
    assert (own["draw"], own["requests"]) == (0, 40)


def test_lengths_are_scaled_and_the_requests_else_the_same(tmp_path: Path) -> None:
    one, _ = workloads.workloads_of(written(tmp_path))
    longer = replace(one, scale_inputs=2.0, scale_outputs=0.5)
    plain, scaled = (
        list(traffic_of(aegaeon_testbed.scenario_of(aegaeon_testbed.Setup(), each), 1)) for each in (one, longer)
    )
    assert [(request.arrived_s, request.model) for request in plain] == [
        (request.arrived_s, request.model) for request in scaled
    ]
    assert [(2 * request.prompt_tokens, 30) for request in plain] == [
        (request.prompt_tokens, request.output_tokens) for request in scaled
    ]


def test_limits_are_found_at_the_rate_and_for_the_lengths_that_are_asked_for(tmp_path: Path) -> None:
    """At a twentieth of the objectives one GPU's longer answers are late even where it serves few models."""
    arguments = ["limits", str(written(tmp_path, (4,))), "--draws", "1", "--system", "static", "--json"]
    arguments += ["--least", "4", "--most", "8", "--slo-scale", "0.05"]
    limits, said = {}, ""
    for options in ((), ("--scale-outputs", "20"), ("--rate", "0.5")):
        result = CliRunner().invoke(aegaeon.app, [*arguments, *options])
        assert result.exit_code == 0, result.output
        [row] = json.loads(result.stdout)
        limits[options], said = row["token"]["mean"], result.stderr
    assert limits[()] > limits["--scale-outputs", "20"]
    assert "models at 0.5, draw 1" in said


def test_where_time_goes_is_told_of_each_setup_and_size(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    arguments = ["where-time-goes", str(written(tmp_path)), "--models", "4", "--models", "24", "--draws", "2"]
    result = CliRunner().invoke(aegaeon.app, [*arguments, "--plot", str(plot), "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [(row["setup"].partition(",")[0], row["models"]) for row in rows] == [
        (system, models) for system in aegaeon_testbed.POOLS for models in (4, 24)
    ]
    for row in rows:
        for shares in (row["requests"], row["slots"]):
            assert abs(sum(share["mean"] for share in shares.values()) - 1) < 1e-9
            assert all(0 <= share["low"] <= share["mean"] <= share["high"] for share in shares.values())
    busier, aggregated = rows[1], rows[3]
    assert busier["slots"]["idle"]["mean"] < rows[0]["slots"]["idle"]["mean"]
    assert busier["switches"].keys() == {"7B", "9B", "13B"}
    assert busier["switches"]["13B"]["quantiles"]["1"] > busier["switches"]["7B"]["quantiles"]["0.5"]
    assert busier["kv"]["mean_s"] > aggregated["kv"]["mean_s"] == 0
    assert "Figure 15" in plot.read_text()
    shown = CliRunner().invoke(aegaeon.app, [*arguments, "--system", "pooled"], env={"COLUMNS": "250"})
    assert "decode waiting" in shown.stdout
    assert "within 10 ms" in shown.stdout
    wrong = CliRunner().invoke(aegaeon.app, [*arguments, "--system", "static"])
    assert (wrong.exit_code, "--system" in wrong.stderr) == (2, True)


def test_a_pool_on_nodes_keeps_each_model_and_its_kv_on_one(tmp_path: Path) -> None:
    one, _ = workloads.workloads_of(written(tmp_path))
    whole, apart = (aegaeon_testbed.measure(aegaeon_testbed.Setup(nodes=nodes), one) for nodes in (0, 2))
    assert whole.event_log_hash != apart.event_log_hash
    assert (apart.nodes, apart.unserved) == (2, 0)
    for options in (("--system", "static"), ("--system", "pooled", "--prefill-slots", "5")):
        arguments = ["models", str(one.path), "--least", "4", "--most", "4", "--nodes", "2", *options]
        result = CliRunner().invoke(aegaeon.app, arguments)
        assert result.exit_code == 2
        assert "--nodes" in result.stderr


def test_a_metric_is_kept_by_itself() -> None:
    row = aegaeon_testbed.Row(
        system="pooled",
        models=1,
        rate="0.1",
        scale_inputs=1.0,
        scale_outputs=1.0,
        draw=0,
        slo_scale=1.0,
        prefill_slots=6,
        nodes=0,
        requests=1,
        unserved=0,
        service_attainment=0.93,
        token_attainment=0.87,
        switches=0,
        busy_share=1.0,
        seconds=1.0,
        event_log_hash="",
    )
    assert (row.keeps("service"), row.keeps("token")) == (True, False)
    assert not replace(row, unserved=1).keeps("service")


def test_turns_are_told_a_scaled_objective(tmp_path: Path) -> None:
    """One slot decodes four models: with less time for each token its turns are others."""
    one, _ = workloads.workloads_of(written(tmp_path))
    logs = [
        aegaeon_testbed.measure(aegaeon_testbed.Setup(prefill_slots=15, slo_scale=scale), one).event_log_hash
        for scale in (1.0, 0.3)
    ]
    assert logs[0] != logs[1]


def test_the_table(tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    arguments = ["models", str(written(tmp_path)), "--least", "4", "--most", "10", "--every", "6", "--json"]
    arguments += ["--system", "pooled", "--system", "request-level", "--plot", str(plot)]
    result = CliRunner().invoke(aegaeon.app, arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    expected = [(system, models) for system in ("pooled", "request-level") for models in (4, 10)]
    assert [(row["system"], row["models"]) for row in rows] == expected
    said = "pooled, SLO x 1: 10 models at 90 % service attainment, 10 at 90 % of tokens in time"
    assert said in " ".join(result.stderr.split())
    assert plot.stat().st_size > 0
    wrong = CliRunner().invoke(aegaeon.app, ["models", str(written(tmp_path)), "--system", "none"])
    assert wrong.exit_code == 2
    assert "--system" in wrong.stderr
