"""Liveness, readiness and metrics, with Postgres or Redis away."""

from typing import Any

import pytest
from pydantic import SecretStr

from ops.ports import free_port
from tests.controlplane.api.gateway import running_gateway
from tests.controlplane.world import FakeAgent, World


def test_ready(world: World) -> None:
    with running_gateway(world, FakeAgent()) as gateway:
        ready = gateway.http.get("/readyz")
        assert (ready.status_code, ready.json()) == (200, {"status": "ok", "missing": [], "away": []})
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
        answer = gateway.http.get("/readyz")
        assert (answer.status_code, answer.json()["missing"]) == (status, missing)
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
