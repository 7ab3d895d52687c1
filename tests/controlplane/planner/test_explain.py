"""A plan's explanation, from real rows: the stored inputs and answers, and forecasts against the measured demand."""

import pytest

from controlplane.errors import NotFoundError
from controlplane.planner.explain import explanation_of
from controlplane.planner.plan import plan_hour
from controlplane.policies.facts import Endpoint
from controlplane.settings import Settings
from controlplane.store.demand import IW, DemandRow, put_demand, put_forecasts, read_record
from controlplane.store.plans import roll_back
from tests.controlplane.planner.test_expected import a_forecast
from tests.controlplane.world import World

EAST = Endpoint(model="tide", region="us-east")
NOW_S = 1_000_000_800


@pytest.fixture
def fleet(world: World) -> World:
    """A node, and three hours of 1,500 tokens/s around now with one high minute an hour (mean of its window: 2,100)."""
    world.join("n1")
    rows = [
        DemandRow(
            endpoint=EAST,
            kind=IW,
            start_s=NOW_S + 60 * minute,
            tokens_per_s=4500.0 if minute % 60 == 30 else 1500.0,
        )
        for minute in range(-120, 60)
    ]
    with world.database.transaction() as session:
        put_demand(session, rows)
    return world


def explain(world: World, plan_id: str) -> str:
    with world.database.transaction() as session:
        return explanation_of(session, plan_id)


def test_forecasts_are_held_against_what_came(fleet: World) -> None:
    with fleet.database.transaction() as session:
        forecasts = [a_forecast(EAST, NOW_S - 7200, 2000.0), a_forecast(EAST, NOW_S - 3600, 2200.0)]
        put_forecasts(session, [*forecasts, a_forecast(EAST, NOW_S + 1800, 1.0)])
        record = read_record(session, [EAST], since_s=NOW_S - 7200, until_s=NOW_S + 1800)
        assert (record.hours, record.covered) == (2, 1), "an hour that is not over is not judged"
        assert record.actual_sum == pytest.approx(4200.0), "peaks of 5-minute means, not of minutes"
        assert record.error_sum == pytest.approx(abs(1000 - 2100) + abs(1100 - 2100))
        assert read_record(session, [], since_s=0, until_s=NOW_S).hours == 0
        other = Endpoint(model="tide", region="us-west")
        assert read_record(session, [other], since_s=0, until_s=NOW_S).hours == 0


def test_a_plan_is_told_from_expectation_to_certainty(fleet: World, settings: Settings) -> None:
    with fleet.database.transaction() as session:
        put_forecasts(session, [a_forecast(EAST, NOW_S - 3600, 2000.0), a_forecast(EAST, NOW_S, 2500.0)])
    plan_id = plan_hour(fleet.database, settings, now_s=NOW_S)
    assert plan_id is not None
    text = explain(fleet, plan_id)
    for words in (
        f"Plan {plan_id} for ",
        "Made by the schedule",
        "went into force by itself",
        "1 endpoint from",
        "2,500 tokens/s at the 0.9 quantile",
        "tide in us-east on H800: 0 -> 3.",
        "1 count: demand of the whole fleet",
        "the plan covers all that was expected",
        "0 of 1 peaks",
        "In this very hour, 1 of 1 peaks",
        "a gap of",
    ):
        assert words in text, f"{words!r} is missing in:\n{text}"


def test_a_rollback_says_that_nobody_solved_it(fleet: World, settings: Settings) -> None:
    first = plan_hour(fleet.database, settings, now_s=NOW_S)
    second = plan_hour(fleet.database, settings, now_s=NOW_S + 3600)
    assert second is not None
    with fleet.database.transaction() as session:
        restored = roll_back(session, second, window_start_s=0, by="ann", note="too few").id
    text = explain(fleet, restored)
    assert f"the placement of plan {first} again; too few" in text
    assert "Approved by ann" in text
    assert "No solver was asked" in text
    with pytest.raises(NotFoundError), fleet.database.transaction() as session:
        explanation_of(session, "plan_none")


def test_pools_of_one_place_are_told_apart_by_their_size(fleet: World) -> None:
    place = {"region": "us-east", "gpu_type": "H800", "before": 0}
    pooled = [{"model": "tide", "occupancy": 0.5, "before": True}]
    pools = [place | {"worker_gpus": gpus, "after": 2 * gpus, "pooled": pooled} for gpus in (1, 4)]
    text = explain(fleet, fleet.in_force([], pools=pools))
    assert "- H800 in us-east, slots of 1: 0 -> 2 GPUs for 1 endpoint (tide)" in text
    assert "- H800 in us-east, slots of 4: 0 -> 8 GPUs for 1 endpoint (tide)" in text
    alone = explain(fleet, fleet.in_force([], pools=pools[1:]))
    assert "- H800 in us-east: 0 -> 8 GPUs for 1 endpoint (tide)" in alone
