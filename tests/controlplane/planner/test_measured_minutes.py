"""A minute without demand takes no row, and every reader sees what it saw when each had one."""

import random
from typing import Any

import pytest
from sqlalchemy import delete, func, select

from controlplane.planner.measure import measure
from controlplane.policies.facts import Endpoint
from controlplane.store import fleet
from controlplane.store.demand import (
    IW,
    NIW,
    DemandBucket,
    DemandMinute,
    DemandRow,
    DemandSpan,
    Forecast,
    endpoints_with_demand,
    latest_demand_s,
    mean_demand,
    peak_demand,
    put_demand,
    put_forecasts,
    read_demand,
    read_record,
)
from controlplane.store.tables import EndpointRow
from tests.controlplane.world import World

REGIONS = ("us-east", "us-west")
ENDPOINTS = [Endpoint(model="tide", region=region) for region in REGIONS]
BEGIN_S = 1_000_000_800
MINUTES = 150
Key = tuple[str, Endpoint, int]


def written(world: World) -> int:
    """Rows of demand."""
    with world.database.transaction() as session:
        return session.scalar(select(func.count()).select_from(DemandBucket)) or 0


def run(world: World, minute: int) -> int:
    with world.database.transaction() as session:
        return measure(session, world.live, now_s=BEGIN_S + 60 * minute + 5)


def offer(world: World, endpoint: Endpoint, *, there: bool) -> None:
    with world.database.transaction() as session:
        row = session.get(EndpointRow, (endpoint.model, endpoint.region))
        if there and row is None:
            fleet.put_endpoint(session, model=endpoint.model, region=endpoint.region, minimum=0, maximum=1)
        elif not there and row is not None:
            session.delete(row)


class Dense:
    """The form before: a row for every endpoint in each of the last five minutes, rewritten each minute."""

    def __init__(self) -> None:
        self.rows: dict[Key, float] = {}

    def measure(self, counted: dict[int, dict[tuple[str, Endpoint], float]], minute: int, there: set[Endpoint]) -> None:
        for back in range(minute - 5, minute):
            if back not in counted:
                continue
            tokens = {(IW, endpoint): 0.0 for endpoint in there} | counted[back]
            for (kind, endpoint), count in tokens.items():
                self.rows[kind, endpoint, BEGIN_S + 60 * back] = count / 60

    def put(self, world: World) -> None:
        with world.database.transaction() as session:
            for table in (DemandBucket, DemandMinute, DemandSpan):
                session.execute(delete(table))
            put_demand(
                session,
                (
                    DemandRow(endpoint=endpoint, kind=kind, start_s=start_s, tokens_per_s=value)
                    for (kind, endpoint, start_s), value in self.rows.items()
                ),
            )


def all_readings(world: World) -> dict[str, Any]:
    """What every reader says, over several spans."""
    found: dict[str, Any] = {}
    with world.database.transaction() as session:
        found["latest"] = latest_demand_s(session)
        for first, last in ((0, MINUTES), (30, 90), (7, 8), (100, 160)):
            span = {"since_s": BEGIN_S + 60 * first, "until_s": BEGIN_S + 60 * last}
            found[f"record {first}"] = read_record(session, ENDPOINTS, **span)
            for kind in (IW, NIW):
                name = f"{kind} {first} {last}"
                found[f"series {name}"] = read_demand(session, kind=kind, **span)
                for endpoint in ENDPOINTS:
                    found[f"of {endpoint} {name}"] = read_demand(session, kind=kind, only=endpoint, **span)
                found[f"endpoints {name}"] = endpoints_with_demand(session, kind=kind, **span)
                found[f"peak {name}"] = peak_demand(session, kind=kind, **span)
                mean = mean_demand(session, kind=kind, **span)
                found[f"mean {name}"] = [round(mean.get(endpoint, 0.0), 9) for endpoint in ENDPOINTS]
    return found


@pytest.mark.parametrize("seed", range(6))
def test_both_forms_read_the_same(world: World, seed: int) -> None:
    """Gateways come and go, counts come late, endpoints are made and deleted, and the loop misses turns."""
    chance, dense = random.Random(seed), Dense()
    counted: dict[int, dict[tuple[str, Endpoint], float]] = {}
    there = set(ENDPOINTS)
    with world.database.transaction() as session:
        put_forecasts(session, [a_forecast(endpoint, hour) for endpoint in ENDPOINTS for hour in (0, 1)])

    def count(minute: int) -> None:
        counts = {
            (kind, endpoint): float(chance.randrange(1, 5000))
            for kind in (IW, NIW)
            for endpoint in ENDPOINTS
            if chance.random() < 0.3
        }
        known = counted.setdefault(minute, {})
        for key, tokens in counts.items():
            known[key] = known.get(key, 0.0) + tokens
        world.live.count_demand("a", dict(known), minute_s=BEGIN_S + 60 * minute)

    away_until = -1
    for minute in range(MINUTES):
        if chance.random() < 0.02:
            away_until = minute + chance.randrange(1, 12)
        if minute > away_until:
            count(minute)
        late = minute - chance.randrange(4)
        if chance.random() < 0.2 and late in counted:
            count(late)
        if chance.random() < 0.05:
            endpoint = chance.choice(ENDPOINTS)
            there ^= {endpoint}
            offer(world, endpoint, there=endpoint in there)
        for _ in range(chance.choice((0, 1, 1, 1, 2))):
            run(world, minute + 1)
            dense.measure(counted, minute + 1, there)
    sparse = all_readings(world)
    rows = written(world)
    assert rows < len(dense.rows)
    dense.put(world)
    assert sparse == all_readings(world)


def a_forecast(endpoint: Endpoint, hour: int) -> Forecast:
    return Forecast(
        model=endpoint.model,
        region=endpoint.region,
        origin_s=BEGIN_S + 3600 * hour,
        forecaster="x",
        peak_q50=50.0,
        peak_upper=60.0,
        quantile=0.9,
        path=[60.0],
        candidates={},
        state=None,
        reason="",
    )


def test_only_what_is_new_is_written(world: World) -> None:
    east = ENDPOINTS[0]
    for minute in range(5):
        world.live.count_demand("a", {(IW, east): 60.0} if minute == 2 else {}, minute_s=BEGIN_S + 60 * minute)
    assert run(world, 5) == 1
    assert run(world, 5) == 0, "all of it is known"
    world.live.count_demand("a", {(IW, east): 60.0}, minute_s=BEGIN_S + 60)
    world.live.count_demand("a", {(NIW, east): 60.0}, minute_s=BEGIN_S + 5 * 60)
    assert run(world, 6) == 2, "one came late"
    assert written(world) == 3


def test_an_imported_minute_that_is_measured_gives_way(world: World) -> None:
    with world.database.transaction() as session:
        put_demand(
            session, [DemandRow(endpoint=ENDPOINTS[0], kind=IW, start_s=BEGIN_S, tokens_per_s=9.0)], imported=True
        )
    world.live.count_demand("a", {}, minute_s=BEGIN_S)
    run(world, 1)
    with world.database.transaction() as session:
        assert read_demand(session, kind=IW, since_s=BEGIN_S, until_s=BEGIN_S + 60)[ENDPOINTS[0]] == [(BEGIN_S, 0.0)]
