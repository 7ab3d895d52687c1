"""The whole API in process, with one key of each role."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from controlplane.api.app import make_app
from controlplane.settings import Settings
from controlplane.store.keys import make_key
from controlplane.store.session import Database
from controlplane.store.tables import Role

Ask = Callable[..., Any]


@pytest.fixture
def secrets(database: Database) -> dict[str, str]:
    """A secret by role."""
    with database.transaction() as session:
        return {role.value: make_key(session, name=role.value, role=role, tenant="acme").secret for role in Role}


@pytest.fixture
def api(settings: Settings) -> Iterator[TestClient]:
    """A client of the running app; it sends no key of itself."""
    with TestClient(make_app(settings), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def ask(api: TestClient, secrets: dict[str, str]) -> Ask:
    """`ask(method, path, role=..., status=..., **request)`: the JSON of an answer that has that status."""

    def ask(method: str, path: str, *, role: str = "operator", status: int = 200, **request: Any) -> Any:
        headers = {"Authorization": f"Bearer {secrets[role]}", **request.pop("headers", {})}
        answer = api.request(method, path, headers=headers, **request)
        assert answer.status_code == status, answer.text
        if status >= 400:
            assert answer.headers["content-type"] == "application/problem+json", answer.headers
            assert answer.json()["status"] == status
        return answer.json()

    return ask


@pytest.fixture
def fleet(ask: Ask) -> None:
    """Two regions, a GPU type, two models, a profile and an endpoint."""
    for region in ("us-east", "us-west"):
        ask("PUT", f"/admin/regions/{region}")
    ask("PUT", "/admin/gpu-types/H800", json={"memory_bytes": 85_899_345_920, "cost_per_hour": 2.5})
    for name in ("llama", "Qwen/Qwen3-8B"):
        ask("PUT", f"/admin/models/{name}", json=MODEL)
    ask("PUT", "/admin/profiles", json=PROFILE)
    ask("PUT", "/admin/endpoints", json=ENDPOINT)


MODEL = {
    "path": "/models/one",
    "architecture": "LlamaForCausalLM",
    "weights_bytes": 16_000_000,
    "kv_bytes_per_token": 2048,
    "context_tokens": 4096,
}
PROFILE = {
    "model": "llama",
    "gpu_type": "H800",
    "tokens_per_s": 12_000,
    "gpus": 1,
    "load_time_s": 30,
    "latency": None,
    "engine_rates": None,
}
ENDPOINT = {"model": "llama", "region": "us-east", "instances_min": 0, "instances_max": 4}
