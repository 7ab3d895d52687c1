"""Sessions of people: signing in with a key, what a session may do, and its end."""

import time
from collections.abc import Callable

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

from controlplane.api.browsers import csrf_token
from controlplane.settings import Settings
from controlplane.store.console import ConsoleSession
from controlplane.store.keys import KeyScope, make_key
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database
from controlplane.store.tables import Role
from tests.controlplane.api.conftest import Ask
from tests.controlplane.api.console.browser import SECURE, Browser
from tests.controlplane.redis_clock import RedisClock
from tests.controlplane.world import until

Open = Callable[..., Browser]


def test_a_key_signs_in_and_the_session_says_whose_it_is(
    browser: Browser, secrets: dict[str, str], settings: Settings
) -> None:
    nobody = browser.ask("GET", "/ui/session", status=401)
    assert (nobody["code"], nobody["sign_in"], nobody["oidc_name"]) == ("sign_in_needed", ["key"], None)
    session = browser.sign_in(secrets["operator"])
    assert {name: session[name] for name in ("name", "role", "tenant", "source")} == {
        "name": "operator",
        "role": "operator",
        "tenant": "acme",
        "source": "key",
    }
    assert session["ends_s"] - session["signed_in_s"] == settings.console_session_s
    assert session["idle_ends_s"] - session["signed_in_s"] == settings.console_idle_s
    again = browser.send("GET", "/ui/session")
    assert again.json() == session | {"now_s": again.json()["now_s"]}
    assert again.headers["cache-control"] == "no-store"


def test_the_cookie_is_out_of_the_reach_of_scripts_and_of_other_sites(
    open_browser: Open, secrets: dict[str, str]
) -> None:
    for origin, name, secure in (("http://testserver", "tidepool_session", False),
                                 (SECURE, "__Host-tidepool_session", True)):  # fmt: skip
        browser = open_browser(origin=origin)
        told = browser.send("POST", "/ui/session", json={"key": secrets["viewer"]}).headers["set-cookie"]
        parts = {part.strip().lower() for part in told.split(";")[1:]}
        assert told.startswith(f"{name}=")
        assert {"httponly", "samesite=strict", "path=/"} <= parts
        assert ("secure" in parts) == secure
        assert not any(part.startswith("domain") for part in parts)
        assert browser.ask("GET", "/ui/session")["role"] == "viewer"


@pytest.mark.parametrize("role", ["client", "node"])
def test_keys_of_programs_are_refused_with_the_reason(browser: Browser, secrets: dict[str, str], role: str) -> None:
    refused = browser.ask("POST", "/ui/session", json={"key": secrets[role]}, status=403)
    assert refused["param"] == "key"
    assert f"'{role}'" in refused["detail"]
    assert "viewer, operator, admin" in refused["detail"]
    wrong = browser.ask("POST", "/ui/session", json={"key": secrets[role] + "x"}, status=401)
    assert wrong["code"] == "invalid_api_key"
    assert not browser.http.cookies
    for body in ({}, {"key": ""}, {"key": "k" * 513}, {"key": secrets["admin"], "role": "admin"}):
        assert browser.ask("POST", "/ui/session", json=body, status=400)["param"]


def test_a_session_may_what_a_key_of_its_role_may(open_browser: Open, secrets: dict[str, str], ask: Ask) -> None:
    requests = (
        ("GET", "/admin/regions", None),
        ("PUT", "/admin/regions/mars", {}),
        ("GET", "/admin/keys", None),
        ("POST", "/admin/keys", {"name": "k", "role": "client"}),
        ("GET", "/v1/models", None),
        ("GET", "/v1/batches", None),
        ("POST", "/v1/batches", {}),
        ("POST", "/v1/chat/completions", {"model": "none", "messages": [{"role": "user", "content": "hi"}]}),
    )
    for role in ("viewer", "operator", "admin"):
        browser = open_browser()
        browser.sign_in(secrets[role])
        for method, path, body in requests:
            by_key = browser.http.request(method, path, json=body, headers={"Authorization": f"Bearer {secrets[role]}"})
            by_session = browser.send(method, path, json=body)
            assert by_session.status_code == by_key.status_code, (role, method, path, by_session.text)
    assert browser.send("GET", "/v1/requests/req_1").status_code == 401, "sessions are for the console's own needs"


