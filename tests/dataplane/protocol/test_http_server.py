"""What a server's connection takes as HTTP/1.1, what it refuses, and in which order it answers."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import uvicorn

from dataplane.protocol.http_server import ServerConnection
from tests.event_loop import asynchronous, until

HEAD_BYTES_MAX = 4096
GET = b"GET /a HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /a HTTP/1.1\r\nhost: x\r\n"
LAST = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


class Echo:
    """Answers with what it was asked. `/held` waits for `released`, `/early` does not read the body, and `/parts` sends
    its answer in two parts. `gone`: paths whose client disconnected first.
    """

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.asked: list[str] = []
        self.gone: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path, body = scope["path"], b""
        self.asked.append(path)
        if path == "/held":
            watch = asyncio.create_task(self.leaves(receive))
            release = asyncio.create_task(self.released.wait())
            await asyncio.wait([watch, release], return_when=asyncio.FIRST_COMPLETED)
            for task in (watch, release):
                task.cancel()
        elif path != "/early":
            while True:
                message = await receive()
                body += message.get("body", b"")
                if message["type"] == "http.disconnect":
                    self.gone.append(path)
                    return
                if not message["more_body"]:
                    break
        told = {
            **{name: scope[name] for name in ("method", "path", "http_version")},
            "query": scope["query_string"].decode(),
            "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]],
            "body": body.decode(),
        }
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if path == "/parts":
            await send({"type": "http.response.body", "body": b" ", "more_body": True})
        await send({"type": "http.response.body", "body": json.dumps(told).encode(), "more_body": False})

    async def leaves(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.append("/held")


@contextlib.asynccontextmanager
async def served(echo: Echo) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server."""
    config = uvicorn.Config(
        echo, port=0, log_config=None, lifespan="off", ws="none",
        http=partial(ServerConnection, head_bytes_max=HEAD_BYTES_MAX),  # type: ignore[arg-type]
    )  # fmt: skip
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.servers[0].sockets[0].getsockname()[1])
    try:
        yield reader, writer
    finally:
        writer.close()
        server.should_exit = True
        await serving


def answers_in(data: bytes) -> list[tuple[int, Any]]:
    """Status and body of all answers that a connection gave: an echo, or a refusal's text."""
    found = []
    for part in re.split(rb"(?=HTTP/1\.1 \d{3} )", data)[1:]:
        head, _, body = part.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head:
            body = re.sub(rb"[0-9a-f]+\r\n(.*?)\r\n", rb"\1", body, flags=re.DOTALL)
        found.append((int(part.split()[1]), json.loads(body) if body.strip().startswith(b"{") else body.decode()))
    return found


async def asked(*pieces: bytes, echo: Echo | None = None) -> list[tuple[int, Any]]:
    """All answers to what is sent, piece by piece, until the server closes."""
    async with served(echo or Echo()) as (reader, writer):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        with contextlib.suppress(ConnectionError):
            return answers_in(await reader.read())
        return []


