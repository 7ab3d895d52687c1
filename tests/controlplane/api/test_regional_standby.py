"""A gateway in a region with its own standby of Postgres, while the primary is there, behind, and away."""

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from pydantic import SecretStr
from sqlalchemy import text

import migrations
from controlplane.settings import Settings
from controlplane.store.keys import ApiKey, make_key, revoke_key
from controlplane.store.log_position import read_log_position
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database, make_engine
from controlplane.store.tables import Role
from ops.local.ports import free_port
from ops.local.supervisor import Supervisor
from tests.controlplane.api.gateway import Gateway, assert_error, running_gateway
from tests.controlplane.world import FakeAgent, World, until
from tests.servers import Servers, Standby, suspended


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
        until(self._is_paused)
        try:
            yield
        finally:
            self._tell("SELECT pg_wal_replay_resume()")

    def has(self, key_id: str) -> bool:
        """Whether the standby knows of a key."""
        with self.copy.transaction() as session:
            return session.get(ApiKey, key_id) is not None

    def is_in_step(self) -> bool:
        """Whether the standby has replayed all that the primary has written."""
        with self.database.transaction() as here, self.copy.transaction() as there:
            return read_log_position(here).bytes <= read_log_position(there).bytes

    def _is_paused(self) -> bool:
        """A standby is asked to pause, and goes on for a moment."""
        with self.copy.transaction() as session:
            return session.execute(text("SELECT pg_get_wal_replay_pause_state()")).scalar_one() == "paused"

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


def is_behind(told: Any) -> bool:
    """Whether one answer says that the copy is too old (more than 2 s, told in tenths), and what follows of it. A
    machine that stands still makes it too old for a moment, so that two answers need not agree.
    """
    return told["behind"] == ["replica"] and told["status"] == "degraded" and (told["replica_age_s"] or 0.0) > 2.0


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


def test_a_key_that_was_revoked_elsewhere_is_refused_at_once_though_the_standby_is_behind(region: Region) -> None:
    """It is read from the primary, whose word counts while it is there; a key too that the standby has not got."""
    with running_gateway(region.world, FakeAgent(), replica_lag_max_s=2.0) as gateway:
        with region.database.transaction() as session:
            made = make_key(session, name="leaked", role=Role.CLIENT, tenant="acme")
        until(lambda: region.has(made.row.id))
        assert asks(gateway, made.secret).status_code == 200
        with region.not_replaying():
            with region.database.transaction() as session:
                revoke_key(session, made.row.id)
                fresh = make_key(session, name="fresh", role=Role.CLIENT, tenant="acme")
            assert asks(gateway, fresh.secret).status_code == 200
            until(lambda: asks(gateway, made.secret).status_code == 401)
            until(lambda: is_behind(gateway.http.get("/readyz").json()))
            assert not region.has(fresh.row.id)
        until(lambda: ready(gateway) == (200, "ok", []))


def test_a_copy_beyond_the_bound_lets_nobody_in_and_heals(region: Region) -> None:
    """The error says how old the copy is; a shorter bound than the outage is set here."""
    with running_gateway(region.world, FakeAgent(), key_revocation_max_age_s=2.0) as gateway:
        until(lambda: asks(gateway, gateway.secret).status_code == 200)
        with region.servers.stopped("postgres"):
            until(lambda: asks(gateway, gateway.secret).status_code == 503)
            refused = asks(gateway, gateway.secret)
            assert "old; 2 s are allowed" in assert_error(refused)["message"]
            assert ready(gateway)[0] == 503
        until(lambda: asks(gateway, gateway.secret).status_code == 200)


def test_a_standby_that_is_away_is_named_and_not_needed(region: Region) -> None:
    nobody = SecretStr(f"postgresql+psycopg://127.0.0.1:{free_port()}/tidepool")
    with running_gateway(region.world, FakeAgent(), database_replica_url=nobody) as gateway:
        assert asks(gateway, gateway.secret).status_code == 200
        assert asks(gateway, "tp-client-unknown").status_code == 401
        assert ready(gateway) == (200, "degraded", ["replica"])
        assert 'tidepool_server_away{server="replica"} 1.0' in gateway.http.get("/metrics").text


