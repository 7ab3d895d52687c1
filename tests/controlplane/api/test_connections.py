"""Clients that send too slowly, send too much, or do not read."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from controlplane.api import request_limits
from controlplane.api.app import make_app, server_config
from controlplane.settings import Settings
from controlplane.store.keys import KeyScope, make_key
from controlplane.store.session import Database
from controlplane.store.tables import Role
from tests.controlplane.world import PATIENCE_S, until

Connect = Callable[[], socket.socket]
QUICK = {"body_idle_timeout_s": 0.5, "client_idle_timeout_s": 1.0, "port": 0}


@contextlib.contextmanager
def listening(app: Any, settings: Settings) -> Iterator[Connect]:
    """`connect()` is a new connection to the app, served as the API process serves it."""
    server = uvicorn.Server(server_config(app, settings))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    address = server.servers[0].sockets[0].getsockname()
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection(address, timeout=PATIENCE_S))
    server.should_exit = True
    thread.join(timeout=PATIENCE_S)
    assert not thread.is_alive()


@pytest.fixture
def quick(settings: Settings) -> Settings:
    return settings.model_copy(update=QUICK)


@pytest.fixture
def connect(quick: Settings) -> Iterator[Connect]:
    with listening(make_app(quick), quick) as connect:
        yield connect


@pytest.fixture
def hasty(quick: Settings) -> Iterator[Connect]:
    """A head must come within a second."""
    with listening(make_app(quick), quick.model_copy(update={"header_timeout_s": 1.0})) as connect:
        yield connect


def answer_of(client: socket.socket) -> tuple[int, bytes, Any]:
    """Status, head and JSON body of what comes until the server closes."""
    with client.makefile("rb") as stream:
        head, _, body = stream.read().partition(b"\r\n\r\n")
    return int(head.split()[1]), head.lower(), json.loads(body)


def test_a_head_that_does_not_come_ends_the_connection(hasty: Connect) -> None:
    for beginning in (b"", b"GET /livez HT", b"GET /livez HTTP/1.1\r\nhost: a\r\n"):
        client = hasty()
        with contextlib.suppress(ConnectionError):
            client.sendall(beginning)
            assert client.recv(1000) == b""


def test_dripping_does_not_extend_the_time(hasty: Connect) -> None:
    client = hasty()
    client.settimeout(0.05)
    deadline = time.monotonic() + PATIENCE_S
    with contextlib.suppress(ConnectionError):
        client.sendall(b"GET /livez HTTP/1.1\r\n")
        while time.monotonic() < deadline:
            client.sendall(b"a: b\r\n")
            with contextlib.suppress(TimeoutError):
                assert client.recv(1000) == b""
                break
    assert time.monotonic() < deadline, "it was cut off"


def test_an_idle_connection_between_requests_stays(hasty: Connect) -> None:
    client = hasty()
    for pause_s in (1.5, 0.1):  # longer than a head may take
        client.settimeout(PATIENCE_S)
        client.sendall(b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):  # head and body may come apart
            answer += client.recv(10_000)
        assert answer.startswith(b"HTTP/1.1 200")
        client.settimeout(pause_s)
        with pytest.raises(TimeoutError):
            client.recv(1)


def test_too_large_a_head(connect: Connect) -> None:
    client = connect()
    client.sendall(b"GET /livez HTTP/1.1\r\nhost: a\r\nconnection: close\r\nx: " + b"y" * 40_000 + b"\r\n\r\n")
    status, head, body = answer_of(client)
    assert status in {400, 431}, "whether it came in pieces"
    assert b"application/problem+json" in head
    assert body["status"] == status


@pytest.mark.parametrize("path", [b"/v1/models", b"/admin/regions"])
def test_too_many_headers(connect: Connect, path: bytes) -> None:
    client = connect()
    many = b"".join(b"x-%d: y\r\n" % number for number in range(100))
    client.sendall(b"GET " + path + b" HTTP/1.1\r\nhost: a\r\nconnection: close\r\n" + many + b"\r\n")
    status, head, body = answer_of(client)
    assert status == 431
    assert b"x-request-id" in head
    assert (body["error"] if path.startswith(b"/v1") else body)["code"] == "headers_too_large"


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/files", b"/node/heartbeat", b"/admin/keys"])
def test_a_body_that_does_not_come_on_is_given_up(connect: Connect, database: Database, path: bytes) -> None:
    role = Role.NODE if path.startswith(b"/node") else Role.ADMIN
    with database.transaction() as session:
        secret = make_key(session, name="a", role=role, tenant="acme").secret.encode()
    client = connect()
    form = b"content-type: multipart/form-data; boundary=x\r\n" if path.endswith(b"files") else b""
    head = b"POST " + path + b" HTTP/1.1\r\nhost: a\r\nauthorization: Bearer " + secret + b"\r\n" + form
    client.sendall(head + b"content-length: 1000\r\n\r\n" + b"--x\r\n")
    status, answered, body = answer_of(client)
    assert status == 408
    assert b"connection: close" in answered
    assert (body["error"] if path.startswith(b"/v1") else body)["code"] == "request_timeout"


def test_no_body_is_read_of_who_has_no_key(connect: Connect, quick: Settings) -> None:
    """The body never comes: who waits for it answers 408."""
    paths = make_app(quick).openapi()["paths"]
    asked = [(path, method.upper()) for path, methods in paths.items() for method in methods.keys() & {"post", "put"}]
    assert len(asked) > 40
    for path, method in asked:
        for key in ("", "authorization: Bearer tp-client-wrong\r\n", "cookie: tidepool_session=wrong\r\n"):
            client = connect()
            head = f"{method} {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
            client.sendall(f"{head}{key}content-length: 1000\r\n\r\n".encode())
            status, _, body = answer_of(client)
            assert status == (408 if path == "/ui/session" else 401), (method, path, key, body)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody reads is dropped until it ends, however long it pauses."""
    for limit in ("_DROPPED_S", "_PAUSE_S"):
        monkeypatch.setattr(request_limits, limit, PATIENCE_S)


