"""What a key may do: its scopes, models and node; rotation; and revocation, everywhere and without Postgres."""

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from controlplane.api.credentials import KeyCache
from controlplane.errors import AuthenticationError
from controlplane.serving.regional_reads import RegionalReads
from controlplane.settings import Settings
from controlplane.store.keys import ApiKey, make_key, revoke_key
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database
from controlplane.store.tables import Role
from dataplane.protocol.joining import Join
from dataplane.protocol.messages import Heartbeat
from tests.controlplane.api.conftest import Ask
from tests.controlplane.api.gateway import assert_error, running_gateway
from tests.controlplane.world import FakeAgent, World, until


def _made(ask: Ask, status: int = 201, **fields: Any) -> Any:
    return ask("POST", "/admin/keys", role="admin", json={"name": "k", "role": "client"} | fields, status=status)


def _bearer(secret: str) -> dict[str, dict[str, str]]:
    return {"headers": {"Authorization": f"Bearer {secret}"}}


def test_a_key_reaches_only_what_its_scopes_name(ask: Ask, api: TestClient) -> None:
    made = _made(ask, scopes=["files", "models"])
    assert made["scopes"] == ["files", "models"]
    key = _bearer(made["secret"])
    assert api.get("/v1/files", **key).status_code == 200
    assert api.get("/v1/models", **key).status_code == 200
    for method, path in (("GET", "/v1/batches"), ("POST", "/v1/batches"), ("POST", "/v1/chat/completions"),
                         ("POST", "/v1/completions"), ("GET", "/v1/batches/batch_1")):  # fmt: skip
        answer = api.request(method, path, **key)
        assert answer.status_code == 403, path
        error = assert_error(answer)  # type: ignore[arg-type]
        assert error["code"] == "permission_denied"
        assert "files, models" in error["message"]
    assert api.get("/admin/regions", **key).status_code == 403


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"scopes": []}, "scopes"),
        ({"scopes": ["all"]}, "scopes.0"),
        ({"role": "viewer", "scopes": ["chat"]}, "scopes"),
        ({"role": "node", "models": ["m"], "node": "n"}, "models"),
        ({"models": []}, "models"),
        ({"models": ["\0"]}, "models.0"),
        ({"node": "n1"}, "node"),
        ({"role": "node", "node": "a/b"}, "node"),
    ],
)
def test_narrowing_that_does_not_fit_is_refused(ask: Ask, fields: dict[str, Any], param: str) -> None:
    assert _made(ask, status=400, **fields)["param"] == param


def test_a_key_sees_and_uses_its_models_only(world: World) -> None:
    world.add_model("other")
    with world.database.transaction() as session:
        secret = make_key(session, name="k", role=Role.CLIENT, tenant="acme", models=["other"]).secret
    with running_gateway(world, FakeAgent()) as gateway:
        key = _bearer(secret)
        assert [m["id"] for m in gateway.http.get("/v1/models", **key).json()["data"]] == ["other"]
        assert len(gateway.http.get("/v1/models").json()["data"]) == 2
        for method, path in (("GET", "/v1/models/tide"), ("POST", "/v1/chat/completions")):
            body = {"model": "tide", "messages": [{"role": "user", "content": "hi"}]} if method == "POST" else None
            answer = gateway.http.request(method, path, json=body, **key)
            assert answer.status_code == 404
            hidden = assert_error(answer)
            body = body and body | {"model": "nothing"}
            unknown = assert_error(gateway.http.request(method, path.replace("tide", "nothing"), json=body, **key))
            assert hidden["message"].replace("tide", "nothing") == unknown["message"], "it looks like no model at all"
            assert hidden["code"] == unknown["code"] == "model_not_found"


