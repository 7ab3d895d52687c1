"""Deletions over the admin API: what a refusal says, and how soon gateways forget a model."""

from datetime import UTC, datetime, timedelta

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from controlplane.settings import Settings
from controlplane.store.instances import set_desired
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database
from controlplane.store.tables import Desired, Node
from tests.controlplane.api.conftest import Ask
from tests.controlplane.world import World, until


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Nobody waits for an instance: there is no node."""
    return settings.model_copy(update={"request_start_wait_s": 0.0})


def test_a_refusal_says_what_uses_it_in_a_form_for_scripts(ask: Ask, fleet: None) -> None:
    refused = ask("DELETE", "/admin/models/llama", status=409)
    assert refused["code"] == "in_use"
    [use] = refused["used_by"]
    assert (use["kind"], use["count"], use["names"]) == ("endpoint", 1, ["us-east"])
    assert "tidepool endpoint delete" in use["then"]
    ask("DELETE", "/admin/models/llama", role="viewer", status=403)


@pytest.mark.usefixtures("fleet")
def test_gateways_forget_a_deleted_model(ask: Ask, api: TestClient, secrets: dict[str, str]) -> None:
    client = {"Authorization": f"Bearer {secrets['client']}"}
    body = {"model": "llama", "messages": [{"role": "user", "content": "hi"}]}

    def answer() -> str:
        return str(api.post("/v1/chat/completions", headers=client, json=body).json()["error"]["code"])

    assert answer() != "model_not_found"
    ask("DELETE", "/admin/endpoints", params={"model": "llama", "region": "us-east"})
    ask("DELETE", "/admin/models/llama")
    until(lambda: answer() == "model_not_found")
    assert [model["id"] for model in api.get("/v1/models", headers=client).json()["data"]] == ["Qwen/Qwen3-8B"]


def test_a_deleted_node_comes_back_with_a_new_key_only(
    ask: Ask, api: TestClient, fleet: None, database: Database, live: LiveStore, settings: Settings
) -> None:
    world = World(database, live, settings)
    world.join("n1")

    def key() -> dict[str, str]:
        made = ask("POST", "/admin/keys", role="admin", status=201, json={"name": "n1", "role": "node", "node": "n1"})
        return {"Authorization": f"Bearer {made['secret']}"}

    def join(headers: dict[str, str]) -> int:
        slots = [{"gpus": 1, "memory_bytes": 1 << 30}]
        said = {"node": "n1", "region": "us-east", "gpu_type": "H800", "url": "http://127.0.0.1:9", "engine": "replay"}
        return api.post("/node/join", headers=headers, json=said | {"slots": slots}).status_code

    old = key()
    assert join(old) == 200
    assert "stop its agent first" in ask("DELETE", "/admin/nodes/n1", status=409)["detail"]
    with database.transaction() as session:
        session.execute(update(Node).values(last_seen_at=datetime.now(UTC) - timedelta(hours=1)))
    ask("DELETE", "/admin/nodes/n1")
    assert join(old) == 401
    assert ask("GET", "/admin/nodes")["data"] == []
    assert join(key()) == 200


@pytest.mark.usefixtures("fleet")
def test_a_profile_is_forgotten_unless_its_model_has_instances_there(
    ask: Ask, database: Database, live: LiveStore, settings: Settings
) -> None:
    where = {"model": "llama", "gpu_type": "H800"}
    world = World(database, live, settings)
    world.join("n1")
    instance = world.place("n1", model="llama")
    refused = ask("DELETE", "/admin/profiles", params=where, status=409)
    assert [use["names"] for use in refused["used_by"]] == [[instance]]
    with database.transaction() as session:
        set_desired(session, [instance], Desired.STOPPED)
    ask("DELETE", "/admin/profiles", role="viewer", params=where, status=403)
    assert ask("DELETE", "/admin/profiles", params=where)["model"] == "llama"
    left = [(row["model"], row["gpu_type"]) for row in ask("GET", "/admin/profiles")["data"]]
    assert left
    assert ("llama", "H800") not in left
    ask("DELETE", "/admin/profiles", params=where, status=404)


@pytest.mark.usefixtures("fleet")
def test_a_latency_is_forgotten_and_carries_its_owner_until_then(ask: Ask) -> None:
    ask("PUT", "/admin/regions/us-west", json={})
    latency = {"origin": "us-east", "destination": "us-west", "ms": 62.0}
    assert ask("PUT", "/admin/region-latencies", json=latency)["owner"] is None
    assert ask("PUT", "/admin/region-latencies", json=latency, params={"owner": "prod"})["owner"] == "prod"
    assert ask("PUT", "/admin/region-latencies", json=latency)["owner"] == "prod"
    ask("PUT", "/admin/region-latencies", json=latency, params={"owner": "No Name"}, status=400)
    where = {"origin": "us-east", "destination": "us-west"}
    assert ask("DELETE", "/admin/region-latencies", params=where)["ms"] == 62.0
    ask("DELETE", "/admin/region-latencies", params=where, status=404)
