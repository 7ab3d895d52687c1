"""Cost of a token in a node's agent: eight replayed workers of 128 sequences each, all streams read by one client.

The agent is the real process, with real worker processes. Counted are CPU seconds of the agent and of its children but
the workers, over windows in which all streams run. A step of a worker takes `--every-ms`, so that the agent is below
saturation: tokens a second of a core are 1 / (CPU seconds of a token). With `--every-ms 0` the workers go as fast as
they can. Tokens are words of a byte-level vocabulary, decoded by the tokenizer of a checkpoint. `--wire records` asks
for server-sent events as a gateway does; `lines` for JSON events.
"""

import asyncio
import contextlib
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from tokenizers import Tokenizer, decoders, models

from dataplane.engines.replay.vocabulary import WORDS
from dataplane.protocol.messages import DesiredInstance, DesiredInstances, Generate, Heartbeat, ModelSpec, Sampling
from dataplane.protocol.records import MEDIA_TYPE
from dataplane.protocol.tiers import Tier
from dataplane.scheduling.profile import load_gpu_profile
from ops.bench.gateway.stack import served_by
from ops.bench.shared import cpu_s, work_folder
from ops.client.screen import AsJson, Columns, print_json, print_table
from ops.local.ports import free_port

PROFILE = Path(__file__).parents[2] / "profiles" / "h800.toml"
KEY = "node-key-of-the-benchmark"
WEIGHTS_BYTES = 2**34
KV_BYTES_PER_TOKEN = 512
CONTEXT_TOKENS = 2**17
PROMPT = (1, 2, 3)
TEXT_FRAME = ('data: {"id":"c","object":"chat.completion.chunk","choices":[{"delta":{"content":', "}}]}\n\n")
TEXT_MARK, LINE_MARK = b"data: ", b'"type":"token"'
READY_MAX_S = 120.0
HEARTBEATS_MAX_S = 30.0
"""Within which two heartbeats come, of which there is one each second."""
Wire = Literal["lines", "records"]


class Control(ThreadingHTTPServer):
    """A control plane that takes the node and wants some instances. `received_s`: when its heartbeats came."""

    daemon_threads = True

    def __init__(self, wanted: DesiredInstances) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.wanted = msgspec.json.encode(wanted)
        self.heartbeat: Heartbeat | None = None
        self.received_s: list[float] = []

    def ready(self) -> bool:
        reported = () if self.heartbeat is None else self.heartbeat.instances
        return bool(reported) and all(instance.state == "ready" for instance in reported)

    def failed(self) -> bool:
        return self.heartbeat is not None and any(one.state == "failed" for one in self.heartbeat.instances)


