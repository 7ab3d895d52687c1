"""The comparison of scaling strategies, on a run of minutes, and what instance hours are said to be for."""

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from ops.bench.planner import strategies
from ops.bench.planner.strategies import FRONTIER, compared, hours_at
from ops.bench.planner.strategies_cases import (
    CASES,
    POINTS,
    SCENARIO,
    case_scenario,
    parts_of,
    tail_hours,
    thetas_of,
    work_hours,
)
from ops.plots.lines_plot import LinesPanel, draw_lines
from ops.simulator.results.results import EndpointSeries, Row, Series, State
from ops.simulator.scenario.scenario import Scenario, ScenarioError
from ops.simulator.traffic.traffic_parts import MixedPart

RECORDING = "sageserve/nov2024_week_prompt_tokens_per_min.csv.gz"
QUICK = ["traffic.until_s=1800", "planning.learn_s=1200", "traffic.scale=1.0"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    week = tmp_path / RECORDING
    week.parent.mkdir()
    lines = ["minute,model,workload,prompt_tokens_per_min"]
    lines += [f"{minute},{model},prod,60000" for minute in range(40) for model in ("A", "B")]
    week.write_bytes(gzip.compress("\n".join(lines).encode()))
    return tmp_path


def rows_of(data: Path, *more: str) -> list[dict[str, Any]]:
    commands = Typer()
    commands.command()(strategies.main)
    quick = [word for setting in QUICK for word in ("--set", setting)]
    arguments = ["--data", str(data), "--runs", str(data / "runs"), "--case", "a-day", *quick, "--json", *more]
    result = CliRunner().invoke(commands, arguments)
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = json.loads(result.stdout)
    return rows


def test_strategies_are_compared_on_one_model_of_a_recording_and_runs_are_kept(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(data, "--strategy", "reactive", "--strategy", "lt-ua")
    reactive, planned = rows
    assert (reactive["strategy"], planned["strategy"]) == ("reactive", "lt-ua")
    assert reactive["requests"] == planned["requests"] > 100
    assert reactive["distances"] == {"reactive": {"hours": 0.0, "all_hours": 0.0, "no_later": True}}
    distance = planned["instance_hours"] / reactive["instance_hours"] - 1
    assert planned["distances"]["reactive"]["hours"] == pytest.approx(distance)
    assert planned["published"] == pytest.approx(-0.234, abs=1e-3)

    simulated: list[int] = []
    simulate = strategies.simulate
    monkeypatch.setattr(strategies, "simulate", lambda *a, **k: simulated.append(k["seed"]) or simulate(*a, **k))
    [again] = rows_of(data, "--strategy", "reactive")
    assert again == reactive
    assert not simulated
    [both] = rows_of(data, "--strategy", "reactive", "--seed", "1", "--seed", "2")
    assert both["seeds"] == 2
    low, high = both["instance_hours_range"]
    assert reactive["instance_hours"] in (low, high)
    assert both["instance_hours"] == pytest.approx((low + high) / 2)
    assert simulated == [2]
    shown = rows_of(data, "--kept", "--seed", "1", "--seed", "2", "--seed", "3")
    assert [(row["strategy"], row["seeds"]) for row in shown] == [("reactive", 2), ("lt-ua", 1)]
    assert simulated == [2]
    rows_of(data, "--strategy", "reactive", "--set", "scaling.cooldown_s=30")
    assert simulated == [2, 1], "a run of another scenario was taken for this one"
    [kept] = (data / "runs").glob("*-lt-ua-1.json")
    before = json.loads(kept.read_text())
    assert planned["instance_hours"] == pytest.approx(before["instance_hours"] - before["tail_hours"])
    del before["tail_hours"]
    kept.write_text(json.dumps(before))
    [shown] = rows_of(data, "--kept", "--strategy", "lt-ua")
    assert (shown["instance_hours"], shown["tail_hours"]) == (before["instance_hours"], None)
    kept.write_text(kept.read_text().replace('"ttft_p99_s"', '"ttft_p90_s"'))
    rows_of(data, "--strategy", "lt-ua")
    assert simulated == [2, 1, 1], "a run that does not tell all was taken for one that does"


def test_hours_against_lateness_are_drawn_a_line_for_each_strategy(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[LinesPanel] = []

    def draw(panels: Sequence[LinesPanel], title: str, path: Path) -> None:
        drawn.extend(panels)
        draw_lines(panels, title, path)

    monkeypatch.setattr(strategies, "draw_lines", draw)
    picture = tmp_path / "frontier.png"
    chosen = ("reactive", "reactive-50-25", "lt-ua")
    rows = rows_of(data, *(word for name in chosen for word in ("--strategy", name)), "--plot", str(picture))
    [panel] = drawn
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert panel.title == "a-day"
    assert {name: len(points) for name, points in panel.lines.items()} == {"reactive": 2, "lt-ua": 1}
    points = sorted(point for line in panel.lines.values() for point in line)
    assert points == sorted((row["instance_hours"], 100 * row["late"]) for row in rows)


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_run(data: Path) -> None:
    commands = Typer()
    commands.command()(strategies.main)
    given = ["--data", str(data), "--runs", str(data / "runs"), "--plot", str(data / "frontier.txt")]
    result = CliRunner().invoke(commands, given)
    assert result.exit_code == 2
    assert not (data / "runs").exists()


def test_names_that_are_none_are_refused(data: Path) -> None:
    commands = Typer()
    commands.command()(strategies.main)
    given = ["--data", str(data), "--runs", str(data)]
    for option in ("--case", "--strategy"):
        assert CliRunner().invoke(commands, [*given, option, "none"]).exit_code == 2
    (data / RECORDING).write_bytes(gzip.compress(b"minute,model,workload,prompt_tokens_per_min\n0,B,prod,1"))
    assert CliRunner().invoke(commands, [*given, "--case", "a-day"]).exit_code == 2


def test_other_settings_are_kept_apart_from_the_runs_of_the_page(data: Path) -> None:
    commands = Typer()
    commands.command()(strategies.main)
    given = ["--data", str(data), "--kept"]
    for more in (["--set", "planning.epsilon=1"], ["--scenario", str(data / RECORDING)]):
        refused = CliRunner().invoke(commands, [*given, *more])
        assert refused.exit_code == 2
        assert "another folder" in refused.output


def with_c(data: Path) -> None:
    """The recording's B is called C."""
    text = gzip.decompress((data / RECORDING).read_bytes()).decode().replace(",B,", ",C,")
    (data / RECORDING).write_bytes(gzip.compress(text.encode()))


@pytest.mark.parametrize("name", ["four-day", "four-week"])
def test_four_models_are_as_they_are_alone_but_on_one_fleet(name: str, data: Path) -> None:
    with_c(data)
    scenario = case_scenario(CASES[name], "reactive", data, data, SCENARIO, ())
    assert [model.name for model in scenario.models] == ["A", "C", "coding", "mid"]
    assert isinstance(scenario.traffic, MixedPart)
    for (model, case), own, part in zip(
        CASES[name].parts.items(), scenario.models, scenario.traffic.parts, strict=True
    ):
        alone = case_scenario(case, "reactive", data, data, SCENARIO, ())
        assert own == alone.models[0].model_copy(update={"name": model})
        assert part == alone.traffic.model_copy(update={"models": {model: 1.0}})
        assert part.duration_s == scenario.traffic.duration_s
        assert alone.planning == scenario.planning
    there = Counter[str]()
    for one in scenario.fleet.instances:
        there[one.region] += one.count
    assert there == {node.region: node.count for node in scenario.fleet.nodes}
    moved = scenario.model_dump()
    for part in moved["traffic"]["parts"]:
        part["path"] = "elsewhere" / part["path"]
    assert strategies.digest_of(Scenario.model_validate(moved)) == strategies.digest_of(scenario)


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_learnt_before_it_is_served(name: str, data: Path) -> None:
    with_c(data)
    scenario = case_scenario(CASES[name], "lt-i", data, data, SCENARIO, ())
    served_s = scenario.traffic.duration_s - scenario.planning.learn_s  # type: ignore[union-attr, operator]
    assert scenario.planning.learn_s >= 86_400
    assert served_s in {3 * 3600, 86_400, 6 * 86_400, 7 * 86_400}


@pytest.mark.parametrize("variant", POINTS)
def test_every_variant_is_a_scenario(variant: str, data: Path) -> None:
    scenario = case_scenario(CASES["burst"], variant, data, data, SCENARIO, ())
    assert scenario.scaling is not None
    assert scenario.scaling.strategy == POINTS[variant][0]
    assert set(FRONTIER) <= set(POINTS)


def test_a_planner_that_takes_instances_for_more_does_not_make_less_work_of_the_same_requests(data: Path) -> None:
    busy, usual = (
        case_scenario(CASES["a-day"], name, data, data, SCENARIO, ())
        for name in ("lt-d-reserve-busy", "lt-d-reserve-median")
    )
    assert thetas_of(busy) == {name: pytest.approx(1.33 * theta) for name, theta in thetas_of(usual).items()}
    [busy_row, usual_row] = rows_of(data, "--strategy", "lt-d-reserve-busy", "--strategy", "lt-d-reserve-median")
    assert busy_row["work_hours"] == pytest.approx(usual_row["work_hours"])
    assert 1.33 * busy_row["parts"]["demand"] == pytest.approx(usual_row["parts"]["demand"]), "as the plans take it"


def test_rates_that_hang_on_the_gpu_type_are_refused(data: Path) -> None:
    scenario = case_scenario(CASES["a-day"], "lt-i", data, data, SCENARIO, ["models.0.tokens_per_s={ H800 = 9 }"])
    with pytest.raises(ScenarioError, match=r"models\.0\.tokens_per_s: must be one number here"):
        thetas_of(scenario)


def series(demand: float, forecast: float | None, planned: int | None, minutes: int = 60) -> EndpointSeries:
    """An hour in which the first minute alone asks for more: 5 times `demand`."""
    nothing = [0.0] * minutes
    return EndpointSeries(
        model="m",
        region="east",
        demand=[5 * demand, *[demand] * (minutes - 1)],
        forecast=[forecast] * minutes,
        planned=[planned] * minutes,
        serving={},
        pooled=nothing,
        warming=nothing,
        draining=nothing,
        spot=nothing,
        utilization=[None] * minutes,
    )


def test_hours_after_the_last_request_are_a_tail() -> None:
    gpus: dict[State, list[float]] = {"serving": [2.0] * 90, "spot": [9.0] * 90, "draining": [0.0] * 60 + [1.0] * 30}
    whole = Series(start_s=0.0, step_s=60.0, gpus=gpus, switches=[], endpoints=[], pools=[], queues=[], tiers=[])
    assert tail_hours(whole, 3600.0) == pytest.approx(1.5)
    assert tail_hours(whole, 5400.0) == 0


def test_work_is_what_all_tiers_ask_for_at_each_models_theta() -> None:
    def row(model: str | None, tier: str, tokens: int) -> Row:
        return Row(
            model=model,
            tier=tier,
            requests=1,
            failed=0,
            service_attainment=1.0,
            token_attainment=1.0,
            ttft_violations=0.0,
            input_tokens=tokens,
            output_tokens=9,
            ttft_s=None,
            tbt_mean_s=None,
            service_s=None,
        )

    rows = [row("a", "IW-F", 3_600_000), row("a", "NIW", 1_800_000), row("b", "IW-F", 720_000), row(None, "IW-F", 7)]
    assert work_hours(rows, {"a": 1000.0, "b": 100.0}) == pytest.approx(1.0 + 0.5 + 2.0)


def test_instance_hours_are_told_apart() -> None:
    endpoints = [series(300, 800, 9), series(0, 10, 2)]
    parts = parts_of(endpoints, {"m": 100.0}, 2, 10.0)
    assert parts.demand == pytest.approx(3 * 64 / 60)
    assert parts.demand + parts.peak == pytest.approx(3 * 9 / 5), "the mean of the fullest five minutes"
    assert parts.demand + parts.peak + parts.headroom == pytest.approx(8.1)
    assert parts.minimum == pytest.approx(2 - 0.1)
    assert parts.rounding == pytest.approx(11 - 10.0)
    assert parts.beside == pytest.approx(10.0 - 11)
    assert sum(astuple(parts)) == pytest.approx(10.0)


def test_without_a_plan_only_demand_and_minimum_are_told_apart() -> None:
    parts = parts_of([series(100, None, None)], {"m": 100.0}, 2, 4.0)
    assert (parts.peak, parts.headroom, parts.rounding) == (0, 0, 0)
    assert parts.demand + parts.minimum == pytest.approx((5 + 59 * 2) / 60)
    assert sum(astuple(parts)) == pytest.approx(4.0)


def point(strategy: str, hours: float, late: float, slow: int, tail_hours: float | None = 10.0) -> dict[str, Any]:
    figures = {"instance_hours": hours, "tail_hours": tail_hours, "late": late, "slow_minutes": slow}
    return {"strategy": strategy, **figures}


def test_strategies_are_compared_at_the_quality_that_they_give() -> None:
    points = [
        point("reactive", 200, 0.08, 70, tail_hours=None),
        point("reactive-50-25", 300, 0.04, 20, tail_hours=40.0),
        point("lt-i", 240, 0.05, 10),
        point("lt-d", 240, 0.05, 30),
        point("oracle", 230, 0.09, 5),
    ]
    found = {row["strategy"]: (row["beaten_by"], row["reactive_alike"]) for row in compared(points)}
    assert found == {
        "reactive": (None, 200),
        "reactive-50-25": (None, 300),
        "lt-i": (None, pytest.approx(275)),
        "lt-d": ("lt-i", pytest.approx(275)),
        "oracle": (None, None),
    }
    distances = {row["strategy"]: row["distances"] for row in compared(points)}
    assert distances["lt-i"] == {
        "reactive": {"hours": pytest.approx(0.2), "all_hours": None, "no_later": True},
        "reactive-50-25": {"hours": pytest.approx(-0.2), "all_hours": pytest.approx(250 / 340 - 1), "no_later": False},
    }
    assert hours_at([(0.05, 9.0), (0.05, 7.0)], 0.05) == 9.0
    assert hours_at([], 0.05) is None