def test_rotation_with_overlap(ask: Ask, api: TestClient, database: Database, settings: Settings) -> None:
    first = _made(ask)
    second = ask("POST", f"/admin/keys/{first['id']}/rotate", role="admin", json={"overlap_s": 3600})
    assert second["id"] == first["id"]
    assert second["secret"].startswith(second["prefix"])
    works = [api.get("/v1/files", **_bearer(key["secret"])).status_code for key in (first, second)]
    assert works == [200, 200]
    third = ask("POST", f"/admin/keys/{first['id']}/rotate", role="admin", json={"overlap_s": 3600})
    until(lambda: api.get("/v1/files", **_bearer(first["secret"])).status_code == 401)
    with database.transaction() as session:
        row = session.get_one(ApiKey, first["id"])
        row.old_until = row.created_at
    fresh = TestClientAgain(settings)
    assert [fresh.status(key["secret"]) for key in (first, second, third)] == [401, 401, 200]
    ask("DELETE", f"/admin/keys/{first['id']}", role="admin")
    assert api.get("/v1/files", **_bearer(third["secret"])).status_code == 401
    ask("POST", f"/admin/keys/{first['id']}/rotate", role="admin", status=409)
    ask("POST", "/admin/keys/key_0/rotate", role="admin", status=404)
    ask("POST", f"/admin/keys/{first['id']}/rotate", role="admin", json={"overlap_s": -1}, status=400)
    events = ask("GET", "/admin/audit", params={"limit": 10})["data"]
    assert [e["action"] for e in events] == ["key.revoke", "key.rotate", "key.rotate", "key.create"]
    for secret in (first["secret"], second["secret"], third["secret"]):
        assert secret not in str(events)
    assert "hash" not in str(events)


def test_rotation_without_overlap_ends_the_old_secret_at_once(ask: Ask, api: TestClient) -> None:
    first = _made(ask)
    assert api.get("/v1/files", **_bearer(first["secret"])).status_code == 200
    second = ask("POST", f"/admin/keys/{first['id']}/rotate", role="admin", json={"overlap_s": 0})
    assert api.get("/v1/files", **_bearer(first["secret"])).status_code == 401
    assert api.get("/v1/files", **_bearer(second["secret"])).status_code == 200


class TestClientAgain:
    """A gateway that has seen no key yet."""

    __test__ = False

    def __init__(self, settings: Settings) -> None:
        from controlplane.api.app import make_app  # noqa: PLC0415 - one use

        self.app = make_app(settings)

    def status(self, secret: str) -> int:
        with TestClient(self.app, raise_server_exceptions=False) as client:
            return int(client.get("/v1/files", **_bearer(secret)).status_code)


def test_a_nodes_key_speaks_for_its_node_alone(ask: Ask, api: TestClient, fleet: None) -> None:
    made = _made(ask, role="node", node="n1")
    assert made["node"] == "n1"
    key = _bearer(made["secret"])
    for status, name in ((200, "n1"), (403, "n2")):
        join = Join(node=name, region="us-east", gpu_type="H800", url="http://n:1", slots=(), engine="torch")
        assert api.post("/node/join", content=msgspec.json.encode(join), **key).status_code == status
        beat = Heartbeat(node=name, boot_id="b", generation=0, instances=())
        answer = api.post("/node/heartbeat", content=msgspec.json.encode(beat), **key)
        assert answer.status_code == status, answer.text
        if status == 403:
            assert answer.json()["param"] == "node"


@pytest.fixture
def strict(settings: Settings, secrets: dict[str, str]) -> Iterator[TestClient]:
    """A gateway as it is by default: it takes node keys of a node only."""
    settings = Settings(**settings.model_dump() | {"node_keys_unbound": False})
    with TestClient(TestClientAgain(settings).app, raise_server_exceptions=False) as client:
        yield client


def test_a_key_of_no_node_is_for_one_machine(strict: TestClient, secrets: dict[str, str]) -> None:
    join = Join(node="n1", region="us-east", gpu_type="H800", url="http://n:1", slots=(), engine="torch")
    answer = strict.post("/node/join", content=msgspec.json.encode(join), **_bearer(secrets["node"]))
    assert answer.status_code == 403
    body = {"name": "k", "role": "node"}
    answer = strict.post("/admin/keys", json=body, **_bearer(secrets["admin"]))
    assert (answer.status_code, answer.json()["param"]) == (400, "node")


def test_a_revoked_key_ends_at_every_gateway_without_postgres(world: World) -> None:
    patient = {"key_cache_s": 3600.0}
    with running_gateway(world, FakeAgent(), **patient) as one, running_gateway(world, **patient) as other:
        assert [gateway.chat().status_code for gateway in (one, other)] == [200, 200]
        admin = _bearer(world.key(Role.ADMIN))
        for key in one.http.get("/admin/keys", **admin).json()["data"]:
            if key["role"] == "client":
                assert one.http.delete(f"/admin/keys/{key['id']}", **admin).status_code == 200
        for gateway in (one, other):
            until(lambda gateway=gateway: gateway.http.get("/v1/models").status_code == 401)  # type: ignore[misc]


