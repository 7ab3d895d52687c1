"""Cost of the gateway, against a bare ASGI hop in the same language, and against the LiteLLM proxy if it is given.

All forward to the same upstream, a process that streams tokens as a node does; each hop has a core of its own if the
machine has two. Two loads: paced streams, with a token every `--every-ms` on each of `--streams` connections, measure
CPU seconds and added latency of a token; short requests, one after another, measure requests a second. Tokens a second
of a core are 1 / (CPU seconds of a token), measured below saturation, so that no hop gains by reading several tokens at
once. Rounds alternate between the hops; figures are medians.
"""

import asyncio
import contextlib
import math
import os
import re
import secrets
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ops.bench.gateway.stack import fill_one_node, gateway_process, served_by
from ops.bench.shared import cpu_s, work_folder
from ops.client.screen import AsJson, Columns, print_json, print_table
from ops.faults.percentiles import percentile
from ops.local.ports import free_port

MODEL = "tide-0"
_STAMP = re.compile(rb'[":]"?(\d{9,}) "')
_END = b"0\r\n\r\n"
PEERS = (sys.executable, "-m", "ops.bench.gateway.peers")


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


def request_bytes(path: str, key: str, *, stream: bool, **fields: Any) -> bytes:
    """A chat request as it goes over the wire. `fields`: further ones of its body."""
    messages = [{"role": "user", "content": "hi"}]
    body = msgspec.json.encode({"model": MODEL, "messages": messages, "stream": stream, "max_tokens": 512, **fields})
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


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


TARGET_SHARE = 0.6
_SHORT_TOKENS = 4
_CHAT = "/v1/chat/completions"


