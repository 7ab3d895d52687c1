"""Changes that are refused, and an API that goes away between two of them."""

import httpx2 as httpx
import pytest

from ops.client.api import Api
from ops.client.fleet_file.applying import apply_changes
from ops.client.fleet_file.changes import Change
from ops.client.fleet_file.resources import ENDPOINT, MODEL, REGION, Resource


def created(*names: str) -> list[Change]:
    return [Change(before=None, after=Resource(kind=REGION, key=(name,), fields={})) for name in names]


def states(handler: httpx.MockTransport, changes: list[Change]) -> list[tuple[str, str]]:
    with httpx.Client(base_url="http://api", transport=handler) as client:
        return [(each.change.resource.key[0], each.state) for each in apply_changes(Api(client), changes)]


def test_a_refused_change_keeps_no_other_from_being_made() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(409 if request.url.path.endswith("/b") else 200, json={})

    made = states(httpx.MockTransport(answer), created("a", "b", "c"))
    assert made == [("a", "done"), ("b", "failed"), ("c", "done")]


def test_what_the_client_refuses_keeps_no_other_from_being_made() -> None:
    """The path of a name that an earlier release took, and the draining of an endpoint that is pinned."""
    row = {"model": "m", "region": "a", "id": "pin_1"}
    pages = {"/admin/endpoints": [row], "/admin/pins": [row]}

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"data": pages.get(request.url.path, []), "has_more": False})

    model = Change(before=Resource(kind=MODEL, key=("a/../b",), fields={}), after=None)
    pinned = Change(before=Resource(kind=ENDPOINT, key=("m", "a"), fields={}), after=None)
    made = states(httpx.MockTransport(answer), [model, pinned, *created("c")])
    assert made == [("a/../b", "failed"), ("m", "failed"), ("c", "done")]


@pytest.mark.parametrize("away", [True, False])
def test_without_an_api_or_a_key_the_rest_is_not_tried(away: bool) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if len(asked) < 2:
            return httpx.Response(200, json={})
        if away:
            raise httpx.ConnectError("away")
        return httpx.Response(401, json={"detail": "revoked"})

    made = states(httpx.MockTransport(answer), created("a", "b", "c"))
    assert made == [("a", "done"), ("b", "failed"), ("c", "not done")]
    assert asked == ["/admin/regions/a", "/admin/regions/b"]


def test_a_model_whose_name_has_a_slash_is_put_under_its_name() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(f"{request.method} {request.url.path}")
        return httpx.Response(200, json={})

    model = Change(before=None, after=Resource(kind=MODEL, key=("Qwen/Qwen3-8B",), fields={"path": "/models/q"}))
    assert states(httpx.MockTransport(answer), [model]) == [("Qwen/Qwen3-8B", "done")]
    assert asked == ["PUT /admin/models/Qwen/Qwen3-8B"]
