"""CPU cost of heartbeats for the gateway, Postgres and Valkey, and of the gateway's live view of the fleet.

A real gateway with its own servers receives heartbeats of all nodes in turn, at a rate it can keep up with. CPU seconds
come from the kernel; shares are of one core at 1,000 heartbeats a second. The share of the live view is what the idle
gateway uses once it knows all nodes, less what it used before.
"""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Annotated, Any

import msgspec
import typer

from ops.bench.gateway.stack import Fleet, GatewayProcess, fill_fleet, gateway_process
from ops.bench.shared import cpu_s, work_folder
from ops.client.screen import AsJson, notes, print_fields, print_json

BEATS_PER_S = 1000.0
CONNECTIONS = 8
_END = b"\r\n\r\n"
REPORTED: dict[str, Any] = {
    "kv_used_bytes": 1 << 30,
    "kv_capacity_bytes": 1 << 34,
    "remaining_tokens": 12_345,
    "running": 17,
    "prefill_wait_s": 0.25,
    "prefill_urgent_wait_s": 0.125,
    "prefill_token_s": 1e-4,
}
"""What each instance reports of itself in a heartbeat."""


@dataclass(frozen=True, kw_only=True)
class Used:
    """CPU seconds over a time, by process."""

    wall_s: float
    beats: int
    cpu_s: dict[str, float]

    def share(self, process: str) -> float:
        return self.cpu_s[process] / self.wall_s


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Medians over the rounds. `*_share`: of one core, of 1,000 beats a second; `view_share`: of each gateway."""

    nodes: int
    instances: int
    beats_per_s: float
    gateway_share: float
    postgres_share: float
    valkey_share: float
    view_share: float


async def beat(port: int, key: str, bodies: Sequence[bytes], *, count: int, per_s: float) -> None:
    """Send `count` heartbeats to a gateway, of all nodes in turn, `per_s` a second as far as they are answered.

    Raises:
        RuntimeError: one was refused.
    """
    loop = asyncio.get_running_loop()
    started_s = loop.time()

    async def connection(own: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for number in range(count):
                node = number % len(bodies)
                if node % CONNECTIONS == own:  # a node's beats go one after the other
                    await asyncio.sleep(started_s + number / per_s - loop.time())
                    await _exchange(reader, writer, key, bodies[node])
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async with asyncio.TaskGroup() as group:
        for own in range(CONNECTIONS):
            group.create_task(connection(own))


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str, body: bytes) -> None:
    head = (
        "POST /node/heartbeat HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    answer = await reader.readuntil(_END)
    length = int(answer.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    content = await reader.readexactly(length)
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"a heartbeat was refused: {answer.splitlines()[0]!r} {content!r}")


class _Bench:
    def __init__(self, gateway: GatewayProcess[Fleet], per_s: float, seconds: float) -> None:
        self._gateway = gateway
        self._bodies = list(map(msgspec.json.encode, gateway.filled.heartbeats))
        self._per_s = per_s
        self._seconds = seconds

    async def measure(self, rounds: int) -> tuple[Used, list[Used], list[Used]]:
        """CPU seconds while idle before any heartbeat, then of rounds of heartbeats and of idle rounds between them."""
        before = await self._used(0)
        await self._beat(len(self._bodies))
        beating, idling = [], []
        for number in range(rounds):
            beating.append(await self._used(int(self._per_s * self._seconds)))
            idling.append(await self._used(0))
            notes().print(
                f"round {number + 1}: {beating[-1].beats / beating[-1].wall_s:.0f} beats/s take "
                f"{beating[-1].share('gateway'):.1%} of a core; idle {idling[-1].share('gateway'):.1%}",
                soft_wrap=True,
            )
        return before, beating, idling

    async def _beat(self, count: int) -> None:
        await beat(self._gateway.port, self._gateway.filled.node_key, self._bodies, count=count, per_s=self._per_s)

    async def _used(self, beats: int) -> Used:
        loop = asyncio.get_running_loop()
        before_s, started_s = self._cpu_s(), loop.time()
        await (self._beat(beats) if beats else asyncio.sleep(self._seconds))
        wall_s = loop.time() - started_s
        after_s = self._cpu_s()
        return Used(wall_s=wall_s, beats=beats, cpu_s={name: after_s[name] - before_s[name] for name in before_s})

    def _cpu_s(self) -> dict[str, float]:
        return {name: cpu_s(pid) for name, pid in {"gateway": self._gateway.pid, **self._gateway.servers}.items()}


def figures(nodes: int, instances: int, before: Used, beating: Sequence[Used], idling: Sequence[Used]) -> Figures:
    """What a beat took beyond idling, times a thousand."""

    def share(process: str) -> float:
        return median(
            (beats.cpu_s[process] - idle.share(process) * beats.wall_s) / beats.beats * BEATS_PER_S
            for beats, idle in zip(beating, idling, strict=True)
        )

    return Figures(
        nodes=nodes,
        instances=instances,
        beats_per_s=median(each.beats / each.wall_s for each in beating),
        gateway_share=share("gateway"),
        postgres_share=share("postgres"),
        valkey_share=share("valkey"),
        view_share=median(each.share("gateway") for each in idling) - before.share("gateway"),
    )


def main(
    nodes: Annotated[int, typer.Option(min=1)] = 1000,
    instances: Annotated[int, typer.Option(min=1, help="Instances of each node.")] = 4,
    per_s: Annotated[float, typer.Option(min=1, help="Beats a second that are sent.")] = 50.0,
    seconds: Annotated[float, typer.Option(min=1, help="Length of a round, and of the idling after it.")] = 10.0,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    as_json: AsJson = False,
) -> None:
    """Measure the heartbeats of a large fleet.

    \b
    Examples:
      python -m ops.bench.gateway.heartbeats
      python -m ops.bench.gateway.heartbeats --nodes 1000 --instances 16 --per-s 100 --json
    """
    notes().print(f"starting a gateway that knows {nodes} nodes")
    fill = partial(fill_fleet, nodes=nodes, instances=instances, **REPORTED)
    with work_folder() as home, gateway_process(home, fill, core=0) as gateway:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        measured = asyncio.run(_Bench(gateway, per_s, seconds).measure(rounds))
    found = figures(nodes, instances, *measured)
    if as_json:
        print_json(asdict(found))
        return
    print_fields(
        [
            ("nodes, instances of each", f"{nodes}, {instances}"),
            ("beats measured at", f"{found.beats_per_s:.0f} a second"),
            ("1,000 beats a second: gateways", f"{found.gateway_share:.1%} of a core"),
            ("... Postgres", f"{found.postgres_share:.1%}"),
            ("... Valkey", f"{found.valkey_share:.1%}"),
            ("the view of them, each gateway", f"{found.view_share:.1%}"),
        ]
    )


if __name__ == "__main__":
    typer.run(main)
