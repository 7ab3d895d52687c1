"""The HTTP client of nodes, before servers that write odd bytes."""

import asyncio
import gc
import ssl
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import httptools
import msgspec
import pytest

from controlplane.errors import NodeError
from controlplane.serving.node_connections import Address, CannotConnectError, NodeConnection, NodeConnections
from controlplane.serving.node_streams import LineReader, NodeReply, NodeStream
from dataplane.protocol.messages import Started, Token, encode_line
from dataplane.protocol.tls import client_context
from ops.local.ports import free_port
from tests.dataplane.protocol.test_tls import files  # noqa: F401  (a fixture)
from tests.event_loop import asynchronous, until

SILENCE_S = 600.0
CONTEXT = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""It believes nobody."""
ADDRESS = Address(host="127.0.0.1", port=1, is_secure=False)
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Kept:
    """A receiver that keeps everything."""

    silence_s = SILENCE_S

    def __init__(self) -> None:
        self.status, self.media_type, self.body = 0, "", b""
        self.error: Exception | None = None
        self.is_ended = asyncio.Event()

    def begun(self, status: int, media_type: str) -> None:
        self.status, self.media_type = status, media_type

    def received(self, data: bytes) -> bool:
        self.body += data
        return True

    def ended(self, error: Exception | None) -> None:
        assert not self.is_ended.is_set()
        self.error = error
        self.is_ended.set()


@asynccontextmanager
async def node(serve: Serve, context: ssl.SSLContext | None = None) -> AsyncIterator[tuple[NodeConnections, str]]:
    """Connections, and the address of a server that does this on each of them."""

    running = 0

    async def closed_after(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal running
        running += 1
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            running -= 1

    connections = NodeConnections(CONTEXT)
    async with await asyncio.start_server(closed_after, "127.0.0.1", port := free_port(), ssl=context):
        yield connections, f"{'http' if context is None else 'https'}://127.0.0.1:{port}/generate?a=b"
        connections.close()
        await until(lambda: not running)


async def asked(reader: asyncio.StreamReader) -> bytes:
    """The head of the next request, whose body is one byte."""
    head = await reader.readuntil(b"\r\n\r\n")
    return head + await reader.readexactly(1)


def answering(*pieces: bytes, stays: bool = False) -> Serve:
    """Answers every request so; the pieces come apart."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if stays:
            await reader.read()

    return serve


async def answer(connections: NodeConnections, url: str) -> Kept:
    kept = Kept()
    await connections.post(url, {"x-a": "b"}, b"?", kept)
    await kept.is_ended.wait()
    return kept


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/Plain; charset=utf-8\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nthe\r\n5;ext=1\r\n tide\r\n0\r\n\r\n"
SIZED = HEAD + b"content-length: 8\r\n\r\nthe tide"
UNSIZED = HEAD + b"connection: close\r\n\r\nthe tide"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED


@pytest.mark.parametrize("whole", [CHUNKED, SIZED, UNSIZED, INTERIM])
def test_an_answer_may_be_cut_anywhere(whole: bytes) -> None:
    @asynchronous
    async def run() -> None:
        for cut in range(1, len(whole), 3):
            async with node(answering(whole[:cut], whole[cut:])) as (connections, url):
                kept = await answer(connections, url)
            assert (kept.status, kept.media_type, kept.body, kept.error) == (200, "text/plain", b"the tide", None), cut

    run()


@pytest.mark.parametrize("whole", [CHUNKED, SIZED])
def test_an_answer_that_breaks_off_is_not_whole(whole: bytes) -> None:
    @asynchronous
    async def run() -> None:
        for cut in (0, 5, len(HEAD), whole.index(b"tide") + 2):
            async with node(answering(whole[:cut])) as (connections, url):
                kept = await answer(connections, url)
            assert isinstance(kept.error, ConnectionError), cut

    run()