class _Handler(BaseHTTPRequestHandler):
    server: Control

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/node/heartbeat":
            self.server.heartbeat = msgspec.json.decode(body, type=Heartbeat)
            self.server.received_s.append(time.monotonic())
        self.send_response(200)
        self.send_header("content-length", str(len(self.server.wanted)))
        self.end_headers()
        self.wfile.write(self.server.wanted)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def control_plane(wanted: DesiredInstances) -> Iterator[Control]:
    """A running one."""
    with Control(wanted) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer whose tokens are the replayed words, each with the blank before it."""
    tokenizer = Tokenizer(models.BPE(vocab={f"Ġ{word}": number for number, word in enumerate(WORDS)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def wanted_instances(folder: Path, workers: int) -> DesiredInstances:
    """One instance on each worker, each of a model of its own; all have the tokenizer of the folder."""
    return DesiredInstances(
        generation=1,
        instances=tuple(
            DesiredInstance(
                instance_id=f"i{number}",
                slot=number,
                gpus=1,
                model=ModelSpec(
                    name=f"tide-{number}",
                    path=str(folder),
                    weights_bytes=WEIGHTS_BYTES,
                    kv_bytes_per_token=KV_BYTES_PER_TOKEN,
                    context_tokens=CONTEXT_TOKENS,
                ),
            )
            for number in range(workers)
        ),
    )


@contextlib.contextmanager
def agent_process(folder: Path, *, workers: int, sequences: int, every_s: float) -> Iterator[tuple[int, int]]:
    """A running agent whose instances are ready; its port and its process id."""
    latency = load_gpu_profile(PROFILE).nearest_model(WEIGHTS_BYTES, 1).latency
    memory_bytes = 2 * (WEIGHTS_BYTES + sequences * CONTEXT_TOKENS * KV_BYTES_PER_TOKEN)
    settings = {
        "GPU_TYPE": "H800",
        "SLOTS": msgspec.json.encode([{"gpus": 1, "memory_bytes": memory_bytes}] * workers).decode(),
        "ENGINE": "replay",
        "PROFILE": str(PROFILE),
        "REPLAY_SPEED": str(latency.decode_s(sequences * len(PROMPT), sequences) / every_s if every_s else 1e6),
        "BATCH_MAX": str(sequences),
        "CACHE_BYTES": str(2**20),
    }
    with node_process(wanted_instances(folder, workers), settings) as node:
        yield node.port, node.pid


@dataclass(frozen=True, kw_only=True)
class NodeProcess:
    """A running agent, and the control plane that it follows."""

    port: int
    pid: int
    control: Control

    def wait_for(self, happened: Callable[[], bool], lacking: str, limit_s: float) -> None:
        """Wait until something has happened. `lacking`: what is said where it has not.

        Raises:
            RuntimeError: the agent ended, an instance failed, or it has not happened in time.
        """
        deadline_s = time.monotonic() + limit_s
        while not happened():
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                raise RuntimeError(f"the agent ended with status {status}")
            if self.control.failed():
                raise RuntimeError(f"an instance failed: {self.control.heartbeat}")
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{lacking} within {limit_s:g} s: {self.control.heartbeat}")
            time.sleep(0.1)

    def fresh_heartbeat(self) -> Heartbeat:
        """The second heartbeat from now on: the first may have been written before.

        Raises:
            RuntimeError: see `wait_for`.
        """
        wanted = len(self.control.received_s) + 2
        self.wait_for(
            lambda: len(self.control.received_s) >= wanted, "two more heartbeats did not come", HEARTBEATS_MAX_S
        )
        assert self.control.heartbeat is not None
        return self.control.heartbeat


@contextlib.contextmanager
def node_process(
    wanted: DesiredInstances,
    settings: Mapping[str, str],
    *,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
    ready_max_s: float = READY_MAX_S,
) -> Iterator[NodeProcess]:
    """A running agent whose instances are ready. `settings`: its own, without their prefix, beside those of any node
    here; `environment`: more variables. `log`: what it and its workers print.

    Raises:
        RuntimeError: it ended, an instance failed, or they were not ready in time.
    """
    with control_plane(wanted) as control:
        port = free_port()
        given = {
            "NODE": "n1",
            "REGION": "here",
            "NODE_KEY": KEY,
            "CONTROL_URL": f"http://127.0.0.1:{control.server_address[1]}",
            "PORT": str(port),
            **settings,
        }
        command = [python, "-c", "from ops.cli.main import main; main()", "agent"]
        named = {f"TIDEPOOL_AGENT_{name}": value for name, value in given.items()} | dict(environment or {})
        with served_by(command, port, core=None, environment=named, log=log, start_max_s=ready_max_s) as pid:
            node = NodeProcess(port=port, pid=pid, control=control)
            node.wait_for(control.ready, "the instances are not ready", ready_max_s)
            yield node


class Stream(asyncio.Protocol):
    """One stream, whose tokens are counted."""

    def __init__(self, request: bytes, mark: bytes) -> None:
        self._request = request
        self._mark = mark
        self._rest = b""
        self.tokens = 0
        self.begun = asyncio.Event()
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        self.tokens += data.count(self._mark)
        self._rest = data[-len(self._mark) + 1 :]
        if self.tokens:
            self.begun.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True


def request_bytes(number: int, worker: int, wire: Wire) -> bytes:
    """A request for more tokens than the benchmark reads."""
    body = msgspec.json.encode(
        Generate(
            request_id=f"r{number}",
            instance_id=f"i{worker}",
            model=f"tide-{worker}",
            tier=Tier.IW_N,
            prompt_tokens=PROMPT,
            sampling=Sampling(max_tokens=CONTEXT_TOKENS - len(PROMPT), seed=number, ignore_eos=True),
            text_frame=TEXT_FRAME if wire == "records" else None,
        )
    )
    accept = f"accept: {MEDIA_TYPE}\r\n" if wire == "records" else ""
    head = (
        f"POST /generate HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n{accept}"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass(frozen=True, kw_only=True)
class Row:
    """One window. `agent_share`: of a core."""

    wire: Wire
    streams: int
    tokens: int
    token_cpu_us: float
    tokens_per_core_s: float
    tokens_per_s: float
    agent_share: float


async def measure(
    port: int, pid: int, *, wire: Wire, workers: int, sequences: int, windows: int, window_s: float
) -> list[Row]:
    """Figures of each window, all streams running from the first to the last one.

    Raises:
        RuntimeError: a stream ended before, or a window is too short to measure.
    """
    loop = asyncio.get_running_loop()
    mark = TEXT_MARK if wire == "records" else LINE_MARK
    streams: list[Stream] = []
    for number in range(workers * sequences):
        request = request_bytes(number, number % workers, wire)
        _, stream = await loop.create_connection(lambda request=request: Stream(request, mark), "127.0.0.1", port)  # type: ignore[misc]
        streams.append(stream)
    for stream in streams:
        await stream.begun.wait()
    rows = []
    for _ in range(windows):
        tokens, used_s, began_s = sum(stream.tokens for stream in streams), _agent_cpu_s(pid), time.monotonic()
        await asyncio.sleep(window_s)
        tokens = sum(stream.tokens for stream in streams) - tokens
        used_s, wall_s = _agent_cpu_s(pid) - used_s, time.monotonic() - began_s
        if any(stream.lost for stream in streams):
            raise RuntimeError("a stream ended")
        if not (tokens and used_s):
            raise RuntimeError(
                f"a window of {window_s:g} s had {tokens} tokens and {used_s:g} CPU seconds of the agent, which are"
                " counted in ticks of 10 ms: --window-s must be longer, or --sequences more"
            )
        rows.append(
            Row(
                wire=wire,
                streams=len(streams),
                tokens=tokens,
                token_cpu_us=1e6 * used_s / tokens,
                tokens_per_core_s=tokens / used_s,
                tokens_per_s=tokens / wall_s,
                agent_share=used_s / wall_s,
            )
        )
    for stream in streams:
        stream.transport.abort()
    return rows


def _agent_cpu_s(pid: int) -> float:
    """CPU seconds of the agent and its children but the workers."""
    return cpu_s(pid, but="dataplane.worker.main")


def medians(rows: Sequence[Row]) -> Row:
    """The medians of the windows."""
    first = rows[0]
    names = [field.name for field in fields(Row) if field.name not in {"wire", "streams", "tokens"}]
    middle = {name: statistics.median(getattr(row, name) for row in rows) for name in names}
    return Row(wire=first.wire, streams=first.streams, tokens=sum(row.tokens for row in rows), **middle)


def main(
    workers: Annotated[int, typer.Option(min=1)] = 8,
    sequences: Annotated[int, typer.Option(min=1, help="Streams of each worker, all in one batch.")] = 128,
    every_ms: Annotated[float, typer.Option(min=0.0, help="A step of a worker; 0: as fast as it can.")] = 400.0,
    windows: Annotated[int, typer.Option(min=1)] = 3,
    window_s: Annotated[float, typer.Option(min=0.1)] = 8.0,
    wire: Annotated[list[str] | None, typer.Option(help="lines or records; both if none is named.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the cost of a token in a node's agent.

    \b
    Examples:
      python -m ops.bench.engine.agent
      python -m ops.bench.engine.agent --wire records --every-ms 0 --json
    """
    rows = []
    known: tuple[Wire, ...] = ("lines", "records")
    with work_folder() as folder:
        write_tokenizer(folder)
        for each in known:
            if wire and each not in wire:
                continue
            running = agent_process(folder, workers=workers, sequences=sequences, every_s=every_ms / 1e3)
            with running as (port, pid):
                found = asyncio.run(
                    measure(
                        port, pid, wire=each, workers=workers, sequences=sequences, windows=windows, window_s=window_s
                    )
                )
            rows.append(medians(found))
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    columns: Columns = {field.name.replace("_", " "): field.name for field in fields(Row)}
    print_table(f"Medians of {windows} windows of {window_s:g} s", columns, map(asdict, rows))


if __name__ == "__main__":
    typer.run(main)
