"""Keys, and POSTs that are sent twice."""

from typing import Any

import pytest

from controlplane.settings import Settings
from controlplane.store.keys import IdempotencyKey
from controlplane.store.session import Database
from tests.controlplane.api.conftest import Ask
from tests.controlplane.world import at_once


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"key_cache_s": 0.0})


def _create(ask: Ask, name: str = "ci", role: str = "viewer", status: int = 201, **request: Any) -> Any:
    return ask("POST", "/admin/keys", role="admin", json={"name": name, "role": role}, status=status, **request)


def test_a_made_key_works_until_it_is_revoked(ask: Ask, api: Any) -> None:
    made = _create(ask)
    assert made["secret"].startswith(made["prefix"])
    assert made["tenant"] == "default"
    headers = {"Authorization": f"Bearer {made['secret']}"}
    assert api.get("/admin/regions", headers=headers).status_code == 200
    assert api.put("/admin/regions/a", headers=headers).status_code == 403
    revoked = ask("DELETE", f"/admin/keys/{made['id']}", role="admin")
    assert revoked["revoked_at"] is not None
    assert ask("DELETE", f"/admin/keys/{made['id']}", role="admin") == revoked
    assert api.get("/admin/regions", headers=headers).status_code == 401


def test_the_secret_is_shown_nowhere_else(ask: Ask) -> None:
    made = _create(ask)
    listed = ask("GET", "/admin/keys", role="admin", params={"limit": 100})["data"]
    assert made["id"] in {key["id"] for key in listed}
    event = ask("GET", "/admin/audit", params={"limit": 1})["data"][0]
    assert event["subject"] == made["id"]
    for shown in (str(listed), str(event)):
        assert made["secret"] not in shown
        assert "secret" not in shown


def test_expiry(ask: Ask) -> None:
    body = {"name": "ci", "role": "client", "tenant": "acme", "expires_in_days": 1}
    made = ask("POST", "/admin/keys", role="admin", json=body, status=201)
    assert made["expires_at"] > made["created_at"]


def test_bad_keys_are_not_made(ask: Ask) -> None:
    count = len(ask("GET", "/admin/keys", role="admin")["data"])
    changes = ({"role": "king"}, {"name": "A"}, {"name": ""}, {"expires_in_days": 0}, {"tenant": "a b"}, {"x": 1})
    for change in changes:
        body = {"name": "ci", "role": "client"} | change
        assert ask("POST", "/admin/keys", role="admin", json=body, status=400)["param"] == next(iter(change))
    assert len(ask("GET", "/admin/keys", role="admin")["data"]) == count


def test_the_last_admin_key_stays(ask: Ask) -> None:
    keys = ask("GET", "/admin/keys", role="admin", params={"limit": 100})["data"]
    own = next(key["id"] for key in keys if key["role"] == "admin")
    second = _create(ask, role="admin")
    ask("DELETE", f"/admin/keys/{second['id']}", role="admin")
    assert ask("DELETE", f"/admin/keys/{own}", role="admin", status=409)["code"] == "conflict"
    ask("DELETE", "/admin/keys/key_0", role="admin", status=404)


def test_a_repeated_post_changes_nothing(ask: Ask, database: Database) -> None:
    once = {"headers": {"Idempotency-Key": "k-1"}}
    made = _create(ask, **once)
    again = _create(ask, **once)
    assert again == made | {"secret": None}
    names = [key["name"] for key in ask("GET", "/admin/keys", role="admin", params={"limit": 100})["data"]]
    assert names.count("ci") == 1
    with database.transaction() as session:
        kept = session.query(IdempotencyKey).one()
    assert made["secret"] not in str(kept.body)


def test_an_idempotency_key_is_for_one_request(ask: Ask) -> None:
    once = {"headers": {"Idempotency-Key": "k-1"}}
    _create(ask, **once)
    assert _create(ask, name="other", status=409, **once)["param"] == "Idempotency-Key"
    ask("POST", "/admin/nodes/x/drain", role="admin", status=409, **once)
    _create(ask, name="other", headers={"Idempotency-Key": "k-2"})


def test_a_failed_post_leaves_its_key_free(ask: Ask) -> None:
    once = {"headers": {"Idempotency-Key": "k-1"}}
    _create(ask, role="king", status=400, **once)
    ask("POST", "/admin/keys", role="viewer", json={"name": "ci", "role": "viewer"}, status=403, **once)
    _create(ask, **once)


def test_bad_idempotency_keys(ask: Ask) -> None:
    for key in ("", "a b", "x" * 256):
        _create(ask, status=400, headers={"Idempotency-Key": key})


def test_two_at_once_make_one(ask: Ask) -> None:
    answers = at_once(*[lambda: _create(ask, headers={"Idempotency-Key": "k-1"})] * 4)
    assert len({answer["id"] for answer in answers}) == 1
    assert sum(answer["secret"] is not None for answer in answers) == 1