@pytest.mark.parametrize(
    "garbage",
    [b"<html>\r\n\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", b"HTTP/1.1 999999 A\r\n\r\n"],
)
def test_garbage_ends_the_answer(garbage: bytes) -> None:
    @asynchronous
    async def run() -> None:
        async with node(answering(garbage, stays=True)) as (connections, url):
            assert isinstance((await answer(connections, url)).error, httptools.HttpParserError)

    run()


@pytest.mark.parametrize(
    ("written", "times"),
    [(SIZED, 1), (CHUNKED, 1), (SIZED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), 3), (UNSIZED, 3)],
)
def test_a_connection_is_kept_where_both_sides_may(written: bytes, times: int) -> None:
    """The request itself is as it should be."""
    opened, requests = [], []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer)
        while True:
            requests.append(await asked(reader))
            writer.write(written)
            if b"close" in written:
                return

    @asynchronous
    async def run() -> None:
        async with node(serve) as (connections, url):
            for _ in range(3):
                assert (await answer(connections, url)).body == b"the tide"
            assert len(opened) == times
        host = url.split("/")[2]
        assert requests[-1].startswith(b"POST /generate?a=b HTTP/1.1\r\n")
        assert requests[-1].endswith(b"\r\nx-a: b\r\n\r\n?")
        assert f"\r\nhost: {host}\r\n".encode() in requests[-1]

    run()


def test_what_was_not_asked_for_closes_an_idle_connection() -> None:
    @asynchronous
    async def run() -> None:
        gone, opened = asyncio.Event(), []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            opened.append(writer)
            await asked(reader)
            writer.write(SIZED)
            if len(opened) == 1:
                await gone.wait()
                writer.write(SIZED)
                assert await reader.read() == b""
                gone.clear()
            else:
                await reader.read()

        async with node(serve) as (connections, url):
            await answer(connections, url)
            gone.set()
            await until(lambda: not gone.is_set())
            assert (await answer(connections, url)).body == b"the tide"
            assert len(opened) == 2

    run()


def test_another_protocol_ends_the_answer() -> None:
    switched = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"

    @asynchronous
    async def run() -> None:
        async with node(answering(switched, stays=True)) as (connections, url):
            assert isinstance((await answer(connections, url)).error, ConnectionError)

    run()


def test_a_head_is_bounded() -> None:
    async def without_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        while True:
            writer.write(b"x-more: " + b"y" * 1000)
            await writer.drain()

    @asynchronous
    async def run() -> None:
        async with node(without_end) as (connections, url):
            assert isinstance((await answer(connections, url)).error, ConnectionError)

    run()


def test_what_is_read_as_a_whole_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.serving.node_streams._WHOLE_BYTES_MAX", 100)
    with pytest.raises(msgspec.DecodeError, match="over 100 bytes"):
        LineReader().feed(b"x" * 101)

    @asynchronous
    async def run() -> None:
        for body, error in ((b"x" * 100, None), (b"x" * 101, "over 100 bytes")):
            reply = NodeReply(silence_s=SILENCE_S)
            async with node(answering(HEAD + b"connection: close\r\n\r\n" + body)) as (connections, url):
                await connections.post(url, {}, b"?", reply)
                with nullcontext() if error is None else pytest.raises(NodeError, match=error):
                    assert await reply.body() == body

    run()


def test_a_closed_connection_waits_for_no_collection_of_garbage() -> None:
    @asynchronous
    async def run() -> None:
        async with node(answering(HEAD, stays=True)) as (connections, url):
            kept = Kept()
            connection: Any = weakref.ref(await connections.post(url, {}, b"?", kept))
            gc.disable()
            try:
                connection().leave(kept, at_end=False)
                await until(lambda: connection() is None)
                assert not kept.is_ended.is_set(), "who left is told nothing"
            finally:
                gc.enable()

    run()


def test_two_answers_to_one_request_are_an_error() -> None:
    @asynchronous
    async def run() -> None:
        async with node(answering(SIZED + SIZED, stays=True)) as (connections, url):
            assert isinstance((await answer(connections, url)).error, ConnectionError)

    run()


