"""Odd and hostile requests: each gets a 4xx of the documented shape, and nothing of it goes further."""

import http.client
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from controlplane.api.app import make_app
from controlplane.bodies import FAULTS_MAX
from controlplane.settings import Settings
from controlplane.store.keys import make_key
from controlplane.store.session import Database
from controlplane.store.tables import Role
from tests.controlplane.api.test_connections import Connect, answer_of, listening

LINE = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tide", "prompt": "x"}}\n'
NUL, HUGE, DOTS = "%00", "9" * 5000, "..%2f..%2f..%2fetc%2fpasswd"


@pytest.fixture
def secret(database: Database) -> str:
    with database.transaction() as session:
        return make_key(session, name="a", role=Role.ADMIN, tenant="acme").secret


@pytest.fixture
def connect(settings: Settings, secret: str) -> Iterator[Connect]:
    with listening(make_app(settings), settings.model_copy(update={"port": 0})) as connect:
        yield connect


def raw(connect: Connect, secret: str, target: str, *, method: str = "GET", head: str = "", body: bytes = b"") -> Any:
    """Status, head and JSON of the answer to a request that no client would send. The connection stays open: one that
    closes may lose the answer in a reset, where the server has not read the whole body.
    """
    client: socket.socket = connect()
    lines = f"{method} {target} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {secret}\r\n"
    sized = f"content-length: {len(body)}\r\n" if body or method in {"POST", "PUT"} else ""
    client.sendall(f"{lines}{sized}{head}\r\n".encode("latin-1") + body)
    answer = http.client.HTTPResponse(client, method=method)
    answer.begin()
    return answer.status, str(answer.headers).lower().encode(), json.loads(answer.read())


def check_refused(target: str, answer: Any) -> None:
    status, head, body = answer
    assert 400 <= status < 500, (status, body)
    if target.startswith("/v1"):
        assert set(body["error"]) == {"message", "type", "param", "code"}, body
    else:
        assert b"application/problem+json" in head
        assert {"type", "title", "status", "detail", "code"} <= set(body), body
        assert body["status"] == status


PATHS = [
    f"/v1/files/{NUL}", f"/v1/files/{HUGE}", f"/v1/files/{DOTS}", f"/v1/files/{DOTS}/content", "/v1/files/%ff%fe",
    "/v1/files/file-%F0%9F%8C%8A", "/v1/files/../../admin/keys", f"/v1/batches/{NUL}", f"/v1/batches/{HUGE}",
    f"/v1/models/{NUL}", f"/v1/models/{DOTS}", "/v1/models/" + "a/" * 2000, f"/v1/files?after={NUL}",
    "/v1/files?limit=-1", "/v1/files?limit=0", f"/v1/files?limit={HUGE}", "/v1/files?limit=1e3", "/v1/files?limit=",
    "/v1/files?limit=1&limit=-1", "/v1/files?order=asc&order=up", "/v1/files?purpose=x", f"/v1/batches?after={NUL}",
    "/v1/batches?limit=99999999999999999999", "/v1/batches?limit=%D9%A1%00", f"/admin/nodes/{NUL}",
    f"/admin/nodes/{HUGE}", f"/admin/tenants/{DOTS}", "/admin/tenants/%C3%A4", "/admin/tenants/%E2%80%AEacme",
    f"/admin/regions?after={NUL}", "/admin/regions?limit=-1", "/admin/regions?limit=101", f"/admin/audit?after={HUGE}",
    "/admin/audit?after=-1", "/admin/keys?limit=NaN", f"/admin/demand?model={NUL}&region=a", "/admin/demand",
    f"/admin/plans/{NUL}", f"/admin/models/{NUL}", "//admin/keys", "/admin//keys", "/nowhere", "/v1/nowhere",
    "/v1/%2e%2e",
]  # fmt: skip


def test_odd_paths_and_queries(connect: Connect, secret: str) -> None:
    for target in PATHS:
        try:
            check_refused(target, raw(connect, secret, target))
        except Exception as error:
            raise AssertionError(f"{target[:80]}: {error!r}") from error


def deep(opening: bytes, closing: bytes, depth: int) -> bytes:
    return opening * depth + b"1" + closing * depth


