"""What an open page shows while the gateway, Redis or Postgres is away, and that it heals by itself."""

import os
import signal
import time
from datetime import datetime
from typing import Any

import redis

from ops.client.api import Api
from ops.local.stack import LocalStack
from tests.browser.conftest import SignIn, Watched
from tests.flows.waiting import wait_until
from tests.servers import Servers

ALL_WELL = "Everything answers, and every wanted instance has its place."


def _status(page: Any) -> Any:
    return page.get_by_role("status")


def _watching(signed_in: SignIn, role: str = "operator") -> Watched:
    """A person who sees the overview live. The mark on the window is gone once the page is loaded again."""
    person = signed_in(role)
    person.open("#/overview")
    _status(person.page).get_by_text("live").wait_for()
    person.page.get_by_text(ALL_WELL).wait_for()
    person.page.evaluate("() => { window.mark = 1; }")
    return person


def _is_same_page(page: Any) -> bool:
    return bool(page.evaluate("() => window.mark === 1"))


def _as_of_s(page: Any) -> float:
    """Of when the overview is, by the server's clock."""
    written = page.get_by_role("main").locator("time").first.get_attribute("datetime")
    return datetime.fromisoformat(written).timestamp()


def _age(page: Any) -> str:
    """The age of the last view, as the page's head says it."""
    return str(_status(page).get_by_text("last view").inner_text())


def _until_new(page: Any, after_s: float) -> None:
    wait_until(lambda: _as_of_s(page) > after_s, "the overview is of a later moment")


def _all_loads_are_known(admin: Api) -> bool:
    return all(region["utilization"] is not None for region in admin.get("/admin/overview")["regions"])


def test_a_gateway_that_dies_under_an_open_page_comes_back_to_it(signed_in: SignIn, stack: LocalStack) -> None:
    person = _watching(signed_in, "viewer")
    person.expected = [
        "ERR_CONNECTION_REFUSED",
        "ERR_INCOMPLETE_CHUNKED_ENCODING",
        "ERR_CONNECTION_RESET",
        "ERR_EMPTY_RESPONSE",
    ]
    page = person.page
    os.kill(stack.supervisor.pids()["api"], signal.SIGKILL)
    _status(page).get_by_text("last view").wait_for()
    assert page.get_by_role("heading", name="Overview").is_visible(), "what was seen stays"
    _status(page).get_by_text("live").wait_for()
    _until_new(page, time.time())
    assert _is_same_page(page)


def test_redis_is_flushed_under_an_open_page(signed_in: SignIn, stack: LocalStack, admin: Api) -> None:
    person = _watching(signed_in)
    page = person.page
    with redis.Redis.from_url(stack.redis_url) as server:
        server.flushall()
    flushed_s = time.time()
    _until_new(page, flushed_s)
    page.get_by_text(ALL_WELL).wait_for()
    wait_until(lambda: _all_loads_are_known(admin), "every region's load is known again")
    page.get_by_role("navigation").get_by_role("link", name="Nodes").click()
    page.get_by_role("link", name="us-east-1").first.click()
    page.get_by_role("button", name="Drain", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Drain", exact=True).click()
    page.get_by_role("button", name="Put back into service").click()
    page.get_by_role("dialog").get_by_role("button", name="Put back", exact=True).click()
    page.get_by_role("button", name="Drain", exact=True).wait_for()
    assert not admin.get("/admin/nodes/us-east-1")["draining"], "the session goes on, and may do what it did before"
    assert _is_same_page(page)


def test_postgres_stops_under_an_open_page(signed_in: SignIn, servers: Servers) -> None:
    person, newcomer = _watching(signed_in), signed_in("operator")
    page = person.page
    for each in (person, newcomer):
        each.expected = ["503"]
    with servers.stopped("postgres"):
        _status(page).get_by_text("last view").wait_for()
        seen_s, age = _as_of_s(page), _age(page)
        wait_until(lambda: _age(page).endswith("ago") and _age(page) != age, "the view's age grows as it is shown")
        assert _as_of_s(page) == seen_s
        assert page.get_by_text(ALL_WELL).is_visible(), "the last view stays"
        page.get_by_role("navigation").get_by_role("link", name="Models").click()
        page.get_by_role("alert").get_by_text("A server that this needs is away").wait_for()
        newcomer.open("#/models")
        newcomer.page.get_by_role("alert").get_by_text("A server that this needs is away").first.wait_for()
    for each in (person, newcomer):
        _status(each.page).get_by_text("live").wait_for()
        each.page.get_by_role("link", name="tide", exact=True).wait_for()
        assert each.page.get_by_role("alert").count() == 0
    assert _is_same_page(page)
