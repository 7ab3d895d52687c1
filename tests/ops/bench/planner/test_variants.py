"""Variants of a scenario, side by side."""

import json
from pathlib import Path

from typer import Typer
from typer.testing import CliRunner

from ops.bench.planner import variants

SCENARIOS = Path(__file__).parents[4] / "ops" / "scenarios"
app = Typer()
app.command()(variants.main)


def arguments(scenario: str = "simulate-scaled.toml", *names: str) -> list[str]:
    shorter = ["--set", "traffic.duration_s=1200", "--set", "planning.learn_s=0"]
    return [str(SCENARIOS / scenario), *shorter, *(option for name in names for option in ("--variant", name))]


def test_each_variant_is_simulated_with_its_own_key_and_those_of_all() -> None:
    names = ("scaling.strategy=reactive", "scaling.strategy=siloed")
    result = CliRunner().invoke(app, [*arguments("simulate-scaled.toml", *names), "--json"])
    assert result.exit_code == 0, result.output
    reactive, siloed = json.loads(result.stdout)
    assert (reactive["variant"], siloed["variant"]) == names
    assert reactive["requests"] == siloed["requests"] > 0
    assert 0 < reactive["instance_hours"] < siloed["instance_hours"], "each tier has a minimum of its own"
    assert 0 <= reactive["late"] <= 1
    assert reactive["ttft_p95_s"] > 0
    seeds = ("--seed", "2", "--seed", "1")
    second, first = json.loads(
        CliRunner().invoke(app, [*arguments("simulate-scaled.toml", names[0]), *seeds, "--json"]).stdout
    )
    assert (second["seed"], first["seed"]) == (2, 1)
    assert second["requests"] != first["requests"]
    assert first == reactive, "the scenario's own seed"
    assert "instance-h" in CliRunner().invoke(app, arguments("simulate-scaled.toml", names[0])).stdout


def test_what_cannot_be_simulated_or_compared_is_named() -> None:
    wrong = CliRunner().invoke(app, arguments("simulate-scaled.toml", "scaling.strategy=none"))
    assert (wrong.exit_code, "scaling.strategy" in wrong.stderr) == (2, True)
    fixed = CliRunner().invoke(app, [str(SCENARIOS / "simulate-small.toml"), "--variant", "policy.order=edf"])
    assert fixed.exit_code == 2
    assert "needs [scaling]" in fixed.stderr
