"""Every change over the admin API is in the audit: who, what, and the row before and after."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest
from fastapi.testclient import TestClient

from controlplane.api.admin import pins, plans, rollouts, spot, what_if
from controlplane.policies.facts import ModelGpu
from controlplane.policies.lifecycle import InstanceState
from controlplane.policies.profile_correction import Correction
from controlplane.policies.step_correction import StepCorrection
from controlplane.settings import Settings
from controlplane.store.plans import get_plan
from controlplane.store.profile_corrections import put_correction
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database
from controlplane.store.tables import Desired, Instance, Node
from tests.controlplane.api.conftest import ENDPOINT, MODEL, PROFILE, Ask
from tests.controlplane.api.test_admin_plans import waiting
from tests.controlplane.world import World

Name = str | Callable[[], str]
FIRST = {"before": False, "after": True}
CHANGED = {"before": True, "after": True}
GONE = {"before": True, "after": False}


@pytest.fixture(autouse=True)
def _no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (plans, pins, rollouts, spot, what_if):
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


def changes(ask: Ask, world: World, database: Database) -> list[tuple[str, dict[str, bool], Name, dict[str, Any]]]:
    """One change by each route that makes changes, in an order in which they work: the route, what its event must hold,
    the name in its path, and the request.
    """
    hours = count()

    def draft() -> str:
        return waiting(database, 2, later=range(next(hours)))  # an hour has one plan of the schedule

    def approved() -> str:
        plan_id = draft()
        ask("POST", f"/admin/plans/{plan_id}/approve", role="admin")
        return plan_id

    def put_aside(model: str) -> dict[str, str]:
        ask("PUT", f"/admin/models/{model}", role="admin", json=MODEL)
        endpoint = {"model": model, "region": "us-east"}
        ask("PUT", "/admin/endpoints", role="admin", json=endpoint | {"instances_min": 0, "instances_max": 0})
        ask("PUT", "/admin/profiles", role="admin", json=PROFILE | {"model": model})
        return endpoint

    def spare(kind: str, name: str, **values: int) -> Name:
        return lambda: ask("PUT", f"/admin/{kind}/{name}", role="admin", json=values)["name"]

    def silent_node() -> str:
        world.join("n2")
        with database.transaction() as session:
            session.get_one(Node, "n2").last_seen_at = datetime.now(UTC) - timedelta(hours=1)
        return "n2"

    def regrouping_node() -> str:
        world.join("n3", slots=1)
        with database.transaction() as session:
            session.get_one(Node, "n3").regroups = True
        return "n3"

    def correction() -> str:
        observed = Correction(factor=0.85, reason="it does less", estimate=600.0, windows=72, moved_s=1.0)
        steps = StepCorrection(prefill_factor=1.0, decode_factor=1.0, reason="as stated")
        with database.transaction() as session:
            put_correction(session, ModelGpu(model="extra", gpu_type="H800"), observed, steps, stated_tokens_per_s=9.0)
        return ""

    def newest(kind: str) -> Name:
        return lambda: ask("GET", f"/admin/{kind}", role="admin", params={"limit": 100})["data"][-1]["id"]

    spot, aside = _spot(world), put_aside("extra")
    candidate = put_aside("candidate")
    ask("PUT", "/admin/endpoints", role="admin", json=candidate | {"instances_min": 0, "instances_max": 1})
    rollout = {"alias": "llama", "model": "candidate"}
    applied = draft()
    with database.transaction() as session:
        index = get_plan(session, applied).fleet_index
    csv = "start_s,region,model,tokens_per_s\n0,us-east,llama,1\n"
    gpu_type = {"memory_bytes": 9, "cost_per_hour": 1}
    key, lease = {"name": "k", "role": "viewer"}, {"holder": "lab", "duration_s": 600}
    return [
        ("POST /admin/plans/{plan_id}/apply", CHANGED, applied, {"json": {"index": index}}),
        ("PUT /admin/regions/{name}", CHANGED, "us-east", {"json": {"position": 7}}),
        ("PUT /admin/gpu-types/{name}", CHANGED, "H800", {"json": gpu_type}),
        ("PUT /admin/models/{name}", FIRST, "new", {"json": MODEL}),
        ("PUT /admin/profiles", CHANGED, "", {"json": PROFILE | {"load_time_s": 9}}),
        ("PUT /admin/endpoints", CHANGED, "", {"json": ENDPOINT | {"instances_max": 5}}),
        ("PUT /admin/region-latencies", FIRST, "", {"json": LATENCY}),
        ("POST /admin/nodes/{name}/drain", CHANGED, "n1", {}),
        ("POST /admin/nodes/{name}/undrain", CHANGED, "n1", {}),
        ("PUT /admin/nodes/{name}/layout", CHANGED, regrouping_node, {"json": {"layout": [1, 1]}}),
        ("DELETE /admin/nodes/{name}/layout", CHANGED, "n3", {}),
        ("POST /admin/spot/{instance_id}/lease", FIRST, spot, {"json": lease, "status": 201}),
        ("DELETE /admin/spot/{instance_id}/lease", CHANGED, spot, {}),
        ("POST /admin/demand", FIRST, "", {"content": csv}),
        ("POST /admin/forecasts/run", FIRST, "", {"json": {}, "status": 202}),
        ("POST /admin/plans", FIRST, "", {"json": {}}),
        ("POST /admin/plans/{plan_id}/approve", CHANGED, draft, {}),
        ("POST /admin/plans/{plan_id}/reject", CHANGED, draft, {"json": {"note": "no"}}),
        ("POST /admin/plans/{plan_id}/rollback", CHANGED, approved, {"json": {"note": "back"}}),
        ("POST /admin/pins", FIRST, "", {"json": PIN, "status": 201}),
        ("DELETE /admin/pins/{pin_id}", CHANGED, newest("pins"), {}),
        ("PUT /admin/aliases/{name}", FIRST, "chat", {"json": {"targets": {"llama": 1}}}),
        ("DELETE /admin/aliases/{name}", GONE, "chat", {}),
        ("POST /admin/rollouts", FIRST, "", {"json": rollout, "status": 201}),
        ("POST /admin/rollouts/{rollout_id}/pause", CHANGED, newest("rollouts"), {}),
        ("POST /admin/rollouts/{rollout_id}/resume", CHANGED, newest("rollouts"), {}),
        ("POST /admin/rollouts/{rollout_id}/promote", CHANGED, newest("rollouts"), {}),
        ("POST /admin/rollouts/{rollout_id}/rollback", CHANGED, newest("rollouts"), {}),
        ("POST /admin/what-if", FIRST, "", {"json": {"name": "half"}, "status": 201}),
        ("POST /admin/what-if/{run_id}/cancel", CHANGED, newest("what-if"), {}),
        ("DELETE /admin/what-if/{run_id}", GONE, newest("what-if"), {}),
        ("POST /admin/keys", FIRST, "", {"json": key, "status": 201}),
        ("POST /admin/keys/{key_id}/rotate", CHANGED, newest("keys"), {}),
        ("DELETE /admin/keys/{key_id}", CHANGED, newest("keys"), {}),
        ("POST /admin/batches/{batch_id}/cancel", CHANGED, world.add_batch(lines=1), {}),
        ("POST /admin/console/links", FIRST, "", {"status": 201}),
        ("DELETE /admin/console/sessions", FIRST, "", {"params": {"subject": "ada", "issuer": "https://id.example"}}),
        ("POST /admin/term/raise", CHANGED, "", {}),
        ("PUT /admin/tenants/{name}", FIRST, "acme", {"json": {}}),
        ("DELETE /admin/models/{name}", GONE, "new", {}),
        ("DELETE /admin/profile-corrections", GONE, correction, {"params": {"model": "extra", "gpu_type": "H800"}}),
        ("DELETE /admin/profiles", GONE, "", {"params": {"model": "extra", "gpu_type": "H800"}}),
        ("DELETE /admin/region-latencies", GONE, "", {"params": {"origin": "us-east", "destination": "us-west"}}),
        ("DELETE /admin/endpoints", GONE, "", {"params": aside}),
        ("DELETE /admin/regions/{name}", GONE, spare("regions", "mars"), {}),
        ("DELETE /admin/gpu-types/{name}", GONE, spare("gpu-types", "H20", **gpu_type), {}),
        ("DELETE /admin/nodes/{name}", GONE, silent_node, {}),
        ("DELETE /admin/tenants/{name}", GONE, "acme", {}),
    ]


TOMORROW = (datetime.now(UTC) + timedelta(days=1)).isoformat()
PIN = {"model": "llama", "region": "us-east", "instances": 1, "until": TOMORROW}
LATENCY = {"origin": "us-east", "destination": "us-west", "ms": 60}


def routes(api: TestClient) -> set[str]:
    document = api.get("/openapi.json").json()
    return {
        f"{method.upper()} {path}"
        for path, methods in document["paths"].items()
        for method in methods
        if path.startswith("/admin") and method != "get"
    }


def test_every_change_is_in_the_audit(ask: Ask, api: TestClient, world: World, database: Database) -> None:
    table = changes(ask, world, database)
    assert routes(api) == {route for route, *_ in table}, "each route that changes something has its change here"
    for route, holds, name, request in table:
        method, path = route.split()
        ask(method, re.sub(r"{\w+}", name if isinstance(name, str) else name(), path), role="admin", **request)
        event = ask("GET", "/admin/audit", params={"limit": 1})["data"][0]
        assert event["actor"] == "admin", route
        assert {name: event[name] is not None for name in ("before", "after")} == holds, (route, event)
        assert event["before"] != event["after"], route
        assert "hash" not in str(event), route
