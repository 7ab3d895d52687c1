"""The page of tenants: limits that an administrator changes, and usage by model and day."""

import re

from ops.client.api import Api
from tests.browser.conftest import SignIn


def test_an_administrator_limits_a_tenant(signed_in: SignIn, admin: Api) -> None:
    person = signed_in("admin")
    person.open("#/tenants/team-limited")
    page = person.page
    page.get_by_role("button", name="Change the limits …").click()
    page.get_by_label("Requests, uploads and batches per minute").fill("120")
    page.get_by_role("button", name="Limit", exact=True).click()
    page.get_by_text("It has limits of its own.").wait_for()
    limits = admin.get("/admin/tenants/team-limited")
    assert (limits["requests_per_minute"], limits["tokens_per_minute"]) == (120, None)
    person.open("#/tenants")
    page.get_by_role("region", name="Limits by tenant").get_by_role("link", name="team-limited").click()
    page.get_by_role("button", name="Use those of the settings …").click()
    page.get_by_role("button", name="Use those", exact=True).click()
    page.get_by_text("These are the limits of the settings").wait_for()
    assert admin.get("/admin/tenants/team-limited")["is_default"]


def test_a_viewer_sees_limits_and_changes_none(signed_in: SignIn) -> None:
    person = signed_in("viewer")
    person.open("#/tenants/default")
    person.page.get_by_role("heading", name="What it may use").wait_for()
    person.page.get_by_role("heading", name="What it used").wait_for()
    assert person.page.get_by_role("button", name=re.compile("limits")).count() == 0
    assert person.page.get_by_role("link", name="Its requests").count() == 0
