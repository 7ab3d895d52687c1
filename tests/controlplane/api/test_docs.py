"""The addresses at `/`, the documentation, and the OpenAPI document."""

import gzip
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from fastapi.testclient import TestClient

from controlplane.api.app import make_app
from controlplane.api.docs import PLACES
from controlplane.settings import Settings

OPERATION_BYTES_MAX = 2750
"""Of the document, shared parts included, for each operation; 7,500 before failures were shared."""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return make_app(Settings()).openapi()


def test_the_root_says_where_things_are(api: TestClient) -> None:
    told = api.get("/").json()
    assert told["name"] == "tidepool"
    assert {name: told[name] for name in PLACES} == PLACES
    for path in set(PLACES.values()) - {"/v1"}:
        assert api.get(path).status_code in {200, 401, 503}, path
    page = api.get("/", headers={"Accept": "text/html,*/*"})
    assert page.headers["content-type"].startswith("text/html")
    assert all(f'href="{path}"' in page.text for path in PLACES.values())


def test_the_documentation_needs_nothing_from_elsewhere(api: TestClient) -> None:
    page = api.get("/docs")
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["content-security-policy"]
    links = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert len(links) == 3
    for link in links:
        assert link.startswith(("/docs/", "data:")), link
    assert not re.findall(r"https?://(?!www\.w3\.org)", page.text)
    for link in (link for link in links if link.startswith("/")):
        asset = api.get(link)
        assert asset.status_code == 200, link
        assert asset.headers["content-encoding"] == "gzip"
        assert len(asset.content) > 100_000
        plain = api.get(link, headers={"Accept-Encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert plain.content == asset.content
    assert api.get("/docs/other.js").status_code == 404
    assert api.get("/redoc").status_code == 404


def test_the_assets_come_with_their_licence() -> None:
    assets = files("controlplane.api") / "assets"
    assert "Apache License" in (assets / "LICENSE").read_text()
    assert "swagger-ui-dist" in (assets / "NOTICE").read_text()
    assert b"SwaggerUIBundle" in gzip.decompress((assets / "swagger-ui-bundle.js.gz").read_bytes())


def test_the_document_is_small_and_says_each_failure_once(document: dict[str, Any]) -> None:
    operations = sum(map(len, document["paths"].values()))
    assert len(json.dumps(document, separators=(",", ":"))) < operations * OPERATION_BYTES_MAX
    components = document["components"]
    shared = components["responses"]
    assert len({json.dumps(each, sort_keys=True) for each in shared.values()}) == len(shared)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert "422" not in operation["responses"], (method, path)
            for status, response in operation["responses"].items():
                assert status.startswith("2") or "$ref" in response or "content" not in response, (method, path)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    refs = set(re.findall(r'"\$ref": "#/([^"]*)"', json.dumps(document)))
    assert any(ref.startswith("components/responses/") for ref in refs)
    for ref in refs:
        place: Any = document
        for part in ref.split("/"):
            place = place[part]
        assert place
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(set(ids)) == len(ids)


def test_head_is_known_wherever_get_is(api: TestClient, secrets: dict[str, str], document: dict[str, Any]) -> None:
    headers = {"Authorization": f"Bearer {secrets['admin']}"}
    gets = {path: methods["get"] for path, methods in document["paths"].items() if "get" in methods}
    streams = {
        path for path, get in gets.items() if "text/event-stream" in get["responses"].get("200", {}).get("content", ())
    }
    paths = [path for path in gets if "{" not in path and path not in streams]  # a stream has no end
    assert {"/health", "/v1/models"} <= set(paths)
    for path in ("/", "/docs", *paths):
        head, get = api.head(path, headers=headers), api.get(path, headers=headers)
        assert (head.status_code, head.content) == (get.status_code, b""), path
        assert head.headers.get("content-type") == get.headers.get("content-type"), path
    assert api.head("/v1/chat/completions", headers=headers).status_code == 405


def test_the_page_names_what_viewers_are_refused(
    api: TestClient, secrets: dict[str, str], document: dict[str, Any]
) -> None:
    def refused(role: str) -> set[str]:
        headers = {"Authorization": f"Bearer {secrets[role]}"}
        gets = [path for path, methods in document["paths"].items() if path.startswith("/admin/") and "get" in methods]
        gets.remove("/admin/live")  # it has no end
        return {path.removeprefix("/admin/") for path in gets if api.get(path, headers=headers).status_code == 403}

    page = (Path(__file__).parents[3] / "ops/docs/api.md").read_text()
    [row] = re.findall(r"^\| `viewer` \|.* except (.*), which only an admin reads, and (.*)$", page, re.MULTILINE)
    for_admins, for_operators = (set(re.findall("`([^`]*)`", part)) for part in row)
    assert (for_admins, for_admins | for_operators) == (refused("operator"), refused("viewer"))


def test_a_page_of_another_origin_may_call_where_it_is_allowed(api: TestClient, settings: Settings) -> None:
    asks = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    asks |= {"Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang"}

    def preflight(client: TestClient, **changes: str) -> httpx.Headers:
        headers: httpx.Headers = client.options("/v1/chat/completions", headers=asks | changes).headers
        return headers

    assert "access-control-allow-origin" not in preflight(api), "off unless it is set"
    changed = Settings(**settings.model_dump() | {"cors_origins": "https://chat.example, http://localhost:3000"})
    with TestClient(make_app(changed)) as open_api:
        allowed = preflight(open_api)
        assert allowed["access-control-allow-origin"] == "https://chat.example"
        assert "POST" in allowed["access-control-allow-methods"]
        assert "x-stainless-lang" in allowed["access-control-allow-headers"]
        assert "access-control-allow-origin" not in preflight(open_api, Origin="https://evil.example")
        refused = open_api.get("/v1/models", headers={"Origin": "http://localhost:3000"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "http://localhost:3000"
        assert "x-request-id" in refused.headers["access-control-expose-headers"].lower()
        large = open_api.post(
            "/v1/chat/completions",
            content=b"x" * (changed.request_body_bytes_max + 1),
            headers={"Origin": asks["Origin"]},
        )
        assert (large.status_code, large.headers["access-control-allow-origin"]) == (413, asks["Origin"])


@pytest.mark.parametrize("origins", ["chat.example", "https://a/b", "https://a b", "null"])
def test_what_is_no_origin_is_refused_at_the_start(origins: str) -> None:
    with pytest.raises(ValueError, match="is no origin"):
        Settings(cors_origins=origins)
