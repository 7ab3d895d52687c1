"""Bodies written as their parts arise: what a client reads, when there is room, and who is disconnected."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import uvicorn

from dataplane.protocol.connections import BodyWriter, GatheredWrites, WritableConnection, body_writer
from tests.event_loop import asynchronous, until

Answer = Callable[[BodyWriter], Awaitable[None]]
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
END = b"0\r\n\r\n"


def app(answer: Answer) -> Any:
    """Answers with a body that is written where that is possible, else with one that is sent."""

    async def run(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        writer = body_writer(scope)
        if writer is None:
            await send({"type": "http.response.body", "body": b"sent", "more_body": False})
            return
        await answer(writer)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return run


@contextlib.asynccontextmanager
async def served(answer: Answer, *, reading_s: float = 60.0) -> AsyncIterator[int]:
    """The port of a server."""
    config = uvicorn.Config(
        app(answer), port=0, log_config=None, lifespan="off", ws="none",
        http=partial(WritableConnection, reading_s=reading_s, head_bytes_max=10_000),  # type: ignore[arg-type]
    )  # fmt: skip
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await serving


async def hello(writer: BodyWriter) -> None:
    writer.write(b"hello")
    await asyncio.sleep(0)
    writer.write(b" " * 20)


@asynchronous
async def test_parts_arrive_as_chunks_and_the_connection_serves_the_next_request() -> None:
    async with served(hello) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(REQUEST)
            answer = await reader.readuntil(END)
            assert answer.partition(b"\r\n\r\n")[2] == b"5\r\nhello\r\n14\r\n" + b" " * 20 + b"\r\n" + END
        writer.write(REQUEST * 3)
        for _ in range(3):
            assert (await reader.readuntil(END)).count(b"hello") == 1
        writer.close()


@pytest.mark.parametrize("request_line", [b"GET / HTTP/1.0", b"HEAD / HTTP/1.1"])
@asynchronous
async def test_no_chunks_are_written_to_who_cannot_read_them(request_line: bytes) -> None:
    async with served(hello) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_line + b"\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = await reader.read()
        assert answer.partition(b"\r\n\r\n")[2] == (b"" if request_line.startswith(b"HEAD") else b"sent")
        writer.close()


@asynchronous
async def test_a_writer_tells_when_its_reader_leaves_much_unread_and_reads_again() -> None:
    seen: list[str] = []
    written = 0

    async def flood(writer: BodyWriter) -> None:
        nonlocal written
        room = asyncio.Event()
        writer.on_room = lambda: (seen.append("room"), room.set())[1]
        while not writer.full:
            writer.write(b"x" * 10_000)
            written += 10_000
        seen.append("full")
        await room.wait()

    async with served(flood) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        answer = b""
        while not answer.endswith(END):
            answer += await reader.read(2**16)
        assert answer.count(b"x") == written
        assert seen == ["full", "room"]
        writer.close()


@asynchronous
async def test_who_reads_nothing_for_too_long_is_disconnected_and_who_leaves_is_noticed() -> None:
    lost: list[bool] = []

    async def flood(writer: BodyWriter) -> None:
        def fill() -> None:
            while not writer.full:
                writer.write(b"x" * 10_000)

        gone = asyncio.Event()
        writer.on_lost, writer.on_room = gone.set, fill
        fill()
        await gone.wait()
        writer.write(b"to nobody")
        lost.append(writer.lost)

    async def wait(writer: BodyWriter) -> None:
        gone = asyncio.Event()
        writer.on_lost = gone.set
        writer.write(b"x")
        await gone.wait()
        lost.append(writer.lost)

    async with served(flood, reading_s=0.2) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        await until(lambda: lost == [True])
        writer.close()
    async with served(wait) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        await reader.readuntil(b"x\r\n")
        writer.close()
        await until(lambda: lost == [True, True])


@asynchronous
async def test_what_a_client_leaves_behind_waits_for_no_collection_of_garbage() -> None:
    """It holds the request."""

    def left() -> int:
        return sum(type(each) is WritableConnection for each in gc.get_objects())

    async with served(hello) as port:
        gc.collect()
        gc.disable()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST)
            await reader.readuntil(END)
            assert left() == 1
            writer.close()
            await until(lambda: not left())
        finally:
            gc.enable()


class Written:
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.writes.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


@asynchronous
async def test_what_is_written_within_one_turn_is_one_write_in_its_order() -> None:
    written = Written()
    transport = GatheredWrites(written, asyncio.get_running_loop())  # type: ignore[arg-type]
    transport.write(b"head ")
    transport.write(b"body")
    assert written.writes == []
    await asyncio.sleep(0)
    assert written.writes == [b"head body"]
    transport.write(b"more ")
    transport.write_now(b"at once")
    assert written.writes[1:] == [b"more at once"]
    transport.write_now(b"alone")
    transport.write(b"x" * 65_536)
    assert written.writes[2:] == [b"alone", b"x" * 65_536], "much does not wait"
    transport.write(b"end")
    transport.close()
    assert written.writes[4:] == [b"end"]
    assert written.closed
    transport.write(b"to nobody")
    await asyncio.sleep(0)
    assert len(written.writes) == 5


@asynchronous
async def test_who_watches_a_reader_is_told_once_it_is_gone_and_not_after_it_stopped_to_watch() -> None:
    told: list[str] = []

    async def watch(writer: BodyWriter) -> None:
        gone = asyncio.Event()
        writer.watch(lambda: told.append("never"))
        writer.unwatch()
        writer.watch(gone.set)
        writer.write(b"x")
        await gone.wait()
        writer.watch(lambda: told.append("at once"))

    async with served(watch) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST * 2)  # another one waits, so that the connection would not be read
        await reader.readuntil(b"x\r\n")
        writer.close()
        await until(lambda: told == ["at once"])
