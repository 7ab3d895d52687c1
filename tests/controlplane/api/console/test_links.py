"""Sign-in links: each is good once, for ten minutes, while its key is good."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import text

from controlplane.store.session import Database
from tests.controlplane.api.conftest import Ask
from tests.controlplane.api.console.browser import Browser

Open = Callable[..., Browser]
PAGE = "http://testserver/ui/#/sign-in?link="


def _made(ask: Ask, **request: Any) -> Any:
    made = ask("POST", "/admin/console/links", role="admin", status=201, **request)
    assert made["page"] == PAGE
    return made


def test_a_link_signs_in_once_and_its_secret_reaches_no_path(open_browser: Open, ask: Ask) -> None:
    link = _made(ask)
    browser, second = open_browser(), open_browser()
    session = browser.keep(browser.ask("POST", "/ui/session", json={"link": link["secret"]}))
    assert (session["name"], session["role"], session["source"]) == ("admin", "admin", "link")
    browser.ask("PUT", "/admin/regions/mars", json={})
    refused = second.ask("POST", "/ui/session", json={"link": link["secret"]}, status=401)
    assert (refused["param"], "used" in refused["detail"]) == ("link", True)
    assert not second.http.cookies
    for method in ("GET", "HEAD"):
        assert second.send(method, f"/ui/sign-in?token={_made(ask)['secret']}").status_code in {200, 503}
    assert not second.http.cookies, "reading a page uses no link up"


def test_two_at_once_use_a_link_once(open_browser: Open, ask: Ask) -> None:
    link = _made(ask)
    browsers = [open_browser() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(b.send, "POST", "/ui/session", json={"link": link["secret"]}) for b in browsers]
        assert sorted(answer.result().status_code for answer in sent) == [200, 401, 401, 401]


@pytest.mark.parametrize("why", ["expired", "its key is revoked", "never made"])
def test_a_link_that_is_not_good_signs_nobody_in(browser: Browser, ask: Ask, database: Database, why: str) -> None:
    secret = _made(ask)["secret"]
    with database.transaction() as session:
        if why == "expired":
            session.execute(text("UPDATE console_links SET ends_at = now() - interval '1 ms'"))
        elif why == "its key is revoked":
            session.execute(text("UPDATE api_keys SET revoked_at = now() WHERE role = 'admin'"))
    browser.ask("POST", "/ui/session", json={"link": secret + "x" * (why == "never made")}, status=401)
    assert not browser.http.cookies


def test_only_an_admin_key_makes_links(browser: Browser, ask: Ask, secrets: dict[str, str]) -> None:
    for role in ("viewer", "operator", "client", "node"):
        ask("POST", "/admin/console/links", role=role, status=403)
    browser.sign_in(secrets["admin"])
    assert "admin key" in browser.ask("POST", "/admin/console/links", status=403)["detail"]


def test_a_link_is_kept_nowhere(ask: Ask, database: Database) -> None:
    key = {"Idempotency-Key": "once"}
    secret = _made(ask, headers=key)["secret"]
    assert _made(ask, headers=key)["secret"] is None
    with database.transaction() as session:
        for table in ("console_links", "idempotency_keys", "audit_events"):
            rows = session.execute(text(f"SELECT row_to_json(t)::text FROM {table} t")).scalars().all()
            assert rows
            assert secret not in "".join(rows), table


def test_a_session_by_a_link_ends_with_its_key(browser: Browser, ask: Ask, secrets: dict[str, str]) -> None:
    made = ask("POST", "/admin/keys", role="admin", json={"name": "boss", "role": "admin"}, status=201)
    secrets["boss"] = made["secret"]
    link = ask("POST", "/admin/console/links", role="boss", status=201)
    browser.keep(browser.ask("POST", "/ui/session", json={"link": link["secret"]}))
    assert browser.send("GET", "/admin/keys").status_code == 200
    ask("DELETE", f"/admin/keys/{made['id']}", role="admin")
    assert browser.send("GET", "/admin/keys").status_code == 401


@pytest.mark.parametrize("how", ["rotated", "rotated with an overlap", "revoked", "logged out everywhere"])
def test_a_link_ends_with_the_secret_that_made_it(
    open_browser: Open, ask: Ask, secrets: dict[str, str], database: Database, how: str
) -> None:
    made = ask("POST", "/admin/keys", role="admin", json={"name": "boss", "role": "admin"}, status=201)
    secrets["boss"] = made["secret"]
    link, other = ask("POST", "/admin/console/links", role="boss", status=201), _made(ask)
    if how == "revoked":
        ask("DELETE", f"/admin/keys/{made['id']}", role="admin")
    elif how == "logged out everywhere":
        browser = open_browser()
        browser.sign_in(made["secret"])
        browser.ask("DELETE", "/ui/sessions")
    else:
        overlap_s = 60 if how == "rotated with an overlap" else 0
        ask("POST", f"/admin/keys/{made['id']}/rotate", role="admin", json={"overlap_s": overlap_s})
    if how == "rotated with an overlap":
        with database.transaction() as session:
            ends = text(
                "SELECT l.ends_at = k.old_until FROM console_links l JOIN api_keys k ON k.id = l.key_id"
                " WHERE k.name = 'boss'"
            )
            assert session.scalar(ends)
    else:
        open_browser().ask("POST", "/ui/session", json={"link": link["secret"]}, status=401)
    assert open_browser().ask("POST", "/ui/session", json={"link": other["secret"]})["name"] == "admin"


def test_a_link_made_by_a_replaced_secret_ends_with_it(ask: Ask, secrets: dict[str, str], database: Database) -> None:
    made = ask("POST", "/admin/keys", role="admin", json={"name": "boss", "role": "admin"}, status=201)
    rotated = ask("POST", f"/admin/keys/{made['id']}/rotate", role="admin", json={"overlap_s": 60})
    with database.transaction() as session:
        until: datetime = session.scalars(text("SELECT old_until FROM api_keys WHERE name = 'boss'")).one()
    for secret, ends_with_it in ((made["secret"], True), (rotated["secret"], False)):
        secrets["boss"] = secret
        link = ask("POST", "/admin/console/links", role="boss", status=201)
        assert (datetime.fromisoformat(link["ends_at"]) <= until) == ends_with_it


@pytest.mark.parametrize("overlap_s", [60, 3600])
def test_a_session_by_a_link_of_a_replaced_secret_ends_with_it(
    open_browser: Open, ask: Ask, secrets: dict[str, str], database: Database, overlap_s: int
) -> None:
    made = ask("POST", "/admin/keys", role="admin", json={"name": "boss", "role": "admin"}, status=201)
    secrets["boss"] = made["secret"]
    before = ask("POST", "/admin/console/links", role="boss", status=201)
    rotated = ask("POST", f"/admin/keys/{made['id']}/rotate", role="admin", json={"overlap_s": overlap_s})
    by_old = ask("POST", "/admin/console/links", role="boss", status=201)
    secrets["boss"] = rotated["secret"]
    by_new = ask("POST", "/admin/console/links", role="boss", status=201)
    for link in (before, by_old, by_new, _made(ask)):
        browser = open_browser()
        browser.keep(browser.ask("POST", "/ui/session", json={"link": link["secret"]}))
    ends = (
        "SELECT coalesce(s.ends_at = k.old_until, false) FROM console_sessions s JOIN api_keys k ON k.id = s.key_id"
        " ORDER BY s.id"
    )
    cannot_be_told_apart = overlap_s > 600  # the link of the new secret ends before the replaced secret too
    with database.transaction() as session:
        assert session.scalars(text(ends)).all() == [True, True, cannot_be_told_apart, False]


def test_a_link_made_after_the_replaced_secret_ended_begins_a_whole_session(
    browser: Browser, ask: Ask, secrets: dict[str, str]
) -> None:
    made = ask("POST", "/admin/keys", role="admin", json={"name": "boss", "role": "admin"}, status=201)
    rotated = ask("POST", f"/admin/keys/{made['id']}/rotate", role="admin", json={"overlap_s": 0})
    secrets["boss"] = rotated["secret"]
    link = ask("POST", "/admin/console/links", role="boss", status=201)
    session = browser.keep(browser.ask("POST", "/ui/session", json={"link": link["secret"]}))
    assert session["ends_s"] - session["signed_in_s"] > 7200


def test_one_of_key_and_link_is_given(browser: Browser, secrets: dict[str, str]) -> None:
    for body in ({}, {"key": secrets["admin"], "link": "x"}):
        assert browser.ask("POST", "/ui/session", json=body, status=400)["param"] == "key"
