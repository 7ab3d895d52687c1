"""Aegaeon's Figure 17: the nodes, and the largest load that keeps 90 %."""

from pathlib import Path

import pytest

from dataplane.scheduling.profile import load_gpu_profile
from ops.bench.papers.aegaeon_hardware import SYSTEMS, Point, System, a10, eight_h800, kept, scenario_of
from ops.bench.papers.workloads import model_name, write_workload
from ops.simulator.run import simulate
from ops.simulator.scenario.scenario import TargetPart
from ops.simulator.traffic.traces import Recorded


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_system_serves_a_light_load_in_time_on_both_nodes(system: System, tmp_path: Path) -> None:
    requests = [Recorded(5.0 * n, model_name(n % 2), 100, 20) for n in range(6)]
    workload = write_workload(tmp_path / "light.csv", requests, models=2)
    for hardware in (a10(), eight_h800(tmp_path)):
        result = simulate(scenario_of(hardware, system, workload, TargetPart(ttft_s=10.0, tbt_s=0.1))).result
        assert (result.requests, result.service_attainment) == (6, 1.0)


def test_a_slot_has_room_for_one_model_and_kv(tmp_path: Path) -> None:
    for hardware, gib in ((a10(), 24), (eight_h800(tmp_path), 320)):
        least_bytes = min(model.weights_bytes for model in hardware.models)
        assert hardware.kv_bytes + hardware.weights_bytes < gib * 2**30
        assert hardware.weights_bytes < 2 * least_bytes
        assert hardware.kv_bytes > 5 * 10**9


def test_four_gpus_each_read_a_quarter_of_the_model(tmp_path: Path) -> None:
    (model,) = load_gpu_profile(eight_h800(tmp_path).profile).models
    read_s = model.weights_bytes / 4 / 3350e9
    assert 10e-3 + read_s < model.latency.decode_base_s < 15e-3 + 1.3 * read_s


def _point(models: int, service: float, unserved: int = 0) -> Point:
    return Point(
        system="pooled", scaled="", models=models, rate=0.1, service=[service], tokens=[1.0], unserved=unserved
    )


def test_kept_is_the_last_load_before_the_first_that_is_not() -> None:
    points = [_point(6, 0.95), _point(2, 1.0), _point(4, 0.89)]
    assert (kept(points, "service", "models"), kept(points, "tokens", "models")) == (2.0, 6.0)
    assert kept([_point(2, 1.0, unserved=1)], "service", "models") == 0.0
