"""A plan sizes a reserve by how far the errors of past forecasts went together."""

from sqlalchemy import select

from controlplane.planner.draft import DraftOf
from controlplane.planner.plan import draft_plan
from controlplane.settings import Settings
from controlplane.store.demand import Forecast
from tests.controlplane.planner.pool_fleet import add_models, expect, join
from tests.controlplane.world import World

NOW_S = 1_000_000_800
MODELS = ("ebb", "flood", "neap", "surge")
HOURS = 48


def reasons(world: World, settings: Settings) -> list[str]:
    """Why the reserves of a plan are as they are."""
    of = DraftOf(window_start_s=NOW_S, origin="operator", created_by="test")
    pools = draft_plan(world.database, settings, of, now_s=NOW_S).plan.pools
    return [pool["reserve"]["reason"] for pool in pools]


def test_a_plan_says_what_past_errors_say(world: World, settings: Settings) -> None:
    add_models(world, *MODELS)
    for number in range(6):
        join(world, f"n{number}")
    for hour in range(HOURS):
        expect(world, dict.fromkeys(MODELS, 20.0), origin_s=NOW_S - 3600 * (hour + 2))
    expect(world, dict.fromkeys(MODELS, 20.0), origin_s=NOW_S - 600)
    settings = settings.model_copy(update={"plan_reserve": True, "pools_enabled": False})
    [before] = reasons(world, settings)
    assert "errors of forecasts: correlation 0.20 as set" in before
    with world.database.transaction() as session:
        for row in session.scalars(select(Forecast).where(Forecast.origin_s < NOW_S - 3600)):
            row.peak_upper = 40.0
            row.actual_peak = 30.0 if row.origin_s // 3600 % 2 else 10.0
    [after] = reasons(world, settings)
    assert f"errors of forecasts: correlation 0.60 from {HOURS} hours" in after, "half 1.0, half 0.2"
