"""The page on restoring to a moment is followed on real servers, with its own lines and commands."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import text
from sqlalchemy.orm import Session

import migrations
from controlplane.settings import Settings
from controlplane.store.fleet import touch_node
from controlplane.store.instances import desired_of, observe, touch_generations
from controlplane.store.joining import join_node
from controlplane.store.keys import make_key, revoke_key
from controlplane.store.queue import Claim, Outcome, finish
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database, make_engine
from controlplane.store.tables import Role
from dataplane.agent.heartbeats import join_message
from dataplane.agent.node import Agent
from dataplane.protocol.errors import StaleTermError
from dataplane.protocol.messages import DesiredInstances
from ops.local.embedded import EmbeddedPostgres, unprivileged
from ops.local.ports import LOOPBACK, free_port
from ops.local.wheels import postgres_binary
from tests.controlplane.world import World, claim_waiting, until
from tests.dataplane.replay_node import settings as agent_settings

SECTION = (Path(__file__).parents[3] / "ops/docs/backup.md").read_text().partition("## Restore to a moment\n")[2]
CONFIGURATION, BACK_UP, COME_BACK = re.findall(r"```(?:ini|sh)\n(.*?)```", SECTION, re.DOTALL)[:3]
COMMAND_TIMEOUT_S = 120.0
TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY tablename"
NOW = "SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US')"
NODE = "n1"


class Server:
    """A server whose postgresql.conf is told what the page says, started by pg_ctl as on a machine of its own. The
    page's folders lie in `home`.
    """

    def __init__(self, home: Path) -> None:
        self._embedded = EmbeddedPostgres(home, free_port(), fsync=False)
        self._embedded.prepare()
        self._folders = {
            "/var/lib/postgresql/data": str(self._embedded.data),
            "/var/lib/postgresql": str(home),
            "/archive": str(home / "archive"),
            "/backups": str(home / "backups"),
        }
        for folder in ("archive", "backups"):
            (home / folder).mkdir()
        own = {
            "listen_addresses": LOOPBACK,
            "port": self._embedded.port,
            "unix_socket_directories": "",
            "fsync": "off",
            "timezone": "America/Sao_Paulo",
        }
        with (self._embedded.data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in own.items())
            file.write(self.here(CONFIGURATION))
        self._embedded.own(home)
        self.url = self._embedded.url()

    def here(self, written: str) -> str:
        """A text of the page with the folders of this server."""
        for there, here in self._folders.items():
            written = written.replace(there, here)
        return written

    def run(self, script: str, environment: Mapping[str, str] | None = None) -> None:
        """Run commands of the page as the user of PostgreSQL; the first one that fails fails the test."""
        programs = postgres_binary("postgres").parent
        argv = unprivileged(["sh", "-euc", self.here(script)], programs, self._embedded.home)
        path = f"{programs}:{os.environ['PATH']}"
        done = subprocess.run(
            argv,
            env=os.environ | {"PATH": path} | dict(environment or {}),
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self) -> None:
        self.run("pg_ctl --pgdata=/var/lib/postgresql/data --log=/var/lib/postgresql/first.log start")
        self._embedded.ensure_database()

    def stop(self) -> None:
        """Stop whichever runs."""
        for data in ("data", "restored"):
            folder = self.here(f"/var/lib/postgresql/{data}")
            if (Path(folder) / "postmaster.pid").exists():
                self.run(f"pg_ctl --pgdata={folder} --mode=immediate stop")


class Installation:
    """What a control plane does with its database, and a node that follows it."""

    def __init__(self, url: str, home: Path) -> None:
        settings = Settings(database_url=SecretStr(url), redis_url=SecretStr("redis://127.0.0.1:9/0"), home=home)
        self.database = Database(make_engine(settings))
        self.world = World(self.database, LiveStore(settings), settings)
        self.agent = Agent(agent_settings(node=NODE, state_dir=home / "node"), "boot")
        with self.database.transaction() as session:
            join_node(session, join_message(self.agent, "http://127.0.0.1:9"))

    def beat(self) -> DesiredInstances:
        """A heartbeat of the node, which follows what it is answered."""
        with self.database.transaction() as session:
            touch_node(session, NODE)
            observe(session, self.agent.heartbeat())
            desired = desired_of(session, NODE)
        self.agent.apply(desired)
        return desired

    def claim(self) -> list[Claim]:
        with self.database.transaction() as session:
            return claim_waiting(session, 2)

    def finish(self, held: Claim) -> int:
        with self.database.transaction() as session:
            return sum(finish(session, [Outcome(claim=held, status_code=200, body={"line": held.line})]).values())

    def rows(self) -> dict[str, Any]:
        """Every row of every table."""
        with self.database.transaction() as session:
            return {table: _rows(session, table) for table in session.scalars(text(TABLES))}


def _rows(session: Session, table: str) -> list[str]:
    return list(session.scalars(text(f"SELECT t::text FROM {table} AS t ORDER BY 1")))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "servers")
    server.start()
    yield server
    server.stop()


def back_up(server: Server) -> None:
    """As the page says, by a user that may do nothing else."""
    database = Database(make_engine(Settings(database_url=SecretStr(server.url))))
    with database.statement() as session:
        session.execute(text("CREATE ROLE replicator LOGIN REPLICATION PASSWORD 'secret'"))
    address = database.engine.url.set(drivername="postgresql", username="replicator", password="secret", database="")
    database.close()
    server.run(BACK_UP, {"REPLICATION_URL": address.render_as_string(hide_password=False)})


@pytest.fixture
def installed(server: Server, tmp_path: Path) -> Iterator[Installation]:
    migrations.upgrade(server.url)
    installed = Installation(server.url, tmp_path / "home")
    yield installed
    installed.database.close()


def now(database: Database) -> str:
    with database.transaction() as session:
        return str(session.scalar(text(NOW)))


def come_back(server: Server, database: Database, moment: str) -> None:
    """As the page says, until the server takes writes."""
    database.engine.dispose()
    commands = COME_BACK.replace("2026-11-24 12:00:00+00", f"{moment}+00").partition("# once it takes writes")[0]
    assert f"'{moment}+00'" in commands
    server.run(commands)
    until(lambda: not in_recovery(database))


@pytest.mark.slow
def test_a_server_comes_back_to_the_moment(server: Server, installed: Installation) -> None:
    back_up(server)
    database, world = installed.database, installed.world

    batch_id = world.add_batch(lines=4)
    done, running = installed.claim()
    assert installed.finish(done) == 1
    with database.transaction() as session:
        key = make_key(session, name="made before", role=Role.CLIENT, tenant="acme").row.id
    world.join("n2")
    world.place("n2")
    followed = installed.beat()
    then = installed.rows()
    moment = now(database)

    world.add_batch(lines=3)
    assert installed.finish(running) == 1
    with database.transaction() as session:
        revoke_key(session, key)
        touch_generations(session, [NODE])
    later = installed.beat()
    assert later.generation > followed.generation

    come_back(server, database, moment)
    assert installed.rows() == then != {}
    restored = installed.beat()
    assert (later.term, restored.term, installed.agent.term) == (1, 2, 2)
    assert restored.generation > later.generation
    with pytest.raises(StaleTermError):
        installed.agent.apply(later)

    assert installed.finish(running) == 1, "the claim of the moment still holds"
    for held in installed.claim():
        assert installed.finish(held) == 1
    with database.transaction() as session:
        statement = text("SELECT line FROM batch_results JOIN batches ON number = batch_number WHERE id = :id")
        assert sorted(session.scalars(statement, {"id": batch_id})) == [1, 2, 3, 4]


@pytest.mark.slow
def test_nodes_obey_the_server_that_came_back_last(server: Server, installed: Installation) -> None:
    """The moment knows nothing of the first return, whose term nodes have seen."""
    back_up(server)
    assert installed.beat().term == 1
    moment = now(installed.database)
    installed.beat()
    come_back(server, installed.database, moment)
    of_first = installed.beat()
    installed.database.engine.dispose()
    server.run(
        "mv /var/lib/postgresql/data /var/lib/postgresql/old; mv /var/lib/postgresql/restored /var/lib/postgresql/data"
    )
    come_back(server, installed.database, moment)
    assert (of_first.term, installed.beat().term) == (2, 3)
    with pytest.raises(StaleTermError):
        installed.agent.apply(of_first)


def in_recovery(database: Database) -> bool:
    with database.statement() as session:
        return bool(session.scalar(text("SELECT pg_is_in_recovery()")))


def archived(folder: Path, name: str) -> int:
    """The exit status of the page's archive_command for a file of `folder`."""
    found = re.search(r"^archive_command = '(.*)'$", CONFIGURATION, re.MULTILINE)
    assert found is not None
    command = found[1].replace("/archive", str(folder / "archive")).replace("%p", name).replace("%f", name)
    return subprocess.run(["sh", "-c", command], cwd=folder, check=False, timeout=COMMAND_TIMEOUT_S).returncode


def test_the_archive_takes_a_file_once_and_never_replaces_it(tmp_path: Path) -> None:
    (tmp_path / "archive").mkdir()
    wal = tmp_path / "000000010000000000000001"
    wal.write_bytes(b"first" * 1000)
    kept = tmp_path / "archive" / wal.name
    kept.with_name(f"{wal.name}.new").write_bytes(b"half")  # of a copy that was cut off
    assert [archived(tmp_path, wal.name) for _ in range(2)] == [0, 0]
    assert [path.name for path in (tmp_path / "archive").iterdir()] == [wal.name]
    wal.write_bytes(b"another cluster's")
    assert archived(tmp_path, wal.name) != 0
    assert kept.read_bytes() == b"first" * 1000
    shutil.rmtree(tmp_path / "archive")
    assert archived(tmp_path, wal.name) != 0