def test_an_idle_connection_closes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.serving.node_connections._IDLE_CONNECTION_S", 0.01)

    @asynchronous
    async def run() -> None:
        closed = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asked(reader)
            writer.write(SIZED)
            assert await reader.read() == b""
            closed.set()

        async with node(serve) as (connections, url):
            await answer(connections, url)
            await closed.wait()

    run()


@pytest.mark.parametrize("at_end", [True, False])
def test_who_leaves_before_the_end_keeps_the_connection_only_if_nothing_else_is_missing(at_end: bool) -> None:
    @asynchronous
    async def run() -> None:
        left, opened = asyncio.Event(), []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            opened.append(writer)
            while True:
                await asked(reader)
                writer.write(CHUNKED.removesuffix(b"0\r\n\r\n"))
                await left.wait()
                writer.write(b"0\r\n\r\n")

        async with node(serve) as (connections, url):
            kept = Kept()
            connection = await connections.post(url, {}, b"?", kept)
            await until(lambda: kept.body == b"the tide")
            connection.leave(kept, at_end=at_end)
            left.set()
            await until(lambda: connection.is_closing or bool(connections._idle))
            assert (await answer(connections, url)).body == b"the tide"
            assert len(opened) == (1 if at_end else 2)
            assert not kept.is_ended.is_set()

    run()


def test_a_node_that_is_not_there_and_a_header_that_is_two() -> None:
    @asynchronous
    async def run() -> None:
        connections = NodeConnections(CONTEXT)
        with pytest.raises(CannotConnectError):
            await connections.post(f"http://127.0.0.1:{free_port()}/", {}, b"?", Kept())
        with pytest.raises(ValueError, match="line break"):
            await connections.post("http://127.0.0.1:1/", {"a": "b\r\nc: d"}, b"?", Kept())

    run()


def test_silence_is_measured_from_the_last_byte() -> None:
    @asynchronous
    async def run() -> None:
        receiver = Kept()
        receiver.silence_s = 0.3
        async with node(answering(HEAD + b"content-length: 9\r\n\r\n", b"the", stays=True)) as at:
            await at[0].post(at[1], {}, b"?", receiver)
            await receiver.is_ended.wait()
        assert isinstance(receiver.error, TimeoutError)
        assert receiver.body == b"the"

    run()


class Transport(asyncio.Transport):
    """Counts pauses, and writes nothing."""

    is_paused = False

    def write(self, data: object) -> None:
        pass

    def abort(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


def test_a_node_whose_events_nobody_takes_is_not_read() -> None:
    """It is read again as soon as somebody takes them, and they are in order."""

    @asynchronous
    async def run() -> None:
        connection, transport = NodeConnection(NodeConnections(CONTEXT), ADDRESS), Transport()
        connection.connection_made(transport)
        stream = NodeStream(first_token_s=SILENCE_S, idle_s=SILENCE_S)
        connection.send(b"", stream)
        connection.data_received(HEAD + b"\r\n" + encode_line(Started(prompt_tokens=1)))
        sent, taken = 0, []
        for _ in range(3):
            while not transport.is_paused:
                connection.data_received(encode_line(Token(text="x" * 1000, token_ids=(sent,))))
                sent += 1
                assert sent < 300, "bounded"
            taken += await stream.next()
            connection.resume(Kept())
            assert transport.is_paused, "only whoever has sent the request may"
            connection.resume(stream)
            assert not transport.is_paused
        assert [event.token_ids for event in taken if isinstance(event, Token)] == [(each,) for each in range(sent)]
        connection.leave(stream, at_end=False)

    run()


def test_tls(files: Path) -> None:  # noqa: F811
    @asynchronous
    async def run() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files / "node.pem", files / "node.key")
        async with node(answering(CHUNKED), context) as (strangers, url):
            with pytest.raises(CannotConnectError, match="certificate verify failed"):
                await answer(strangers, url)
            connections = NodeConnections(client_context(files / "ca.pem"))
            assert (await answer(connections, url)).body == b"the tide"
            connections.close()

    run()