@pytest.mark.usefixtures("patient")
def test_who_sends_all_before_reading_sees_the_refusal(connect: Connect) -> None:
    """Its connection closes after the answer; closed with bytes unread, it would be reset."""
    client = connect()
    head = b"POST /v1/responses HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
    client.sendall(head + b"authorization: Bearer tp-client-wrong\r\ncontent-length: 4000000\r\n\r\n")
    client.sendall(b" " * 4_000_000)
    assert answer_of(client)[0] == 401


@pytest.mark.parametrize(
    ("path", "size", "status"),
    [("/v1/responses", "content-length: 5", 401), ("/v1/responses", "transfer-encoding: chunked", 401),
     ("/v1/files", "content-length: 5", 401), ("/v1/batches", "content-length: 1000000000", 413)],
)  # fmt: skip
def test_who_waits_to_be_told_to_go_on_is_answered_instead(connect: Connect, path: str, size: str, status: int) -> None:
    """It sends no body, and the connection closes: a request after it would be taken for that body."""
    client = connect()
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer tp-client-wrong\r\nexpect: 100-continue\r\n"
    client.sendall(f"{head}content-type: application/json\r\n{size}\r\n\r\n".encode())
    answered, answer, _ = answer_of(client)
    assert answered == status, "and not 100 Continue"
    assert b"connection: close" in answer


@pytest.mark.usefixtures("patient")
def test_who_was_told_to_go_on_and_sends_too_much_sees_the_refusal(connect: Connect, database: Database) -> None:
    """Its connection closes after the answer; closed with bytes unread, it would be reset."""
    with database.transaction() as session:
        secret = make_key(session, name="a", role=Role.CLIENT, tenant="acme").secret
    client = connect()
    head = f"POST /v1/batches HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {secret}\r\nconnection: close\r\n"
    client.sendall(f"{head}expect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n".encode())
    assert client.recv(1000).startswith(b"HTTP/1.1 100 ")
    client.sendall((b"2000\r\n" + b" " * 0x2000 + b"\r\n") * 500 + b"0\r\n\r\n")
    assert answer_of(client)[0] == 413


def test_no_file_is_read_of_who_has_another_key(connect: Connect, database: Database) -> None:
    """The file never comes: who waits for it answers 408."""
    with database.transaction() as session:
        models = make_key(session, name="m", role=Role.CLIENT, tenant="acme", scopes=[KeyScope.MODELS]).secret
        node = make_key(session, name="n", role=Role.NODE, tenant="acme", node="n1").secret
    for path, secret in [(path, secret) for path in ("/v1/files", "/admin/demand") for secret in (models, node)]:
        client = connect()
        head = f"POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\nauthorization: Bearer {secret}\r\n"
        head += "content-type: multipart/form-data; boundary=x\r\ncontent-length: 1000\r\n\r\n--x\r\n"
        client.sendall(head.encode())
        status, _, body = answer_of(client)
        assert status == 403, (path, body)


@pytest.mark.parametrize(
    ("path", "limit"), [("/v1/chat/completions", "request_body_timeout_s"), ("/v1/files", "body_timeout_s")]
)
def test_bodies_and_files_have_a_time_of_their_own(
    settings: Settings, database: Database, path: str, limit: str
) -> None:
    """A byte comes every now and then, so that the client is never idle."""
    long = {"request_body_timeout_s": 900.0, "body_timeout_s": 900.0}
    changed = settings.model_copy(update=long | {limit: 0.5, "port": 0})
    with database.transaction() as session:
        secret = make_key(session, name="a", role=Role.CLIENT, tenant="acme").secret
    with listening(make_app(changed), changed) as connect:
        client = connect()
        head = f"POST {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {secret}\r\n"
        head += "content-type: multipart/form-data; boundary=x\r\ncontent-length: 100000\r\n\r\n"
        form = '--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        client.sendall((head + form).encode())
        begun_s, answer = time.monotonic(), b""
        client.settimeout(0.05)
        while not answer and time.monotonic() - begun_s < PATIENCE_S:
            client.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                answer = client.recv(4096)
    assert b" 408 " in answer.split(b"\r\n", 1)[0]


class Flood:
    """Answers without end, until nobody wants more."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.app = Starlette(routes=[Route("/", self.answer)])

    async def answer(self, _: Request) -> StreamingResponse:
        return StreamingResponse(self.chunks())

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 16_384
                await asyncio.sleep(0)
        finally:
            self.ended.set()


def test_who_does_not_read_is_cut_off(quick: Settings) -> None:
    flood = Flood()
    with listening(flood.app, quick) as connect:
        client = connect()
        client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        assert flood.ended.wait(PATIENCE_S), "its stream ended"


def test_who_reads_too_slowly_is_too(quick: Settings) -> None:
    flood = Flood()
    with listening(flood.app, quick) as connect:
        client = connect()
        client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        deadline = time.monotonic() + PATIENCE_S
        with contextlib.suppress(ConnectionError):
            while not flood.ended.wait(0.02):
                assert time.monotonic() < deadline
                client.recv(1)


def test_who_reads_slowly_is_not(quick: Settings) -> None:
    flood = Flood()
    with listening(flood.app, quick.model_copy(update={"client_idle_timeout_s": PATIENCE_S})) as connect:
        client = connect()
        client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        read_bytes = 0
        while read_bytes < 2**22:
            read_bytes += len(client.recv(65_536))
        assert not flood.ended.is_set()