@pytest.mark.parametrize(
    ("refused", "status", "why"),
    [
        (POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400, "Content-Length"),
        (POST + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n", 400, "Content-Length"),
        (POST + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd", 400, "Content-Length"),
        (POST + b"content-length: +3\r\n\r\nabc", 400, "Content-Length"),
        (POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400, "chunked"),
        (POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n", 400, "chunked"),
        (b"POST /a HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400, "HTTP/1.0"),
        (b"GET /a HTTP/1.1\nhost: x\n\n", 400, "CRLF"),
        (b"GET /a HTTP/1.1\r\nhost: x\n\r\n", 400, "CR"),
        (GET + b"a: b\r\n c\r\n\r\n", 400, "whitespace"),
        (GET + b"a : b\r\n\r\n", 400, "header"),
        (GET + b"a: b\0c\r\n\r\n", 400, "header"),
        (b"GET /a HTTP/1.1\r\n\r\n", 400, "'host'"),
        (GET + b"host: y\r\n\r\n", 400, "'host'"),
        (b"GET /a HTTP/2.0\r\nhost: x\r\n\r\n", 400, "HTTP/2.0"),
        (b"GET /\r\n\r\n", 400, "HTTP/0.9"),
        (b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n", 400, "target"),
        (b"GET ftp://x/a HTTP/1.1\r\nhost: x\r\n\r\n", 400, "target"),
        (b"GET http://user@x/a HTTP/1.1\r\nhost: x\r\n\r\n", 400, "user"),
        (b"GET http:///a HTTP/1.1\r\nhost: x\r\n\r\n", 400, ""),
        (b"GET /a#b HTTP/1.1\r\nhost: x\r\n\r\n", 400, "fragment"),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400, "invalid HTTP"),
    ],
)
@asynchronous
async def test_what_is_no_plain_http_is_refused_and_ends_the_connection(refused: bytes, status: int, why: str) -> None:
    [(answered, text)] = await asked(refused + LAST)
    assert answered == status
    assert why in text


@pytest.mark.parametrize(
    ("target", "path", "query", "host"),
    [
        (b"/a/b?c=d?e", "/a/b", "c=d?e", "x"),
        (b"//a//b", "//a//b", "", "x"),
        (b"/a%20b%2Fc", "/a b/c", "", "x"),
        (b"http://h:1/a?b", "/a", "b", "h:1"),
        (b"HTTPS://h", "/", "", "h"),
        (b"http://h?b=/c", "/", "b=/c", "h"),
    ],
)
@asynchronous
async def test_targets_are_paths_or_urls_whose_host_counts(target: bytes, path: str, query: str, host: str) -> None:
    [(status, told)] = await asked(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert (status, told["path"], told["query"]) == (200, path, query)
    assert [value for name, value in told["headers"] if name == "host"] == [host]


@asynchronous
async def test_options_may_ask_for_the_whole_server() -> None:
    [(status, told)] = await asked(b"OPTIONS * HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert (status, told["path"]) == (200, "*")


@asynchronous
async def test_values_have_no_spaces_around_them_and_trailers_are_no_headers() -> None:
    chunks = b"3;note=1\r\nabc\r\n2\r\nde\r\n0\r\nauthorization: Bearer x\r\n\r\n"
    [(_, told), _] = await asked(POST + b"a:   b c \t \r\ntransfer-encoding: Chunked\r\n\r\n" + chunks + LAST)
    assert told["body"] == "abcde"
    assert ["a", "b c"] in told["headers"]
    assert "authorization" not in dict(told["headers"])


@pytest.mark.parametrize("cut", [1, 7, 20, 60, 80, 90])
@pytest.mark.parametrize(
    "framed", [b"content-length: 3\r\n\r\nabc", b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"]
)
@asynchronous
async def test_a_request_for_another_protocol_is_answered_as_if_it_had_not_asked(cut: int, framed: bytes) -> None:
    """As Java's client asks for HTTP/2 with each first request."""
    request = POST + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: x\r\n" + framed
    plain = GET + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n"
    whole = request + plain + LAST
    found = await asked(whole[:cut], whole[cut:])
    assert [(status, told["path"], told["body"]) for status, told in found] == [
        (200, "/a", "abc"),
        (200, "/a", ""),
        (200, "/last", ""),
    ]


@pytest.mark.parametrize("sent", [b"a: " + b"b" * 1000, b"\r\n" * 500, b"a: b\r\n" * 200])
@asynchronous
async def test_heads_without_end_are_refused(sent: bytes) -> None:
    beginning = b"" if sent.startswith(b"\r") else GET
    [(status, text)] = await asked(beginning + sent, *[sent] * (HEAD_BYTES_MAX // len(sent)))
    assert status == 431
    assert str(HEAD_BYTES_MAX) in text


@asynchronous
async def test_trailers_without_end_are_refused() -> None:
    beginning = POST + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\na: "
    [(status, _)] = await asked(beginning, *[b"b" * 1000] * 5)
    assert status == 431


@asynchronous
async def test_requests_in_a_row_are_answered_in_their_order_and_what_is_wrong_in_its_turn() -> None:
    echo = Echo()
    async with served(echo) as (reader, writer):
        writer.write(b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n" + GET + b"\r\nnonsense\r\n\r\n" + GET + b"\r\n")
        await until(lambda: echo.asked == ["/held"])
        echo.released.set()
        found = answers_in(await reader.read())
    assert [status for status, _ in found] == [200, 200, 400]
    assert [told["path"] for _, told in found[:2]] == ["/held", "/a"]


@asynchronous
async def test_a_body_at_fault_is_the_fault_of_its_own_request() -> None:
    wrong = POST + b"transfer-encoding: chunked\r\n\r\nnonsense\r\n"
    echo = Echo()
    assert [status for status, _ in await asked(wrong, echo=echo)] == [400]
    assert echo.gone == ["/a"]
    echo = Echo()
    async with served(echo) as (reader, writer):
        writer.write(b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n" + wrong)
        await until(lambda: echo.asked == ["/held"])
        echo.released.set()
        assert [status for status, _ in answers_in(await reader.read())] == [200, 400]
    assert echo.asked == ["/held"], "the request at fault did not begin"


@asynchronous
async def test_so_many_requests_may_wait_and_no_more() -> None:
    echo = Echo()
    async with served(echo) as (reader, writer):
        writer.write(b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n" + (GET + b"\r\n") * 100)
        await until(lambda: echo.asked == ["/held"])
        echo.released.set()
        statuses = [status for status, _ in answers_in(await reader.read())]
    assert statuses == [200] * 65 + [429]


@asynchronous
async def test_who_leaves_is_noticed_while_a_further_request_waits() -> None:
    echo = Echo()
    async with served(echo) as (_, writer):
        writer.write(b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n" + GET + b"\r\n")
        await until(lambda: echo.asked == ["/held"])
        writer.close()
        await until(lambda: echo.gone == ["/held"])


@asynchronous
async def test_a_body_that_nobody_reads_is_passed_over() -> None:
    head = b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n"
    found = await asked(head + b"a" * 10, b"a" * 99_990 + LAST)
    assert [(status, told["path"]) for status, told in found] == [(200, "/early"), (200, "/last")]


@asynchronous
async def test_to_http_1_0_the_end_of_the_connection_ends_the_body() -> None:
    async with served(Echo()) as (reader, writer):
        writer.write(b"GET /parts HTTP/1.0\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert json.loads(body)["http_version"] == "1.0"


@asynchronous
async def test_who_waits_to_be_asked_for_a_body_is_asked() -> None:
    async with served(Echo()) as (reader, writer):
        writer.write(POST + b"expect: 100-continue\r\ncontent-length: 3\r\nconnection: close\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        [(status, told)] = answers_in(await reader.read())
    assert (status, told["body"]) == (200, "abc")
