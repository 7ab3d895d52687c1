"""Signing in at an OpenID provider: a real one, and one that attacks."""

import base64
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import httpx2 as httpx
import pytest
from fastapi.testclient import TestClient
from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey
from pydantic import SecretStr
from sqlalchemy import text

from controlplane.api.app import make_app
from controlplane.api.console.provider import OpenIdProvider
from controlplane.settings import Settings
from controlplane.store.session import Database
from ops.local.ports import free_port
from tests.controlplane.api.console.browser import Browser
from tests.controlplane.world import until

ISSUER = "https://id.example"
OIDC = {
    "oidc_issuer": ISSUER,
    "oidc_client_id": "console",
    "oidc_client_secret": SecretStr("hush"),
    "oidc_name": "Example",
    "oidc_role_claim": "realm.roles",
    "oidc_roles": {"admin": ["sre"], "viewer": ["staff"]},
}


class FakeProvider:
    """A provider in the test's hands. `claims` change those of its tokens, None takes one away."""

    def __init__(self) -> None:
        self.key = RSAKey.generate_key(2048, parameters={"kid": "one"})
        self.claims: dict[str, Any] = {}
        self.sign: Callable[[dict[str, Any]], str] = self._signed
        self.codes: dict[str, dict[str, str]] = {}
        self.about: dict[str, Any] = {}

    def authorize(self, url: str) -> dict[str, str]:
        """What the browser brings back from there."""
        query = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        assert query["code_challenge_method"] == "S256"
        assert query["response_type"] == "code"
        code = f"code-{len(self.codes)}"
        self.codes[code] = query
        return {"code": code, "state": query["state"]}

    def _signed(self, claims: dict[str, Any]) -> str:
        return jwt.encode({"alg": "RS256", "kid": self.key.kid}, claims, self.key)

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("openid-configuration"):
            about = {name: f"{ISSUER}/{name}" for name in
                     ("authorization_endpoint", "token_endpoint", "jwks_uri", "end_session_endpoint")}  # fmt: skip
            return httpx.Response(200, json={"issuer": ISSUER} | about | self.about)
        if request.url.path == "/jwks_uri":
            return httpx.Response(200, json={"keys": [self.key.as_dict(private=False)]})
        sent = {name: values[0] for name, values in parse_qs(request.content.decode()).items()}
        asked = self.codes.pop(sent.get("code", ""), None)
        challenge = hashlib.sha256(sent["code_verifier"].encode()).digest()
        if asked is None or base64.urlsafe_b64encode(challenge).decode().rstrip("=") != asked["code_challenge"]:
            return httpx.Response(400, json={"error": "invalid_grant", "error_description": "the code is not good"})
        assert request.headers["authorization"] == "Basic " + base64.b64encode(b"console:hush").decode()
        now_s = int(time.time())
        claims = {"iss": ISSUER, "aud": "console", "sub": "u1", "iat": now_s, "exp": now_s + 300,
                  "nonce": asked["nonce"], "preferred_username": "ada", "realm": {"roles": ["staff"]}}  # fmt: skip
        claims = {name: value for name, value in (claims | self.claims).items() if value is not None}
        tokens = {"access_token": "a", "token_type": "Bearer", "id_token": self.sign(claims)}
        return httpx.Response(200, json=tokens)


@pytest.fixture
def provider() -> FakeProvider:
    return FakeProvider()


@pytest.fixture
def api(settings: Settings, provider: FakeProvider) -> Iterator[TestClient]:
    changed = Settings(**settings.model_dump() | OIDC)
    with TestClient(make_app(changed), raise_server_exceptions=False) as client:
        client.app.state.tidepool.provider = OpenIdProvider(  # type: ignore[attr-defined]
            changed, httpx.MockTransport(provider.answer)
        )
        yield client


def go(browser: Browser, path: str, **query: str) -> str:
    """Where a navigation that another site begins is sent."""
    headers = {"Sec-Fetch-Site": "cross-site", "X-CSRF-Token": None}
    answer = browser.send("GET", path, params=query, headers=headers, follow_redirects=False)
    assert answer.status_code == 303, answer.text
    return str(answer.headers["location"])


def refusal(place: str) -> str:
    """The words on the sign-in page."""
    before, _, problem = place.partition("?problem=")
    assert before == "/ui/#/sign-in", place
    return unquote(problem)


