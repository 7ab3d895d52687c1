"""Signing in and out, what roles see, keys of the keyboard, and a gateway or a Redis that goes away."""

import os
import signal
from typing import Any

import pytest

from ops.local.stack import LocalStack
from tests.browser.conftest import SignIn, Watched


@pytest.fixture
def stranger(stack: LocalStack, browser: Any):
    context = browser.new_context()
    watched = Watched(context.new_page(), stack.url)
    watched.expected = ["401"]
    yield watched
    watched.check()
    context.close()


def test_a_person_signs_in_with_a_key_and_out_again(stranger: Watched, keys: dict[str, str]) -> None:
    page = stranger.page
    stranger.open("#/overview")
    page.get_by_label("Key of an administrator").fill("sk-wrong")
    page.get_by_role("button", name="Sign in", exact=True).click()
    page.get_by_role("alert").get_by_text("Incorrect API key").wait_for()
    page.get_by_label("Key of an administrator").fill(keys["operator"])
    page.get_by_role("button", name="Sign in", exact=True).click()
    page.get_by_role("heading", name="Overview").wait_for()
    page.get_by_role("status").get_by_text("live").wait_for()
    assert page.evaluate("() => document.cookie") == "", "no script sees the session"
    page.reload()
    page.get_by_role("heading", name="Overview").wait_for()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Key of an administrator").wait_for()


def test_signing_out_everywhere_ends_other_browsers(signed_in: SignIn) -> None:
    one, other = signed_in("viewer"), signed_in("viewer")
    for person in (one, other):
        person.expected = ["401"]
        person.open("#/overview")
        person.page.get_by_role("status").get_by_text("live").wait_for()
    one.page.get_by_role("button", name="everywhere").click()
    one.page.get_by_label("Key of an administrator").wait_for()
    other.page.reload()
    other.page.get_by_label("Key of an administrator").wait_for()


def test_keys_lead_to_pages(signed_in: SignIn) -> None:
    person = signed_in("viewer")
    person.open("#/nowhere")
    person.page.get_by_role("heading", level=1).wait_for()
    person.page.keyboard.press("g")
    person.page.keyboard.press("o")
    person.page.get_by_role("heading", name="Overview").wait_for()
    person.page.keyboard.press("/")
    person.page.get_by_role("combobox", name="Search for").fill("overv")
    person.page.get_by_role("option", name="Overview").wait_for()
    person.page.keyboard.press("Escape")
    person.page.keyboard.press("?")
    person.page.get_by_role("dialog", name="Keys").wait_for()


def test_a_gateway_that_dies_under_an_open_page_comes_back_to_it(signed_in: SignIn, stack: LocalStack) -> None:
    person = signed_in("viewer")
    person.expected = [
        "ERR_CONNECTION_REFUSED",
        "ERR_INCOMPLETE_CHUNKED_ENCODING",
        "ERR_CONNECTION_RESET",
        "ERR_EMPTY_RESPONSE",
    ]
    person.open("#/overview")
    person.page.get_by_role("status").get_by_text("live").wait_for()
    os.kill(stack.supervisor.pids()["api"], signal.SIGKILL)
    person.page.get_by_role("status").get_by_text("last view").wait_for()
    assert person.page.get_by_role("heading", name="Overview").is_visible(), "what was seen stays"
    person.page.get_by_role("status").get_by_text("live").wait_for()