BODIES = [
    b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b"\0", b"{}" * 2, b"NaN", b'{"a": 1e999999}', b"1" * 5000,
    deep(b"[", b"]", 100_000), deep(b'{"a":', b"}", 100_000), deep(b"[", b"]", 900), deep(b'{"metadata":', b"}", 400),
    json.dumps({"model": "m" * 300_000}).encode(), b'{"model": "\\ud800", "messages": []}',
    json.dumps({str(number): number for number in range(50_000)}).encode(),
]  # fmt: skip
TAKE_BODIES = [
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/batches"), ("POST", "/admin/keys"),
    ("PUT", "/admin/tenants/acme"), ("PUT", "/admin/profiles"), ("PUT", "/admin/models/m"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "target"), TAKE_BODIES)
def test_bodies_that_are_no_request(connect: Connect, secret: str, method: str, target: str) -> None:
    for body in BODIES:
        try:
            check_refused(target, raw(connect, secret, target, method=method, head=JSON, body=body))
        except Exception as error:
            raise AssertionError(f"{body[:60]!r}: {error!r}") from error


def test_many_faults_are_counted_and_not_described(connect: Connect, secret: str) -> None:
    body = json.dumps({str(number): number for number in range(FAULTS_MAX + 1)}).encode()
    for method, target in TAKE_BODIES:
        _, _, answer = raw(connect, secret, target, method=method, head=JSON, body=body)
        told = answer["error"]["message"] if target.startswith("/v1") else answer["detail"]
        assert re.fullmatch("the body has [0-9]+ faults", told), (target, told)


@pytest.mark.parametrize(("target", "bytes_max"), [("/ui/session", 16 * 1024), ("/v1/batches", 128 * 1024)])
def test_bodies_that_are_never_large_have_a_small_limit(
    connect: Connect, secret: str, target: str, bytes_max: int
) -> None:
    for size, statuses in ((bytes_max, {400, 401, 403}), (bytes_max + 1, {413})):
        status, _, body = raw(connect, secret, target, method="POST", head=JSON, body=b" " * size)
        assert status in statuses, (size, body)


JSON = "content-type: application/json\r\n"
HEADS = [
    ("/v1/files", "authorization: Bearer other\r\n"), ("/v1/models", "content-length: 5\r\ncontent-length: 6\r\n"),
    ("/v1/models", "transfer-encoding: chunked\r\ncontent-length: 3\r\n"), ("/v1/models", "content-length: -1\r\n"),
    ("/v1/models", f"content-length: {HUGE}\r\n"), ("/v1/models", "x y: z\r\n"), ("/v1/models", ": z\r\n"),
    ("/v1/models", "a: b\0c\r\n"), ("/v1/models", " folded: yes\r\n"), ("/v1/models", "transfer-encoding: gzip\r\n"),
]  # fmt: skip


def test_odd_heads(connect: Connect, secret: str) -> None:
    for target, head in HEADS:
        client = connect()
        lines = f"GET {target} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{head}"
        client.sendall(f"{lines}\r\n".encode("latin-1"))
        status, _, body = answer_of(client)
        assert 400 <= status < 500, (head, status, body)


def test_odd_keys(connect: Connect) -> None:
    for key in ("", " ", "a" * 8000, "\xff\xfe", "tp-admin-", "' OR 1=1 --", "a b", "\t", "{}", "null"):
        answer = raw(connect, key, "/v1/models")
        assert answer[0] == 401, key
        check_refused("/v1/models", answer)


def upload(name: bytes, content: bytes, *, purpose: bytes = b"batch", more: bytes = b"") -> tuple[str, bytes]:
    """A form: its head and body."""
    parts = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n' + purpose + b"\r\n" + more
    parts += b'--x\r\ncontent-disposition: form-data; name="file"; filename="' + name + b'"\r\n\r\n' + content
    return "content-type: multipart/form-data; boundary=x\r\n", parts + b"\r\n--x--\r\n"


NAMES = [
    b"../../../etc/passwd",
    b"/etc/passwd",
    b"C:\\\\boot.ini",
    b"..",
    b"a" * 5000,
    b"%00",
    b"a\0b",
    b"\xf0\x9f\x8c\x8a.jsonl",
    b"",
]


def test_file_names_are_only_names(connect: Connect, secret: str, settings: Settings) -> None:
    for name in NAMES:
        head, body = upload(name, LINE.encode())
        status, _, answer = raw(connect, secret, "/v1/files", method="POST", head=head, body=body)
        if status != 200:
            check_refused("/v1/files", (status, b"", answer))
            continue
        assert len(answer["filename"]) <= 255
    stored = {path.name for path in (settings.home / "files").rglob("*") if path.is_file()}
    assert all(name.startswith("file-") for name in stored), "its bytes lie under ids of ours"


