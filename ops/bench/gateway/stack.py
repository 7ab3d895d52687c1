"""The processes that `ops.bench.gateway.run` measures, each started, waited for and ended."""

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
from typing import Generic, TypeVar

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
from dataplane.protocol.messages import Heartbeat, InstanceReport, Join, SlotSpec
from ops.local.embedded import EmbeddedPostgres, EmbeddedValkey
from ops.local.ports import free_port
from ops.local.supervisor import Supervisor

_START_TIMEOUT_S = 240.0
_STOP_TIMEOUT_S = 30.0
_STALE_S = 86_400.0
T = TypeVar("T")


@contextlib.contextmanager
def served_by(
    command: Sequence[str], port: int, *, core: int, environment: Mapping[str, str] | None = None
) -> Iterator[int]:
    """A process on a core of its own, once it listens; its id."""
    cores = sorted(os.sched_getaffinity(0))
    process = subprocess.Popen(
        ["taskset", "-c", str(cores[min(core, len(cores) - 1)]), *command],
        env=os.environ | dict(environment or {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port, process)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with status {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise RuntimeError(f"{process.args!r} did not listen on {port} within {_START_TIMEOUT_S:g} s")


@dataclass(frozen=True, kw_only=True)
class GatewayProcess(Generic[T]):
    """A running `tidepool api`; process ids of it and of its servers, and what `fill` returned."""

    port: int
    pid: int
    servers: Mapping[str, int]
    filled: T


@contextlib.contextmanager
def gateway_process(home: Path, fill: Callable[[Settings], T], *, core: int) -> Iterator[GatewayProcess[T]]:
    """A whole `tidepool api` with Postgres and Valkey of its own, whose database `fill` has filled."""
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
        migrations.upgrade(settings.database_url.get_secret_value())
        filled = fill(settings)
        environment = {
            "TIDEPOOL_DATABASE_URL": settings.database_url.get_secret_value(),
            "TIDEPOOL_REDIS_URL": settings.redis_url.get_secret_value(),
            "TIDEPOOL_HOME": str(home),
            "TIDEPOOL_PORT": str(port),
            "TIDEPOOL_HEARTBEAT_STALE_S": str(_STALE_S),
            "TIDEPOOL_KEY_CACHE_S": "3600",
            "TIDEPOOL_NODE_KEYS_UNBOUND": "true",
        }
        command = [sys.executable, "-c", "from ops.cli.main import main; main()", "api"]
        with served_by(command, port, core=core, environment=environment) as pid:
            yield GatewayProcess(port=port, pid=pid, servers=servers.pids(), filled=filled)


def fill_one_node(settings: Settings, upstream: str) -> str:
    """One model on one node, at `upstream`; a client's key."""
    database, live = Database(make_engine(settings)), LiveStore(settings)
    with database.transaction() as session:
        fleet.put_region(session, name="here", position=None)
        fleet.put_gpu_type(session, name="H800", memory_bytes=80 << 30, cost_per_hour=2.0)
        model = Model(
            name="tide", path="/x", architecture="Llama", weights_bytes=1, kv_bytes_per_token=512, context_tokens=4096
        )
        fleet.put_model(session, model)
        fleet.put_endpoint(session, model="tide", region="here", minimum=0, maximum=1)
        slots = (SlotSpec(gpus=1, memory_bytes=80 << 30),)
        join = Join(node="n", region="here", gpu_type="H800", url=upstream, slots=slots, engine="replay")
        join_node(session, join)
        held = add_instance(session, model="tide", region="here", gpu_type="H800", node="n", slot=0, gpus=1)
        session.flush()
        key = make_key(session, name="bench", role=Role.CLIENT, tenant="bench").secret
        report = InstanceReport(instance_id=held.id, model="tide", slot=0, state="ready", kv_capacity_bytes=1 << 50)
    beat = Heartbeat(node="n", boot_id="b", generation=0, instances=(report,))
    live.write_heartbeat(beat, region="here", gpu_type="H800", url=upstream)
    live.close()
    database.close()
    return key
