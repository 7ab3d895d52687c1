"""Every page: it opens without an error or a foreign request, axe-core finds nothing serious, and it is drawn."""

import re
from typing import Any

import httpx2 as httpx
import pytest

from ops.client.api import Api
from ops.local.stack import LocalStack
from tests.browser.conftest import NARROW, PICTURES, ROOT, WIDE, SignIn, serious_faults
from tests.flows.waiting import wait_until

PAGES = re.findall(r'\{ path: "([a-z-]+)"', (ROOT / "ops" / "console" / "src" / "pages.ts").read_text())
DETAILS = {"models": "name", "nodes": "name", "plans": "id", "requests": "request_id"}
"""Pages of one thing, and the field that names it."""
PARTS = {"light": (WIDE, NARROW), "dark": (WIDE,)}


def settled(page: Any) -> None:
    """Wait for the page's own heading and until its first requests are answered; the stream never ends."""
    page.get_by_role("main").get_by_role("heading", level=1).wait_for()
    page.wait_for_function("() => document.querySelectorAll('[aria-busy=true]').length === 0")


BEYOND = """() => [...document.querySelectorAll("body *")]
    .filter((each) => each.getBoundingClientRect().right > window.innerWidth && !each.closest(".scroll"))
    .map((each) => `${each.tagName}.${each.className}`).slice(0, 9).join(", ")"""
"""The elements that reach beyond the window."""


def _look(signed_in: SignIn, address: str, name: str, theme: str) -> None:
    """Open it at each width, draw it, and check what must hold of any page."""
    for size in PARTS[theme]:
        person = signed_in("admin", size=size, theme=theme)
        person.open(f"#/{address}")
        settled(person.page)
        person.page.wait_for_timeout(800)  # charts and tables have drawn what came
        PICTURES.mkdir(parents=True, exist_ok=True)
        person.page.screenshot(path=PICTURES / f"{name}-{theme}-{size[0]}.png", full_page=True)
        assert serious_faults(person.page) == []
        overflow = person.page.evaluate("() => document.documentElement.scrollWidth - window.innerWidth")
        assert overflow <= 0, f"{name} is {overflow} px wider than {size[0]}: {person.page.evaluate(BEYOND)}"


@pytest.mark.parametrize("theme", PARTS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page(signed_in: SignIn, name: str, theme: str) -> None:
    _look(signed_in, name, name, theme)


@pytest.mark.parametrize("theme", PARTS)
@pytest.mark.parametrize("name", DETAILS)
def test_a_page_of_one_thing(stack: LocalStack, admin: Api, signed_in: SignIn, name: str, theme: str) -> None:
    if name == "requests":
        _chat(stack)
    elif name == "plans":
        admin.post("/admin/plans", {})
    wait_until(lambda: bool(admin.get(f"/admin/{name}", limit=1)["data"]), f"one of the {name} is listed")
    (first, *_) = admin.get(f"/admin/{name}", limit=1)["data"]
    _look(signed_in, f"{name}/{first[DETAILS[name]]}", f"{name}-detail", theme)


def _chat(stack: LocalStack) -> None:
    body = {"model": "tide", "messages": [{"role": "user", "content": "Which pool is deepest?"}], "max_tokens": 8}
    answer = httpx.post(
        f"{stack.url}/v1/chat/completions", headers={"Authorization": f"Bearer {stack.keys['client']}"}, json=body
    )
    answer.raise_for_status()


def test_there_are_pages() -> None:
    assert "overview" in PAGES


def test_an_address_that_leads_nowhere_says_so(signed_in: SignIn) -> None:
    person = signed_in("viewer")
    person.open("#/nowhere")
    assert "no such page" in person.page.get_by_role("heading", level=1).inner_text()
