"""The embedded servers, really run: data survive, kills are healed, root and plain users both can."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ops.client.home import remembered_port
from ops.local.embedded import EmbeddedError, EmbeddedPostgres, EmbeddedValkey
from ops.local.ports import free_port
from ops.local.privileges import as_user
from ops.local.supervisor import Supervisor, SupervisorError
from tests.flows.waiting import wait_until

TIMEOUT_S = 30.0

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Both servers, running."""

    postgres: EmbeddedPostgres
    valkey: EmbeddedValkey
    supervisor: Supervisor

    def kill(self, name: str) -> None:
        """SIGKILL a server and wait until it is up again."""
        before = self.supervisor.restarts()[name]
        os.kill(self.supervisor.pids()[name], signal.SIGKILL)
        wait_until(lambda: self.supervisor.restarts()[name] > before)
        self.supervisor.wait_ready(TIMEOUT_S)


def ask(server: EmbeddedPostgres, sql: str) -> list[tuple[object, ...]]:
    """Run one statement, committed; its rows if it has any."""
    with psycopg.connect(server.url().replace("+psycopg", ""), autocommit=True) as connection:
        cursor = connection.execute(sql.encode())
        return cursor.fetchall() if cursor.description else []


def workers(server: EmbeddedPostgres) -> list[int]:
    """The processes that work in the server's data folder."""
    return list(server.processes())


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    home = tmp_path_factory.mktemp("home")
    postgres, valkey = EmbeddedPostgres(home, free_port(), fsync=False), EmbeddedValkey(home, free_port())
    postgres.prepare()
    valkey.prepare()
    with Supervisor([postgres.child(), valkey.child()], report=lambda _: None) as supervisor:
        yield Stack(postgres=postgres, valkey=valkey, supervisor=supervisor)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> EmbeddedPostgres:
    """A prepared server that does not run; tests copy its home."""
    server = EmbeddedPostgres(tmp_path_factory.mktemp("cluster"), free_port(), fsync=False)
    server.prepare()
    return server


def copy_of(cluster: EmbeddedPostgres, home: Path) -> EmbeddedPostgres:
    shutil.copytree(cluster.home, home)
    return EmbeddedPostgres(home, free_port(), fsync=False)


def test_the_servers_answer_and_are_configured(stack: Stack) -> None:
    shown = {
        name: ask(stack.postgres, f"SHOW {name}")[0][0] for name in ("server_encoding", "listen_addresses", "fsync")
    }
    assert shown == {"server_encoding": "UTF8", "listen_addresses": "127.0.0.1", "fsync": "off"}
    assert ask(stack.postgres, "SELECT current_database()") == [("tidepool",)]
    with redis.Redis.from_url(stack.valkey.url()) as client:
        assert client.set("tide", "in")
        assert client.get("tide") == b"in"
        assert client.config_get("bind")["bind"] == "127.0.0.1"


def test_both_ask_for_the_password(stack: Stack) -> None:
    notes = json.loads((stack.postgres.home / "embedded.json").read_text())
    assert notes["postgres"]["port"] == stack.postgres.port
    secret = notes["postgres"]["password"]
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(stack.postgres.url().replace("+psycopg", "").replace(secret, "guess"))
    with (
        redis.Redis(port=stack.valkey.port, retry=Retry(NoBackoff(), 0)) as client,
        pytest.raises(redis.AuthenticationError),
    ):
        client.ping()


