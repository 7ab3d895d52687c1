"""Streams against one address, and what came of them: counts, times from writing a token to reading it, CPU time."""

import asyncio
import contextlib
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

_STAMP = re.compile(rb'[":]"?(\d{9,}) "')
_END = b"0\r\n\r\n"
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(kw_only=True)
class Seen:
    """What the client saw. Times in seconds; `token_s` from the upstream's write to the client's read."""

    requests: int = 0
    tokens: int = 0
    failures: int = 0
    first_s: list[float] = field(default_factory=list)
    request_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0


def request_bytes(path: str, key: str, *, stream: bool) -> bytes:
    """A chat request as it goes over the wire."""
    body = msgspec.json.encode(
        {"model": "tide", "messages": [{"role": "user", "content": "hi"}], "stream": stream, "max_tokens": 512}
    )
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def load(port: int, request: bytes, *, streams: int, each: int, pid: int | None) -> Seen:
    """`streams` connections, each of which asks `each` times, one after the other."""
    seen = Seen()
    before_s, began_s = (cpu_s(pid) if pid is not None else 0.0), time.monotonic()
    await asyncio.gather(*(_connection(port, request, each, seen) for _ in range(streams)))
    seen.wall_s = time.monotonic() - began_s
    seen.cpu_s = (cpu_s(pid) if pid is not None else 0.0) - before_s
    return seen


async def _connection(port: int, request: bytes, each: int, seen: Seen) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(each):
        asked_s = time.monotonic()
        writer.write(request)
        data = await reader.read(65536)
        ok = data.startswith(b"HTTP/1.1 200")
        begun = False
        while ok and data:
            now_s = time.monotonic()
            stamps = _STAMP.findall(data)
            if stamps and not begun:
                seen.first_s.append(now_s - asked_s)
                begun = True
            seen.tokens += len(stamps)
            seen.token_s += [now_s - int(stamp) / 1e9 for stamp in stamps]
            if data.endswith(_END):
                break
            data = await reader.read(65536)
        seen.requests += 1
        seen.request_s.append(time.monotonic() - asked_s)
        if not ok or not data:
            seen.failures += 1
            break
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