class Postgres:
    """A database that can be away, slow or well, in front of the real one."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.away = False
        self.answers = threading.Event()
        self.answers.set()
        self.asked = 0

    def transaction(self) -> Any:
        self.asked += 1
        self.answers.wait()
        if self.away:
            raise OperationalError("SELECT 1", {}, Exception("away"))
        return self._database.transaction()


def _cache(database: Database, settings: Settings, **changes: Any) -> tuple[Postgres, KeyCache]:
    postgres = Postgres(database)
    reads = RegionalReads(postgres, settings)  # type: ignore[arg-type]
    return postgres, KeyCache(reads, settings.model_copy(update={"key_cache_s": 0.0} | changes))


def test_without_postgres_good_keys_work_and_bad_ones_stay_bad(database: Database, settings: Settings) -> None:
    with database.transaction() as session:
        good, gone = (make_key(session, name=n, role=Role.CLIENT, tenant="acme") for n in ("good", "gone"))
        ending = make_key(session, name="e", role=Role.CLIENT, tenant="acme")

    async def run() -> None:
        postgres, cache = _cache(database, settings)
        for key in (good, gone, ending):
            assert (await cache.find(key.secret)).key_id == key.row.id
        with database.transaction() as session:
            revoke_key(session, gone.row.id)
        with pytest.raises(AuthenticationError):
            await cache.find(gone.secret)
        postgres.away = True
        assert (await cache.find(good.secret)).tenant == "acme"
        with pytest.raises(AuthenticationError):
            await cache.find(gone.secret)
        with pytest.raises(OperationalError):
            await cache.find("never seen")
        cache.forget(frozenset({ending.row.secret_hash}))
        with pytest.raises(AuthenticationError):
            await cache.find(ending.secret)

    asyncio.run(run())


def test_a_key_ends_at_its_time_though_it_is_cached(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with database.transaction() as session:
        made = make_key(session, name="a", role=Role.CLIENT, tenant="acme")
        session.flush()
        session.execute(text("UPDATE api_keys SET expires_at = clock_timestamp() + interval '1 h'"))
    now_s = 0.0
    monkeypatch.setattr("controlplane.api.credentials.time", SimpleNamespace(monotonic=lambda: now_s))

    async def run() -> None:
        nonlocal now_s
        _, cache = _cache(database, settings, key_cache_s=7200.0)
        await cache.find(made.secret)
        with database.transaction() as session:
            session.execute(text("UPDATE api_keys SET expires_at = clock_timestamp()"))
        await cache.find(made.secret)  # it is not asked for again before its time
        now_s = 3600.0
        with pytest.raises(AuthenticationError):
            await cache.find(made.secret)

    asyncio.run(run())


def test_a_slow_postgres_is_asked_once_and_not_waited_for_again(database: Database, settings: Settings) -> None:
    with database.transaction() as session:
        secret = make_key(session, name="a", role=Role.CLIENT, tenant="acme").secret

    async def run() -> None:
        postgres, cache = _cache(database, settings, key_wait_s=0.2)
        await cache.find(secret)
        postgres.asked = 0
        postgres.answers.clear()
        await asyncio.gather(*(cache.find(secret) for _ in range(50)))
        for _ in range(50):
            await cache.find(secret)
        assert postgres.asked == 1
        assert cache._loading, "nobody waited for the answer"
        postgres.answers.set()

    asyncio.run(run())


def test_made_up_keys_push_no_good_one_out(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.api.credentials._KEYS_MAX", 3)
    with database.transaction() as session:
        secret = make_key(session, name="a", role=Role.CLIENT, tenant="acme").secret

    async def run() -> None:
        postgres, cache = _cache(database, settings)
        await cache.find(secret)
        for number in range(10):
            with pytest.raises(AuthenticationError):
                await cache.find(f"made up {number}")
        assert len(cache._bad) <= 3
        postgres.away = True
        await cache.find(secret)

    asyncio.run(run())


def test_revocations_are_told_in_redis(live: LiveStore) -> None:
    assert live.read_revoked() == frozenset()
    live.note_revoked({"a", "b"})
    live.note_revoked({"b"})
    assert live.read_revoked() == {"a", "b"}
