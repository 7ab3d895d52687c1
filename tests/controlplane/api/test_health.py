"""Liveness, readiness and metrics, with Postgres or Redis away."""

from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import text

from controlplane.planner.runs import note
from controlplane.policies.readiness import Loop
from controlplane.store.tables import Role
from ops.local.ports import free_port
from tests.controlplane.api.gateway import running_gateway
from tests.controlplane.world import FakeAgent, World, until

WELL = {"status": "ok", "missing": [], "away": [], "late": [], "lost": [], "behind": [], "replica_age_s": None}
WELL |= {"term": None, "reported_term": None}


def test_ready(world: World) -> None:
    with running_gateway(world, FakeAgent()) as gateway:
        ready = gateway.http.get("/readyz")
        assert (ready.status_code, ready.json()) == (200, WELL)
        gateway.chat()
        metrics = gateway.http.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain; version=")
        assert 'tidepool_requests_total{model="tide",outcome="ok",region="us-east",tier="IW-N"} 1.0' in metrics.text
        assert 'tidepool_input_tokens_total{model="tide",tier="IW-N"} 7.0' in metrics.text
        assert 'gen_ai_server_time_to_first_token_seconds_count{model="tide",tier="IW-N"} 1.0' in metrics.text


@pytest.mark.parametrize(
    ("away", "status", "missing"),
    [("redis_url", 200, []), ("database_url", 503, ["catalog", "keys"])],
)
def test_a_gateway_that_starts_alone_says_what_it_lacks(
    world: World, away: str, status: int, missing: list[str]
) -> None:
    """Postgres has a first view where Redis is away; nothing stands in for Postgres."""
    scheme = {"redis_url": "redis", "database_url": "postgresql+psycopg"}[away]
    changes: dict[str, Any] = {away: SecretStr(f"{scheme}://127.0.0.1:{free_port()}/0")}
    with running_gateway(world, **changes) as gateway:

        def says() -> bool:  # a probe that takes two seconds on a busy machine counts as away
            answer = gateway.http.get("/readyz")
            return (answer.status_code, answer.json()["missing"]) == (status, missing)

        until(says)
        assert gateway.http.get("/livez").json() == {"status": "ok"}
        if away == "database_url":
            refused = gateway.chat(503)
            assert refused.json()["error"]["code"] == "unavailable"


def test_health_is_for_those_who_ask_as_they_ask_vllm(world: World) -> None:
    with running_gateway(world, FakeAgent()) as gateway:
        for ask in (gateway.http.get, gateway.http.head):
            answer = ask("/health", headers={"Authorization": ""})
            assert (answer.status_code, answer.content) == (200, b"")
        gateway.state.draining = True
        assert gateway.http.get("/health").status_code == 503


def test_head_over_the_wire_leaves_the_connection_usable(world: World) -> None:
    with running_gateway(world, FakeAgent()) as gateway:
        for path in ("/", "/v1/models", "/metrics", "/docs/swagger-ui.css"):
            head = gateway.http.head(path)
            assert (head.status_code, head.content) == (200, b""), path
            assert gateway.http.get(path).content


def test_late_loops_degrade_and_are_named_everywhere(world: World) -> None:
    with running_gateway(world, FakeAgent()) as gateway:
        with world.database.transaction() as session:
            session.execute(text("UPDATE fleet SET created_at = now() - interval '1 hour'"))
        for loop in set(Loop) - {Loop.SCALE}:
            note(world.database, loop)
        note(world.database, Loop.SCALE, "ValueError: no GPU")
        ready = gateway.http.get("/readyz")
        degraded = WELL | {"status": "degraded", "late": ["scale"]}
        assert (ready.status_code, ready.json()) == (200, degraded)
        viewer = {"Authorization": f"Bearer {world.key(Role.VIEWER)}"}
        status = gateway.http.get("/admin/status", headers=viewer).json()
        assert status["health"] == degraded
        loops = {loop["loop"]: loop for loop in status["loops"]}
        assert loops.keys() == set(Loop)
        assert (loops["scale"]["late"], loops["scale"]["since_success_s"]) == (True, None)
        assert loops["scale"]["last_error"] == "ValueError: no GPU"
        assert (loops["plan"]["late"], loops["plan"]["since_success_s"] >= 0) == (False, True)
        metrics = gateway.http.get("/metrics").text
        assert 'tidepool_loop_late{loop="scale"} 1.0' in metrics
        assert 'tidepool_loop_late{loop="plan"} 0.0' in metrics
        assert 'tidepool_loop_last_success_timestamp_seconds{loop="plan"} 1.' in metrics
        assert 'last_success_timestamp_seconds{loop="scale"}' not in metrics

        note(world.database, Loop.SCALE)
        assert gateway.http.get("/readyz").json() == WELL
        assert 'tidepool_loop_late{loop="scale"} 0.0' in gateway.http.get("/metrics").text


def test_a_silent_node_is_lost_everywhere(world: World) -> None:
    """The next heartbeat makes it well again."""
    with running_gateway(world, FakeAgent(), heartbeat_stale_s=60.0) as gateway:
        viewer = {"Authorization": f"Bearer {world.key(Role.VIEWER)}"}

        def told(path: str) -> Any:
            return gateway.http.get(path, headers=viewer).json()

        def states() -> list[Any]:
            status, live = told("/admin/status"), told("/admin/status/live")
            [instance] = told("/admin/instances")["data"]
            [of_node] = told("/admin/nodes/n0")["instances"]
            [node] = told("/admin/nodes")["data"]
            region = next(region for region in status["regions"] if region["name"] == "us-east")
            endpoint = next(row for row in live["endpoints"] if row["region"] == "us-east")
            return [
                told("/readyz") == status["health"],
                (instance["state"], of_node["state"], *status["instances"], *endpoint["instances"]),
                (node["alive"], region["nodes_alive"], region["instances_ready"]),
                (status["health"]["status"], status["health"]["lost"]),
            ]

        with world.database.transaction() as session:
            session.execute(text("UPDATE instances SET observed = 'ready'"))
        well = [True, ("ready",) * 4, (True, 1, 1), ("ok", [])]
        until(lambda: states() == well)  # a crowded Postgres may answer too late
        with world.database.transaction() as session:
            session.execute(text("UPDATE nodes SET last_seen_at = now() - interval '61 s'"))
        until(lambda: states() == [True, ("lost",) * 4, (False, 0, 0), ("degraded", ["n0"])])
        with world.database.transaction() as session:
            session.execute(text("UPDATE nodes SET last_seen_at = now()"))
        until(lambda: states() == well)
