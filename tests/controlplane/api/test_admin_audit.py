"""Every change over the admin API is in the audit: who, what, and the row before and after."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest
from fastapi.testclient import TestClient

from controlplane.api.admin import pins, plans, spot
from controlplane.policies.lifecycle import InstanceState
from controlplane.settings import Settings
from controlplane.store.plans import get_plan
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database
from controlplane.store.tables import Desired, Instance, Node
from tests.controlplane.api.conftest import ENDPOINT, MODEL, PROFILE, Ask
from tests.controlplane.api.test_admin_plans import waiting
from tests.controlplane.world import World

Act = Callable[[], Any]
FIRST = {"before": False, "after": True}
CHANGED = {"before": True, "after": True}
GONE = {"before": True, "after": False}


@pytest.fixture(autouse=True)
def _no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (plans, pins, spot):
        monkeypatch.setattr(module, "enqueue", lambda *_, **__: True)


@pytest.fixture
def world(database: Database, live: LiveStore, settings: Settings, fleet: None) -> World:
    """A fleet with a node that holds a spot instance."""
    world = World(database, live, settings)
    world.join("n1")
    return world


def _spot(world: World) -> str:
    instance_id = world.place("n1", desired=Desired.SPOT)
    with world.database.transaction() as session:
        session.get_one(Instance, instance_id).observed = InstanceState.SPOT
    return instance_id


def changes(ask: Ask, world: World, database: Database) -> dict[tuple[str, str], tuple[dict[str, bool], Act]]:
    """One change by each route that makes changes, in an order in which they work, and what its event must hold."""
    made: dict[str, Any] = {}

    def admin(method: str, path: str, **request: Any) -> Any:
        return ask(method, path, role="admin", **request)

    def keep(name: str, answer: Any) -> Any:
        made[name] = answer
        return answer

    hours = count()

    def draft() -> str:
        return waiting(database, 2, later=range(next(hours)))  # an hour has one plan of the schedule

    def approved() -> str:
        plan_id = draft()
        admin("POST", f"/admin/plans/{plan_id}/approve")
        return plan_id

    def apply() -> Any:
        plan_id = draft()
        with database.transaction() as session:
            index = get_plan(session, plan_id).fleet_index
        return admin("POST", f"/admin/plans/{plan_id}/apply", json={"index": index})

    def put_aside(model: str) -> dict[str, str]:
        admin("PUT", f"/admin/models/{model}", json=MODEL)
        endpoint = {"model": model, "region": "us-east"}
        admin("PUT", "/admin/endpoints", json=endpoint | {"instances_min": 0, "instances_max": 0})
        return endpoint

    def spare_region() -> str:
        admin("PUT", "/admin/regions/mars")
        return "mars"

    def spare_gpu_type() -> str:
        admin("PUT", "/admin/gpu-types/H20", json={"memory_bytes": 9, "cost_per_hour": 1})
        return "H20"

    def silent_node() -> str:
        world.join("n2")
        with database.transaction() as session:
            session.get_one(Node, "n2").last_seen_at = datetime.now(UTC) - timedelta(hours=1)
        return "n2"

    made["spot"] = _spot(world)
    lease = f"/admin/spot/{made['spot']}/lease"
    table: dict[tuple[str, str], tuple[dict[str, bool], Act]] = {
        ("PUT", "/admin/regions/{name}"): (
            CHANGED,
            lambda: admin("PUT", "/admin/regions/us-east", json={"position": 7}),
        ),
        ("PUT", "/admin/gpu-types/{name}"): (
            CHANGED,
            lambda: admin("PUT", "/admin/gpu-types/H800", json={"memory_bytes": 9, "cost_per_hour": 1}),
        ),
        ("PUT", "/admin/models/{name}"): (FIRST, lambda: admin("PUT", "/admin/models/new", json=MODEL)),
        ("PUT", "/admin/profiles"): (
            CHANGED,
            lambda: admin("PUT", "/admin/profiles", json=PROFILE | {"load_time_s": 9}),
        ),
        ("PUT", "/admin/endpoints"): (
            CHANGED,
            lambda: admin("PUT", "/admin/endpoints", json=ENDPOINT | {"instances_max": 5}),
        ),
        ("PUT", "/admin/region-latencies"): (
            FIRST,
            lambda: admin("PUT", "/admin/region-latencies", json=LATENCY),
        ),
        ("POST", "/admin/nodes/{name}/drain"): (CHANGED, lambda: admin("POST", "/admin/nodes/n1/drain")),
        ("POST", "/admin/nodes/{name}/undrain"): (CHANGED, lambda: admin("POST", "/admin/nodes/n1/undrain")),
        ("POST", "/admin/spot/{instance_id}/lease"): (
            FIRST,
            lambda: admin("POST", lease, json={"holder": "lab", "duration_s": 600}, status=201),
        ),
        ("DELETE", "/admin/spot/{instance_id}/lease"): (CHANGED, lambda: admin("DELETE", lease)),
        ("POST", "/admin/demand"): (
            FIRST,
            lambda: admin("POST", "/admin/demand", content="start_s,region,model,tokens_per_s\n0,us-east,llama,1\n"),
        ),
        ("POST", "/admin/forecasts/run"): (FIRST, lambda: admin("POST", "/admin/forecasts/run", json={}, status=202)),
        ("POST", "/admin/plans"): (FIRST, lambda: admin("POST", "/admin/plans", json={})),
        ("POST", "/admin/plans/{plan_id}/apply"): (CHANGED, apply),
        ("POST", "/admin/plans/{plan_id}/approve"): (CHANGED, lambda: admin("POST", f"/admin/plans/{draft()}/approve")),
        ("POST", "/admin/plans/{plan_id}/reject"): (
            CHANGED,
            lambda: admin("POST", f"/admin/plans/{draft()}/reject", json={"note": "no"}),
        ),
        ("POST", "/admin/plans/{plan_id}/rollback"): (
            CHANGED,
            lambda: admin("POST", f"/admin/plans/{approved()}/rollback", json={"note": "back"}),
        ),
        ("POST", "/admin/pins"): (FIRST, lambda: keep("pin", admin("POST", "/admin/pins", json=PIN, status=201))),
        ("DELETE", "/admin/pins/{pin_id}"): (CHANGED, lambda: admin("DELETE", f"/admin/pins/{made['pin']['id']}")),
        ("POST", "/admin/keys"): (
            FIRST,
            lambda: keep("key", admin("POST", "/admin/keys", json={"name": "k", "role": "viewer"}, status=201)),
        ),
        ("POST", "/admin/keys/{key_id}/rotate"): (
            CHANGED,
            lambda: admin("POST", f"/admin/keys/{made['key']['id']}/rotate"),
        ),
        ("DELETE", "/admin/keys/{key_id}"): (CHANGED, lambda: admin("DELETE", f"/admin/keys/{made['key']['id']}")),
        ("PUT", "/admin/tenants/{name}"): (FIRST, lambda: admin("PUT", "/admin/tenants/acme", json={})),
        ("DELETE", "/admin/models/{name}"): (GONE, lambda: admin("DELETE", "/admin/models/new")),
        ("DELETE", "/admin/endpoints"): (GONE, lambda: admin("DELETE", "/admin/endpoints", params=put_aside("extra"))),
        ("DELETE", "/admin/regions/{name}"): (GONE, lambda: admin("DELETE", f"/admin/regions/{spare_region()}")),
        ("DELETE", "/admin/gpu-types/{name}"): (GONE, lambda: admin("DELETE", f"/admin/gpu-types/{spare_gpu_type()}")),
        ("DELETE", "/admin/nodes/{name}"): (GONE, lambda: admin("DELETE", f"/admin/nodes/{silent_node()}")),
        ("DELETE", "/admin/tenants/{name}"): (GONE, lambda: admin("DELETE", "/admin/tenants/acme")),
    }
    return table


TOMORROW = (datetime.now(UTC) + timedelta(days=1)).isoformat()
PIN = {"model": "llama", "region": "us-east", "instances": 1, "until": TOMORROW}
LATENCY = {"origin": "us-east", "destination": "us-west", "ms": 60}


def routes(api: TestClient) -> set[tuple[str, str]]:
    document = api.get("/openapi.json").json()
    return {
        (method.upper(), path)
        for path, methods in document["paths"].items()
        for method in methods
        if path.startswith("/admin") and method != "get"
    }


def test_every_change_is_in_the_audit(ask: Ask, api: TestClient, world: World, database: Database) -> None:
    table = changes(ask, world, database)
    assert routes(api) == set(table), "each route that changes something has its change here"
    for route, (holds, act) in table.items():
        act()
        event = ask("GET", "/admin/audit", params={"limit": 1})["data"][0]
        assert event["actor"] == "admin", route
        assert {name: event[name] is not None for name in ("before", "after")} == holds, (route, event)
        assert event["before"] != event["after"], route
        assert "hash" not in str(event), route
