"""Markup in every name and text that a stranger may choose: it is refused, or shown as what it is."""

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import httpx2 as httpx
import pytest
from pydantic import SecretStr
from sqlalchemy import delete

from controlplane.settings import Settings
from controlplane.store.session import Database, make_engine
from controlplane.store.tables import Node
from ops.client.api import Api, CommandError
from ops.local.stack import LocalStack
from tests.browser.conftest import HOSTILE, SignIn, Watched, expect
from tests.browser.test_pages import PAGES, settled

FOREIGN = "() => document.querySelectorAll('img[src=x], script:not([src])').length"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (f"/admin/models/{quote(HOSTILE)}", {}, "name"),
        (f"/admin/regions/{quote(HOSTILE)}", {}, "name"),
        (f"/admin/gpu-types/{quote(HOSTILE)}", {"memory_bytes": 1, "cost_per_hour": 1.0}, "name"),
        (f"/admin/tenants/{quote(HOSTILE)}", {"requests_per_minute": 1}, "name"),
    ],
)
def test_names_with_markup_are_refused(admin: Api, path: str, body: dict[str, Any], field: str) -> None:
    with pytest.raises(CommandError, match=field):
        admin.put(path, body)


def test_keys_have_no_markup_in_name_or_tenant(admin: Api) -> None:
    for field in ("name", "tenant"):
        with pytest.raises(CommandError, match=field):
            admin.post("/admin/keys", {"name": "plain", "role": "client", "tenant": "default", field: HOSTILE})


@pytest.fixture
def planted(stack: LocalStack, admin: Api) -> Iterator[None]:
    """Markup where any text may stand: what nodes call themselves and report, notes, names of runs, asked models."""
    admin.post("/admin/what-if", {"name": HOSTILE, "hours": 1})
    until = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    pin = {"model": "flood", "region": "us-east", "instances": 1, "until": until, "note": HOSTILE}
    pin_id = admin.post("/admin/pins", pin)["id"]
    body = {"model": HOSTILE, "messages": [{"role": "user", "content": HOSTILE}]}
    refused = httpx.post(
        f"{stack.url}/v1/chat/completions", headers={"Authorization": f"Bearer {stack.keys['client']}"}, json=body
    )
    assert refused.status_code == 404
    database = Database(make_engine(Settings(database_url=SecretStr(stack.database_url))))
    with database.transaction() as session:
        session.add(Node(name=HOSTILE, region="us-west", gpu_type="H800", url="http://127.0.0.1:9", engine="torch"))
    yield
    admin.delete(f"/admin/pins/{pin_id}")
    with database.transaction() as session:
        session.execute(delete(Node).where(Node.name == HOSTILE))
    database.close()


@pytest.mark.usefixtures("planted")
def test_no_page_takes_text_for_markup(signed_in: SignIn) -> None:
    person = signed_in("admin")
    page = person.page
    seen = 0
    for name in (*PAGES, f"models?words={quote(HOSTILE)}", f"nodes/{quote(HOSTILE, safe='')}", quote(HOSTILE, safe="")):
        person.open(f"#/{name}")
        settled(page)
        page.wait_for_timeout(300)
        assert page.evaluate(FOREIGN) == 0, name
        seen += HOSTILE in page.get_by_role("main").inner_text()
    assert seen >= 5, "what was planted is shown"
    person.open("#/plans")
    expect(page.get_by_role("listitem").filter(has_text=HOSTILE)).to_be_visible()
    page.keyboard.press("/")
    page.get_by_role("combobox", name="Search for").fill(HOSTILE)
    expect(page.get_by_role("option").filter(has_text=HOSTILE).first).to_be_visible()
    assert page.evaluate(FOREIGN) == 0
    assert page.evaluate("() => window.pwned") is None


def test_the_sign_in_page_takes_no_markup_from_its_address(stack: LocalStack, browser: Any) -> None:
    with closing(browser.new_context()) as context:
        person = Watched(context.new_page(), stack.url)
        person.expected = ["401"]
        person.open(f"#/sign-in?problem={quote(HOSTILE, safe='')}")
        expect(person.page.get_by_role("alert").filter(has_text=HOSTILE)).to_be_visible()
        assert person.page.evaluate(FOREIGN) == 0
        assert person.page.evaluate("() => window.pwned") is None
        person.check()
