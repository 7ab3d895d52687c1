"""The simulator's benchmarks, on loads that take no time."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ops.bench.papers import aegaeon_fleet
from ops.bench.papers.orders import measure_order
from ops.bench.papers.simulator import measure_speed


def test_a_speed_is_of_the_requests_it_asked_for() -> None:
    speed = measure_speed("dedicated", 300)
    assert speed.requests == pytest.approx(300, rel=0.25)
    assert speed.requests_per_cpu_s == pytest.approx(speed.requests / speed.cpu_s)
    assert 0.1 < speed.busy_share < 1.0


def test_a_fleet_has_the_published_rates() -> None:
    small, large = aegaeon_fleet.parts_of()
    rates_per_s = [*small.rates_per_s, *large.rates_per_s]
    assert (len(small.rates_per_s), len(large.rates_per_s)) == (28, 19)
    assert sum(rates_per_s) / 47 == pytest.approx(0.037)
    assert (max(rates_per_s), round(min(rates_per_s), 2)) == (1.13, 0.01)


def test_active_models_beside_the_theorem(tmp_path: Path) -> None:
    plot = tmp_path / "active.png"
    arguments = ["active", "--models", "20", "--duration-s", "20", "--plot", str(plot), "--json"]
    result = CliRunner().invoke(aegaeon_fleet.app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert 0 < found["active_mean"] < found["active_max"] <= 20
    assert found["theorem"] == pytest.approx(found["active_mean"], rel=0.6)
    assert plot.stat().st_size > 0


def test_priority_first_spares_the_fast_tier_at_the_cost_of_the_other() -> None:
    load = {"rate_per_s": 1.0, "burst": 6.0, "burst_s": 15.0, "duration_s": 60.0}
    fcfs, priority = measure_order("fcfs", 1, **load), measure_order("pf", 1, **load)
    assert priority.fast_missed < fcfs.fast_missed
    assert priority.fast_p75_s < fcfs.fast_p75_s
    assert priority.normal_p75_s > fcfs.normal_p75_s
