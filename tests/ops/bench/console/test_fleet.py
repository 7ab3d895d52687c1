"""The benchmark of the console: its fleet is one that the API shows, and its consoles are told what changes."""

import asyncio

import pytest
from sqlalchemy import text

from controlplane.api.app import make_app
from controlplane.settings import Settings
from controlplane.store.session import Database
from ops.bench.console.fleet import SMALL, FleetSize, fill_large
from ops.bench.console.large_fleet import measure_endpoints
from ops.bench.console.watchers import measure
from ops.bench.gateway.stack import GatewayProcess
from tests.controlplane.world import served


@pytest.mark.parametrize("size", [SMALL, FleetSize(models=70, regions=7, instances=300, events=400, waiting=40)])
def test_the_fleet_is_as_large_as_asked_for(settings: Settings, database: Database, size: FleetSize) -> None:
    filled = fill_large(settings, size)
    with database.transaction() as session:
        tables = ("models", "regions", "instances", "nodes", "endpoints", "queued_requests")
        counts = [session.execute(text(f"SELECT count(*) FROM {table}")).scalar_one() for table in tables]
        changed = "SELECT count(*) FROM plan_entries WHERE plan_id = :plan AND before <> after"
        drafted = session.execute(text(changed), {"plan": filled.plan_drafted}).scalar_one()
    cells = size.models * size.regions
    assert counts == [size.models, size.regions, size.instances, size.nodes, cells, size.waiting]
    assert drafted >= cells // 20


def test_every_endpoint_and_the_stream_answer(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.api.live_stream._PAUSE_MAX_S", 0.0)  # this process does much else
    monkeypatch.setattr("ops.bench.console.watchers._SETTLE_S", 0.0)
    filled = fill_large(settings, SMALL)
    with served(make_app(settings)) as url:
        port = int(url.rsplit(":", 1)[1])
        gateway = GatewayProcess(port=port, pid=1, servers={"postgres": 1}, filled=filled)
        costs = {cost.path: cost for cost in measure_endpoints(gateway, 1)}
        none, some = asyncio.run(measure(gateway, "small", (0, 2), 6.0))
    assert costs["/admin/live, first event"].bytes > costs["/admin/overview"].bytes > 0
    assert (none.consoles, none.events_per_s, none.more_share) == (0, 0.0, 0.0)
    assert some.consoles == 2
    assert some.events_per_s > 0
    assert some.bytes_per_s > 0
