"""The whole stack on one machine: embedded Postgres and Valkey, the control plane, the agents.

    postgres, valkey -> api -> dispatcher, worker, forecaster, beat, agents

`tidepool up` runs it in the foreground, the demo and the tests inside a with-statement. TIDEPOOL_DATABASE_URL and
TIDEPOOL_REDIS_URL replace the embedded servers.
"""

import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import httpx2 as httpx
import redis
from pydantic import SecretStr
from redis.backoff import NoBackoff
from redis.retry import Retry
from sqlalchemy import make_url

import migrations
from controlplane.database_address import psycopg_url
from controlplane.settings import Settings
from controlplane.store.session import Database, make_engine
from ops.client.home import EmbeddedError, make_home
from ops.local.addresses import given_settings
from ops.local.bootstrap import FirstKeys, keep_secrets, store_keys
from ops.local.embedded import EmbeddedPostgres, EmbeddedValkey
from ops.local.ports import free_port
from ops.local.postgres_cluster import region_home, regions_at
from ops.local.processes import Child
from ops.local.supervisor import Supervisor

LOOPBACK = "127.0.0.1"
_REDIS_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class LocalNode:
    """A node and its agent. Its only worker group simulates `gpus` GPUs; `memory_bytes` is the memory that it
    allocates. `settings`: more of its agent's settings, by name.
    """

    name: str
    region: str
    gpu_type: str
    gpus: int
    memory_bytes: int
    engine: str = "torch"
    profile: Path | None = None
    settings: Mapping[str, int | float | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """The number of each process, and the ports by which they reach each other.

    Replicas are named `name`, `name-2` and so on. `between(caller, called, port)` is the port by which a child reaches
    another that listens on `port`; `*` is the caller where several share a port.
    `programs`: what Python runs for some children instead of the command line's module. `schema`: the revision that the
    database is migrated to. `command(argv)` is what a child is run by in place of its own command.
    """

    replicas: Mapping[str, int] = field(default_factory=dict)
    between: Callable[[str, str, int], int] = lambda _caller, _called, port: port
    programs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    schema: str = "head"
    command: Callable[[tuple[str, ...]], tuple[str, ...]] = lambda argv: argv

    def names(self, command: str) -> tuple[str, ...]:
        """The names of a command's children."""
        return tuple(command if n == 1 else f"{command}-{n}" for n in range(1, self.replicas.get(command, 1) + 1))


class LocalStack:
    """The children, their addresses and their keys. `urls` are those of all gateways, `url` is the first. `postgres`: a
    server to run whose database is made already, at TIDEPOOL_DATABASE_URL, and what else has to run for it.
    """

    def __init__(
        self,
        home: Path,
        port: int,
        nodes: tuple[LocalNode, ...],
        *,
        environment: Mapping[str, str] | None = None,
        report: Callable[[str], None] | None = None,
        wiring: Wiring | None = None,
        postgres: Sequence[Child] = (),
    ) -> None:
        self._wiring = wiring or Wiring()
        self._postgres = postgres
        self._environment = dict(os.environ) | dict(environment or {})
        settings = given_settings(home)  # not in the ready check, where an invalid one would count as not ready yet
        make_home(home)
        if not self._environment.get("TIDEPOOL_DATABASE_URL"):
            _refuse_regional(home)
        if redis_url := self._environment.get("TIDEPOOL_REDIS_URL"):
            _ping_redis(redis_url)
        self._lock = lock_home(home)
        self.home = home
        gateways = self._wiring.names("api")
        self._ports = dict(zip(gateways, (port, *(free_port() for _ in gateways[1:])), strict=True))
        self.urls = tuple(f"http://{LOOPBACK}:{each}" for each in self._ports.values())
        self.url = self.urls[0]
        self._first_keys = keep_secrets(home)
        self.keys = self._first_keys.secrets
        self._logs = home / "logs"
        self._logs.mkdir(exist_ok=True)
        self._database_ready = False
        self._report = report or (lambda line: None)
        servers = self._servers()
        self._env = self._environment | {
            "TIDEPOOL_HOME": str(home),
            "TIDEPOOL_HOST": LOOPBACK,
            "TIDEPOOL_NODE_KEY": self.keys["node"],
            "TIDEPOOL_NODE_KEYS_UNBOUND": "true",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._settings = settings.model_copy(update={"database_url": SecretStr(self.database_url)})
        if not any(server.name == "postgres" for server in servers):
            self._prepare_database()
        agents = [self._agent(node, gateways[index % len(gateways)]) for index, node in enumerate(nodes)]
        children = [*servers, *self._control_plane(servers), *agents]
        run_by = self._wiring.command
        self.supervisor = Supervisor([replace(child, argv=run_by(child.argv)) for child in children], report=report)

    def __enter__(self) -> "LocalStack":
        self.supervisor.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, on_ready: Callable[[], None]) -> None:
        """Start, call `on_ready`, and block until SIGTERM or SIGINT; then stop. Main thread only.

        Raises:
            SupervisorError: a child does not get ready.
        """
        self.supervisor.run(on_ready)

    def stop(self) -> None:
        """Stop every child and unlock the home."""
        self.supervisor.stop()
        self._lock.close()

    def kill(self) -> None:
        """Kill every child at once, and unlock the home."""
        self.supervisor.kill()
        self._lock.close()

    def _servers(self) -> list[Child]:
        """An embedded server for each URL that is not configured."""
        given = self._environment.get("TIDEPOOL_DATABASE_URL", "")
        self.database_url = psycopg_url(given) if given else ""
        self.redis_url = self._environment.get("TIDEPOOL_REDIS_URL", "")
        servers = list(self._postgres)
        if not self.database_url:
            postgres = EmbeddedPostgres(self.home, free_port())
            postgres.prepare()
            self.database_url = postgres.url()
            servers.append(
                replace(
                    postgres.child(), ready=lambda: postgres.ready() and self._prepare_database(), ready_timeout_s=120.0
                )
            )
        if not self.redis_url:
            valkey = EmbeddedValkey(self.home, free_port())
            valkey.prepare()
            self.redis_url = valkey.url()
            servers.append(valkey.child())
        return servers

    def _prepare_database(self) -> bool:
        """Migrate the schema and store the first keys, once; returns True when that is done."""
        if not self._database_ready:
            for fault in prepare_database(self._settings, self._first_keys, self._wiring.schema):
                self._report(fault)
            self._database_ready = True
        return True

    def _control_plane(self, servers: list[Child]) -> list[Child]:
        after = tuple(server.name for server in servers)
        gateways = [
            self._tidepool(
                "api", name=name, after=after, ready=_probe(port, "readyz"), env={"TIDEPOOL_PORT": str(port)}
            )
            for name, port in self._ports.items()
        ]
        others = ("dispatcher", "worker", "forecaster", "beat")
        names = ((command, name) for command in others for name in self._wiring.names(command))
        return [*gateways, *(self._tidepool(command, name=name, after=("api",)) for command, name in names)]

    def _agent(self, node: LocalNode, gateway: str) -> Child:
        name, port = f"agent-{node.name}", free_port()
        control_port = self._wiring.between(name, gateway, self._ports[gateway])
        env = {
            "TIDEPOOL_AGENT_NODE": node.name,
            "TIDEPOOL_AGENT_REGION": node.region,
            "TIDEPOOL_AGENT_GPU_TYPE": node.gpu_type,
            "TIDEPOOL_AGENT_SLOTS": json.dumps([{"gpus": node.gpus, "memory_bytes": node.memory_bytes}]),
            "TIDEPOOL_AGENT_ENGINE": node.engine,
            "TIDEPOOL_AGENT_PORT": str(port),
            "TIDEPOOL_AGENT_ADVERTISE_URL": f"http://{LOOPBACK}:{self._wiring.between('*', name, port)}",
            "TIDEPOOL_AGENT_CONTROL_URL": f"http://{LOOPBACK}:{control_port}",
            "TIDEPOOL_AGENT_NODE_KEY": self.keys["node"],
            "TIDEPOOL_AGENT_STATE_DIR": str(self.home / "nodes" / node.name),
            **{f"TIDEPOOL_AGENT_{key.upper()}": str(value) for key, value in node.settings.items()},
        }
        if node.profile is not None:
            env["TIDEPOOL_AGENT_PROFILE"] = str(node.profile)
        # An agent may start before the control plane: its worker takes longest, and it retries to join.
        child = self._tidepool("agent", name=name, after=(), ready=_probe(port, "livez"), env=env)
        return replace(child, stop_signal=signal.SIGINT)  # the whole stack stops, so no other node can take over

    def _tidepool(
        self,
        command: str,
        *,
        name: str,
        after: tuple[str, ...],
        ready: Callable[[], bool] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Child:
        program = self._wiring.programs.get(name, ("-m", "ops.cli.main"))
        return Child(
            name=name,
            argv=(sys.executable, *program, command),
            log=self._logs / f"{name}.log",
            env=self._env | ({} if command == "agent" else self._servers_of(name)) | dict(env or {}),
            ready=ready,
            ready_timeout_s=120.0,
            stop_timeout_s=15.0,
            after=after,
        )

    def _servers_of(self, name: str) -> dict[str, str]:
        """The servers' addresses for a child of the control plane."""
        return {
            "TIDEPOOL_DATABASE_URL": self._reached(name, "postgres", self.database_url),
            "TIDEPOOL_REDIS_URL": self._reached(name, "valkey", self.redis_url),
        }

    def _reached(self, caller: str, called: str, url: str) -> str:
        """A server's address, with the port by which a child reaches it."""
        port = make_url(url).port
        if port is None:
            return url
        through = self._wiring.between(caller, called, port)
        return make_url(url).set(port=through).render_as_string(hide_password=False) if through != port else url


def prepare_database(settings: Settings, keys: FirstKeys, schema: str = "head") -> list[str]:
    """Migrate the schema and store the first keys; returns a line for each that was rotated or revoked."""
    migrations.upgrade(settings.database_url.get_secret_value(), schema)
    database = Database(make_engine(settings))
    with database.transaction() as session:
        faults = store_keys(session, keys)
    database.close()
    return faults


def _ping_redis(url: str) -> None:
    """Ask a Redis that is not embedded for an answer; one that still loads its data will have one.

    Raises:
        EmbeddedError: it gives none.
    """
    limits = {"socket_timeout": _REDIS_TIMEOUT_S, "socket_connect_timeout": _REDIS_TIMEOUT_S}
    try:
        with redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **limits) as one, suppress(redis.BusyLoadingError):
            one.ping()
    except redis.RedisError as error:
        raise EmbeddedError(f"the server of TIDEPOOL_REDIS_URL does not answer: {error}") from error


def _probe(port: int, name: str) -> Callable[[], bool]:
    return lambda: httpx.get(f"http://{LOOPBACK}:{port}/{name}", timeout=1.0).status_code == httpx.codes.OK


def _refuse_regional(home: Path) -> None:
    """Refuse a home that holds a stack of several regions: an empty database would be made beside theirs.

    Raises:
        EmbeddedError: it does.
    """
    if regions_at(home) and not (home / "postgres").exists():
        raise EmbeddedError(
            f"{home} holds a stack of several regions: run `tidepool up --regions 3`, or set TIDEPOOL_HOME to another"
            " folder"
        )


def another_runs_on(home: Path) -> EmbeddedError:
    """The error where a second stack is started on a home."""
    return EmbeddedError(f"another Tidepool runs on {home}; stop it, or set TIDEPOOL_HOME to another folder")


def is_running(home: Path) -> bool:
    """Whether a stack, of one region or of several, runs on the home."""
    return any(_is_locked(each) for each in (home, *(region_home(home, region) for region in regions_at(home))))


def _is_locked(home: Path) -> bool:
    try:
        with (home / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def lock_home(home: Path) -> IO[str]:
    """Lock the home against a second stack. The kernel releases the lock when the file is closed or this process ends.

    Raises:
        EmbeddedError: another stack runs on it.
    """
    lock = (home / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise another_runs_on(home) from None
    return lock
