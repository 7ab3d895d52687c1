"""Plans of the first schema live through 0002, and what only 0002 knows is told in the first schema's words again."""

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, text

OLD_PLAN = (
    "INSERT INTO plans (id, state, origin, window_start_s, fleet_index, solver, status, solve_time_s, unserved, reason,"
    " created_by) VALUES (:id, :state, 'schedule', :window_s, 1, 'highs', 'optimal', 0.1, '[]', 'r', 'schedule')"
)


def add(engine: Engine, *plans: tuple[str, str, int]) -> None:
    with engine.begin() as connection:
        for plan_id, state, window_s in plans:
            connection.execute(text(OLD_PLAN), {"id": plan_id, "state": state, "window_s": window_s})


def states(engine: Engine) -> dict[str, str]:
    with engine.begin() as connection:
        return dict(connection.execute(text("SELECT id, state FROM plans")).all())  # type: ignore[arg-type]


def test_old_plans_live_on(engine: Engine, config: Config) -> None:
    command.downgrade(config, "0001")
    add(engine, ("a", "applied", 3600), ("b", "failed", 7200))
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO plan_entries VALUES ('a', 'm', 'r', 'g', 0, 2, 'why')"))
        connection.execute(
            text(
                "INSERT INTO forecasts (model, region, origin_s, forecaster, peak_q50, peak_upper, quantile, path,"
                " candidates, reason) VALUES ('m', 'r', 3600, 'arima', 1, 2, 0.9, '[2]', '{}', 'why')"
            )
        )
    command.upgrade(config, "head")
    with engine.begin() as connection:
        plan = connection.execute(text("SELECT inputs, pools, previous_plan_id FROM plans WHERE id = 'a'")).one()
        assert tuple(plan) == (None, [], None)
        entry = connection.execute(text('SELECT "constraint", cost_if_not, after FROM plan_entries')).one()
        assert tuple(entry) == ("none", 0.0, 2)
        assert connection.execute(text("SELECT state, peak_upper FROM forecasts")).one() == (None, 2.0)
    command.downgrade(config, "0001")
    assert states(engine) == {"a": "applied", "b": "failed"}


def test_what_only_0002_knows_is_told_in_old_words(engine: Engine, config: Config) -> None:
    """One plan of the schedule a window is all that the first schema holds: attempts made good go, the last one of a
    window without a plan stays.
    """
    command.downgrade(config, "0002")
    add(engine, ("a1", "failed", 3600), ("a2", "failed", 3600), ("a3", "rejected", 3600))
    add(engine, ("b1", "failed", 7200), ("b2", "failed", 7200))
    command.downgrade(config, "0001")
    assert states(engine) == {"a3": "superseded", "b2": "failed"}
    command.upgrade(config, "head")
    assert states(engine) == {"a3": "superseded", "b2": "failed"}
