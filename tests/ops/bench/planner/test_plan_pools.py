"""The long-tailed fleet of the pools' figure is as long-tailed as it says."""

import pytest

from ops.bench.planner.plan_pools import FleetShape


def test_the_tail_has_its_share() -> None:
    shape = FleetShape(models=100, requests_per_s=400.0)
    rates = shape.rates()
    assert len(rates) == 100
    assert rates == sorted(rates, reverse=True)
    assert sum(rates) == pytest.approx(400.0)
    assert sum(rates[6:]) == pytest.approx(0.0135 * 400.0)
