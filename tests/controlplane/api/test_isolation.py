"""Tenants are apart: what is another's looks like nothing at all, to every role."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import httpx2 as httpx
import pytest

from controlplane.store.batch_tables import Batch, File
from controlplane.store.files import add_file, new_file_id
from controlplane.store.tables import Role
from tests.controlplane.api.gateway import Gateway, assert_error, running_gateway
from tests.controlplane.world import World

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tide", "prompt": "x"}}\n'
BATCH = {"endpoint": "/v1/completions", "completion_window": "24h"}
STRANGERS = [(Role.CLIENT, "other"), (Role.OPERATOR, "other"), (Role.ADMIN, "other"), (Role.CLIENT, "acm"),
             (Role.CLIENT, "acme2")]  # fmt: skip


@pytest.fixture
def gateway(world: World) -> Iterator[Gateway]:
    with running_gateway(world) as gateway:
        yield gateway


@pytest.fixture
def owned(gateway: Gateway, world: World) -> dict[str, str]:
    """A file, a batch and an output file of tenant `acme`."""
    uploaded = gateway.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", LINE)}).json()
    batch = gateway.http.post("/v1/batches", json=BATCH | {"input_file_id": uploaded["id"]}).json()
    with world.database.transaction() as session:
        output = new_file_id()
        add_file(
            session,
            file_id=output,
            tenant="acme",
            filename="out",
            purpose="batch_output",
            size_bytes=3,
            keep=timedelta(days=1),
        )
        session.get_one(Batch, batch["id"]).output_file_id = output
    with gateway.state.blobs.writing(output) as stream:
        stream.write(b"{}\n")
    return {"file": uploaded["id"], "batch": batch["id"], "output": output}


def _calls(owned: dict[str, str]) -> list[tuple[str, str, Any]]:
    asks = (("GET", ""), ("GET", "/content"), ("DELETE", ""))
    names = ("file", "output")
    files = [(method, f"/v1/files/{owned[name]}{end}", None) for name in names for method, end in asks]
    batches = [("GET", f"/v1/batches/{owned['batch']}", None), ("POST", f"/v1/batches/{owned['batch']}/cancel", None)]
    return [*files, *batches, ("POST", "/v1/batches", BATCH | {"input_file_id": owned["file"]})]


def _said(answer: httpx.Response, ids: dict[str, str]) -> str:
    text = str({key: value for key, value in assert_error(answer).items() if key != "param"})
    for known in ids.values():
        text = text.replace(known, "ID")
    return text


@pytest.mark.parametrize(("role", "tenant"), STRANGERS)
def test_what_is_anothers_is_not_there(
    gateway: Gateway, world: World, owned: dict[str, str], role: Role, tenant: str
) -> None:
    key = {"Authorization": f"Bearer {world.key(role, tenant)}"}
    nothing = {name: known[:-6] + "000000" for name, known in owned.items()}
    for real, made_up in zip(_calls(owned), _calls(nothing), strict=True):
        answers = [gateway.http.request(method, path, json=body, headers=key) for method, path, body in (real, made_up)]
        assert [answer.status_code for answer in answers] == [404, 404], real
        assert _said(answers[0], owned) == _said(answers[1], nothing), "not even the words differ"
    for path in ("/v1/files", "/v1/batches"):
        assert gateway.http.get(path, headers=key).json()["data"] == []
    assert gateway.http.get(f"/v1/files/{owned['output']}/content").content == b"{}\n", "nothing was deleted"
    assert gateway.http.get(f"/v1/batches/{owned['batch']}").json()["status"] == "validating"


def test_a_cursor_of_another_tenant_shows_nothing_of_it(gateway: Gateway, world: World, owned: dict[str, str]) -> None:
    """A cursor is an id to begin after; a stranger's own list goes on from there, and holds only what is its own."""
    key = {"Authorization": f"Bearer {world.key(tenant='other')}"}
    own = gateway.http.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", LINE)}, headers=key
    ).json()
    for path, cursor in (("/v1/files", owned["file"]), ("/v1/batches", owned["batch"])):
        for order in ("asc", "desc"):
            params = {"after": cursor} | ({"order": order} if path.endswith("files") else {})
            answer = gateway.http.get(path, params=params, headers=key)
            assert answer.status_code in {200, 400, 404}, answer.text
            if answer.status_code == 200:
                assert {row["id"] for row in answer.json()["data"]} <= {own["id"]}


def test_an_admin_key_sees_no_tenants_files(gateway: Gateway, world: World, owned: dict[str, str]) -> None:
    for role in (Role.OPERATOR, Role.ADMIN):
        key = {"Authorization": f"Bearer {world.key(role, 'default')}"}
        assert gateway.http.get("/v1/files", headers=key).json()["data"] == []
    with world.database.transaction() as session:
        assert session.get_one(File, owned["file"]).tenant == "acme"


def test_viewers_and_nodes_have_no_part_in_v1(gateway: Gateway, world: World, owned: dict[str, str]) -> None:
    for role in (Role.VIEWER, Role.NODE):
        key = {"Authorization": f"Bearer {world.key(role)}"}
        for method, path, body in _calls(owned):
            assert gateway.http.request(method, path, json=body, headers=key).status_code == 403
