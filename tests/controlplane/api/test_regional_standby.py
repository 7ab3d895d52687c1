"""A gateway in a region with its own standby of Postgres, while the primary is there, behind, and away."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from pydantic import SecretStr
from sqlalchemy import text

import migrations
from controlplane.settings import Settings
from controlplane.store.keys import ApiKey
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database, make_engine
from ops.local.supervisor import Supervisor
from tests.controlplane.api.gateway import Gateway, assert_error, running_gateway
from tests.controlplane.world import FakeAgent, World, until
from tests.servers import Servers, Standby


class Region:
    """A primary elsewhere, and the standby of this region."""

    def __init__(self, folder: Path, servers: Servers) -> None:
        self.servers = servers
        self.standby = Standby(folder, servers.postgres)
        self.standby.prepare()
        self._running = ExitStack()
        self._running.enter_context(Supervisor([self.standby.child()]))
        url = servers.postgres.url()
        self.settings = Settings(
            database_url=SecretStr(url),
            database_replica_url=SecretStr(self.standby.url()),
            redis_url=SecretStr(servers.redis.url()),
            home=folder,
            key_cache_s=0.0,
        )
        self.database, self.live = Database(make_engine(self.settings)), LiveStore(self.settings)
        at_standby = self.settings.model_copy(update={"database_url": SecretStr(self.standby.url())})
        self.copy = Database(make_engine(at_standby))
        self.world = World(self.database, self.live, self.settings)

    @contextmanager
    def not_replaying(self) -> Iterator[None]:
        """The standby receives what the primary writes, and applies none of it."""
        self._tell("SELECT pg_wal_replay_pause()")
        try:
            yield
        finally:
            self._tell("SELECT pg_wal_replay_resume()")

    def has(self, key_id: str) -> bool:
        """Whether the standby knows of a key."""
        with self.copy.transaction() as session:
            return session.get(ApiKey, key_id) is not None

    def _tell(self, statement: str) -> None:
        with self.copy.transaction() as session:
            session.execute(text(statement))

    def close(self) -> None:
        self.live.close()
        for database in (self.database, self.copy):
            database.close()
        self._running.close()
        self.servers.close()


@pytest.fixture(scope="module")
def region(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Region]:
    servers = Servers(tmp_path_factory.mktemp("servers"))
    migrations.upgrade(servers.postgres.url())
    region = Region(tmp_path_factory.mktemp("standby"), servers)
    yield region
    region.close()


def ready(gateway: Gateway) -> Any:
    answer = gateway.http.get("/readyz")
    return answer.status_code, answer.json()["status"], answer.json()["away"]


def asks(gateway: Gateway, secret: str) -> httpx.Response:
    """A request with a key of its own."""
    body = {"model": "tide", "prompt": "x"}
    return gateway.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {secret}"})


def test_a_region_serves_from_its_standby_while_no_primary_is_there(region: Region) -> None:
    """Also a gateway that starts meanwhile, and keys that it has never seen."""
    with running_gateway(region.world, FakeAgent()) as gateway:
        until(lambda: ready(gateway) == (200, "ok", []))
        late_key = region.world.key()
        until(lambda: asks(gateway, late_key).status_code == 200)
        with region.servers.stopped("postgres"):
            until(lambda: ready(gateway) == (200, "degraded", ["postgres"]))
            with running_gateway(region.world, secret=gateway.secret) as late:
                assert ready(late) == (200, "degraded", ["postgres"])
                for stream in (False, True):
                    assert "turns" in late.chat(200, stream=stream).text
                assert asks(late, late_key).status_code == 200
                refused = asks(late, "tp-client-unknown")
                assert refused.status_code == 503, "nobody can say whether it is good"
                assert_error(refused)
                assert "tidepool_replica_age_seconds" in late.http.get("/metrics").text
        until(lambda: ready(gateway) == (200, "ok", []))
        until(lambda: asks(gateway, "tp-client-unknown").status_code == 401)
