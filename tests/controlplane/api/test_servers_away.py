"""Postgres or Redis goes away while a gateway serves, and comes back (promise 6)."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import text

import migrations
from controlplane.settings import Settings
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database, make_engine
from tests.controlplane.api.gateway import Gateway, assert_error, running_gateway
from tests.controlplane.world import FakeAgent, World, until
from tests.servers import Servers


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("servers"))
    migrations.upgrade(servers.postgres.url())
    yield servers
    servers.close()


@pytest.fixture
def gateway(servers: Servers, tmp_path: Path) -> Iterator[Gateway]:
    """A gateway on these servers whose keys are asked for anew with every request."""
    settings = Settings(
        database_url=SecretStr(servers.postgres.url()), redis_url=SecretStr(servers.redis.url()), home=tmp_path
    )
    database, live = Database(make_engine(settings)), LiveStore(settings)
    agents = (FakeAgent(), FakeAgent())
    with running_gateway(World(database, live, settings), *agents, key_cache_s=0.0) as gateway:
        yield gateway
    live.close()
    database.close()


def ready(gateway: Gateway) -> tuple[int, Any, Any]:
    answer = gateway.http.get("/readyz")
    return answer.status_code, answer.json()["status"], answer.json()["away"]


def serves(gateway: Gateway) -> None:
    for stream in (False, True):
        assert "turns" in gateway.chat(200, stream=stream).text


def test_redis_goes_and_comes_back_and_then_postgres(gateway: Gateway, servers: Servers) -> None:
    serves(gateway)
    assert ready(gateway) == (200, "ok", [])

    servers.stop("redis")
    for _ in range(3):
        serves(gateway)
    assert ready(gateway) == (200, "degraded", ["redis"])
    servers.start("redis")
    until(lambda: ready(gateway)[2] == [])
    serves_again = gateway.chat
    until(lambda: serves_again(200))

    servers.stop("postgres")
    for _ in range(3):
        serves(gateway)
    assert ready(gateway) == (200, "degraded", ["postgres"])
    for method, path in (("GET", "/v1/batches"), ("GET", "/v1/files"), ("GET", "/v1/batches/batch_1")):
        refused = gateway.http.request(method, path)
        assert refused.status_code == 503, path
        assert_error(refused)
    stranger = gateway.http.post(
        "/v1/completions", json={"model": "tide", "prompt": "x"}, headers={"Authorization": "Bearer tp-client-unknown"}
    )
    assert stranger.status_code == 503, "nobody can say whether it is good"
    servers.start("postgres")
    until(lambda: ready(gateway) == (200, "ok", []))
    until(lambda: gateway.http.get("/v1/batches").status_code == 200)
    serves(gateway)


def test_a_gateway_that_starts_without_redis_asks_postgres_who_is_there(gateway: Gateway, servers: Servers) -> None:
    with gateway.world.database.transaction() as session:
        session.execute(text("UPDATE instances SET observed = 'ready'"))
    servers.stop("redis")
    with running_gateway(gateway.world) as late:
        until(lambda: ready(late) == (200, "degraded", ["redis"]))
        serves(late)
        servers.start("redis")
        until(lambda: ready(late) == (200, "ok", []))
        serves(late)


def test_many_probes_of_a_postgres_that_hangs_hold_up_nobody(gateway: Gateway, servers: Servers) -> None:
    serves(gateway)
    with servers.frozen_postgres():
        with ThreadPoolExecutor(60) as pool:  # more than there are threads for requests
            answers = list(pool.map(lambda _: ready(gateway), range(60)))
        assert answers == [(200, "degraded", ["postgres"])] * 60
        serves(gateway)
    until(lambda: ready(gateway) == (200, "ok", []))