def test_a_primary_that_hangs_holds_up_no_request(region: Region) -> None:
    """It takes connections and answers none; keys are read from the standby, also those that are new to the gateway."""
    with running_gateway(region.world, FakeAgent()) as gateway:
        until(lambda: ready(gateway) == (200, "ok", []))
        keys = [region.world.key() for _ in range(30)]  # more than there are threads for keys
        until(region.is_in_step)
        until(lambda: asks(gateway, keys[0]).status_code == 200)
        with region.servers.frozen_postgres():
            with ThreadPoolExecutor(len(keys)) as pool:
                answers = list(pool.map(lambda key: asks(gateway, key).status_code, keys))
            assert answers == [200] * len(keys)
            assert ready(gateway) == (200, "degraded", ["postgres"])
        until(lambda: ready(gateway) == (200, "ok", []))


def test_a_standby_that_hangs_keeps_no_revoked_key_good_and_no_key_waiting(region: Region) -> None:
    """It takes connections and answers none, and is noticed some seconds later: what was asked of it before is asked of
    the primary then.
    """
    with running_gateway(region.world, FakeAgent(), replica_lag_max_s=2.0) as gateway:
        until(lambda: ready(gateway) == (200, "ok", []))
        with region.database.transaction() as session:
            leaked, other = (make_key(session, name=f"{n}", role=Role.CLIENT, tenant="acme") for n in range(2))
        until(region.is_in_step)
        until(lambda: asks(gateway, leaked.secret).status_code == 200)
        with suspended(region.standby):
            with region.database.transaction() as session:
                revoke_key(session, leaked.row.id)
            asks(gateway, leaked.secret)  # is read from the standby still
            until(lambda: asks(gateway, leaked.secret).status_code == 401)
            until(lambda: asks(gateway, other.secret).status_code == 200)
            until(lambda: ready(gateway) == (200, "degraded", ["replica"]))
        until(lambda: ready(gateway) == (200, "ok", []))


def test_what_needs_a_primary_waits_and_says_so(region: Region) -> None:
    """Both where nobody answers, and where the one that answers takes no writes, as a former primary does."""
    with running_gateway(region.world, FakeAgent()) as gateway:
        admin = region.world.key(Role.ADMIN)
        file_id = _upload(gateway).json()["id"]
        only_standby = region.settings.model_copy(update={"database_url": region.settings.database_replica_url})
        reading = copy.copy(region.world)
        reading.settings = only_standby
        with running_gateway(reading, secret=gateway.secret) as former:
            until(lambda: former.http.get(f"/v1/files/{file_id}").status_code == 200)
            assert ready(former)[::2] == (200, ["postgres"])
            _refuses_writes(former, admin, file_id)
        with region.servers.stopped("postgres"):
            _refuses_writes(gateway, admin, file_id)
            until(lambda: ready(gateway) == (200, "degraded", ["postgres"]))
            _refuses_writes(gateway, admin, file_id)
        until(lambda: _upload(gateway).status_code == 200)
        assert len(gateway.http.get("/v1/files").json()["data"]) == 2, "what was refused left nothing"


def _refuses_writes(gateway: Gateway, admin: str, file_id: str) -> None:
    """Batches and files in OpenAI's words, the admin API by a problem, all with the time to come back."""
    batch = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    for refused in (_upload(gateway), gateway.http.post("/v1/batches", json=batch)):
        assert refused.status_code == 503, refused.text
        assert assert_error(refused)["code"] == "unavailable"
    headers = {"Authorization": f"Bearer {admin}"}
    refused = gateway.http.put("/admin/regions/eu-west", json={}, headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (503, "unavailable"), refused.text
    assert refused.headers["content-type"] == "application/problem+json"
    assert int(refused.headers["retry-after"]) >= 1


def _upload(gateway: Gateway) -> httpx.Response:
    return gateway.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", b"{}\n")})
