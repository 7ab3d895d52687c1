"""Scenarios with [scaling]: the example, errors that name the key, and what is written of a run."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from ops.cli.main import app
from ops.client.api import CommandError
from ops.simulator.results.results import ResultError, read_result
from ops.simulator.run import build_world, simulate
from ops.simulator.scenario.scenario import ScenarioError, load_scenario
from tests.ops.simulator.examples import EXAMPLES, SCALED, SMALL, changed
from tests.ops.simulator.scaled import REGIONS, scaled


@pytest.mark.parametrize(
    "name", ["simulate-scaled.toml", "simulate-types.toml", "simulate-pools.toml", "strategies.toml"]
)
def test_the_examples_are_some(name: str) -> None:
    scenario = load_scenario(EXAMPLES / name)
    assert scenario.scaling is not None
    assert scenario.with_strategy("chiron").scaling.strategy == "chiron"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('strategy = "lt-i"', 'strategy = "lt-x"', "scaling.strategy: Input should be 'lt-i'"),
        ("instances_max = 6", "instances_max = 1", "scaling: instances_min 2 is above instances_max 1"),
        ("instances_max = 6", "out_above = 0.2", "scaling: need 0 <= in_below < out_above <= 1"),
        ('"ARIMA", "Theta"', '"ARIMAX"', "planning: forecasters: 'ARIMAX' is none of"),
        ("learn_s = 14_400 ", "learn_s = 14_401 ", "planning.learn_s: Input should be a multiple of 60"),
        ("local_s = 600", "local_s = -1", "provisioning.local_s: Input should be greater than or equal to 0"),
        ("remote_s = 7200", "weights = { huge = [] }", "provisioning.weights: 'huge' is none of large"),
        ("remote_s = 7200", 'weights = { large = ["x"] }', "provisioning.weights.large: 'x' is none of us-central"),
        ("tokens_per_s = 700 ", "gpus = 1 ", "models.0.tokens_per_s: is needed where [scaling] is"),
        ('{ region = "us-west", count = 2, slots = 4 }', '{ region = "us-wst" }', "fleet.nodes.2.region: 'us-wst' is"),
        (
            "at_s = 21_600",
            "rate_per_day = 1\nat_s = 1",
            "failures.0: exactly one of at_s and rate_per_day",
        ),
        ("at_s = 21_600", "", "failures.0: exactly one of at_s and rate_per_day"),
        (
            "learn_s = 14_400 ",
            "pools = true\npool_fill = 1.1 ",
            "planning.pool_fill: Input should be less than or equal",
        ),
        ("learn_s = 14_400 ", "pools = true ", "fleet.nodes.0.host_bytes: is needed where planning.pools is set"),
    ],
)
def test_errors_name_the_key(tmp_path: Path, before: str, after: str, message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_scenario(changed(SCALED, tmp_path, (before, after)))
    assert message in str(caught.value)


def test_instances_and_nodes_that_are_not_there_are_refused(tmp_path: Path) -> None:
    crowded = load_scenario(
        changed(SCALED, tmp_path, ('region = "us-east", count = 3', 'region = "us-east", count = 9'))
    )
    with pytest.raises(ScenarioError, match=r"fleet.instances: 1 of large: GPUs full in us-east: 0 of 8"):
        simulate(crowded)
    with pytest.raises(ScenarioError, match=r"failures.0.node: us-east has 2 nodes"):
        simulate(load_scenario(changed(SCALED, tmp_path, ("node = 0", "node = 2"))))
    with pytest.raises(ValidationError, match=r"needs fleet\.serving = 'dedicated' and fleet\.nodes"):
        scaled(fleet={"nodes": []})
    nodes = [{"region": region, "count": 2, "slots": 3, "host_bytes": 1} for region in REGIONS]
    with pytest.raises(ValidationError, match=r"fleet\.weights_bytes: is needed where planning\.pools is set"):
        scaled(planning={"pools": True}, fleet={"nodes": nodes})
    with pytest.raises(ScenarioError, match=r"planning\.pools: needs \[scaling\]"):
        load_scenario(changed(SMALL, tmp_path, ("[policy]", "[planning]\npools = true\n\n[policy]")))
    with pytest.raises(ValidationError, match=r"failures: needs \[scaling\]"):
        scaled(scaling=None, failures=[{"region": "east", "at_s": 1.0, "down_s": 1.0}])
    with pytest.raises(ScenarioError, match=r"failures.0.at_s: 299 is before planning.learn_s, 300"):
        simulate(scaled(failures=[{"region": "east", "at_s": 299.0, "down_s": 1.0}]))


def test_the_command_takes_a_policy_and_writes_what_can_be_read(tmp_path: Path) -> None:
    path = changed(
        SCALED, tmp_path, ("duration_s = 25_200 ", "duration_s = 900 "), ("learn_s = 14_400 ", "learn_s = 600 ")
    )
    out = tmp_path / "out.json"
    result = CliRunner().invoke(app, ["simulate", str(path), "--policy", "reactive", "--json", str(out)])
    assert result.exit_code == 0, result.output
    read = read_result(out)
    assert read.strategy == "reactive"
    assert read.event_log_hash in result.stdout
    assert read.totals.starts["present"] == 7
    assert len(read.series.endpoints) == 3
    out.write_text(out.read_text().replace('"slots"', '"slot"', 1))
    with pytest.raises(ResultError, match=r"out.json: slots?: "):
        read_result(out)
    out.write_text("no")
    with pytest.raises(ResultError, match="Invalid JSON"):
        read_result(out)


def test_a_policy_needs_scaling_and_a_name() -> None:
    small = CliRunner().invoke(app, ["simulate", str(SMALL), "--policy", "lt-u"])
    assert isinstance(small.exception, CommandError)
    assert "scaling: is needed" in str(small.exception)
    wrong = CliRunner().invoke(app, ["simulate", str(SCALED), "--policy", "best"])
    assert isinstance(wrong.exception, CommandError)
    assert "'best' is none of lt-i, lt-u" in str(wrong.exception)


def test_pools_for_which_every_model_is_too_large_are_refused() -> None:
    small = load_scenario(EXAMPLES / "simulate-pools.toml", settings=["fleet.weights_bytes=13_499_999_999"])
    with pytest.raises(ScenarioError, match=r"fleet.weights_bytes: no model fits into what the slot of a pool has"):
        build_world(small, 1)
    build_world(load_scenario(EXAMPLES / "simulate-pools.toml", settings=["fleet.weights_bytes=13_500_000_000"]), 1)
