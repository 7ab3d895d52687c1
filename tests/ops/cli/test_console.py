"""`tidepool console` prints a link that signs in."""

import os
from urllib.parse import urlsplit

import httpx2 as httpx

from tests.ops.cli.running import Run


def test_the_link_signs_in_with_the_rights_of_the_admin_key(served: Run) -> None:
    link = served("console").out.strip()
    address, _, secret = link.partition("#/sign-in?link=")
    assert address == f"{os.environ['TIDEPOOL_URL']}/ui/"
    origin = f"http://{urlsplit(address).netloc}"
    answer = httpx.post(f"{origin}/ui/session", json={"link": secret}, headers={"Origin": origin})
    assert answer.status_code == 200, answer.text
    assert (answer.json()["role"], answer.json()["source"]) == ("admin", "link")
    assert served("console", "--json").json["link"].startswith(address)
