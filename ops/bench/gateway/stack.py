"""The processes that the benchmarks of the gateway measure, and the fleets that they know."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import SecretStr

import migrations
from controlplane.settings import Settings
from controlplane.store import fleet
from controlplane.store.instances import add_instance
from controlplane.store.joining import join_node
from controlplane.store.keys import make_key
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database, make_engine
from controlplane.store.tables import Model, Role
from dataplane.protocol.joining import Join, SlotSpec
from dataplane.protocol.messages import Heartbeat, InstanceReport
from ops.local.embedded import EmbeddedPostgres, EmbeddedValkey
from ops.local.ports import free_port
from ops.local.supervisor import Supervisor

_START_TIMEOUT_S = 240.0
_STOP_TIMEOUT_S = 30.0
_STALE_S = 86_400.0
REGION, GPU_TYPE = "here", "H800"
T = TypeVar("T")


@contextlib.contextmanager
def served_by(
    command: Sequence[str],
    port: int,
    *,
    core: int | None,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
    start_max_s: float = _START_TIMEOUT_S,
) -> Iterator[int]:
    """Start a process on one core, or on any with None, and wait until it listens; its id. `log`: what it prints."""
    cores = sorted(os.sched_getaffinity(0))
    pinned = () if core is None else ("taskset", "-c", str(cores[min(core, len(cores) - 1)]))
    with open(os.devnull if log is None else log, "ab") as printed:
        process = subprocess.Popen(
            [*pinned, *command], env=os.environ | dict(environment or {}), stdout=printed, stderr=printed
        )
    try:
        _wait_for(port, process, start_max_s)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes], start_max_s: float) -> None:
    deadline_s = time.monotonic() + start_max_s
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with status {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise RuntimeError(f"{process.args!r} did not listen on {port} within {start_max_s:g} s")


@dataclass(frozen=True, kw_only=True)
class GatewayProcess(Generic[T]):
    """A running `tidepool api`; process ids of it and of its servers, and what `fill` returned."""

    port: int
    pid: int
    servers: Mapping[str, int]
    filled: T


@contextlib.contextmanager
def gateway_process(home: Path, fill: Callable[[Settings], T], *, core: int) -> Iterator[GatewayProcess[T]]:
    """A `tidepool api` with its own Postgres and Valkey; `fill` writes to the database before it starts."""
    postgres = EmbeddedPostgres(home / "postgres", free_port(), fsync=False)
    valkey = EmbeddedValkey(home / "valkey", free_port())
    for server in (postgres, valkey):
        server.prepare()
    with Supervisor([postgres.child(), valkey.child()]) as servers:
        port = free_port()
        settings = Settings(
            database_url=SecretStr(postgres.url()), redis_url=SecretStr(valkey.url()), home=home, port=port,
            heartbeat_stale_s=_STALE_S, key_cache_s=3600.0,
        )  # fmt: skip
        migrations.upgrade(postgres.url())
        filled = fill(settings)
        environment = {
            "TIDEPOOL_DATABASE_URL": postgres.url(),
            "TIDEPOOL_REDIS_URL": valkey.url(),
            "TIDEPOOL_HOME": str(home),
            "TIDEPOOL_PORT": str(port),
            "TIDEPOOL_HEARTBEAT_STALE_S": str(_STALE_S),
            "TIDEPOOL_KEY_CACHE_S": "3600",
            "TIDEPOOL_NODE_KEYS_UNBOUND": "true",
        }
        command = [sys.executable, "-c", "from ops.cli.main import main; main()", "api"]
        with served_by(command, port, core=core, environment=environment) as pid:
            yield GatewayProcess(port=port, pid=pid, servers=servers.pids(), filled=filled)


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """What `fill_fleet` wrote: the keys of nodes and of a client, and a heartbeat of each node."""

    node_key: str
    client_key: str
    heartbeats: Sequence[Heartbeat]


def fill_fleet(settings: Settings, *, nodes: int, instances: int, url: str | None = None, **reported: Any) -> Fleet:
    """Write nodes with so many instances each, of models tide-0, tide-1 and so on, to an empty database.

    Args:
        settings: with the database's address.
        nodes: how many.
        instances: of each node.
        url: of all nodes; None: an address that nobody asks.
        reported: what the heartbeats report of each instance: fields of `InstanceReport`.
    """
    database = Database(make_engine(settings))
    heartbeats = []
    with database.transaction() as session:
        fleet.put_region(session, name=REGION, position=None)
        fleet.put_gpu_type(session, name=GPU_TYPE, memory_bytes=80 << 30, cost_per_hour=2.0)
        for number in range(instances):
            name = f"tide-{number}"
            model = Model(
                name=name, path="/x", architecture="Llama", weights_bytes=1, kv_bytes_per_token=512, context_tokens=4096
            )
            fleet.put_model(session, model)
            fleet.put_endpoint(session, model=name, region=REGION, minimum=0, maximum=nodes)
        slots = (SlotSpec(gpus=instances, memory_bytes=80 << 30),)
        for number in range(nodes):
            node, own = f"n{number:05}", f"http://10.0.{number // 250}.{number % 250 + 1}:8000"
            join = Join(node=node, region=REGION, gpu_type=GPU_TYPE, url=url or own, slots=slots, engine="replay")
            join_node(session, join)
            held = [
                add_instance(
                    session, model=f"tide-{model}", region=REGION, gpu_type=GPU_TYPE, node=node, slot=0, gpus=1
                )
                for model in range(instances)
            ]
            session.flush()
            reports = tuple(
                InstanceReport(instance_id=each.id, model=each.model, slot=0, state="ready", **reported)
                for each in held
            )
            heartbeats.append(Heartbeat(node=node, boot_id="b", generation=0, instances=reports, load=0.5))
        node_key, client_key = (
            make_key(session, name=role, role=role, tenant="bench").secret for role in (Role.NODE, Role.CLIENT)
        )
    database.close()
    return Fleet(node_key=node_key, client_key=client_key, heartbeats=heartbeats)


def fill_one_node(settings: Settings, upstream: str) -> str:
    """Write one model on one node, at `upstream`, which has sent its heartbeat; a client's key."""
    written = fill_fleet(settings, nodes=1, instances=1, url=upstream, kv_capacity_bytes=1 << 50)
    live = LiveStore(settings)
    live.write_heartbeat(written.heartbeats[0], region=REGION, gpu_type=GPU_TYPE, url=upstream)
    live.close()
    return written.client_key
