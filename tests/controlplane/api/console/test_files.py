"""The console's files: the page at every path, assets for a year, compressed where it is accepted, and in the wheel."""

import gzip
import shutil
import zipfile
from pathlib import Path

import httpx2 as httpx
import pytest
from fastapi.testclient import TestClient
from hatchling.builders.wheel import WheelBuilder
from starlette.applications import Starlette
from starlette.routing import Mount

from controlplane.api.app import make_app
from controlplane.api.console.built_files import ConsoleFiles
from controlplane.settings import Settings

ROOT = Path(__file__).parents[4]
PAGE = b'<!doctype html><script type="module" src="%bassets/index-a1.js"></script><link href="%bassets/a.css">'
SCRIPT = b"console.log('tide');" * 100
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data:",
    "font-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'self'",
    "frame-ancestors": "'none'",
}


def built(folder: Path, base: bytes = b"/ui/") -> Path:
    """A folder as a build leaves it."""
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_bytes(PAGE % (base, base))
    (folder / "assets" / "index-a1.js").write_bytes(SCRIPT)
    (folder / "favicon.svg").write_bytes(b"<svg/>")
    return folder


@pytest.fixture
def page(api: TestClient, tmp_path: Path) -> TestClient:
    """The API with a built console."""
    api.app.state.tidepool.console = ConsoleFiles(built(tmp_path / "dist"))  # type: ignore[attr-defined]
    return api


def test_every_path_that_is_no_file_is_the_page(page: TestClient) -> None:
    for path in ("/ui/", "/ui/plans/plan_1", "/ui/index.html", "/ui/../ui/x"):
        answer = page.get(path)
        assert answer.status_code == 200, path
        assert answer.content == PAGE % (b"/ui/", b"/ui/"), path
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
    entrance = page.get("/ui", follow_redirects=False)
    assert (entrance.status_code, entrance.headers["location"]) == (307, "/ui/")
    assert page.get("/ui").url.path == "/ui/"
    again = page.get("/ui/", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert page.head("/ui/").headers["content-length"] == page.get("/ui/").headers["content-length"]


def test_assets_stay_for_a_year_and_are_compressed_where_it_is_accepted(page: TestClient) -> None:
    def asked(accepted: str, **headers: str) -> httpx.Response:
        answer: httpx.Response = page.get("/ui/assets/index-a1.js", headers={"Accept-Encoding": accepted} | headers)
        return answer

    packed = asked("br, gzip;q=0.5")
    assert packed.content == SCRIPT
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) == len(gzip.compress(SCRIPT, mtime=0)) < len(SCRIPT)
    assert packed.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert packed.headers["content-type"].startswith("text/javascript")
    for accepted in ("identity", "gzip;q=0", "br"):
        plain = asked(accepted)
        assert plain.content == SCRIPT
        assert "content-encoding" not in plain.headers
        assert plain.headers["vary"] == "Accept-Encoding"
        assert plain.headers["etag"] != packed.headers["etag"]
    assert asked("gzip", **{"If-None-Match": packed.headers["etag"]}).status_code == 304
    assert asked("identity", **{"If-None-Match": packed.headers["etag"]}).status_code == 200
    assert page.get("/ui/favicon.svg").headers["content-type"] == "image/svg+xml"
    missing = page.get("/ui/assets/index-a2.js")
    assert (missing.status_code, missing.headers["content-type"]) == (404, "application/problem+json")


def test_nothing_foreign_is_loaded_or_shown_in_anything_foreign(page: TestClient) -> None:
    for method, path in (("GET", "/ui"), ("GET", "/ui/assets/index-a1.js"), ("GET", "/ui/assets/none"),
                         ("GET", "/ui/session"), ("POST", "/ui/x"), ("POST", "/ui/session")):  # fmt: skip
        headers = page.request(method, path).headers
        policy = dict(rule.strip().split(" ", 1) for rule in headers["content-security-policy"].split(";"))
        assert policy == POLICY, path
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-opener-policy"] == "same-origin"
    assert "content-security-policy" not in page.get("/livez").headers


def test_without_built_files_it_says_so(api: TestClient, tmp_path: Path) -> None:
    for folder in (tmp_path / "nothing", tmp_path):
        api.app.state.tidepool.console = ConsoleFiles(folder)  # type: ignore[attr-defined]
        answer = api.get("/ui/")
        assert answer.status_code == 503
        assert answer.json()["code"] == "console_not_built"
        assert "ops/console" in answer.json()["detail"]
        assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("base", [b"/ui/", b"./"])
def test_a_proxy_may_put_a_prefix_before_it(settings: Settings, tmp_path: Path, base: bytes) -> None:
    app = make_app(settings)
    with TestClient(app), TestClient(Starlette(routes=[Mount("/tide", app)])) as outside:
        app.state.tidepool.console = ConsoleFiles(built(tmp_path / "dist", base))
        assert outside.get("/tide/ui").url.path == "/tide/ui/"
        page = outside.get("/tide/ui/plans")
        assert page.content == PAGE % (b"/tide/ui/", b"/tide/ui/")
        assert "content-security-policy" in page.headers
        assert outside.get("/tide/ui/assets/index-a1.js").content == SCRIPT
        assert outside.get("/tide/ui/session").status_code == 401


def test_the_wheel_has_the_built_files(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    for package in ("controlplane", "dataplane", "forecasts", "migrations", "ops"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    built(tmp_path / "controlplane" / "api" / "console" / "dist")
    (wheel,) = WheelBuilder(str(tmp_path)).build(directory=str(tmp_path / "wheels"))
    with zipfile.ZipFile(wheel) as archive:
        assert {f"controlplane/api/console/dist/{name}" for name in ("index.html", "assets/index-a1.js")} <= set(
            archive.namelist()
        )
