"""Cost of the gateway, against a bare ASGI hop in the same language, and against two others if they are given: the
LiteLLM proxy, and sglang-router, which is written in Rust.

All forward to the same upstream, a process that streams tokens as a node does; each hop has a core of its own if the
machine has two. Two loads: paced streams, with a token every `--every-ms` on each of `--streams` connections, measure
CPU seconds and added latency of a token; short requests, one after another, measure requests a second. Tokens a second
of a core are 1 / (CPU seconds of a token), measured below saturation, so that no hop gains by reading several tokens at
once. What a process uses while it is idle is subtracted, and shown. Rounds alternate between the hops; figures are
medians.
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
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx2 as httpx
import msgspec
import typer
from prometheus_client.parser import text_string_to_metric_families

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

    def without(self, idle_share: float) -> "Seen":
        """The same without what the process would have used anyway."""
        return replace(self, cpu_s=self.cpu_s - idle_share * self.wall_s)


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


TARGET_SHARE = 1.2
_IDLE_S = 20.0
_ROUTER_START_TIMEOUT_S = 60.0
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
    idle_cpu_percent: float
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
    idle = await _idle_shares(hops)
    for number in range(rounds + 1):  # the first warms up
        for name, (long_hop, short_hop) in hops.items():
            for hop, kept, each in ((long_hop, paced, 1), (short_hop, short, requests)):
                request = request_bytes(hop.path, hop.key, stream=True)
                seen = await load(hop.port, request, streams=streams, each=each, pid=hop.pid)
                if number:
                    kept[name].append(seen)
    rows = []
    for name in hops:
        if name != "direct":
            used = [seen.without(idle[name][0]) for seen in paced[name]]
            used_short = [seen.without(idle[name][1]) for seen in short[name]]
            rows.append(_row(name, idle[name][0], used, used_short, paced["direct"], short["direct"]))
    return rows


async def _idle_shares(hops: dict[str, tuple[Hop, Hop]]) -> dict[str, list[float]]:
    """CPU seconds that each process uses in a second in which nobody asks."""
    pids = {name: [hop.pid for hop in both] for name, both in hops.items()}

    def used_s() -> dict[str, list[float]]:
        return {name: [cpu_s(pid) if pid is not None else 0.0 for pid in both] for name, both in pids.items()}

    before = used_s()
    await asyncio.sleep(_IDLE_S)
    after = used_s()
    return {
        name: [(last - first) / _IDLE_S for first, last in zip(before[name], after[name], strict=True)] for name in pids
    }


def _row(
    name: str, idle: float, paced: list[Seen], short: list[Seen], direct: list[Seen], direct_short: list[Seen]
) -> Row:
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
        idle_cpu_percent=100 * idle,
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


def stage_means_us(port: int) -> dict[str, float]:
    """Mean time of each stage of the requests that a gateway has answered, waits for its one core included."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found: dict[str, dict[str, float]] = {}
    for sample in families["tidepool_request_stage_seconds"].samples:
        found.setdefault(sample.labels["stage"], {})[sample.name.rpartition("_")[2]] = sample.value
    return {stage: 1e6 * seen["sum"] / seen["count"] for stage, seen in found.items() if seen["count"]}


@contextlib.contextmanager
def hops(
    paced_tokens: int, every_ms: float, litellm: Path | None, router: Path | None
) -> Iterator[dict[str, tuple[Hop, Hop]]]:
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
            if router is not None:
                port = free_port()
                pid = stack.enter_context(_router(router, port, url))
                hop = Hop(name="sglang-router", port=port, path=_CHAT, key="x", pid=pid)
                found.setdefault("sglang-router", []).append(hop)
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


@contextlib.contextmanager
def _router(python: Path, port: int, upstream: str) -> Iterator[int]:
    """sglang-router once it has found its one worker, with as little logged and checked as it allows."""
    options = ["--worker-urls", upstream, "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    options += ["--disable-health-check", "--log-level", "error", "--prometheus-port", str(free_port())]
    with served_by([str(python), "-m", "sglang_router.launch_router", *options], port, core=0) as pid:
        deadline_s = time.monotonic() + _ROUTER_START_TIMEOUT_S
        while not _answers(port):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the router found no worker within {_ROUTER_START_TIMEOUT_S:g} s")
            time.sleep(0.5)
        yield pid


def _answers(port: int) -> bool:
    """Whether a chat request succeeds."""
    body = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True})
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{_CHAT}", data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_ROUTER_START_TIMEOUT_S):  # noqa: S310
            return True
    except urllib.error.URLError:
        return False


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    streams: Annotated[int, typer.Option(min=1, help="Connections.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a paced stream.")] = 60,
    every_ms: Annotated[float, typer.Option(min=0.0, help="Between the tokens of a paced stream.")] = 400.0,
    requests: Annotated[int, typer.Option(min=1, help="Short requests of each connection in a round.")] = 5,
    litellm: Annotated[
        Path | None, typer.Option(help="Python of an environment that has LiteLLM's proxy.", dir_okay=False)
    ] = None,
    router: Annotated[
        Path | None, typer.Option(help="Python of an environment that has sglang-router.", dir_okay=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the cost of the gateway against a bare hop.

    \b
    Examples:
      python -m ops.bench.gateway.run --rounds 3
      python -m ops.bench.gateway.run --router /path/to/venv/bin/python
      python -m ops.bench.gateway.run --litellm /path/to/venv/bin/python --json
    """
    with hops(tokens, every_ms, litellm, router) as found:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        rows = asyncio.run(measure(found, rounds=rounds, streams=streams, requests=requests))
        stages = stage_means_us(found["tidepool"][1].port)
    bare = next(row for row in rows if row.hop == "bare hop")
    share = {row.hop: row.tokens_per_core_s / bare.tokens_per_core_s for row in rows if bare.tokens_per_core_s}
    if as_json:
        print_json({"rows": [asdict(row) for row in rows], "tokens_share_of_bare_hop": share, "stages_us": stages})
        return
    columns: Columns = {field.name.replace("_", " "): field.name for field in fields(Row)}
    columns = {**columns, "share of the bare hop": lambda row: share.get(row["hop"], 0.0)}
    print_table(f"Medians of {rounds} rounds (target of the share: {TARGET_SHARE})", columns, map(asdict, rows))
    kinds = {"stage": "stage", "mean, us": "mean_us"}
    print_table("Stages of a short request", kinds, ({"stage": name, "mean_us": us} for name, us in stages.items()))


if __name__ == "__main__":
    typer.run(main)