def test_bad_uploads(connect: Connect, secret: str) -> None:
    two = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nvision\r\n'
    bombs = [deep(b"[", b"]", 50_000), deep(b'{"a":', b"}", 50_000), b"\0\n", b"[]\n", b"\xff\n", b""]
    forms = [upload(b"a", bomb) for bomb in bombs]
    forms += [upload(b"a", LINE.encode(), purpose=b"assistants"), upload(b"a", LINE.encode(), more=two),
              ("content-type: multipart/form-data\r\n", b"x"),
              ("content-type: multipart/form-data; boundary=\r\n", b"x"),
              ("content-type: text/plain\r\n", LINE.encode()), ("", LINE.encode()),
              ("content-type: multipart/form-data; boundary=x\r\n", b"--x\r\n" * 5000),
              ("content-type: multipart/form-data; boundary=x\r\n",
               b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\nb\r\n' * 3000 + b"--x--\r\n")]  # fmt: skip
    for head, body in forms:
        sending = http.client.HTTPConnection("a")  # it stays open: one that closes may lose the answer in a reset
        sending.sock = connect()
        headers = {"Authorization": f"Bearer {secret}"} | ({"Content-Type": head[14:-2]} if head else {})
        sending.request("POST", "/v1/files", body, headers)
        answer = sending.getresponse()
        check_refused("/v1/files", (answer.status, b"", json.loads(answer.read())))


HOLD_NUL = [
    ("POST", "/v1/batches", {"metadata": {"a": "a\0b"}}), ("POST", "/v1/batches", {"metadata": {"a\0b": "a"}}),
    ("POST", "/v1/batches", {"input_file_id": "a\0b"}), ("POST", "/v1/batches", {"a\0b": 1}),
    ("POST", "/v1/completions", {"model": "a\0b", "prompt": "x"}),
    ("POST", "/v1/completions", {"model": "a", "prompt": "x", "a\0b": 1}),
    ("POST", "/v1/completions", {"model": "a", "prompt": "x", "user": "a\0b", "prompt_cache_key": "\0"}),
    ("POST", "/v1/chat/completions", {"model": "a\0b", "messages": [{"role": "user", "content": "x"}]}),
    ("POST", "/admin/keys", {"name": "a\0b", "role": "client", "tenant": "acme"}),
    ("POST", "/admin/keys", {"name": "a", "role": "client", "tenant": "acme", "models": ["a\0b"]}),
    ("PUT", "/admin/tenants/acme", {"a\0b": 1}), ("PUT", "/admin/regions/a%00b", {}),
    ("POST", "/admin/pins", {"model": "m", "region": "r", "instances": 1, "note": "a\0b"}),
]  # fmt: skip


def test_nul_is_refused_wherever_it_is(connect: Connect, secret: str) -> None:
    head, form = upload(b"in.jsonl", LINE.encode())
    file_id = raw(connect, secret, "/v1/files", method="POST", head=head, body=form)[2]["id"]
    batch = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    for method, target, body in HOLD_NUL:
        whole = {**batch, **body} if target == "/v1/batches" else body
        answer = raw(connect, secret, target, method=method, head=JSON, body=json.dumps(whole).encode())
        try:
            check_refused(target, answer)
        except Exception as error:
            raise AssertionError(f"{target} {body}: {error!r}") from error
    assert raw(connect, secret, "/v1/batches", method="POST", head=JSON, body=json.dumps(batch).encode())[0] == 200


TENANTS = ["ä", "a b", "", "A", "../x", "a\0", "a" * 64, "\u202eacme", "acme\n", "\u0430cme", "{acme}", "tidepool:*"]


def test_unicode_tenants_are_none(connect: Connect, secret: str) -> None:
    for tenant in TENANTS:
        body = json.dumps({"name": "k", "role": "client", "tenant": tenant}).encode()
        answer = raw(connect, secret, "/admin/keys", method="POST", head=JSON, body=body)
        check_refused("/admin/keys", answer)
        assert answer[2]["param"] == "tenant"


def test_wrong_methods(connect: Connect, secret: str) -> None:
    for method in ("DELETE", "PATCH", "TRACE", "OPTIONS"):
        for target in ("/v1/chat/completions", "/admin/audit", "/livez"):
            check_refused(target, raw(connect, secret, target, method=method))

    status, head, body = raw(connect, secret, "/v1/chat/completions", method="FOO")  # no method of HTTP
    assert status == body["status"] == 400
    assert b"application/problem+json" in head
