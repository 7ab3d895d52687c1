"""The console in a real browser, on a real stack. `make test-browser` installs them and sets TIDEPOOL_CHROMIUM."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ops.client.api import Api
from ops.local.stack import LocalStack
from tests.flows.conftest import admin_of, register, replay_stack, wait_ready

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
WIDE, NARROW = (1400, 900), (360, 740)


def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and CHROMIUM == "":
            item.add_marker(pytest.mark.skip(reason="the browser has a target of its own: make test-browser"))


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A fleet of replayed nodes whose instances are ready."""
    with replay_stack(tmp_path_factory.mktemp("console")) as running:
        with admin_of(running) as admin:
            register(admin)
            wait_ready(admin, 6)
        yield running


@pytest.fixture
def admin(stack: LocalStack) -> Iterator[Api]:
    with admin_of(stack) as api:
        yield api


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright_api = pytest.importorskip("playwright.sync_api")
    with playwright_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield running
        running.close()


class Watched:
    """A page whose errors, and requests to anybody else, are kept."""

    def __init__(self, page: Any, base: str) -> None:
        self.page = page
        self.base = base
        self.faults: list[str] = []
        self.expected: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("console", lambda said: said.type == "error" and self.faults.append(f"console: {said.text}"))
        page.on("request", lambda request: self._look(request.url))

    def open(self, link: str) -> None:
        """Go to a page of the console by its link, `#/plans`."""
        self.page.goto(f"{self.base}/ui/{link}")

    def check(self) -> None:
        """No error that the test did not expect, and no request to another origin."""
        left = [fault for fault in self.faults if not any(words in fault for words in self.expected)]
        assert not left, "\n".join(left)

    def _look(self, url: str) -> None:
        origin = urlsplit(self.base).netloc
        if urlsplit(url).scheme not in {"data", "blob"} and urlsplit(url).netloc != origin:
            self.faults.append(f"a request to another origin: {url}")


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


def serious_faults(page: Any) -> list[str]:
    """What axe-core finds that is serious or worse, each with the first element that has it."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']}: {each['help']}: {each['nodes'][0]['html'][:200]}"
        for each in found["violations"]
        if each["impact"] in {"serious", "critical"}
    ]
