"""The gateway's bench: its upstream and its load understand each other, and its figures are what they say."""

import asyncio

from ops.bench.gateway.peers import Upstream, make_hop
from ops.bench.gateway.run import Seen, load, request_bytes
from ops.local.ports import free_port
from tests.controlplane.world import served


async def _asked(path: str, port: int, through: int | None = None) -> Seen:
    made: list[Upstream] = []

    def upstream() -> Upstream:
        made.append(Upstream(5, 0.0))
        return made[-1]

    async with await asyncio.get_running_loop().create_server(upstream, "127.0.0.1", port):
        request = request_bytes(path, "key", stream=True)
        seen = await load(through or port, request, streams=3, each=2, pid=None)
        for connection in made:
            connection.close()
            await connection.closed.wait()
        await asyncio.sleep(0)  # a turn for the transports to let go of their sockets
        return seen


def test_tokens_are_counted_whoever_speaks() -> None:
    for path in ("/generate", "/v1/chat/completions"):
        seen = asyncio.run(_asked(path, free_port()))
        assert (seen.requests, seen.tokens, seen.failures) == (6, 30, 0), path
        assert len(seen.token_s) == 30
        assert len(seen.first_s) == len(seen.request_s) == 6
        assert all(0 < seconds < seen.wall_s for seconds in seen.token_s)


def test_the_bare_hop_passes_everything_on() -> None:
    port = free_port()
    with served(make_hop(f"http://127.0.0.1:{port}")) as url:
        seen = asyncio.run(_asked("/v1/chat/completions", port, int(url.rsplit(":", 1)[1])))
    assert (seen.requests, seen.tokens, seen.failures) == (6, 30, 0)


def test_what_is_refused_is_a_failure() -> None:
    async def run() -> Seen:
        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await load(port, request_bytes("/x", "key", stream=True), streams=2, each=3, pid=None)

    seen = asyncio.run(run())
    assert (seen.requests, seen.failures, seen.tokens) == (2, 2, 0)