def test_a_session_is_as_narrow_as_its_key(browser: Browser, database: Database) -> None:
    with database.transaction() as session:
        key = make_key(session, name="k", role=Role.OPERATOR, tenant="acme", scopes=[KeyScope.MODELS], models=["a"])
    browser.sign_in(key.secret)
    assert browser.send("GET", "/v1/models").status_code == 200
    assert browser.send("GET", "/v1/batches").status_code == 403


def test_the_audit_names_the_person(browser: Browser, secrets: dict[str, str], ask: Ask) -> None:
    browser.sign_in(secrets["operator"])
    browser.ask("PUT", "/admin/regions/mars", json={})
    browser.ask("DELETE", "/ui/session")
    events = ask("GET", "/admin/audit", role="viewer")["data"]
    assert [(event["action"], event["actor"]) for event in events] == [
        ("session.end", "operator"),
        ("region.put", "operator"),
        ("session.begin", "operator"),
    ]
    began = events[-1]["after"]
    assert (began["source"], began["role"], began["address"]) == ("key", "operator", "testclient")
    assert events[0]["subject"] == events[-1]["subject"]


def test_an_authorization_header_is_never_overruled_by_a_cookie(browser: Browser, secrets: dict[str, str]) -> None:
    browser.sign_in(secrets["admin"])
    name, secret = browser.cookie
    for header in ("Bearer wrong", "Basic YTpi", f"Bearer {secrets['client']}"):
        assert browser.send("GET", "/admin/keys", headers={"Authorization": header}).status_code in {401, 403}
    assert browser.send("GET", "/admin/keys", headers={"x-api-key": "wrong"}).status_code == 401
    bare = browser.http.request("GET", "/admin/keys", headers={"Authorization": f"Bearer {secret}"})
    assert bare.status_code == 401, "a session's secret is no key"
    browser.http.cookies.set(name, secrets["admin"])
    browser.http.cookies.delete(name, domain="testserver.local")
    assert browser.send("GET", "/admin/keys").status_code == 401, "a key is no session's secret"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_what_changes_something_needs_the_token_of_this_session(
    open_browser: Open, secrets: dict[str, str], method: str
) -> None:
    mine, other = open_browser(), open_browser()
    mine.sign_in(secrets["admin"])
    other.sign_in(secrets["admin"])
    path = "/admin/regions/mars"
    tokens = (None, "", "x", other.csrf, csrf_token(""), (mine.csrf or "").upper(), "\u00e9".encode())
    for token in tokens:
        answer = mine.send(method, path, headers={"X-CSRF-Token": token})
        # no such method on the path is said before anybody is asked for
        assert answer.status_code == (405 if method in {"POST", "PATCH"} else 403), (token, answer.text)
        assert "X-CSRF-Token" in answer.text or answer.status_code == 405
    for path in ("/admin/keys", "/v1/chat/completions", "/v1/batches", "/v1/files", "/ui/session/seen"):
        if method == "POST":
            answer = mine.send(method, path, json={}, headers={"X-CSRF-Token": other.csrf})
            assert (answer.status_code, "X-CSRF-Token" in answer.text) == (403, True), path
    assert mine.send("PUT", "/admin/regions/mars", json={}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "http://evil.example", "Sec-Fetch-Site": None},
        {"Origin": "http://testserver.evil.example", "Sec-Fetch-Site": None},
        {"Origin": "http://testserver:8080", "Sec-Fetch-Site": None},
        {"Origin": "null", "Sec-Fetch-Site": None},
        {"Origin": "ftp://testserver", "Sec-Fetch-Site": None},
        {"Origin": "", "Sec-Fetch-Site": None},
    ],
)
def test_another_origins_page_changes_nothing_and_signs_nobody_in(
    browser: Browser, secrets: dict[str, str], headers: dict[str, str | None]
) -> None:
    attacked = browser.ask("POST", "/ui/session", json={"key": secrets["viewer"]}, headers=headers, status=403)
    assert attacked["code"] == "permission_denied"
    assert not browser.http.cookies
    browser.sign_in(secrets["admin"])
    assert browser.ask("PUT", "/admin/regions/mars", json={}, headers=headers, status=403)["detail"]
    for method, path in (("DELETE", "/ui/session"), ("DELETE", "/ui/sessions"), ("POST", "/ui/session/seen")):
        assert browser.send(method, path, headers=headers).status_code == 403, path
    assert browser.send("GET", "/admin/regions").json()["data"] == []


