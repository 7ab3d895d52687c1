"""Demand rows: many at once, again without harm, read by endpoint."""

import time
from collections.abc import Iterator
from functools import partial

import pytest
from sqlalchemy import func, inspect, select, text
from sqlalchemy.exc import OperationalError

from controlplane.policies.facts import Endpoint
from controlplane.store.demand import (
    IW,
    NIW,
    DemandBucket,
    DemandRow,
    Forecast,
    endpoints_with_demand,
    forget_demand,
    latest_demand_s,
    mean_demand,
    put_demand,
    put_forecasts,
    read_demand,
    read_forecasts,
)
from controlplane.store.session import Database, make_engine
from tests.controlplane.world import World, at_once

EAST, WEST = Endpoint(model="tide", region="us-east"), Endpoint(model="tide", region="us-west")


def row(endpoint: Endpoint, minute: int, tokens_per_s: float, kind: str = IW) -> DemandRow:
    return DemandRow(endpoint=endpoint, kind=kind, start_s=60 * minute, tokens_per_s=tokens_per_s)


def test_a_hundred_thousand_rows_twice(world: World) -> None:
    for factor in (1.0, 2.0):
        with world.database.transaction() as session:
            rows = (row((EAST, WEST)[n % 2], n // 2, factor * n) for n in range(100_000))
            assert put_demand(session, rows) == 100_000
    with world.database.transaction() as session:
        assert session.scalar(select(func.count()).select_from(DemandBucket)) == 100_000
        assert read_demand(session, kind=IW, since_s=0, until_s=120, only=WEST) == {WEST: [(0, 2.0), (60, 6.0)]}
        assert latest_demand_s(session) == 60 * 49_999
        assert forget_demand(session, before_s=60 * 49_999, count_max=100_000) == 99_998
        assert len(read_demand(session, kind=IW, since_s=0, until_s=60 * 50_000)[EAST]) == 1


def test_reading(world: World) -> None:
    with world.database.transaction() as session:
        put_demand(session, [row(EAST, 1, 5.0), row(EAST, 3, 7.0), row(WEST, 2, 1.0), row(EAST, 2, 60.0, NIW)])
        put_demand(session, [row(EAST, 4, 9.0), row(EAST, 4, 9.0)])
        assert read_demand(session, kind=IW, since_s=60, until_s=240, only=EAST) == {EAST: [(60, 5.0), (180, 7.0)]}
        assert endpoints_with_demand(session, kind=IW, since_s=120, until_s=180) == [WEST]
        assert mean_demand(session, kind=NIW, since_s=0, until_s=3600) == {EAST: 1.0}
        assert latest_demand_s(session) == 240


def test_rows_may_come_slower_than_a_statement_may_last(world: World) -> None:
    hasty = Database(make_engine(world.settings.model_copy(update={"database_timeout_s": 1})))

    def slowly() -> Iterator[DemandRow]:
        yield row(EAST, 1, 5.0)
        time.sleep(1.2)
        yield row(EAST, 2, 5.0)

    with hasty.transaction() as session:
        assert put_demand(session, slowly()) == 2
    with pytest.raises(OperationalError), hasty.transaction() as session:
        session.execute(text("SELECT pg_sleep(1.2)"))  # the limit is back
    hasty.close()


def test_writers_of_the_same_minutes_in_opposite_orders_take_turns(world: World) -> None:
    minutes = range(3000)

    def write(order: list[int]) -> int:
        for _ in range(4):
            with world.database.transaction() as session:
                put_demand(session, [row(EAST, n, 1.0) for n in order[:1500]])
                put_demand(session, [row(EAST, n, 1.0) for n in order[1500:]])
        return len(order)

    assert at_once(*(partial(write, list(order)) for order in (minutes, reversed(minutes)))) == [3000, 3000]


@pytest.mark.parametrize(("with_candidates", "left"), [(False, {"candidates", "state"}), (True, {"state"})])
def test_the_large_columns_of_forecasts_are_read_only_where_asked_for(
    world: World, left: set[str], *, with_candidates: bool
) -> None:
    forecast = Forecast(
        model="tide",
        region="us-east",
        origin_s=0,
        forecaster="none",
        peak_q50=1.0,
        peak_upper=2.0,
        quantile=0.9,
        path=[2.0],
        candidates={"none": {}},
        state={"large": "x"},
        reason="",
    )
    with world.database.transaction() as session:
        put_forecasts(session, [forecast])
    with world.database.transaction() as session:
        (row,) = read_forecasts(session, origin_s=None, with_candidates=with_candidates)
        assert inspect(row).unloaded == left
        assert row.candidates == {"none": {}}
