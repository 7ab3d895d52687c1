"""What a plan is made for, and what scaling takes as the forecast for now."""

import pytest

from controlplane.policies.demand import demand_to_plan, forecast_at, serving_backlogs, serving_model
from controlplane.policies.facts import Backlog, Endpoint

EAST, WEST = Endpoint(model="m", region="east"), Endpoint(model="m", region="west")


def test_a_share_of_deferred_demand_is_added_to_every_window() -> None:
    demand = demand_to_plan({EAST: (10.0, 20.0)}, {EAST: 100.0, WEST: 50.0}, niw_share=0.1)
    assert demand == {EAST: (20.0, 30.0), WEST: (5.0, 5.0)}


def test_a_single_value_holds_throughout() -> None:
    assert demand_to_plan({EAST: (10.0, 20.0), WEST: (7.0,)}, {}, niw_share=0.1)[WEST] == (7.0, 7.0)
    assert demand_to_plan({}, {EAST: 10.0}, niw_share=0.5) == {EAST: (5.0,)}


@pytest.mark.parametrize(
    ("late_s", "value"),
    [(0.0, 5.0), (1799.0, 5.0), (1800.0, 10.0), (3600.0, 10.0), (7199.0, 10.0), (7200.0, None), (-1.0, None)],
)
def test_the_median_of_the_window_that_runs_and_of_the_last_one_for_another_hour(
    late_s: float, value: float | None
) -> None:
    assert forecast_at((10.0, 20.0), peak_q50=10.0, peak_upper=20.0, late_s=late_s) == value


def test_nothing_is_no_forecast() -> None:
    assert forecast_at((), peak_q50=1.0, peak_upper=1.0, late_s=0.0) is None
    assert forecast_at((0.0,), peak_q50=0.0, peak_upper=0.0, late_s=0.0) is None


def test_what_the_instances_of_a_base_serve_counts_there() -> None:
    assert [serving_model(name, {"a": "m", "b": "m"}) for name in ("a", "m", "x")] == ["m", "m", "x"]
    waiting = {
        "a": Backlog(tokens=1.0, due_s=5.0, at_least=True),
        "b": Backlog(tokens=2.0, due_s=9.0),
        "m": Backlog(tokens=4.0, due_s=7.0),
        "x": Backlog(tokens=8.0, due_s=1.0),
    }
    assert serving_backlogs(waiting, {"a": "m", "b": "m"}) == {
        "m": Backlog(tokens=7.0, due_s=5.0, at_least=True),
        "x": waiting["x"],
    }
    assert serving_backlogs(waiting, {}) == waiting
