"""The whole stack on one machine: embedded Postgres and Valkey, the control plane, one agent for each region.

    postgres, valkey -> api -> dispatcher, worker, beat, agents

`tidepool up` runs it in the foreground, the demo and the tests inside a with-statement. TIDEPOOL_DATABASE_URL and
TIDEPOOL_REDIS_URL replace the embedded servers.
"""

import fcntl
import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx2 as httpx
from pydantic import SecretStr

import migrations
from controlplane.settings import Settings
from controlplane.store.keys import find_key, knows_secret, make_key
from controlplane.store.session import Database, make_engine
from controlplane.store.tables import Role
from ops.embedded import EmbeddedPostgres, EmbeddedValkey
from ops.home import EmbeddedError, make_home, write_secret
from ops.ports import free_port
from ops.processes import Child
from ops.supervisor import Supervisor

LOOPBACK = "127.0.0.1"
BOOTSTRAP_ROLES = (Role.ADMIN, Role.CLIENT, Role.NODE)
TENANT = "default"


@dataclass(frozen=True, kw_only=True)
class LocalNode:
    """A node to run an agent for. Its one slot pretends to hold `gpus` GPUs; `memory_bytes` is what it really takes.
    `settings`: more of its agent's settings, by name.
    """

    name: str
    region: str
    gpu_type: str
    gpus: int
    memory_bytes: int
    engine: str = "torch"
    profile: Path | None = None
    settings: Mapping[str, int | float] = field(default_factory=dict)


class LocalStack:
    """The children, their addresses and their keys."""

    def __init__(
        self,
        home: Path,
        port: int,
        nodes: tuple[LocalNode, ...],
        *,
        environment: Mapping[str, str] | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        make_home(home)
        self._lock = _hold(home)
        self.home = home
        self.url = f"http://{LOOPBACK}:{port}"
        self.keys = _bootstrap_secrets(home)
        self._logs = home / "logs"
        self._logs.mkdir(exist_ok=True)
        self._environment = dict(os.environ) | dict(environment or {})
        self._port = port
        self._database_ready = False
        self._report = report or (lambda line: None)
        servers = self._servers()
        self._env = self._environment | {
            "TIDEPOOL_DATABASE_URL": self._database_url,
            "TIDEPOOL_REDIS_URL": self._redis_url,
            "TIDEPOOL_HOME": str(home),
            "TIDEPOOL_HOST": LOOPBACK,
            "TIDEPOOL_PORT": str(port),
            "TIDEPOOL_NODE_KEY": self.keys["node"],
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if not any(server.name == "postgres" for server in servers):
            self._prepare_database()
        agents = [self._agent(node) for node in nodes]
        self.supervisor = Supervisor([*servers, *self._control_plane(servers), *agents], report=report)

    def __enter__(self) -> "LocalStack":
        """Start everything; returns when every child is ready."""
        self.supervisor.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop everything."""
        self.stop()

    def stop(self) -> None:
        """Stop every child and let go of the home."""
        self.supervisor.stop()
        self._lock.close()

    def _servers(self) -> list[Child]:
        """Embedded servers for what no URL was given for."""
        self._database_url = self._environment.get("TIDEPOOL_DATABASE_URL", "")
        self._redis_url = self._environment.get("TIDEPOOL_REDIS_URL", "")
        servers: list[Child] = []
        if not self._database_url:
            postgres = EmbeddedPostgres(self.home, free_port())
            postgres.prepare()
            self._database_url = postgres.url()
            child = postgres.child()
            servers.append(_with_ready(child, lambda: postgres.ready() and self._prepare_database()))
        if not self._redis_url:
            valkey = EmbeddedValkey(self.home, free_port())
            valkey.prepare()
            self._redis_url = valkey.url()
            servers.append(valkey.child())
        return servers

    def _prepare_database(self) -> bool:
        """Migrate the schema and put the bootstrap keys in, once; True when that is done."""
        if self._database_ready:
            return True
        migrations.upgrade(self._database_url)
        database = Database(make_engine(Settings(database_url=SecretStr(self._database_url))))
        with database.transaction() as session:
            for role in BOOTSTRAP_ROLES:
                if find_key(session, self.keys[role]) is not None:
                    continue
                if knows_secret(session, self.keys[role]):
                    self._report(f"the key '{role}' of keys.json is revoked: take it out there to get a new one")
                else:
                    make_key(session, name=f"bootstrap-{role}", role=role, tenant=TENANT, secret=self.keys[role])
        database.close()
        self._database_ready = True
        return True

    def _control_plane(self, servers: list[Child]) -> list[Child]:
        names = tuple(server.name for server in servers)
        api = self._tidepool("api", after=names, ready=self._api_ready)
        return [api, *(self._tidepool(name, after=("api",)) for name in ("dispatcher", "worker", "forecaster", "beat"))]

    def _agent(self, node: LocalNode) -> Child:
        port = free_port()
        env = {
            "TIDEPOOL_AGENT_NODE": node.name,
            "TIDEPOOL_AGENT_REGION": node.region,
            "TIDEPOOL_AGENT_GPU_TYPE": node.gpu_type,
            "TIDEPOOL_AGENT_SLOTS": json.dumps([{"gpus": node.gpus, "memory_bytes": node.memory_bytes}]),
            "TIDEPOOL_AGENT_ENGINE": node.engine,
            "TIDEPOOL_AGENT_PORT": str(port),
            "TIDEPOOL_AGENT_CONTROL_URL": self.url,
            "TIDEPOOL_AGENT_NODE_KEY": self.keys["node"],
            **{f"TIDEPOOL_AGENT_{name.upper()}": str(value) for name, value in node.settings.items()},
        }
        if node.profile is not None:
            env["TIDEPOOL_AGENT_PROFILE"] = str(node.profile)
        return self._tidepool(
            "agent", name=f"agent-{node.name}", after=("api",), ready=lambda: _answers(LOOPBACK, port), env=env
        )

    def _tidepool(
        self,
        command: str,
        *,
        after: tuple[str, ...],
        name: str | None = None,
        ready: Callable[[], bool] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Child:
        name = name or command
        return Child(
            name=name,
            argv=(sys.executable, "-m", "ops.cli", command),
            log=self._logs / f"{name}.log",
            env=self._env | dict(env or {}),
            ready=ready,
            ready_timeout_s=120.0,
            stop_timeout_s=15.0,
            after=after,
        )

    def _api_ready(self) -> bool:
        return httpx.get(f"{self.url}/readyz", timeout=1.0).status_code == httpx.codes.OK


def _hold(home: Path) -> IO[str]:
    """Hold the home against a second stack; the kernel lets go of it when this process ends, however it does.

    Raises:
        EmbeddedError: another stack runs on it.
    """
    lock = (home / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise EmbeddedError(
            f"another Tidepool runs on {home}; stop it, or set TIDEPOOL_HOME to another folder"
        ) from None
    return lock


def _with_ready(child: Child, ready: Callable[[], bool]) -> Child:
    return Child(**{**child.__dict__, "ready": ready, "ready_timeout_s": 120.0})


def _answers(host: str, port: int) -> bool:
    return httpx.get(f"http://{host}:{port}/livez", timeout=1.0).status_code == httpx.codes.OK


def _bootstrap_secrets(home: Path) -> dict[str, str]:
    """The secrets of keys.json, made at the first start."""
    path = home / "keys.json"
    kept: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    keys = {role.value: kept.get(role) or f"tp-{role.value}-{secrets.token_urlsafe(32)}" for role in BOOTSTRAP_ROLES}
    if keys != kept:
        write_secret(path, json.dumps(keys, indent=2) + "\n")
    return keys
