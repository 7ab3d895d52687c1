"""What a forecast keeps for the next one, in real rows."""

import numpy as np
import pytest
from sqlalchemy import select

from controlplane.planner.forecast import forecast_one
from controlplane.policies.facts import Endpoint
from controlplane.settings import Settings
from controlplane.store.demand import IW, DemandRow, Forecast, put_demand, read_demand_elsewhere, read_forecast_state
from forecasts.models.elsewhere import ELSEWHERE
from tests.controlplane.world import World

EAST, WEST = Endpoint(model="tide", region="us-east"), Endpoint(model="tide", region="us-west")
NOW_S = 1_000_000_800  # a whole minute
HOURS = 9


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"forecast_history_s": 24 * 3600})


@pytest.fixture
def demand(world: World) -> World:
    """Nine hours of noise about 1,000 tokens/s in us-east; the last of them is the coming one."""
    values = 1000 + 100 * np.random.default_rng(0).normal(size=60 * HOURS)
    first_s = NOW_S - 60 * 60 * (HOURS - 1)
    with world.database.transaction() as session:
        put_demand(
            session,
            [
                DemandRow(endpoint=EAST, kind=IW, start_s=first_s + 60 * n, tokens_per_s=float(value))
                for n, value in enumerate(values)
            ],
        )
    return world


def forecast(world: World, origin_s: int, settings: Settings) -> tuple[float, float, str]:
    with world.database.transaction() as session:
        made = forecast_one(session, EAST, origin_s=origin_s, settings=settings)
        return made.peak_q50, made.peak_upper, made.reason


def origins_known(world: World, before_s: int) -> int:
    with world.database.transaction() as session:
        state = read_forecast_state(session, EAST, before_s=before_s)
    return 0 if state is None else len(state["origins_s"])


def test_the_next_forecast_goes_on_from_what_was_kept(demand: World, settings: Settings) -> None:
    forecast(demand, NOW_S, settings)
    known = origins_known(demand, NOW_S + 3600)
    assert known > 1
    assert origins_known(demand, NOW_S) == 0, "nothing was kept before that origin"
    forecast(demand, NOW_S + 3600, settings)
    assert origins_known(demand, NOW_S + 7200) == known + 1


def test_the_same_origin_again_gives_the_same(demand: World, settings: Settings) -> None:
    """A task that is run twice starts from the state of the hour before, not from its own."""
    forecast(demand, NOW_S, settings)
    assert forecast(demand, NOW_S + 3600, settings) == forecast(demand, NOW_S + 3600, settings)
    assert forecast(demand, NOW_S, settings) == forecast(demand, NOW_S, settings)


def test_who_gave_no_answer_is_stored_with_the_reason(demand: World, settings: Settings) -> None:
    forecast(demand, NOW_S, settings)
    with demand.database.transaction() as session:
        candidates = session.scalars(select(Forecast.candidates)).one()
    assert candidates["typical day's shape"]["declined"] == "no past day has this hour"
    assert candidates["last hour's maximum"]["error"] > 0


def test_a_new_series_borrows_from_its_model_in_other_regions(demand: World, settings: Settings) -> None:
    """Two hours in us-west, where the model is new; us-east has eight."""
    with demand.database.transaction() as session:
        rows = [
            DemandRow(endpoint=WEST, kind=IW, start_s=NOW_S - 60 * minute, tokens_per_s=50.0 + minute % 7)
            for minute in range(1, 121)
        ]
        put_demand(session, rows)
        found = read_demand_elsewhere(session, WEST, since_s=NOW_S - 7200, until_s=NOW_S)
        made = forecast_one(session, WEST, origin_s=NOW_S, settings=settings)
        assert len(found) == 120
        assert 900 < np.mean([value for _, value in found]) < 1100
        assert made.candidates[ELSEWHERE]["declined"] == "no past day has this hour"


def test_only_the_newest_states_stay(demand: World, settings: Settings) -> None:
    forecast(demand, NOW_S - 4 * 3600, settings)
    forecast(demand, NOW_S + 3600, settings)
    forecast(demand, NOW_S + 5 * 3600, settings)
    with demand.database.transaction() as session:
        kept = dict(session.execute(select(Forecast.origin_s, Forecast.state.is_not(None))).all())
        assert read_forecast_state(session, WEST, before_s=NOW_S + 10_000) is None
    assert kept == {NOW_S - 4 * 3600: False, NOW_S + 3600: True, NOW_S + 5 * 3600: True}
