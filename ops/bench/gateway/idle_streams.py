"""What streams cost a gateway in which no token comes: memory and CPU of each."""

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ops.bench.gateway.run import PEERS, request_bytes
from ops.bench.gateway.stack import fill_one_node, gateway_process, served_by
from ops.bench.shared import cpu_s, work_folder
from ops.local.ports import free_port

_CHAT = "/v1/chat/completions"
_SILENT_S = 3600.0
_WATCHED_S = 10.0
_AT_ONCE = 50


def memory_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def open_streams(port: int, request: bytes, count: int) -> list[asyncio.StreamWriter]:
    """So many streams whose head and first event have arrived."""
    turns = asyncio.Semaphore(_AT_ONCE)

    async def one() -> asyncio.StreamWriter:
        async with turns:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            await reader.readuntil(b'"role"')
            return writer

    return list(await asyncio.gather(*(one() for _ in range(count))))


async def measure(port: int, key: str, pid: int, count: int) -> None:
    """Print the figures of `count` idle streams."""
    request = request_bytes(_CHAT, key, stream=True)
    opened = await open_streams(port, request, 100)  # the first ones load what all share
    before_bytes = memory_bytes(pid)
    opened += await open_streams(port, request, count)
    grown_bytes = memory_bytes(pid) - before_bytes
    began_s = cpu_s(pid)
    await asyncio.sleep(_WATCHED_S)
    used_percent = 100 * (cpu_s(pid) - began_s) / _WATCHED_S
    print(f"{count} idle streams: {grown_bytes / count / 1024:.1f} KiB each, {used_percent:.1f} % of a core for all")
    for writer in opened:
        writer.close()


def main(count: Annotated[int, typer.Option(min=1, help="Idle streams.")] = 5000) -> None:
    """Measure what idle streams cost a gateway."""
    os.environ["TIDEPOOL_NODE_CONNECTIONS_MAX"] = str(count + 200)
    upstream = free_port()
    url = f"http://127.0.0.1:{upstream}"
    silent = [*PEERS, "upstream", str(upstream), "1", str(_SILENT_S)]
    with (
        work_folder() as home,
        served_by(silent, upstream, core=1),
        gateway_process(home, partial(fill_one_node, upstream=url), core=0) as gateway,
    ):
        asyncio.run(measure(gateway.port, gateway.filled, gateway.pid, count))


if __name__ == "__main__":
    typer.run(main)