@dataclass(frozen=True, kw_only=True)
class Hop:
    """An address for clients. `pid`: of its process; None for the upstream itself."""

    name: str
    port: int
    path: str
    key: str
    pid: int | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians over the rounds. Added times are those over the way without a hop, of the 50th and 99th percentile; NaN
    where nothing was answered.
    """

    hop: str
    token_cpu_us: float
    tokens_per_core_s: float
    token_added_p50_ms: float
    token_added_p99_ms: float
    request_cpu_ms: float
    requests_per_core_s: float
    requests_per_s: float
    request_added_p50_ms: float
    request_added_p99_ms: float
    failures: int


async def measure(hops: dict[str, tuple[Hop, Hop]], *, rounds: int, streams: int, requests: int) -> list[Row]:
    """`hops`: by name, the hop before the paced upstream and the one before the short one."""
    paced: dict[str, list[Seen]] = {name: [] for name in hops}
    short: dict[str, list[Seen]] = {name: [] for name in hops}
    for number in range(rounds + 1):  # the first warms up
        for name, (long_hop, short_hop) in hops.items():
            for hop, kept, each in ((long_hop, paced, 1), (short_hop, short, requests)):
                request = request_bytes(hop.path, hop.key, stream=True)
                seen = await load(hop.port, request, streams=streams, each=each, pid=hop.pid)
                if number:
                    kept[name].append(seen)
    return [_row(name, paced[name], short[name], paced["direct"], short["direct"]) for name in hops if name != "direct"]


def _row(name: str, paced: list[Seen], short: list[Seen], direct: list[Seen], direct_short: list[Seen]) -> Row:
    def added_ms(mine: list[Seen], bare: list[Seen], field: str, share: float) -> float:
        both = [(getattr(one, field), getattr(other, field)) for one, other in zip(mine, bare, strict=True)]
        added_s = [percentile(one, share) - percentile(other, share) for one, other in both if one and other]
        return 1e3 * statistics.median(added_s) if added_s else math.nan

    request_cpu_s = statistics.median(seen.cpu_s / seen.requests for seen in short)
    token_cpu_s = statistics.median(
        (seen.cpu_s - seen.requests * request_cpu_s) / max(1, seen.tokens) for seen in paced
    )
    return Row(
        hop=name,
        token_cpu_us=1e6 * token_cpu_s,
        tokens_per_core_s=1 / token_cpu_s if token_cpu_s > 0 else 0.0,
        token_added_p50_ms=added_ms(paced, direct, "token_s", 0.5),
        token_added_p99_ms=added_ms(paced, direct, "token_s", 0.99),
        request_cpu_ms=1e3 * request_cpu_s,
        requests_per_core_s=1 / request_cpu_s if request_cpu_s > 0 else 0.0,
        requests_per_s=statistics.median(seen.requests / seen.wall_s for seen in short),
        request_added_p50_ms=added_ms(short, direct_short, "first_s", 0.5),
        request_added_p99_ms=added_ms(short, direct_short, "first_s", 0.99),
        failures=sum(seen.failures for seen in (*paced, *short)),
    )


@contextlib.contextmanager
def hops(paced_tokens: int, every_ms: float, litellm: Path | None) -> Iterator[dict[str, tuple[Hop, Hop]]]:
    """All processes, each hop twice: before the paced upstream and before the short one."""
    found: dict[str, list[Hop]] = {}
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(work_folder())
        for kind, tokens, every_s in (("paced", paced_tokens, every_ms / 1e3), ("short", _SHORT_TOKENS, 0.0)):
            upstream = free_port()
            answers = ["upstream", str(upstream), str(tokens), str(every_s)]
            stack.enter_context(served_by([*PEERS, *answers], upstream, core=1))
            found.setdefault("direct", []).append(Hop(name="direct", port=upstream, path=_CHAT, key="x", pid=None))
            url = f"http://127.0.0.1:{upstream}"
            port = free_port()
            bare = stack.enter_context(served_by([*PEERS, "hop", str(port), url], port, core=0))
            found.setdefault("bare hop", []).append(Hop(name="bare hop", port=port, path=_CHAT, key="x", pid=bare))
            ours = stack.enter_context(gateway_process(home / kind, partial(fill_one_node, upstream=url), core=0))
            hop = Hop(name="tidepool", port=ours.port, path=_CHAT, key=ours.filled, pid=ours.pid)
            found.setdefault("tidepool", []).append(hop)
            if litellm is not None:
                port = free_port()
                key = f"sk-{secrets.token_hex(32)}"
                pid = stack.enter_context(_litellm(litellm, home / f"{kind}.yaml", port, url, key))
                found.setdefault("litellm", []).append(Hop(name="litellm", port=port, path=_CHAT, key=key, pid=pid))
        yield {name: (both[0], both[1]) for name, both in found.items()}


@contextlib.contextmanager
def _litellm(python: Path, config: Path, port: int, upstream: str, key: str) -> Iterator[int]:
    config.write_text(
        f"model_list:\n- model_name: {MODEL}\n  litellm_params:\n    model: openai/{MODEL}\n"
        f"    api_base: {upstream}/v1\n    api_key: x\n",
        encoding="utf-8",
    )
    command = [str(python.parent / "litellm"), "--config", str(config), "--port", str(port), "--host", "127.0.0.1"]
    with served_by(command, port, core=0, environment={"LITELLM_MASTER_KEY": key}) as pid:
        yield pid


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    streams: Annotated[int, typer.Option(min=1, help="Connections.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a paced stream.")] = 60,
    every_ms: Annotated[float, typer.Option(min=0.0, help="Between the tokens of a paced stream.")] = 400.0,
    requests: Annotated[int, typer.Option(min=1, help="Short requests of each connection in a round.")] = 5,
    litellm: Annotated[
        Path | None, typer.Option(help="Python of an environment that has LiteLLM's proxy.", dir_okay=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the cost of the gateway against a bare hop.

    \b
    Examples:
      python -m ops.bench.gateway.run --rounds 3
      python -m ops.bench.gateway.run --litellm /path/to/venv/bin/python --json
    """
    with hops(tokens, every_ms, litellm) as found:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        rows = asyncio.run(measure(found, rounds=rounds, streams=streams, requests=requests))
    bare = next(row for row in rows if row.hop == "bare hop")
    share = {row.hop: row.tokens_per_core_s / bare.tokens_per_core_s for row in rows if bare.tokens_per_core_s}
    if as_json:
        print_json({"rows": [asdict(row) for row in rows], "tokens_share_of_bare_hop": share})
        return
    columns: Columns = {field.name.replace("_", " "): field.name for field in fields(Row)}
    columns = {**columns, "share of the bare hop": lambda row: share.get(row["hop"], 0.0)}
    print_table(f"Medians of {rounds} rounds (target of the share: {TARGET_SHARE})", columns, map(asdict, rows))


if __name__ == "__main__":
    typer.run(main)
