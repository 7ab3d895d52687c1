"""The proxy between processes: bytes pass unchanged, late, not at all, or the connection breaks."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from ops.faults.proxy import Fault, Link
from ops.local.ports import LOOPBACK, free_port

LIMIT_S = 60.0
LATE_S = 0.3


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1024):
            writer.write(data)
            await writer.drain()
    await _close(writer)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def _linked() -> AsyncIterator[Link]:
    """A link to a server that says everything again."""
    server = await asyncio.start_server(_echo, LOOPBACK, 0)
    link = Link("caller", "echo", server.sockets[0].getsockname()[1])
    await link.start()
    try:
        async with asyncio.timeout(LIMIT_S):
            yield link
    finally:
        await link.stop()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others)


async def _ask(link: Link, words: bytes = b"hello") -> bytes:
    reader, writer = await asyncio.open_connection(LOOPBACK, link.port)
    try:
        writer.write(words)
        return await reader.readexactly(len(words))
    finally:
        await _close(writer)


def test_a_whole_link_passes_bytes_and_counts_its_connections() -> None:
    async def main() -> None:
        async with _linked() as link:
            words = bytes(range(256)) * 3000
            reader, writer = await asyncio.open_connection(LOOPBACK, link.port)
            writer.write(words)
            assert await reader.readexactly(len(words)) == words
            assert link.connections == 1
            await _close(writer)
            assert link.name == "caller>echo"

    asyncio.run(main())


def test_another_process_stands_in_where_nobody_listens() -> None:
    async def main() -> None:
        async with _linked() as link:
            link.target_port, link.others = free_port(), (free_port(), link.target_port)
            assert await _ask(link) == b"hello"
            link.others = ()
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await _ask(link)

    asyncio.run(main())


def test_latency_delays_and_heals() -> None:
    async def main() -> None:
        async with _linked() as link:
            clock = asyncio.get_running_loop().time
            link.fail(Fault.LATENCY, delay_s=LATE_S)
            started_s = clock()
            assert await _ask(link) == b"hello"
            assert clock() - started_s >= 2 * LATE_S
            link.heal()
            assert await _ask(link) == b"hello"

    asyncio.run(main())


def test_a_black_hole_keeps_bytes_and_gives_them_when_it_heals() -> None:
    async def main() -> None:
        async with _linked() as link:
            reader, writer = await asyncio.open_connection(LOOPBACK, link.port)
            writer.write(b"one")
            assert await reader.readexactly(3) == b"one"
            link.fail(Fault.BLACK_HOLE)
            writer.write(b"two")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), LATE_S)
            link.heal()
            assert await reader.readexactly(3) == b"two"
            await _close(writer)

    asyncio.run(main())


def test_a_reset_breaks_old_and_new_connections() -> None:
    async def main() -> None:
        async with _linked() as link:
            reader, writer = await asyncio.open_connection(LOOPBACK, link.port)
            writer.write(b"one")
            assert await reader.readexactly(3) == b"one"
            link.fail(Fault.RESET)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            await _close(writer)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await _ask(link)
            link.heal()
            assert await _ask(link) == b"hello"

    asyncio.run(main())
