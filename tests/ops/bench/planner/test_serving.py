"""The bench of ways of serving: each is a step beyond the one before it, from SageServe's to the service's own."""

from pathlib import Path

from controlplane.policies.routing import RoutingSettings
from dataplane.scheduling.ordering import OrderSettings
from ops.bench.planner.serving import SERVINGS, row_of
from ops.bench.planner.strategies_cases import CASES, SCENARIO, case_scenario


def test_servings_go_from_the_papers_to_the_services_own(tmp_path: Path) -> None:
    found = []
    for settings in SERVINGS.values():
        policy = case_scenario(CASES["burst"], "reactive", tmp_path, tmp_path, SCENARIO, settings).policy
        found.append((policy.order, policy.timely_share, policy.rerouting))
    ours = OrderSettings().order, RoutingSettings().timely_share
    assert found == [("fcfs", 1.0, False), (ours[0], 1.0, False), (*ours, False), (*ours, True)]


def test_a_line_has_means_and_ranges() -> None:
    runs = [{"slow_minutes": 2.0, "late": 0.1}, {"slow_minutes": 4.0, "late": 0.3}]
    row = row_of({"case": "burst", "strategy": "lt-d", "serving": "edf"}, runs)
    assert (row["serving"], row["seeds"], row["slow_minutes"], row["late"]) == ("edf", 2, 3.0, 0.2)
    assert (row["slow_minutes_range"], row["late_range"]) == ([2.0, 4.0], [0.1, 0.3])