def test_reading_is_refused_to_another_sites_page(browser: Browser, secrets: dict[str, str]) -> None:
    browser.sign_in(secrets["admin"])
    for path in ("/admin/keys", "/v1/models", "/ui/session"):
        assert browser.send("GET", path, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
        for site in ("same-origin", "same-site", "none", None):
            assert browser.send("GET", path, headers={"Sec-Fetch-Site": site}).status_code == 200
    keys = browser.http.get(
        "/v1/models", headers={"Sec-Fetch-Site": "cross-site", "Authorization": f"Bearer {secrets['client']}"}
    )
    assert keys.status_code == 200, "a page that has a key may be anywhere"


def test_the_public_address_is_what_origins_are_compared_with(
    open_browser: Open, api: TestClient, secrets: dict[str, str]
) -> None:
    state = api.app.state.tidepool  # type: ignore[attr-defined]
    state.settings = state.settings.model_copy(update={"console_url": "https://tide.example/tidepool"})
    browser = open_browser()
    for origin, status in (("https://tide.example", 200), ("https://tide.example:443", 200),
                           ("http://tide.example", 403), ("http://testserver", 403)):  # fmt: skip
        headers = {"Origin": origin, "Sec-Fetch-Site": None}
        browser.ask("POST", "/ui/session", json={"key": secrets["viewer"]}, headers=headers, status=status)


def test_signing_in_gives_a_new_session_and_ends_the_one_before(open_browser: Open, secrets: dict[str, str]) -> None:
    browser, planted = open_browser(), open_browser()
    planted.sign_in(secrets["viewer"])
    name, secret = planted.cookie
    browser.http.cookies.set(name, secret, domain="testserver.local", path="/")
    browser.sign_in(secrets["admin"])
    assert browser.cookie[1] != secret
    assert planted.send("GET", "/ui/session").status_code == 401
    assert browser.ask("GET", "/ui/session")["role"] == "admin"
    made_up = open_browser()
    made_up.http.cookies.set(name, "chosen-by-somebody", domain="testserver.local", path="/")
    made_up.sign_in(secrets["viewer"])
    assert made_up.cookie[1] != "chosen-by-somebody"


def test_a_changed_cookie_is_nobodys(browser: Browser, secrets: dict[str, str]) -> None:
    browser.sign_in(secrets["viewer"])
    name, secret = browser.cookie
    browser.http.cookies.clear()
    for value in (secret + "x", secret[:-1], secret.swapcase(), f"{secret}.admin", "admin", "", '"', "a" * 10_000):
        answer = browser.send("GET", "/admin/keys", headers={"Cookie": f"{name}={value}; role=admin"})
        assert answer.status_code == 401, value
    assert browser.send("GET", "/admin/keys", headers={"Cookie": f"{name}={secret}; role=admin"}).status_code == 403
    twice = browser.send("GET", "/admin/regions", headers={"Cookie": f"__Host-{name}={secret}"})
    assert twice.status_code == 401, "the cookie of TLS is good over TLS alone"


def test_logging_out_ends_the_session_and_forgets_the_cookie(browser: Browser, secrets: dict[str, str]) -> None:
    browser.sign_in(secrets["operator"])
    name, secret = browser.cookie
    assert browser.ask("DELETE", "/ui/session") == {"ended": 1, "provider_logout_url": None}
    assert not browser.http.cookies
    for path in ("/ui/session", "/admin/regions"):
        answer = browser.send("GET", path, headers={"Cookie": f"{name}={secret}"})
        assert answer.status_code == 401
    assert "Sign in again" in browser.send("GET", "/admin/regions", headers={"Cookie": f"{name}={secret}"}).text


def test_logging_out_everywhere_ends_all_sessions_of_the_person_alone(
    open_browser: Open, secrets: dict[str, str]
) -> None:
    mine, elsewhere, other = open_browser(), open_browser(), open_browser()
    for browser, role in ((mine, "operator"), (elsewhere, "operator"), (other, "admin")):
        browser.sign_in(secrets[role])
        assert browser.send("GET", "/admin/regions").status_code == 200
    assert mine.ask("DELETE", "/ui/sessions")["ended"] == 2
    assert elsewhere.send("GET", "/admin/regions").status_code == 401
    assert other.send("GET", "/admin/regions").status_code == 200


def test_an_admin_ends_the_sessions_of_another(open_browser: Open, secrets: dict[str, str], ask: Ask) -> None:
    one, two, other = open_browser(), open_browser(), open_browser()
    for browser, role in ((one, "operator"), (two, "operator"), (other, "viewer")):
        browser.sign_in(secrets[role])
        assert browser.send("GET", "/admin/regions").status_code == 200
    begun = ask("GET", "/admin/audit", role="admin", params={"actor": "operator", "kind": "session"})["data"][0]
    whose = {"subject": begun["after"]["subject"]}
    ask("DELETE", "/admin/console/sessions", role="operator", params=whose, status=403)
    elsewhere = whose | {"issuer": "https://id.example"}
    assert ask("DELETE", "/admin/console/sessions", role="admin", params=elsewhere)["ended"] == 0
    assert ask("DELETE", "/admin/console/sessions", role="admin", params=whose)["ended"] == 2
    assert [browser.send("GET", "/admin/regions").status_code for browser in (one, two, other)] == [401, 401, 200]
    ended = ask("GET", "/admin/audit", role="admin", params={"kind": "session"})["data"][0]
    assert (ended["actor"], ended["subject"], ended["after"]["ended"]) == ("admin", whose["subject"], 2)
    one.sign_in(secrets["operator"])


def test_sessions_end_with_the_key_that_they_began_with(browser: Browser, ask: Ask, database: Database) -> None:
    for end in ("revoke", "rotate", "expire"):
        made = ask("POST", "/admin/keys", role="admin", json={"name": end, "role": "operator"}, status=201)
        browser.sign_in(made["secret"])
        assert browser.send("GET", "/admin/regions").status_code == 200
        if end == "revoke":
            ask("DELETE", f"/admin/keys/{made['id']}", role="admin")
        elif end == "rotate":
            ask("POST", f"/admin/keys/{made['id']}/rotate", role="admin", json={"overlap_s": 0})
        else:
            with database.transaction() as session:
                session.execute(text("UPDATE api_keys SET expires_at = now() WHERE name = 'expire'"))
            until(lambda: browser.send("GET", "/admin/regions").status_code == 401)  # after `key_cache_s`
        assert browser.send("GET", "/admin/regions").status_code == 401, end


def test_a_rotation_with_overlap_lets_sessions_last_as_long(browser: Browser, ask: Ask) -> None:
    made = ask("POST", "/admin/keys", role="admin", json={"name": "k", "role": "operator"}, status=201)
    before = browser.sign_in(made["secret"])
    ask("POST", f"/admin/keys/{made['id']}/rotate", role="admin", json={"overlap_s": 600})
    after = browser.ask("POST", "/ui/session/seen")
    assert after["ends_s"] - before["signed_in_s"] < 7200 < before["ends_s"] - before["signed_in_s"]
    assert after["idle_ends_s"] <= after["ends_s"]


def test_a_session_begun_with_a_replaced_secret_ends_with_it(open_browser: Open, ask: Ask, database: Database) -> None:
    made = ask("POST", "/admin/keys", role="admin", json={"name": "k", "role": "operator"}, status=201)
    rotated = ask("POST", f"/admin/keys/{made['id']}/rotate", role="admin", json={"overlap_s": 600})
    open_browser().sign_in(made["secret"])
    open_browser().sign_in(rotated["secret"])
    ends = "SELECT s.ends_at = k.old_until FROM console_sessions s JOIN api_keys k ON k.id = s.key_id ORDER BY s.id"
    with database.transaction() as session:
        assert session.scalars(text(ends)).all() == [True, False]


def test_only_what_the_person_does_moves_the_idle_limit(
    browser: Browser, secrets: dict[str, str], database: Database, settings: Settings
) -> None:
    first = browser.sign_in(secrets["viewer"])
    with database.transaction() as session:
        session.execute(text("UPDATE console_sessions SET seen_at = seen_at - interval '10 min'"))
    for path in ("/admin/regions", "/ui/session"):
        browser.ask("GET", path)
    with database.transaction() as session:
        row = session.query(ConsoleSession).one()
        assert round(row.created_at.timestamp() - row.seen_at.timestamp()) == 600
    seen = browser.ask("POST", "/ui/session/seen")
    assert seen["idle_ends_s"] > first["idle_ends_s"]
    assert seen["ends_s"] == first["ends_s"], "nothing moves the absolute limit"
    with database.transaction() as session:
        session.execute(text("UPDATE console_sessions SET seen_at = now() - make_interval(secs => :idle)"),
                        {"idle": settings.console_idle_s})  # fmt: skip
    assert browser.ask("POST", "/ui/session/seen", status=401)["sign_in"] == ["key"]


@pytest.mark.parametrize("column", ["ends_at", "seen_at"])
def test_a_session_ends_at_its_time_though_it_is_cached(
    browser: Browser, secrets: dict[str, str], database: Database, column: str
) -> None:
    browser.sign_in(secrets["viewer"])
    with database.transaction() as session:
        soon = "now() + interval '1 s'" if column == "ends_at" else "now() - interval '1 h' + interval '1 s'"
        session.execute(text(f"UPDATE console_sessions SET {column} = {soon}"))
    until(lambda: browser.send("GET", "/admin/regions").status_code == 401)


def test_another_gateway_learns_of_the_end_from_redis(browser: Browser, secrets: dict[str, str], live: LiveStore,
                                                      database: Database) -> None:  # fmt: skip
    browser.sign_in(secrets["viewer"])
    assert browser.send("GET", "/admin/regions").status_code == 200
    with database.transaction() as session:
        live.note_revoked([session.query(ConsoleSession).one().secret_hash])  # as a gateway that ends it does
    began_s = time.monotonic()
    until(lambda: browser.send("GET", "/admin/regions").status_code == 401)
    assert time.monotonic() - began_s < 600


def test_who_tries_too_often_waits(
    redis_clock: RedisClock, settings: Settings, open_browser: Open, secrets: dict[str, str]
) -> None:
    browser = open_browser()
    for _ in range(settings.console_sign_ins_per_minute):
        browser.ask("POST", "/ui/session", json={"key": "wrong"}, status=401)
    refused = browser.send("POST", "/ui/session", json={"key": secrets["admin"]})
    assert refused.status_code == 429
    assert refused.json()["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    redis_clock.move(60)
    browser.sign_in(secrets["admin"])


def test_all_addresses_together_have_a_limit(api: TestClient, browser: Browser, secrets: dict[str, str]) -> None:
    state = api.app.state.tidepool  # type: ignore[attr-defined]
    state.settings = state.settings.model_copy(update={"console_sign_ins_all_per_minute": 1})
    browser.ask("POST", "/ui/session", json={"key": "wrong"}, status=401)
    assert "anywhere" in browser.ask("POST", "/ui/session", json={"key": secrets["admin"]}, status=429)["detail"]


def test_secrets_of_sessions_are_stored_nowhere(
    browser: Browser, secrets: dict[str, str], database: Database, ask: Ask
) -> None:
    browser.sign_in(secrets["admin"])
    _, secret = browser.cookie
    with database.transaction() as session:
        rows = session.execute(text("SELECT row_to_json(s)::text FROM console_sessions s")).scalars().all()
    stored = "".join([*rows, str(ask("GET", "/admin/audit", role="viewer"))])
    assert rows
    assert secret not in stored
    assert (browser.csrf or "?") not in stored
    assert secrets["admin"] not in stored
