"""How forecasts are shared out over tasks: few series each while they are few, few messages when they are many."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from controlplane.planner import schedule
from controlplane.planner.scale import Scaled
from controlplane.planner.schedule import (
    Parts,
    run_forecast,
    run_forecast_some,
    share_out,
)
from controlplane.policies.facts import Endpoint
from controlplane.settings import Settings
from controlplane.store.blobs.base import BlobStore
from controlplane.store.demand import IW, DemandRow, put_demand, read_forecasts
from controlplane.store.session import server_time_s
from tests.controlplane.world import PATIENCE_S, World

NOW_S = 1_000_000_800


def endpoints(count: int) -> list[Endpoint]:
    return [Endpoint(model=f"m{number:05}", region="us-east") for number in range(count)]


@given(count=st.integers(0, 3000), most=st.integers(1, 60))
def test_every_series_is_in_one_share(count: int, most: int) -> None:
    shares = share_out(endpoints(count), most=most)
    assert [each for share in shares for each in share] == endpoints(count)
    assert all(1 <= len(share) <= most for share in shares)


def test_few_series_keep_many_workers_busy_and_many_make_few_messages() -> None:
    assert len(share_out(endpoints(200), most=50)) == 200
    assert len(share_out(endpoints(400), most=50)) == 200
    assert len(share_out(endpoints(60_000), most=50)) == 1200


@pytest.fixture
def fleet(world: World, settings: Settings, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch) -> World:
    """Both regions have an hour of demand; tasks of this process use the test's database."""
    quick = settings.model_copy(update={"forecast_history_s": 3600})
    parts = Parts(settings=quick, database=world.database, live=world.live, blobs=blobs)
    monkeypatch.setattr(schedule, "parts", lambda: parts)
    rows = [
        DemandRow(
            endpoint=Endpoint(model="tide", region=region), kind=IW, start_s=NOW_S - 60 * minute, tokens_per_s=100.0
        )
        for region in ("us-east", "us-west")
        for minute in range(1, 60)
    ]
    with world.database.transaction() as session:
        put_demand(session, rows)
    return world


def forecast_regions(world: World) -> list[str]:
    with world.database.transaction() as session:
        return [row.region for row in read_forecasts(session, origin_s=NOW_S)]


@pytest.fixture
def eager() -> Iterator[None]:
    """Tasks are done where they are sent."""
    schedule.celery.conf.update(task_always_eager=True, task_eager_propagates=True)
    yield
    schedule.celery.conf.update(task_always_eager=False, task_eager_propagates=False)


@pytest.mark.usefixtures("eager")
def test_the_hour_is_sent_out_and_done(fleet: World) -> None:
    run_forecast(NOW_S)
    assert forecast_regions(fleet) == ["us-east", "us-west"]


def test_a_series_that_fails_leaves_the_others_be(fleet: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = schedule.forecast_one

    def flaky(session: Any, endpoint: Endpoint, **named: Any) -> Any:
        if endpoint.region == "us-east":
            raise ArithmeticError("did not converge")
        return real(session, endpoint, **named)

    monkeypatch.setattr(schedule, "forecast_one", flaky)
    run_forecast_some([("tide", "us-east"), ("tide", "us-west")], NOW_S)
    assert forecast_regions(fleet) == ["us-west"]


def test_a_share_out_of_time_keeps_what_is_done(fleet: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = schedule.forecast_one
    calls: list[str] = []

    def slow(session: Any, endpoint: Endpoint, **named: Any) -> Any:
        calls.append(endpoint.region)
        if len(calls) == 2:
            raise schedule.SoftTimeLimitExceeded
        return real(session, endpoint, **named)

    monkeypatch.setattr(schedule, "forecast_one", slow)
    run_forecast_some([("tide", region) for region in ("us-west", "us-east", "us-east")], NOW_S)
    assert forecast_regions(fleet) == ["us-west"]
    assert len(calls) == 2


def test_a_share_delivered_twice_is_done_once(fleet: World) -> None:
    for _ in range(2):
        run_forecast_some([("tide", "us-east")], NOW_S)
    assert forecast_regions(fleet) == ["us-east"]


@pytest.mark.usefixtures("an_hour_ahead")
@pytest.mark.parametrize(
    ("task", "work", "done"),
    [
        (schedule.run_scale, "scale", Scaled()),
        (schedule.run_plan, "plan_hour", None),
        (schedule.run_correct, "correct", {}),
    ],
)
def test_loops_go_by_the_clock_of_the_rows(
    fleet: World, monkeypatch: pytest.MonkeyPatch, task: Callable[[], None], work: str, done: Any
) -> None:
    given: list[float] = []

    def note(*_: Any, now_s: float) -> Any:
        given.append(now_s)
        return done

    monkeypatch.setattr(schedule, work, note)
    task()
    with fleet.database.transaction() as session:
        assert server_time_s(session) - PATIENCE_S < given[0] <= server_time_s(session)


def test_what_has_no_place_is_one_line_of_the_log(fleet: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.expect_no_loops()
    unplaced = tuple(f"1 x m{number} in us-east: full" for number in range(200))
    monkeypatch.setattr(schedule, "scale", lambda *_, **__: Scaled(unplaced=unplaced))
    with capture_logs() as logs:
        schedule.run_scale()
    [line] = [line for line in logs if line["event"] == "not placed"]
    assert (line["endpoints"], line["first"]) == (200, unplaced[:3])


def test_what_must_be_quick_never_waits_behind_forecasts() -> None:
    """A worker takes forecasts and what-if runs, or everything else."""
    routed = {task: options["queue"] for task, options in schedule.celery.conf.task_routes.items()}
    assert routed == {"forecast_some": schedule.FORECAST_QUEUE, "what_if": schedule.WHAT_IF_QUEUE}
    assert schedule.celery.conf.task_default_queue == schedule.MAIN_QUEUE
    assert schedule.MAIN_QUEUE not in routed.values()