def test_secrets_are_for_the_owner_alone(stack: Stack) -> None:
    for path in (stack.postgres.home / "embedded.json", stack.valkey.folder / "valkey.conf"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE(stack.postgres.data.stat().st_mode) == 0o700


def test_a_killed_postgres_is_healed_with_its_data(stack: Stack) -> None:
    ask(stack.postgres, "CREATE TABLE kept (n int)")
    ask(stack.postgres, "INSERT INTO kept VALUES (7)")
    stack.kill("postgres")
    assert ask(stack.postgres, "SELECT n FROM kept") == [(7,)]


def test_a_killed_postgres_is_healed_although_a_backend_is_busy(stack: Stack) -> None:
    with psycopg.connect(stack.postgres.url().replace("+psycopg", "")) as connection:
        connection.execute("SELECT 1")
        stack.kill("postgres")
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    assert stack.postgres.ping()


def test_a_killed_valkey_is_healed_and_empty(stack: Stack) -> None:
    with redis.Redis.from_url(stack.valkey.url()) as client:
        client.set("tide", "out")
    stack.kill("valkey")
    with redis.Redis.from_url(stack.valkey.url()) as client:
        assert client.get("tide") is None


@linux
def test_a_second_start_on_a_running_home_is_refused(stack: Stack) -> None:
    with pytest.raises(EmbeddedError, match=r"still runs on .*stop the other Tidepool"):
        EmbeddedPostgres(stack.postgres.home, free_port()).prepare(leftovers_timeout_s=0.2)
    assert stack.postgres.ping()
    assert remembered_port(stack.postgres.home, stack.postgres.name) == stack.postgres.port, "others find it still"


@linux
def test_data_outlive_stop_and_start_and_no_process_is_left(cluster: EmbeddedPostgres, tmp_path: Path) -> None:
    server = copy_of(cluster, tmp_path / "home")
    server.prepare()
    with Supervisor([server.child()]):
        ask(server, "CREATE TABLE kept AS SELECT 42 AS n")
        assert workers(server)
    assert not workers(server)
    again = EmbeddedPostgres(server.home, free_port(), fsync=False)
    again.prepare()
    with Supervisor([again.child()]):
        assert ask(again, "SELECT n FROM kept") == [(42,)]
    assert not workers(again)


@linux
def test_a_stale_pid_file_and_wrong_permissions_are_repaired(cluster: EmbeddedPostgres, tmp_path: Path) -> None:
    """The pid now belongs to another program of the same user, which Postgres alone would take for a server."""
    server = copy_of(cluster, tmp_path / "home")
    server.data.chmod(0o755)
    argv = ["sleep", "600"]
    with subprocess.Popen(as_user(argv, "nobody", []) if os.geteuid() == 0 else argv) as other:
        try:
            (server.data / "postmaster.pid").write_text(f"{other.pid}\n{server.data}\n0\n{server.port}\n\n127.0.0.1\n")
            server.prepare()
            with Supervisor([server.child()]):
                assert ask(server, "SELECT 1") == [(1,)]
        finally:
            other.kill()
    assert stat.S_IMODE(server.data.stat().st_mode) == 0o700


def test_a_half_finished_initdb_is_done_again(tmp_path: Path) -> None:
    partial = tmp_path / "postgres.partial" / "data"
    partial.mkdir(parents=True)
    (partial / "PG_VERSION").write_text("18\n")
    server = EmbeddedPostgres(tmp_path, free_port(), fsync=False)
    server.data.mkdir()
    server.prepare()
    assert (server.data / "global" / "pg_control").exists()
    assert not partial.parent.exists()


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "postgres").mkdir()
    (tmp_path / "postgres" / "thesis.txt").write_text("years of work")
    with pytest.raises(EmbeddedError, match="holds no PostgreSQL data"):
        EmbeddedPostgres(tmp_path, free_port()).prepare()
    assert (tmp_path / "postgres" / "thesis.txt").read_text() == "years of work"


def test_a_lost_password_is_a_clear_error(cluster: EmbeddedPostgres, tmp_path: Path) -> None:
    server = copy_of(cluster, tmp_path / "home")
    (server.home / "embedded.json").unlink()
    with pytest.raises(EmbeddedError, match="has no password for postgres"):
        server.prepare()


def test_a_taken_port_is_told_in_postgres_own_words(stack: Stack, cluster: EmbeddedPostgres, tmp_path: Path) -> None:
    server = copy_of(cluster, tmp_path / "home")
    server.port = stack.postgres.port
    server.prepare()
    with pytest.raises(SupervisorError, match="Address already in use"):
        Supervisor([server.child()], report=lambda _: None).start()


KILLED = """
import sys
from pathlib import Path
from ops.local.embedded import EmbeddedPostgres
from ops.local.privileges import as_user
from ops.local.supervisor import Supervisor
server = EmbeddedPostgres(Path(sys.argv[1]), int(sys.argv[2]), fsync=False)
server.prepare()
Supervisor([server.child()]).run(lambda: print("ready", flush=True))
"""


@linux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_postgres_ends_with_its_supervisor_and_the_next_start_waits_for_that(
    cluster: EmbeddedPostgres, tmp_path: Path, number: signal.Signals
) -> None:
    server = copy_of(cluster, tmp_path / "home")
    argv = [sys.executable, "-c", KILLED, str(server.home), str(server.port)]
    program = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    pids = workers(server)
    assert len(pids) > 1
    program.send_signal(number)
    program.communicate(timeout=TIMEOUT_S)
    if number == signal.SIGTERM:
        assert not workers(server)
    server.prepare()
    assert not workers(server)
