"""The console in a real browser, on a real stack. `make test-browser` installs them and sets TIDEPOOL_CHROMIUM."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

from ops.client.api import Api
from ops.local.ports import free_port
from ops.local.stack import LocalStack
from tests.browser.fleet import keep_schedule_out
from tests.flows.conftest import admin_of, register, replay_stack, wait_ready
from tests.flows.waiting import wait_until
from tests.servers import Servers

ROOT = Path(__file__).parents[2]
CHROMIUM = os.environ.get("TIDEPOOL_CHROMIUM", "")
AXE = ROOT / "ops" / "console" / "node_modules" / "axe-core" / "axe.min.js"
PICTURES = ROOT / "build" / "console"
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE_MS = 60_000
"""How long a page may take on a machine that is busy with other things."""
HOSTILE = '<img src=x onerror="window.pwned=1">'
"""Text that would do something if a page took it for markup."""
WIDE, NARROW = (1400, 900), (360, 740)


def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and CHROMIUM == "":
            item.add_marker(pytest.mark.skip(reason="the browser has a target of its own: make test-browser"))


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The stack's Postgres and Redis, for tests to stop."""
    with closing(Servers(tmp_path_factory.mktemp("servers"))) as servers:
        yield servers


@pytest.fixture(scope="session")
def provider() -> Iterator[str]:
    """The address of an OpenID provider, of another site than the console's: cookies tell `localhost` from 127.0.0.1.
    A person's groups are what the person calls itself there.
    """
    port = free_port()
    address = f"http://localhost:{port}"
    command = [sys.executable, "-m", "oidc_provider_mock", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: _answers(f"{address}/.well-known/openid-configuration"), "the OpenID provider answers")
            yield address
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, servers: Servers, provider: str) -> Iterator[LocalStack]:
    """A fleet of replayed nodes whose instances are ready. Many people sign in to its console from one address."""
    environment = {
        "TIDEPOOL_DATABASE_URL": servers.postgres.url(),
        "TIDEPOOL_REDIS_URL": servers.redis.url(),
        "TIDEPOOL_SCALE_EVERY_S": "5",  # what-if runs scale as often
        "TIDEPOOL_CONSOLE_SIGN_INS_PER_MINUTE": "1000",
        "TIDEPOOL_CONSOLE_SIGN_INS_ALL_PER_MINUTE": "1000",
        "TIDEPOOL_OIDC_ISSUER": provider,
        "TIDEPOOL_OIDC_CLIENT_ID": "console",
        "TIDEPOOL_OIDC_CLIENT_SECRET": "hush",
        "TIDEPOOL_OIDC_ROLE_CLAIM": "sub",
        "TIDEPOOL_OIDC_ROLES": json.dumps({"operator": ["ada"]}),
    }
    with replay_stack(tmp_path_factory.mktemp("console"), environment=environment) as running:
        with admin_of(running) as admin:
            register(admin)
            wait_ready(admin, 6)
            keep_schedule_out(running, admin)
        yield running


@pytest.fixture
def admin(stack: LocalStack) -> Iterator[Api]:
    with admin_of(stack) as api:
        yield api


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright_api = pytest.importorskip("playwright.sync_api")
    playwright_api.expect.set_options(timeout=PATIENCE_MS)
    with playwright_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield running
        running.close()


class Watched:
    """A page whose errors, and requests to anybody else, are kept. `others`: origins that it may go to."""

    def __init__(self, page: Any, base: str, *others: str) -> None:
        self.page = page
        self.base = base
        self.origins = {urlsplit(origin).netloc for origin in (base, *others)}
        self.faults: list[str] = []
        self.expected: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("console", self._listen)
        page.on("request", self._look)

    def open(self, link: str) -> None:
        """Go to a page of the console by its link, `#/plans`."""
        self.page.goto(f"{self.base}/ui/{link}")

    def check(self) -> None:
        """No error that the test did not expect, and no request to another origin."""
        left = [fault for fault in self.faults if not any(words in fault for words in self.expected)]
        assert not left, "\n".join(left)

    def _listen(self, said: Any) -> None:
        if said.type == "error":
            self.faults.append(f"console: {said.text} {said.location.get('url', '')}".rstrip())

    def _look(self, request: Any) -> None:
        """What pages of others ask for is their affair."""
        url = urlsplit(request.url)
        asker = self.base if request.is_navigation_request() else request.frame.url
        is_ours = urlsplit(asker).netloc == urlsplit(self.base).netloc
        if is_ours and url.scheme not in {"data", "blob"} and url.netloc not in self.origins:
            self.faults.append(f"a request to another origin: {request.url}")


SignIn = Callable[..., Watched]


@pytest.fixture
def signed_in(stack: LocalStack, browser: Any, keys: dict[str, str]) -> Iterator[SignIn]:
    """`signed_in(role, size=..., theme=...)`: a new browser of a person with that role."""
    with ExitStack() as open_pages:
        yield lambda role="admin", **looks: open_pages.enter_context(_person(stack, browser, keys[role], **looks))


@contextmanager
def _person(
    stack: LocalStack, browser: Any, key: str, *, size: tuple[int, int] = WIDE, theme: str = "light"
) -> Iterator[Watched]:
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme=theme,
        timezone_id="Asia/Tokyo",
        reduced_motion="reduce",
    )
    try:
        answer = context.request.post(f"{stack.url}/ui/session", data={"key": key})
        assert answer.ok, answer.text()
        watched = Watched(context.new_page(), stack.url)
        yield watched
        watched.check()
    finally:
        context.close()


@pytest.fixture(scope="session")
def keys(stack: LocalStack) -> dict[str, str]:
    """A key of each role that may sign in."""
    with admin_of(stack) as admin:
        made = {
            role: admin.post("/admin/keys", {"name": f"browser-{role}", "role": role, "tenant": "operators"})
            for role in ("viewer", "operator")
        }
    return {"admin": stack.keys["admin"]} | {role: key["secret"] for role, key in made.items()}


def expect(locator: Any) -> Any:
    """Playwright's assertions, which wait for what they assert."""
    return pytest.importorskip("playwright.sync_api").expect(locator)


def serious_faults(page: Any) -> list[str]:
    """What axe-core finds that is serious or worse, each with the first element that has it."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']}: {each['help']}: {each['nodes'][0]['html'][:200]}"
        for each in found["violations"]
        if each["impact"] in {"serious", "critical"}
    ]
