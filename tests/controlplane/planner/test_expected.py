"""What a plan expects where forecasts are late or fail: made good for the busiest, stood in for the rest, and why."""

from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from sqlalchemy import text

from controlplane.planner import expected as expecting
from controlplane.planner.expected import Expected, expected_demand, past_errors
from controlplane.planner.forecast import forecast_one
from controlplane.policies.facts import Endpoint
from controlplane.settings import Settings
from controlplane.store.demand import IW, DemandRow, Forecast, put_demand, put_forecasts, read_forecasts
from tests.controlplane.world import World

NOW_S = 1_000_000_800
MODELS = ("tide", "ebb", "slack")
EAST = tuple(Endpoint(model=model, region="us-east") for model in MODELS)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"forecast_history_s": 2 * 86_400})


@pytest.fixture
def fleet(world: World) -> World:
    """Three models in us-east: 3,000, 2,000 and 1,000 tokens/s for two hours; each with one minute 500 higher."""
    rows = [
        DemandRow(
            endpoint=endpoint,
            kind=IW,
            start_s=NOW_S - 60 * minute,
            tokens_per_s=1000.0 * (3 - rank) + 500.0 * (minute == 7),
        )
        for rank, endpoint in enumerate(EAST)
        for minute in range(1, 121)
    ]
    with world.database.transaction() as session:
        put_demand(session, rows)
    return world


def expect(world: World, settings: Settings, **changes: Any) -> Expected:
    return expected_demand(world.database, settings.model_copy(update=changes), now_s=NOW_S, origin_s=None)


def test_a_plan_out_of_time_for_forecasts_takes_fallbacks(fleet: World, settings: Settings) -> None:
    expected = expect(fleet, settings, plan_forecasts_s=1e-9)
    assert len(expected.series) == len(MODELS)
    assert all("s that a plan takes for them" in (each.fallback or "") for each in expected.series)
    assert all(each.peak_upper > 0 for each in expected.series)


def test_a_dry_run_leaves_no_forecasts(fleet: World, settings: Settings) -> None:
    expected = expected_demand(fleet.database, settings, now_s=NOW_S, origin_s=None, keep=False)
    assert all(each.fallback is None and each.peak_upper > 0 for each in expected.series)
    with fleet.database.transaction() as session:
        assert read_forecasts(session, origin_s=NOW_S) == []


def test_a_worker_out_of_time_stops_at_once(fleet: World, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_time(*_: Any, **__: Any) -> Forecast:
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(expecting, "forecast_one", out_of_time)
    with pytest.raises(SoftTimeLimitExceeded):
        expect(fleet, settings)


def a_forecast(endpoint: Endpoint, origin_s: int, peak: float) -> Forecast:
    return Forecast(
        model=endpoint.model,
        region=endpoint.region,
        origin_s=origin_s,
        forecaster="arima",
        peak_q50=peak / 2,
        peak_upper=peak,
        quantile=0.9,
        path=[peak / 4] * 11 + [peak],
        candidates={},
        reason="",
    )


def test_past_errors_are_those_of_hours_that_are_known(world: World) -> None:
    hour_s = 3600
    rows = [a_forecast(EAST[0], NOW_S - back * hour_s, 1000.0) for back in (0, 1, 2, 200)]
    rows += [a_forecast(EAST[1], NOW_S - hour_s, 0.0)]
    for row in rows:
        row.actual_peak = 700.0
    rows += [a_forecast(EAST[2], NOW_S - hour_s, 1000.0)]
    with world.database.transaction() as session:
        session.add_all(rows)
        session.flush()
        errors = past_errors(session, until_s=NOW_S)
    deviation = 500.0 / 1.2815516
    assert errors == {
        EAST[0]: {NOW_S // hour_s - back: pytest.approx(200.0 / deviation) for back in (1, 2)},
    }, "not of an hour to come, of long ago, without a deviation, or whose peak is not known"


def test_late_forecasts_are_made_for_the_busiest_and_stood_in_for_the_rest(fleet: World, settings: Settings) -> None:
    with fleet.database.transaction() as session:
        put_forecasts(session, [a_forecast(EAST[1], NOW_S - 3600, 4000.0), a_forecast(EAST[1], NOW_S - 7200, 9000.0)])
    found = expect(fleet, settings, plan_forecasts_max=1)
    by_model = {each.endpoint.model: each for each in found.series}
    assert by_model["tide"].fallback is None
    assert 2900 <= by_model["tide"].peak_q50 <= 3600
    assert by_model["ebb"].peak_upper == 4000.0
    assert "fallback: the forecast of 60 minutes before" in (by_model["ebb"].fallback or "")
    assert "over the 1 that a plan makes itself" in (by_model["ebb"].fallback or "")
    assert found.demand[EAST[1]] == (4000.0,) * 12, "its path belongs to another hour, its peak counts throughout"
    assert by_model["slack"].peak_upper == 1.5 * 1500.0
    assert "fallback: the last hour's highest minute" in (by_model["slack"].fallback or "")
    assert {len(path) for path in found.demand.values()} == {12}
    record = found.record()
    assert record["origin_s"] == NOW_S
    assert [each["stand_in"] is None for each in record["series"]].count(True) == 1


def test_forecasts_that_are_there_are_used_and_only_the_missing_made(fleet: World, settings: Settings) -> None:
    with fleet.database.transaction() as session:
        put_forecasts(session, [a_forecast(EAST[0], NOW_S - 600, 100.0), a_forecast(EAST[1], NOW_S - 600, 50.0)])
    found = expect(fleet, settings)
    by_model = {each.endpoint.model: each for each in found.series}
    assert found.origin_s == NOW_S - 600
    assert (by_model["tide"].peak_upper, found.demand[EAST[0]][0]) == (100.0, 25.0)
    assert by_model["slack"].fallback is None
    with fleet.database.transaction() as session:
        assert len(read_forecasts(session, origin_s=NOW_S - 600)) == 3, "what was made is kept"


def test_a_forecaster_that_fails_costs_one_series_its_forecast(
    fleet: World, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flaky(session: Any, endpoint: Endpoint, **named: Any) -> Forecast:
        if endpoint.model == "ebb":
            session.execute(text("SELECT 1 / 0"))  # which breaks a transaction without a savepoint
        return forecast_one(session, endpoint, **named)

    monkeypatch.setattr(expecting, "forecast_one", flaky)
    found = {each.endpoint.model: each for each in expect(fleet, settings).series}
    assert found["tide"].fallback is None
    assert found["slack"].fallback is None
    assert (found["ebb"].fallback or "").startswith("failed: ")
    assert found["ebb"].peak_upper == 1.5 * 2500.0


def test_silence_in_the_last_hour_is_not_taken_for_nothing(world: World, settings: Settings) -> None:
    old = [
        DemandRow(endpoint=EAST[0], kind=IW, start_s=NOW_S - hours * 3600, tokens_per_s=rate)
        for hours, rate in ((5, 700.0), (30, 9000.0))
    ]
    gone = [DemandRow(endpoint=EAST[1], kind=IW, start_s=NOW_S - 30 * 3600, tokens_per_s=500.0)]
    with world.database.transaction() as session:
        put_demand(session, [*old, *gone])
    found = {each.endpoint.model: each for each in expect(world, settings, plan_forecasts_max=0).series}
    assert found["tide"].peak_upper == 1.5 * 700.0
    assert "the last day's highest minute" in (found["tide"].fallback or "")
    assert found["ebb"].peak_upper == 0.0
    assert "no demand in the last day" in (found["ebb"].fallback or "")