def test_a_person_signs_in_with_the_highest_role_of_the_groups(browser: Browser, provider: FakeProvider) -> None:
    assert browser.ask("GET", "/ui/session", status=401)["oidc_name"] == "Example"
    provider.claims = {"realm": {"roles": ["staff", "sre", 7]}}
    back = provider.authorize(go(browser, "/ui/oidc/start", to="/plans/plan_1?x=1"))
    assert go(browser, "/ui/oidc/callback", **back) == "/ui/#/plans/plan_1?x=1"
    session = browser.keep(browser.ask("GET", "/ui/session"))
    assert (session["name"], session["role"], session["source"]) == ("ada", "admin", "oidc")
    for _ in range(2):
        browser.ask("POST", "/admin/keys", json={"name": "k", "role": "client"}, status=201,
                    headers={"Idempotency-Key": "once"})  # fmt: skip
    events = browser.ask("GET", "/admin/audit")["data"]
    assert [(event["action"], event["actor"]) for event in events] == [
        ("key.create", "oidc:ada"),
        ("session.begin", "oidc:ada"),
    ]
    ended = browser.ask("DELETE", "/ui/sessions")
    assert ended["provider_logout_url"].startswith(f"{ISSUER}/end_session_endpoint?id_token_hint=")
    assert browser.send("GET", "/ui/session").status_code == 401


def test_who_has_no_role_gets_none(browser: Browser, provider: FakeProvider) -> None:
    for claims in ({"realm": {"roles": ["guests"]}}, {"realm": None}, {"realm": {"roles": {"sre": True}}},
                   {"realm": "sre"}, {"realm": {"roles": ["SRE"]}}, {"role": "admin", "realm": None}):  # fmt: skip
        provider.claims = claims
        back = provider.authorize(go(browser, "/ui/oidc/start"))
        words = refusal(go(browser, "/ui/oidc/callback", **back))
        assert words.startswith("You are signed in as ada, but none of your groups has a role")
    assert browser.send("GET", "/ui/session").status_code == 401


def unsigned(claims: dict[str, Any]) -> str:
    parts = ({"alg": "none", "typ": "JWT"}, claims)
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts) + "."


@pytest.mark.parametrize(
    "claims",
    [
        {"nonce": "another"},
        {"nonce": None},
        {"aud": "another"},
        {"aud": ["console", "another"]},
        {"aud": None},
        {"azp": "another"},
        {"iss": "https://evil.example"},
        {"exp": 1},
        {"exp": None},
        {"sub": None},
        {"nbf": 9_999_999_999},
    ],
)
def test_a_token_that_is_not_for_this_sign_in_is_refused(
    browser: Browser, provider: FakeProvider, claims: dict[str, Any]
) -> None:
    provider.claims = claims
    back = provider.authorize(go(browser, "/ui/oidc/start"))
    assert "ID token is not valid" in refusal(go(browser, "/ui/oidc/callback", **back))
    assert browser.send("GET", "/ui/session").status_code == 401


@pytest.mark.parametrize("how", ["none", "shared secret", "public key as secret", "another key", "cut"])
def test_a_token_that_the_provider_did_not_sign_is_refused(browser: Browser, provider: FakeProvider, how: str) -> None:
    other = RSAKey.generate_key(2048, parameters={"kid": "one"})
    public = OctKey.import_key(b"x" * 20 + provider.key.as_dict(private=False)["n"].encode())  # type: ignore[union-attr]
    provider.sign = {
        "none": unsigned,
        "shared secret": lambda claims: jwt.encode({"alg": "HS256"}, claims, OctKey.import_key(b"hush" * 8)),
        "public key as secret": lambda claims: jwt.encode({"alg": "HS256", "kid": "one"}, claims, public),
        "another key": lambda claims: jwt.encode({"alg": "RS256", "kid": "one"}, claims, other),
        "cut": lambda claims: provider._signed(claims)[:-8],
    }[how]
    back = provider.authorize(go(browser, "/ui/oidc/start"))
    assert "ID token is not valid" in refusal(go(browser, "/ui/oidc/callback", **back))
    assert browser.send("GET", "/ui/session").status_code == 401


def test_the_provider_may_change_its_keys(browser: Browser, provider: FakeProvider, api: TestClient) -> None:
    ours = api.app.state.tidepool.provider  # type: ignore[attr-defined]
    for kid in ("one", "two"):
        provider.key = RSAKey.generate_key(2048, parameters={"kid": kid})
        ours._keys_asked_s -= 60
        back = provider.authorize(go(browser, "/ui/oidc/start"))
        assert go(browser, "/ui/oidc/callback", **back) == "/ui/#/"


