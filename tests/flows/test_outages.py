"""Postgres and Redis are restarted ten times each under every long-lived process, none of which has a supervisor."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from pydantic import SecretStr
from sqlalchemy import text

import migrations
from controlplane.policies.readiness import Loop
from controlplane.settings import Settings
from controlplane.store.keys import make_key
from controlplane.store.loop_runs import read_loop_runs
from controlplane.store.rows import require
from controlplane.store.session import Database, make_engine
from controlplane.store.tables import Node, Role
from ops.client.api import open_api
from ops.local.embedded import EmbeddedPostgres, EmbeddedValkey
from ops.local.ports import free_port
from ops.local.sample_fleet import PROFILES, REGIONS
from tests.flows.conftest import register, wait_ready
from tests.flows.waiting import wait_until
from tests.servers import Standby

COMMANDS = ("api", "dispatcher", "worker", "forecaster", "beat", "agent")
QUICK_LOOPS = frozenset({Loop.WORKER, Loop.BEAT, Loop.FORECASTER, Loop.DISPATCHER, Loop.SCALE, Loop.EXPIRE})
"""Those that run every second or two here; the others wait for the next minute or hour."""
REGION = REGIONS[0]
PATIENCE_S = 120.0


class System:
    """Servers and processes, each started by itself."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.servers: dict[str, EmbeddedPostgres | EmbeddedValkey] = {
            "postgres": EmbeddedPostgres(folder / "home", free_port(), fsync=False),
            "redis": EmbeddedValkey(folder / "home", free_port()),
        }
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        stack.callback(self.stop)
        for name, server in self.servers.items():
            server.prepare()
            self.start_server(name)
        postgres, redis = self.servers["postgres"], self.servers["redis"]
        assert isinstance(postgres, EmbeddedPostgres)
        postgres.ensure_database()
        migrations.upgrade(postgres.url())
        self.database = Database(make_engine(Settings(database_url=postgres.url(), redis_url=redis.url())))  # type: ignore[arg-type]
        stack.callback(self.database.close)
        self.keys = {role: self._key(role) for role in (Role.ADMIN, Role.CLIENT, Role.NODE)}
        self.url = f"http://127.0.0.1:{free_port()}"
        self._environment = self._environment_of(postgres.url(), redis.url())
        for command in COMMANDS:
            self.start(command)

    def _key(self, role: Role) -> str:
        secret = f"tp-{role.value}-outages"
        with self.database.transaction() as session:
            make_key(session, name=role.value, role=role, tenant="default", secret=secret)
        return secret

    def _environment_of(self, database_url: str, redis_url: str) -> dict[str, str]:
        return os.environ | {
            "TIDEPOOL_DATABASE_URL": database_url,
            "TIDEPOOL_REDIS_URL": redis_url,
            "TIDEPOOL_HOME": str(self.folder / "home"),
            "TIDEPOOL_PORT": self.url.rsplit(":", 1)[1],
            "TIDEPOOL_NODE_KEY": self.keys[Role.NODE],
            "TIDEPOOL_NODE_KEYS_UNBOUND": "true",
            "TIDEPOOL_SCALE_EVERY_S": "1",
            "TIDEPOOL_EXPIRE_EVERY_S": "1",
            "TIDEPOOL_PULSE_EVERY_S": "1",
            "TIDEPOOL_AGENT_NODE": "n1",
            "TIDEPOOL_AGENT_REGION": REGION.name,
            "TIDEPOOL_AGENT_GPU_TYPE": REGION.gpu_type,
            "TIDEPOOL_AGENT_SLOTS": '[{"gpus": 8, "memory_bytes": 67108864}]',
            "TIDEPOOL_AGENT_ENGINE": "replay",
            "TIDEPOOL_AGENT_PROFILE": str(PROFILES / f"{REGION.gpu_type.lower()}.toml"),
            "TIDEPOOL_AGENT_PORT": (port := str(free_port())),
            "TIDEPOOL_AGENT_ADVERTISE_URL": f"http://127.0.0.1:{port}",
            "TIDEPOOL_AGENT_CONTROL_URL": self.url,
            "TIDEPOOL_AGENT_NODE_KEY": self.keys[Role.NODE],
        }

    def _start(self, name: str, argv: list[str], env: dict[str, str] | None = None) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(argv, env=env, stdout=log, stderr=subprocess.STDOUT)

    def start(self, command: str) -> None:
        """A process of Tidepool, by its command."""
        self._start(command, [sys.executable, "-m", "ops.cli.main", command], self._environment)

    def tidepool(self, *words: str) -> Any:
        """What a command answers as JSON."""
        program = (sys.executable, "-m", "ops.cli.main")
        argv = [*program, "--url", self.url, "--key", self.keys[Role.ADMIN], *words, "--json"]
        return json.loads(subprocess.run(argv, capture_output=True, check=True, env=self._environment).stdout)

    def start_server(self, name: str) -> None:
        server = self.servers[name]
        server.prepare()
        self._start(name, server.command())
        wait_until(server.ping, f"{name} answers", PATIENCE_S)

    def restart_server(self, name: str, *, down_s: float, killed: bool) -> None:
        """End a server, gently or not, and start it again later."""
        gentle = signal.SIGINT if name == "postgres" else signal.SIGTERM
        process = self.running.pop(name)
        process.send_signal(signal.SIGKILL if killed else gentle)
        process.wait(PATIENCE_S)
        time.sleep(down_s)
        self.start_server(name)

    @contextmanager
    def hanging(self, name: str) -> Iterator[None]:
        """A server whose kernel takes connections while nobody answers."""
        pid = self.running[name].pid
        os.kill(pid, signal.SIGSTOP)  # from now on it starts no child, and reaps none
        pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
        for each in pids[1:]:
            os.kill(each, signal.SIGSTOP)
        try:
            yield
        finally:
            for each in pids:
                os.kill(each, signal.SIGCONT)

    def stop(self) -> None:
        """Gently, the servers last; what does not follow within a while is killed."""
        for name in sorted(self.running, key=lambda name: name in self.servers):
            process = self.running[name]
            process.send_signal(signal.SIGINT if name == "postgres" else signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def successes_s(self) -> dict[Loop, float]:
        """When each loop last succeeded, on Postgres's clock."""
        with self.database.transaction() as session:
            _, loops = read_loop_runs(session)
        return {facts.loop: facts.last_success_s or 0.0 for facts in loops}

    def now_s(self) -> float:
        with self.database.transaction() as session:
            return read_loop_runs(session)[0]


class SystemWithStandby(System):
    """The same, with a standby of Postgres, which every process knows by its address alone."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, stack)
        stack.callback(self.database.close)

    def _environment_of(self, database_url: str, redis_url: str) -> dict[str, str]:
        primary = self.servers["postgres"]
        assert isinstance(primary, EmbeddedPostgres)
        self.standby = self.servers["standby"] = Standby(self.folder / "standby", primary)
        self.start_server("standby")
        both = database_url.replace(f":{primary.port}/", f":{primary.port},127.0.0.1:{self.standby.port}/")
        self.database.close()
        self.database = Database(make_engine(Settings(database_url=SecretStr(both))))
        return super()._environment_of(both, redis_url)

    def fail_over(self) -> None:
        """Kill the primary, and promote the standby."""
        lost = self.running.pop("postgres")
        lost.kill()
        lost.wait(PATIENCE_S)
        promoted = Database(make_engine(Settings(database_url=SecretStr(self.standby.url()))))
        with promoted.statement() as session:
            assert session.execute(text("SELECT pg_promote()")).scalar_one()
        promoted.close()


def _is_ready(system: System) -> bool:
    try:
        return httpx.get(f"{system.url}/readyz").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with ExitStack() as stack:
        system = System(tmp_path_factory.mktemp("outages"), stack)
        wait_until(lambda: _is_ready(system), "the gateway is ready")
        with open_api(system.url, system.keys[Role.ADMIN]) as admin:
            register(admin, ("tide",), (REGION,))
            wait_ready(admin, 1)
        yield system


def test_every_process_follows_a_promoted_standby(tmp_path: Path) -> None:
    with ExitStack() as stack:
        system = SystemWithStandby(tmp_path, stack)
        wait_until(lambda: _is_ready(system), "the gateway is ready")
        with open_api(system.url, system.keys[Role.ADMIN]) as admin:
            register(admin, ("tide",), (REGION,))
            wait_ready(admin, 1)
        _succeeded_since(system, 0.0)
        system.fail_over()
        promoted_s = system.now_s()
        _succeeded_since(system, promoted_s)
        wait_until(lambda: _heard_of(system, promoted_s), "the agent was heard of", PATIENCE_S)
        _answers(system)
        assert not {name: code for name in COMMANDS if (code := system.running[name].poll()) is not None}


def _succeeded_since(system: System, since_s: float, loops: frozenset[Loop] = QUICK_LOOPS) -> None:
    last: dict[Loop, float] = {}

    def late() -> set[Loop]:
        last.update(system.successes_s())
        return {loop for loop in loops if last[loop] <= since_s}

    try:
        wait_until(lambda: not late(), "every loop succeeded", PATIENCE_S)
    except AssertionError:
        pytest.fail(f"no success since the restart: {sorted(late())}; logs are in {system.folder}")


def _answers(system: System) -> None:
    client = openai.OpenAI(base_url=f"{system.url}/v1", api_key=system.keys[Role.CLIENT], max_retries=0)

    def answered() -> bool:
        try:
            said = client.chat.completions.create(
                model="tide", messages=[{"role": "user", "content": "there?"}], max_tokens=3
            )
        except openai.APIStatusError:
            return False
        return said.usage is not None and said.usage.completion_tokens == 3

    with client:
        wait_until(answered, "a request is answered", PATIENCE_S)


@pytest.mark.parametrize(
    ("server", "restarts"),
    [
        ("postgres", 2),
        pytest.param("postgres", 10, marks=pytest.mark.slow),
        pytest.param("redis", 10, marks=pytest.mark.slow),
    ],
)
def test_every_process_survives_restarts(system: System, server: str, restarts: int) -> None:
    pids = {name: process.pid for name, process in system.running.items() if name in COMMANDS}
    for restart in range(restarts):
        system.restart_server(server, down_s=restart % 3, killed=restart % 2 == 1)
        restarted_s = system.now_s()
        _succeeded_since(system, restarted_s)
        wait_until(lambda s=restarted_s: _heard_of(system, s), "the agent was heard of", PATIENCE_S)  # type: ignore[misc]
        _answers(system)
        ended = {name: code for name in COMMANDS if (code := system.running[name].poll()) is not None}
        assert not ended, f"after restart {restart + 1}"
    assert {name: system.running[name].pid for name in COMMANDS} == pids
    _succeeded_since(system, restarted_s, frozenset({Loop.MEASURE}))
    wait_until(lambda: httpx.get(f"{system.url}/readyz").json()["status"] == "ok", "all is well", PATIENCE_S)


def _heard_of(system: System, since_s: float) -> bool:
    with system.database.transaction() as session:
        heard_at = require(session, Node, "n1", param="node").last_seen_at
    return heard_at is not None and heard_at.timestamp() > since_s


@pytest.mark.slow
def test_every_process_survives_servers_that_hang(system: System) -> None:
    """Longer than any process waits for an answer."""
    for server in ("redis", "postgres"):
        with system.hanging(server):
            time.sleep(15)
        _succeeded_since(system, system.now_s(), QUICK_LOOPS | {Loop.MEASURE})
        _answers(system)


def _termless(verdict: dict[str, object]) -> dict[str, object]:
    """A verdict without the primary's term, which this is not about."""
    return {name: value for name, value in verdict.items() if name not in {"term", "reported_term"}}


@pytest.mark.slow
def test_a_node_whose_agent_was_killed_is_lost_wherever_one_looks(system: System) -> None:
    def shown() -> dict[str, object]:
        """What each way of looking says of the only node and its instances."""
        verdict = httpx.get(f"{system.url}/readyz").json()
        top, status = system.tidepool("top"), system.tidepool("status")
        [node] = system.tidepool("node", "list")["data"]
        states = {row["state"] for row in system.tidepool("instance", "list")["data"]}
        [region] = status["regions"]
        [endpoint] = top["live"]["endpoints"]
        return {
            "verdicts": [_termless(one) for one in (verdict, top["ready"], top["status"]["health"], status["health"])],
            "nodes": {node["alive"], bool(region["nodes_alive"]), bool(top["status"]["regions"][0]["nodes_alive"])},
            "states": states | status["instances"].keys() | endpoint["instances"].keys(),
            "some ready": bool(region["instances_ready"]),
        }

    nothing = {"missing": [], "away": [], "late": [], "behind": [], "replica_age_s": None}
    well = {"status": "ok", **nothing, "lost": []}
    lost = {"status": "degraded", **nothing, "lost": ["n1"]}
    wait_until(lambda: shown() == _alike(well, alive=True, state="ready"), "all is well", PATIENCE_S)
    agent = system.running.pop("agent")
    agent.kill()
    agent.wait()
    wait_until(lambda: shown() == _alike(lost, alive=False, state="lost"), "the node is lost", PATIENCE_S)
    system.start("agent")
    wait_until(lambda: shown() == _alike(well, alive=True, state="ready"), "the node is back", PATIENCE_S)


def _alike(verdict: object, *, alive: bool, state: str) -> dict[str, object]:
    return {"verdicts": [verdict] * 4, "nodes": {alive}, "states": {state}, "some ready": state == "ready"}


def test_a_process_that_is_told_to_stop_stops(system: System) -> None:
    for name in ("worker", "forecaster", "beat"):
        process = system.running[name]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, name
        system.start(name)  # whichever test comes next finds them all
