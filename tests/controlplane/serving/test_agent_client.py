"""The client to nodes: odd streams, and a limit that is its own."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import anyio
import msgspec
import pytest

from controlplane.errors import NodeError
from controlplane.policies.decisions import Route
from controlplane.policies.health import CircuitSettings
from controlplane.serving.agent_client import AgentClient
from controlplane.serving.circuits import Circuits
from controlplane.settings import Settings
from dataplane.protocol.messages import Finished, Generate, Sampling, Started, StreamEvent, Token, encode_line
from dataplane.protocol.records import MEDIA_TYPE, encode_events, encode_text
from ops.local.ports import free_port
from tests.controlplane.serving.scripted import ScriptedConnections

EVENTS: list[StreamEvent] = [
    Started(prompt_tokens=1),
    Token(text="a", token_ids=(1,)),
    Finished(finish_reason="stop", prompt_tokens=1, completion_tokens=1),
]
REQUEST = Generate(request_id="r", instance_id="i", model="m", tier="IW-N", prompt="x", sampling=Sampling())

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def ask(client: Callable[[], AgentClient]) -> list[StreamEvent]:
    """The events of one request."""

    async def run() -> list[StreamEvent]:
        agents = client()
        try:
            return [event async for events in agents.generate("http://n1", REQUEST) for event in events]
        finally:
            await agents.close()

    return anyio.run(run)


@asynccontextmanager
async def node(serve: Serve, **settings: Any) -> AsyncIterator[tuple[AgentClient, str]]:
    """A client, and the address of a node that does this with a connection whose request's head it has read."""
    ended = anyio.Event()

    async def until_left(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with suppress(ConnectionError):
            await serve(reader, writer)
            await reader.read()
        writer.close()
        ended.set()

    client = AgentClient(Settings(**settings))
    async with await asyncio.start_server(until_left, "127.0.0.1", port := free_port()):
        yield client, f"http://127.0.0.1:{port}"
        await client.close()
        with anyio.fail_after(60):
            await ended.wait()


@pytest.mark.parametrize("blank", [b"\n", b"\n\n", b" \n"])
@pytest.mark.parametrize("before", range(len(EVENTS)))
def test_blank_lines_are_nothing(blank: bytes, before: int) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for number, event in enumerate(EVENTS):
            if number == before:
                yield blank
            yield encode_line(event)

    def client() -> AgentClient:
        return AgentClient(Settings(), connections=ScriptedConnections(lambda _node, _asked: chunks()))

    assert ask(client) == EVENTS


def test_a_limit_of_our_own_is_no_fault_of_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one connection that this gateway may have is taken."""
    monkeypatch.setattr("controlplane.serving.agent_client._FREE_TIMEOUT_S", 0.01)

    async def begin(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + CHUNKED + chunk(encode_line(EVENTS[0])))

    async def run() -> NodeError:
        async with (
            node(begin, node_connections_max=1) as (client, url),
            aclosing(client.generate(url, REQUEST)) as first,
        ):
            await anext(first)
            with pytest.raises(NodeError) as caught:
                await anext(client.generate(url, REQUEST))
        return caught.value

    error = anyio.run(run)
    assert (error.status, error.code, error.retryable) == (429, "gateway_busy", True)
    circuits = Circuits(CircuitSettings())
    for _ in range(20):
        circuits.note_end(Route(instance_id="i", node_id="n", region="east", utilization=0.0), error)
    assert not circuits.avoided()


def test_a_node_that_is_not_there_is_lost_and_another_may_do() -> None:
    async def run() -> None:
        client = AgentClient(Settings())
        with pytest.raises(NodeError, match="cannot be reached") as caught:
            _ = [events async for events in client.generate(f"http://127.0.0.1:{free_port()}", REQUEST)]
        assert caught.value.retryable
        await client.close()

    anyio.run(run)


@pytest.mark.parametrize(
    ("said", "first_token_s", "idle_s"), [(0, 0.2, 0.2), (1, 0.2, 0.2), (2, 0.2, 0.2), (1, 0.2, 60.0), (2, 60.0, 0.2)]
)
def test_a_silent_node_is_given_up(said: int, first_token_s: float, idle_s: float) -> None:
    """After so many events; by the connection's limit, or by a shorter one of ours."""

    async def begin(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + CHUNKED)
        if said:
            writer.write(chunk(b"".join(map(encode_line, EVENTS[:said]))))

    async def run() -> None:
        async with node(begin, first_token_timeout_s=first_token_s, stream_idle_timeout_s=idle_s) as (client, url):
            with pytest.raises(NodeError, match="was silent for too long") as caught:
                _ = [events async for events in client.generate(url, REQUEST)]
            assert caught.value.retryable

    anyio.run(run)


def test_whoever_leaves_early_drops_the_request_and_a_whole_stream_keeps_its_connection() -> None:
    """The node sees the end of the connection in the first case, and the next request on the same one in the second."""
    connections, ended = [], anyio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        while head := await reader.readuntil(b"\r\n\r\n"):
            size_bytes = int(head.lower().partition(b"content-length: ")[2].split()[0])
            asked = msgspec.json.decode(await reader.readexactly(size_bytes), type=Generate)
            writer.write(OK + CHUNKED)
            for event in EVENTS[:2] if asked.model == "endless" else EVENTS:
                writer.write(chunk(encode_line(event)))
            if asked.model == "endless":
                assert await reader.read() == b""
                break
            writer.write(b"0\r\n\r\n")
        writer.close()
        ended.set()

    async def run() -> None:
        client = AgentClient(Settings())
        async with await asyncio.start_server(serve, "127.0.0.1", port := free_port()):
            for _ in range(3):
                events = [events async for events in client.generate(f"http://127.0.0.1:{port}", REQUEST)]
                assert [event for together in events for event in together] == EVENTS
            assert len(connections) == 1
            endless = client.generate(f"http://127.0.0.1:{port}", msgspec.structs.replace(REQUEST, model="endless"))
            async with aclosing(endless):
                await anext(endless)
            with anyio.fail_after(30):
                await ended.wait()
            await client.close()

    anyio.run(run)


MUCH = b"a" * 65_536
HUGE_COUNT = encode_line(Started(prompt_tokens=1)).replace(b"1", b"9223372036854775807")
NEGATIVE_COUNT = encode_line(Finished(finish_reason="stop", prompt_tokens=1, completion_tokens=-1))


@pytest.mark.parametrize(
    ("begins", "goes_on"),
    [
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nx", b""),
        (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
        (b"HTTP/1.1 200 ", MUCH),
        (OK + b"x: ", MUCH),
        (OK, b"x: a\r\n"),
        (OK + CHUNKED + b"1;", MUCH),
        (OK + CHUNKED + b"0\r\n", b"x: a\r\n"),
        (b"HTTP/1.1 500 No\r\n" + CHUNKED, chunk(MUCH)),
        (OK + CHUNKED, chunk(MUCH)),
        (OK + CHUNKED + chunk(b'{"type":"token","text":"\xff"}\n'), b""),
        (OK + CHUNKED + chunk(HUGE_COUNT), b""),
        (OK + CHUNKED + chunk(encode_line(EVENTS[0]) + NEGATIVE_COUNT), b""),
    ],
)
def test_a_hostile_node_is_left_by_an_error_of_its_own(begins: bytes, goes_on: bytes) -> None:
    """It may go on for ever: it neither keeps the request nor fills the memory."""

    async def go_on(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begins)
        while goes_on:
            writer.write(goes_on * max(1, 65_536 // len(goes_on)))
            await writer.drain()

    async def run() -> None:
        async with node(go_on) as (client, url):
            with pytest.raises(NodeError) as caught, anyio.fail_after(60):
                _ = [events async for events in client.generate(url, REQUEST)]
            assert caught.value.retryable

    anyio.run(run)


@pytest.mark.parametrize("after", [encode_text((2,), 1, b"x"), encode_events(EVENTS[1:]), encode_events(EVENTS[2:])])
def test_what_follows_the_end_is_nothing(after: bytes) -> None:
    body = encode_events(EVENTS) + after

    async def all_at_once(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + f"content-type: {MEDIA_TYPE}\r\n".encode() + CHUNKED + chunk(body) + b"0\r\n\r\n")

    async def run() -> None:
        async with node(all_at_once) as (client, url):
            assert [event async for events in client.generate(url, REQUEST) for event in events] == EVENTS

    anyio.run(run)
