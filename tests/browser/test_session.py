"""Signing in and out, by keys and by an OpenID provider, and keys of the keyboard."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from ops.client.api import Api
from ops.local.stack import LocalStack
from tests.browser.conftest import HOSTILE, SignIn, Watched


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
    page.get_by_role("button", name="Sign out", exact=True).click()
    page.get_by_label("Key of an administrator").wait_for()


def test_signing_out_everywhere_ends_other_browsers(signed_in: SignIn, admin: Api) -> None:
    one, other = signed_in("viewer"), signed_in("viewer")
    for person in (one, other):
        person.expected = ["401"]
        person.open("#/overview")
        person.page.get_by_role("status").get_by_text("live").wait_for()
    one.page.get_by_role("button", name="everywhere").click()
    one.page.get_by_label("Key of an administrator").wait_for()
    for person in (one, other):
        assert person.page.context.request.get(f"{person.base}/ui/session").status == 401
    other.page.get_by_role("alert").get_by_text("session has ended").wait_for()
    assert other.page.get_by_role("heading", name="Overview").count() == 0, "what was seen is gone with the session"
    (entry, *_) = [row for row in admin.pages("/admin/audit")["data"] if row["action"] == "session.end_all"]
    assert "browser-viewer" in entry["actor"]
    assert entry["after"]["ended"] >= 2


def test_who_signs_in_again_in_another_tab_goes_on_in_the_first(
    signed_in: SignIn, admin: Api, keys: dict[str, str]
) -> None:
    person = signed_in("operator")
    page = person.page
    person.open("#/nodes/us-west-1")
    page.get_by_role("button", name="Drain", exact=True).click()
    again = page.context.request.post(f"{person.base}/ui/session", data={"key": keys["operator"]})
    assert again.ok, again.text()
    person.expected = ["403"]
    dialog = page.get_by_role("dialog")
    with page.expect_response("**/ui/session"):
        dialog.get_by_role("button", name="Drain", exact=True).click()
    dialog.get_by_text("signed in again in another tab").wait_for()
    dialog.get_by_role("button", name="Drain", exact=True).click()
    dialog.wait_for(state="hidden")
    assert admin.get("/admin/nodes/us-west-1")["draining"]
    admin.post("/admin/nodes/us-west-1/undrain")


def test_keys_lead_to_pages(signed_in: SignIn) -> None:
    person = signed_in("viewer")
    person.open("#/nowhere")
    page = person.page
    page.get_by_role("heading", level=1).wait_for()
    page.keyboard.press("g")
    page.keyboard.press("o")
    page.get_by_role("heading", name="Overview").wait_for()
    assert page.url.endswith("#/overview")

    search, field = page.get_by_role("dialog", name="Search"), page.get_by_role("combobox", name="Search for")
    page.keyboard.press("/")
    field.wait_for()
    page.keyboard.type("gn?/")
    assert field.input_value() == "gn?/", "what is typed into a field is text"
    assert page.url.endswith("#/overview")
    field.fill("nod")
    page.get_by_role("option", name="Nodes").wait_for()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Nodes", level=1).wait_for()
    search.wait_for(state="hidden")

    page.keyboard.press("/")
    search.wait_for()
    page.keyboard.press("Escape")
    search.wait_for(state="hidden")
    page.keyboard.press("?")
    listed = page.get_by_role("dialog", name="Keys")
    listed.wait_for()
    titles = page.get_by_role("navigation", name="Pages").get_by_role("link").all_inner_texts()
    assert len(titles) > 5
    shown = listed.get_by_role("definition").all_inner_texts()
    assert set(titles) <= set(shown), "every page that the menu has is reached by keys"


@pytest.fixture
def visitor(stack: LocalStack, browser: Any, provider: str) -> Iterator[Watched]:
    """Somebody who goes to the provider. Its pages ask others for their looks, in vain."""
    with closing(browser.new_context()) as context:
        context.route(lambda url: not url.startswith((stack.url, provider)), lambda route: route.abort())
        person = Watched(context.new_page(), stack.url, provider)
        person.expected = ["401", "404", "ERR_FAILED"]
        yield person
        person.check()


def _authorize(page: Any, sub: str) -> None:
    page.locator("input[name=sub]").fill(sub)
    page.get_by_role("button", name="Authorize").click()


def test_a_person_of_the_provider_signs_in_and_out_of_it(visitor: Watched, stack: LocalStack, provider: str) -> None:
    page = visitor.page
    visitor.open("#/overview")
    page.get_by_role("link", name="Sign in with single sign-on").click()
    page.wait_for_url(f"{provider}/**")
    _authorize(page, "ada")
    page.get_by_role("heading", name="Overview").wait_for()
    assert page.url.startswith(f"{stack.url}/ui/")
    ask_session = lambda: page.context.request.get(f"{stack.url}/ui/session")  # noqa: E731
    session = ask_session().json()
    assert (session["source"], session["role"]) == ("oidc", "operator")

    page.get_by_role("button", name="Sign out", exact=True).click()
    page.wait_for_url(f"{provider}/oauth2/end_session?**")
    asked = parse_qs(urlsplit(page.url).query)
    assert asked["post_logout_redirect_uri"] == [f"{stack.url}/ui/"]
    assert asked["client_id"] == ["console"]
    assert asked["id_token_hint"][0].count(".") == 2
    page.locator("[type=submit]").first.click()
    page.get_by_role("link", name="Sign in with single sign-on").wait_for()
    assert page.url.startswith(f"{stack.url}/ui/")
    assert ask_session().status == 401


def test_who_has_no_role_is_told_so(visitor: Watched) -> None:
    page = visitor.page
    page.goto(f"{visitor.base}/ui/oidc/start")
    _authorize(page, HOSTILE)
    page.get_by_role("alert").get_by_text("none of your groups has a role").wait_for()
    assert HOSTILE in page.get_by_role("alert").inner_text()
    assert page.evaluate("() => window.pwned") is None
