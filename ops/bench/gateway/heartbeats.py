"""What heartbeats cost: of the gateway that receives them, of Postgres and Valkey, and the live view that is built of
them, all in shares of one core at 1,000 nodes that beat once a second.

A real gateway with servers of its own gets beats of all nodes in turn, at a rate it can keep up with; CPU seconds are
read from the kernel, and shares are of 1,000 beats a second: so many cores' worth of gateways receive them. The view's
share is what the gateway takes without any beat and request once it knows all nodes, less what it took before.
"""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
import typer

from controlplane.settings import Settings
from controlplane.store import fleet
from controlplane.store.instances import add_instance
from controlplane.store.joining import join_node
from controlplane.store.keys import make_key
from controlplane.store.session import Database, make_engine
from controlplane.store.tables import Model, Role
from dataplane.protocol.messages import Heartbeat, InstanceReport, Join, SlotSpec
from ops.bench.gateway.run import cpu_s
from ops.bench.gateway.stack import GatewayProcess, gateway_process
from ops.client.screen import AsJson, notes, print_fields, print_json
from ops.faults.wrecker import children_of

BEATS_PER_S = 1000.0
CONNECTIONS = 8
_END = b"\r\n\r\n"


@dataclass(frozen=True, kw_only=True)
class Beats:
    """`key`: what the nodes show; `bodies`: a beat of each node."""

    key: str
    bodies: Sequence[bytes]


@dataclass(frozen=True, kw_only=True)
class Used:
    """CPU seconds over a time, by process."""

    wall_s: float
    beats: int
    cpu_s: dict[str, float]

    def share(self, process: str) -> float:
        """Of one core."""
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


def fill_fleet(settings: Settings, *, nodes: int, instances: int) -> Beats:
    """Nodes with so many instances each, in a database that has none; and their beats."""
    database = Database(make_engine(settings))
    bodies = []
    with database.transaction() as session:
        fleet.put_region(session, name="here", position=None)
        fleet.put_gpu_type(session, name="H800", memory_bytes=80 << 30, cost_per_hour=2.0)
        for model in range(instances):
            row = Model(
                name=f"tide-{model}", path="/x", architecture="Llama", weights_bytes=1, kv_bytes_per_token=512,
                context_tokens=4096,
            )  # fmt: skip
            fleet.put_model(session, row)
            fleet.put_endpoint(session, model=row.name, region="here", minimum=0, maximum=nodes)
        slots = (SlotSpec(gpus=instances, memory_bytes=80 << 30),)
        for number in range(nodes):
            name = f"n{number:05}"
            url = f"http://10.0.{number // 250}.{number % 250 + 1}:8000"
            join = Join(node=name, region="here", gpu_type="H800", url=url, slots=slots, engine="replay")
            join_node(session, join)
            held = [
                add_instance(session, model=f"tide-{model}", region="here", gpu_type="H800", node=name, slot=0, gpus=1)
                for model in range(instances)
            ]
            session.flush()
            bodies.append(_beat(name, [(each.id, each.model) for each in held]))
        key = make_key(session, name="nodes", role=Role.NODE, tenant="bench").secret
    database.close()
    return Beats(key=key, bodies=bodies)


def _beat(node: str, held: Sequence[tuple[str, str]]) -> bytes:
    reports = tuple(
        InstanceReport(
            instance_id=instance_id, model=model, slot=0, state="ready", kv_used_bytes=1 << 30,
            kv_capacity_bytes=1 << 34, remaining_tokens=12_345, running=17, prefill_wait_s=0.25,
            prefill_urgent_wait_s=0.125, prefill_token_s=1e-4,
        )
        for instance_id, model in held
    )  # fmt: skip
    return msgspec.json.encode(Heartbeat(node=node, boot_id="b", generation=0, instances=reports, load=0.5))


async def beat(port: int, beats: Beats, *, count: int, per_s: float) -> None:
    """Send so many, of all nodes in turn, evenly spread over time as far as they are answered.

    Raises:
        RuntimeError: one was refused.
    """
    loop = asyncio.get_running_loop()
    started_s = loop.time()

    async def connection(own: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for number in range(count):
                node = number % len(beats.bodies)
                if node % CONNECTIONS == own:  # a node's beats go one after the other
                    await asyncio.sleep(started_s + number / per_s - loop.time())
                    await _exchange(reader, writer, beats.key, beats.bodies[node])
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
    said = await reader.readexactly(length)
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"a heartbeat was refused: {answer.splitlines()[0]!r} {said!r}")


class _Bench:
    def __init__(self, gateway: GatewayProcess[Beats], per_s: float, seconds: float) -> None:
        self._gateway = gateway
        self._per_s = per_s
        self._seconds = seconds

    async def measure(self, rounds: int) -> tuple[Used, list[Used], list[Used]]:
        """Idle before any beat; then rounds of beats, and of idling with all nodes in view."""
        before = await self._used(0)
        await beat(self._gateway.port, self._gateway.filled, count=len(self._gateway.filled.bodies), per_s=self._per_s)
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

    async def _used(self, beats: int) -> Used:
        loop = asyncio.get_running_loop()
        before_s, started_s = self._cpu_s(), loop.time()
        if beats:
            await beat(self._gateway.port, self._gateway.filled, count=beats, per_s=self._per_s)
        else:
            await asyncio.sleep(self._seconds)
        wall_s = loop.time() - started_s
        after_s = self._cpu_s()
        return Used(wall_s=wall_s, beats=beats, cpu_s={name: after_s[name] - before_s[name] for name in before_s})

    def _cpu_s(self) -> dict[str, float]:
        pids = {"gateway": self._gateway.pid, **self._gateway.servers}
        return {name: sum(cpu_s(each) for each in (pid, *children_of(pid))) for name, pid in pids.items()}


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
    with (
        tempfile.TemporaryDirectory(prefix="tidepool-bench-") as home,
        gateway_process(
            Path(home), lambda settings: fill_fleet(settings, nodes=nodes, instances=instances), core=0
        ) as gateway,
    ):
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
