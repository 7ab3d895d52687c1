"""The Files API, as the official client sees it."""

import socket
from collections.abc import Iterator
from typing import IO, Any

import httpx2 as httpx
import openai
import pytest

from tests.controlplane.api.gateway import Gateway, assert_error, running_gateway
from tests.controlplane.store.s3_server import Bucket
from tests.controlplane.world import PATIENCE_S, World, served, until

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tide", "prompt": "x"}}\n'


@pytest.fixture
def gateway(world: World) -> Iterator[Gateway]:
    with running_gateway(world, file_bytes_max=100_000, batch_lines_max=1000) as gateway:
        yield gateway


def upload(gateway: Gateway, content: bytes = LINE, name: str = "in.jsonl", **changes: Any) -> Any:
    return gateway.client.files.create(file=(name, content), purpose="batch", **changes)


def test_a_file_comes_and_goes(gateway: Gateway) -> None:
    made = upload(gateway, LINE + b"\n" + LINE)
    assert (made.bytes, made.filename, made.purpose, made.status) == (
        2 * len(LINE) + 1,
        "in.jsonl",
        "batch",
        "processed",
    )
    assert made.expires_at - made.created_at == pytest.approx(30 * 86_400, abs=60)
    assert gateway.client.files.retrieve(made.id).id == made.id
    assert gateway.client.files.content(made.id).read() == LINE + b"\n" + LINE
    assert gateway.client.files.delete(made.id).deleted
    for call in (gateway.client.files.retrieve, gateway.client.files.content, gateway.client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    assert gateway.client.files.list().data == []
    assert not list((gateway.world.settings.home / "files").iterdir())


def test_expires_after(gateway: Gateway) -> None:
    made = upload(gateway, expires_after={"anchor": "created_at", "seconds": 3600})
    assert made.expires_at - made.created_at == pytest.approx(3600, abs=60)
    with pytest.raises(openai.BadRequestError):
        upload(gateway, expires_after={"anchor": "created_at", "seconds": 60})


def test_pages_and_order(gateway: Gateway) -> None:
    ids = [upload(gateway, name=f"{n}.jsonl").id for n in range(5)]
    assert [f.id for f in gateway.client.files.list(limit=2)] == ids[::-1], "the client walks the pages"
    first = gateway.client.files.list(limit=2, order="asc")
    assert ([f.id for f in first.data], first.has_more) == (ids[:2], True)
    last = gateway.client.files.list(limit=3, order="asc", after=ids[2])
    assert ([f.id for f in last.data], last.has_more) == (ids[3:], False)
    assert gateway.client.files.list(purpose="batch_output").data == []
    assert assert_error(gateway.http.get("/v1/files?limit=0"))["param"] == "limit"
    assert assert_error(gateway.http.get("/v1/files?order=up"))["param"] == "order"


def test_a_form_has_a_file_and_a_few_short_fields(gateway: Gateway) -> None:
    """The others would be kept in memory."""
    forms: list[tuple[dict[str, str], int]] = [({"a": "x" * 2000}, 1), ({f"a{n}": "x" for n in range(20)}, 1), ({}, 2)]
    for fields, files in forms:
        sent = [("file", ("in.jsonl", LINE))] * files
        answer = gateway.http.post("/v1/files", data={"purpose": "batch"} | fields, files=sent)
        assert answer.status_code == 400, (fields, files)
        assert_error(answer)


def test_what_is_no_batch_file_is_refused_and_nothing_is_kept(gateway: Gateway) -> None:
    rows = [
        (b"", "no line"),
        (b"\n \n", "no line"),
        (LINE + b"{oops\n", "line 2 is not valid JSON"),
        (LINE + LINE + b"[1]\n", "line 3 is not a JSON object"),
        (LINE + b'{"a": "\xff"}\n', "line 2 is not valid JSON"),
        (LINE + b'{"a":' + b"[" * 20_000 + b"\n", "line 2 is not valid JSON"),
        (LINE + b'{"a": "' + b"x" * 70_000 + b'"}\n', "line 2 is over the limit"),
        (LINE + b"\n" * 2000, "over the limit of 2000 lines"),
    ]
    for content, words in rows:
        with pytest.raises(openai.BadRequestError) as caught:
            upload(gateway, content)
        assert words in str(caught.value.message)
        assert caught.value.param == "file"
    with pytest.raises(openai.APIStatusError) as large:
        upload(gateway, LINE * 1000)
    assert large.value.status_code == 413
    assert gateway.client.files.list().data == []
    assert not list((gateway.world.settings.home / "files").iterdir())


def test_forms_that_miss_something(gateway: Gateway) -> None:
    assert assert_error(gateway.http.post("/v1/files", data={"purpose": "batch"}))["param"] == "file"
    form: Any = {"file": ("a", LINE)}
    assert assert_error(gateway.http.post("/v1/files", files=form))["param"] == "purpose"
    assert assert_error(gateway.http.post("/v1/files", files=form, data={"purpose": "fun"}))["param"] == "purpose"
    broken = gateway.http.post("/v1/files", content=b"junk", headers={"content-type": "multipart/form-data"})
    assert broken.status_code == 400
    assert_error(broken)


def test_another_tenant_sees_nothing(gateway: Gateway) -> None:
    made = upload(gateway)
    other = gateway.client_of(gateway.world.key(tenant="other"))
    for call in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    assert other.files.list().data == []
    assert gateway.client.files.content(made.id).read() == LINE


@pytest.mark.parametrize("path", ["file-%00", "..%2F..%2Fkeys.json", "%F0%9F", "x" * 3000])
def test_odd_ids_are_not_found(gateway: Gateway, path: str) -> None:
    for end in ("", "/content"):
        answer = gateway.http.get(f"/v1/files/{path}{end}")
        assert answer.status_code in {400, 404}, answer.text
        assert_error(answer)


def test_an_upload_without_a_key_is_refused_before_its_body_is_read(gateway: Gateway) -> None:
    head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 90000\r\n"
    head += b"Content-Type: multipart/form-data; boundary=x\r\n"
    address = httpx.URL(gateway.url)
    for key in (b"", b"Authorization: Bearer tp-client-wrong\r\n", b"Authorization: Basic abc\r\n"):
        with socket.create_connection((address.host, address.port), timeout=PATIENCE_S) as connection:
            connection.sendall(head + key + b"\r\n" + b"--x\r\n")
            assert b" 401 " in connection.recv(4096).split(b"\r\n", 1)[0]


def test_no_connection_to_postgres_waits_for_the_store(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    made, really = upload(gateway), gateway.state.blobs.open

    def opened(file_id: str) -> IO[bytes]:
        until(lambda: gateway.state.database.engine.pool.checkedout() == 0)
        return really(file_id)

    monkeypatch.setattr(gateway.state.blobs, "open", opened)
    assert gateway.client.files.content(made.id).read() == LINE


def test_a_bucket_that_is_away_is_no_defect(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket()
    for name, value in (("ACCESS_KEY_ID", "k"), ("SECRET_ACCESS_KEY", "s")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with served(bucket.app()) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with running_gateway(world, files_url="s3://tide") as gateway:
            made = upload(gateway)
            assert gateway.client.files.content(made.id).read() == LINE
            bucket.failing = 403
            for call in (lambda: upload(gateway), lambda: gateway.client.files.content(made.id)):
                with pytest.raises(openai.InternalServerError) as caught:
                    call()
                assert caught.value.status_code == 503
                assert assert_error(caught.value.response)["code"] == "unavailable"
            assert [file.id for file in gateway.client.files.list()] == [made.id]
            assert gateway.client.files.delete(made.id).deleted, "its bytes are left to the sweep"
            assert set(bucket.written) == {made.id}