def test_an_answer_is_good_once_in_the_browser_that_asked(
    open_browser: Callable[..., Browser], provider: FakeProvider, database: Database
) -> None:
    mine, other = open_browser(), open_browser()
    back = provider.authorize(go(mine, "/ui/oidc/start"))
    cookies = dict(mine.http.cookies)
    assert "not begun in this browser" in refusal(go(other, "/ui/oidc/callback", **back)), "no cookie"
    theirs = provider.authorize(go(other, "/ui/oidc/start"))
    assert "not begun" in refusal(go(other, "/ui/oidc/callback", code=back["code"], state=back["state"]))
    assert theirs["state"] != back["state"]
    assert go(mine, "/ui/oidc/callback", **back) == "/ui/#/"
    assert not other.http.cookies
    mine.http.cookies.update(cookies)
    assert "finished already" in refusal(go(mine, "/ui/oidc/callback", **back)), "a replayed state"
    again = provider.authorize(go(mine, "/ui/oidc/start"))
    assert "the code is not good" in refusal(go(mine, "/ui/oidc/callback", code=back["code"], state=again["state"]))
    late = provider.authorize(go(mine, "/ui/oidc/start"))
    with database.transaction() as session:
        session.execute(text("UPDATE console_flows SET ends_at = now()"))
    assert "ten minutes" in refusal(go(mine, "/ui/oidc/callback", **late))


@pytest.mark.parametrize(
    "to", ["//evil.example", "https://evil.example", "/\\evil", "/a\r\nSet-Cookie: x=y", "/" + "a" * 600]
)
def test_nobody_is_sent_elsewhere(browser: Browser, provider: FakeProvider, to: str) -> None:
    back = provider.authorize(go(browser, "/ui/oidc/start", to=to))
    place = go(browser, "/ui/oidc/callback", **back)
    assert place.startswith("/ui/#/"), "what follows the # is no address"
    assert "\n" not in place


def test_what_the_provider_says_is_wrong_is_said_in_words(browser: Browser, provider: FakeProvider) -> None:
    back = provider.authorize(go(browser, "/ui/oidc/start"))
    query = {"state": back["state"], "error": "access_denied", "error_description": "not today"}
    assert refusal(go(browser, "/ui/oidc/callback", **query)) == "the provider refused: not today"
    back = provider.authorize(go(browser, "/ui/oidc/start"))
    assert "another provider" in refusal(go(browser, "/ui/oidc/callback", **back, iss="https://evil.example"))


@pytest.mark.parametrize("about", [{"issuer": "https://evil.example"}, {"token_endpoint": "http://id.example/t"}])
def test_a_provider_that_is_another_is_not_used(
    browser: Browser, provider: FakeProvider, about: dict[str, str]
) -> None:
    provider.about = about
    assert refusal(go(browser, "/ui/oidc/start"))


@pytest.mark.parametrize("changes", [{"oidc_client_id": ""}, {"oidc_roles": {}}, {"oidc_issuer": "http://id.example"},
                                     {"oidc_scopes": "email"}, {"oidc_roles": {"node": ["x"]}}])  # fmt: skip
def test_settings_with_which_nobody_could_sign_in_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="oidc"):
        Settings(**OIDC | changes)


def test_a_real_provider(settings: Settings, database: Database) -> None:
    port = free_port()
    issuer = f"http://localhost:{port}"
    user = json.dumps({"sub": "u7", "groups": ["sre"], "preferred_username": "grace"})
    command = [sys.executable, "-m", "oidc_provider_mock", "--port", str(port), "--user-claims", user]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: _answers(f"{issuer}/.well-known/openid-configuration"))
            changed = {"oidc_issuer": issuer, "oidc_role_claim": "sub", "oidc_roles": {"operator": ["u7"]}}
            with TestClient(make_app(Settings(**settings.model_dump() | OIDC | changed))) as api:
                browser = Browser(api)
                there = go(browser, "/ui/oidc/start")
                back = httpx.post(there, data={"sub": "u7"}).headers["location"]
                query = {name: values[0] for name, values in parse_qs(urlsplit(back).query).items()}
                assert go(browser, "/ui/oidc/callback", **query) == "/ui/#/"
                session = browser.keep(browser.ask("GET", "/ui/session"))
                assert (session["role"], session["source"]) == ("operator", "oidc")
                browser.ask("PUT", "/admin/regions/mars", json={})
                url = browser.ask("DELETE", "/ui/session")["provider_logout_url"]
                assert httpx.get(url).status_code == 200
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False
