"""A Postgres and a Redis of a test's own, each to be stopped, frozen and started."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import create_engine, text

from ops.client.home import make_home
from ops.local.embedded import INITDB_TIMEOUT_S, LEFTOVERS_TIMEOUT_S, EmbeddedPostgres, EmbeddedValkey
from ops.local.ports import free_port
from ops.local.supervisor import Supervisor
from ops.local.wheels import postgres_binary


class Servers:
    """Both run from the start. They keep their ports and their data while they are stopped."""

    def __init__(self, folder: Path) -> None:
        self.postgres = EmbeddedPostgres(folder / "postgres", free_port(), fsync=False)
        self.redis = EmbeddedValkey(folder / "valkey", free_port())
        self._running: dict[str, contextlib.ExitStack] = {}
        for name in ("postgres", "redis"):
            getattr(self, name).prepare()
            self.start(name)

    def start(self, name: str) -> None:
        self._running[name] = contextlib.ExitStack()
        self._running[name].enter_context(Supervisor([getattr(self, name).child()]))

    def stop(self, name: str) -> None:
        self._running.pop(name).close()

    @contextlib.contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """Nobody listens on the server's port meanwhile."""
        self.stop(name)
        try:
            yield
        finally:
            self.start(name)

    @contextlib.contextmanager
    def frozen_postgres(self) -> Iterator[None]:
        """Postgres hangs: its kernel takes connections, and nobody answers."""
        engine = create_engine(self.postgres.url())
        with engine.connect() as connection:
            postmaster = _stop_postmaster(self.postgres)
            others = list(connection.scalars(text("SELECT pid FROM pg_stat_activity")))
            frozen = [postmaster, *others]
            for pid in others:
                os.kill(pid, signal.SIGSTOP)
            try:
                yield
            finally:
                for pid in frozen:
                    os.kill(pid, signal.SIGCONT)
        engine.dispose()

    def close(self) -> None:
        for name in list(self._running):
            self.stop(name)


def _stop_postmaster(server: EmbeddedPostgres) -> int:
    """Suspend the first process of a Postgres: from then on it starts no other, and none is gone that has ended."""
    postmaster = int((server.data / "postmaster.pid").read_text().split()[0])
    os.kill(postmaster, signal.SIGSTOP)
    return postmaster


@contextlib.contextmanager
def suspended(server: EmbeddedPostgres) -> Iterator[None]:
    """Every process of a Postgres is stopped meanwhile (on Linux): it takes connections and answers none."""
    _stop_postmaster(server)
    pids = list(server.processes())
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


class Standby(EmbeddedPostgres):
    """A streaming standby of a Postgres that runs."""

    def __init__(self, folder: Path, primary: EmbeddedPostgres) -> None:
        super().__init__(folder, free_port(), fsync=False)
        self._primary = primary

    def prepare(self, *, leftovers_timeout_s: float = LEFTOVERS_TIMEOUT_S) -> None:
        make_home(self.home)
        shutil.copy(self._primary.home / "embedded.json", self.home)  # its roles and their passwords are the primary's
        super().prepare(leftovers_timeout_s=leftovers_timeout_s)

    def _initdb(self) -> None:
        source = self._primary.url("postgres").replace("postgresql+psycopg://", "postgresql://")
        options = ["--write-recovery-conf", "--checkpoint=fast", "--no-sync", "--pgdata", str(self.data)]
        argv = [str(postgres_binary("pg_basebackup")), "--dbname", source, *options]
        subprocess.run(argv, check=True, timeout=INITDB_TIMEOUT_S, env=os.environ | {"PGSSLMODE": "disable"})
