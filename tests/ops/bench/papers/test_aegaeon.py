"""Request-level switching, and the command of the table."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dataplane.protocol.tiers import Objective
from ops.bench.papers import aegaeon, workloads
from ops.simulator.kernel.answers import answers_by_model
from ops.simulator.kernel.costs import InstanceSettings, ModelCosts
from ops.simulator.kernel.events import Events, Kind
from ops.simulator.kernel.requests import Request, Served
from ops.simulator.servers.request_level import RequestLevelCluster, Switching
from tests.ops.simulator.replayed import LATENCY

SWITCH_S = 2.0


def cluster_times(
    gpus: int,
    requests: Sequence[tuple[float, str]],
    *,
    switching: Switching = "first-come",
    output_tokens: Mapping[str, int] | None = None,
) -> tuple[list[Served], int]:
    """Those served, by number, and the switches. `output_tokens` by model."""
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
        answers=answers_by_model(clairvoyant=True),
        ended=ended.append,
        switching=switching,
    )

    def come(number: int, model: str) -> None:
        request = Request(
            number=number,
            arrived_s=events.now_s,
            model=model,
            origin="r",
            tier="IW-F",
            prompt_tokens=10,
            output_tokens=(output_tokens or {}).get(model, 100),
        )
        cluster.submit(Served(request=request, target=Objective(ttft_s=10.0, tbt_s=0.1)))

    for number, (arrived_s, model) in enumerate(requests):
        events.at(arrived_s, Kind.ARRIVAL, partial(come, number, model))
    while events.run(1):
        pass
    assert cluster.busy_s <= gpus * events.now_s * (1 + 1e-9)
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


@pytest.mark.parametrize(("switching", "first"), [("first-come", "b"), ("shortest-first", "c")])
def test_who_waits_for_an_idle_gpu(switching: Switching, first: str) -> None:
    comes = [(0.0, "a"), (0.1, "b"), (0.2, "c")]
    served, _ = cluster_times(1, comes, switching=switching, output_tokens={"b": 200, "c": 20})
    order = sorted(served, key=lambda one: one.first_s)
    assert [one.request.model for one in order][:2] == ["a", first]


def test_a_line_at_each_gpu_does_not_move_to_an_idle_one() -> None:
    """Of two GPUs one has a short and the other a long answer; who came third stands behind the longer one's."""
    comes = [(0.0, "a"), (0.0, "b"), (0.1, "c"), (0.2, "c")]
    tokens = {"a": 1000, "b": 5}
    in_line, _ = cluster_times(2, comes, switching="line-per-gpu", output_tokens=tokens)
    at_once, _ = cluster_times(2, comes, switching="first-come", output_tokens=tokens)
    assert in_line[2].first_s > in_line[0].last_s
    assert in_line[3].first_s == pytest.approx(in_line[2].first_s, abs=0.1)  # it joins its model's run
    assert at_once[2].first_s < at_once[0].last_s


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
    assert aegaeon.measure(aegaeon.Setup(system="dedicated"), one_each).kept
    alone = aegaeon.measure(aegaeon.Setup(system="dedicated"), more)
    assert 0 < alone.unserved < alone.requests
    assert not alone.kept
    assert aegaeon.measure(aegaeon.Setup(system="static"), more).kept
    assert aegaeon.measure(aegaeon.Setup(system="static"), most).unserved > 0


def test_workloads_merged_have_the_requests_of_both(tmp_path: Path) -> None:
    one, other = workloads.workloads_of(written(tmp_path))
    whole = workloads.merged(one, other, tmp_path)
    rows = [line.split(",") for line in whole.path.read_text().splitlines()[1:]]
    assert len(rows) == 80
    assert {row[2] for row in rows} == {f"synth_model_{n:02d}" for n in range(10)}
    assert [row[1] for row in rows] == sorted(row[1] for row in rows)


def test_turns_are_told_a_scaled_objective(tmp_path: Path) -> None:
    """One slot decodes four models: with less time for each token its turns are others."""
    one, _ = workloads.workloads_of(written(tmp_path))
    logs = [
        aegaeon.measure(aegaeon.Setup(prefill_slots=15, slo_scale=scale), one).event_log_hash for scale in (1.0, 0.3)
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
    assert "pooled, SLO x 1: 10 models at 90 % service attainment" in " ".join(result.stderr.split())
    assert plot.stat().st_size > 0
    wrong = CliRunner().invoke(aegaeon.app, ["models", str(written(tmp_path)), "--system", "none"])
    assert wrong.exit_code == 2
    assert "--system" in wrong.stderr
