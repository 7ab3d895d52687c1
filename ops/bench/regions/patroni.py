"""How long writes are away when the region of the primary is lost, and what is lost with it: by Patroni, and by hand.

Three Postgres servers on one machine, commits wait for one other. A client writes row after row. The primary's
processes are killed at once; then Patroni (with its own raft, no etcd) promotes another, or `tidepool failover` does
two seconds later, as an operator would who sees it at once. Every row that was acknowledged must be there afterwards.
`make bench-patroni` installs Patroni and runs this.
"""

import json
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import psycopg
import typer

from controlplane.database_address import libpq_url, psycopg_url
from ops.bench.shared import work_folder
from ops.client.home import EmbeddedError, remember
from ops.client.screen import AsJson, print_json, print_table, same
from ops.failover.members import ask_members, members_of
from ops.failover.run import decide, fail_over
from ops.local.embedded import USER, EmbeddedPostgres, unprivileged
from ops.local.ports import LOOPBACK, free_port
from ops.local.postgres_cluster import PostgresCluster
from ops.local.privileges import leashed
from ops.local.processes import log_tail
from ops.local.supervisor import Supervisor
from ops.local.wheels import postgres_binary

REGIONS = ("region-1", "region-2", "region-3")
STEADY_S, OPERATOR_S, PATIENCE_S = 5.0, 2.0, 120.0
_SETTLED_S = 2.0
DCS = {
    "ttl": 20,
    "loop_wait": 5,
    "retry_timeout": 7,
    "synchronous_mode": "quorum",
    "synchronous_mode_strict": True,
    "postgresql": {"use_pg_rewind": True, "parameters": {"wal_log_hints": "on"}},
}
"""As `ops/docs/postgres-over-regions.md` has them."""


class Writer:
    """Writes row after row at whoever takes writes, in a thread, and remembers what was acknowledged and when."""

    def __init__(self, url: str) -> None:
        self._url = libpq_url(url)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.acknowledged: dict[int, float] = {}

    def __enter__(self) -> "Writer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def missing(self) -> int:
        """How many acknowledged rows are not there."""
        with psycopg.connect(self._url) as connection:
            there = {row[0] for row in connection.execute("SELECT row FROM written")}
        return len(self.acknowledged.keys() - there)

    def gap_s(self, lost_s: float) -> float | None:
        """From a moment to the next acknowledgement; None: there was none yet."""
        return next((at_s - lost_s for at_s in sorted(self.acknowledged.values()) if at_s > lost_s), None)

    def _run(self) -> None:
        row = 0
        while not self._stop.is_set():
            with suppress(psycopg.Error), psycopg.connect(self._url, autocommit=True) as connection:
                connection.execute("CREATE TABLE IF NOT EXISTS written (row int PRIMARY KEY)")
                while not self._stop.is_set():
                    row += 1
                    connection.execute("INSERT INTO written VALUES (%s)", [row])
                    self.acknowledged[row] = time.monotonic()
                    time.sleep(0.01)
            time.sleep(0.05)


class PatroniTrio:
    """A Patroni and its Postgres for each region. `python`: that of an environment with patroni and pysyncobj."""

    def __init__(self, home: Path, python: Path) -> None:
        self._python = python
        self._folders = {region: home / region for region in REGIONS}
        self._ports = {region: tuple(free_port() for _ in range(3)) for region in REGIONS}
        self._password = secrets.token_hex(16)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        hosts = ",".join(f"{LOOPBACK}:{ports[0]}" for ports in self._ports.values())
        self.url = psycopg_url(f"postgresql://{USER}:{self._password}@{hosts}/postgres?sslmode=disable")
        for region, folder in self._folders.items():
            folder.mkdir(parents=True)
            remember(folder, EmbeddedPostgres.name, self._ports[region][0], self._password)
            EmbeddedPostgres(folder, self._ports[region][0]).own(folder)
            (folder / "patroni.yml").write_text(json.dumps(self._configuration(region)))

    def start(self, address: str) -> None:
        """Start the Patroni of the Postgres at an address, which starts that."""
        region = self._region_of(address)
        folder = self._folders[region]
        argv = [str(self._python), "-m", "patroni", str(folder / "patroni.yml")]
        with (folder / "patroni.log").open("ab") as log:
            self._running[region] = subprocess.Popen(
                leashed(unprivileged(argv, self._python, folder), signal.SIGTERM),
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": ""},
            )

    def check(self) -> None:
        """See that all of them run.

        Raises:
            EmbeddedError: one has ended, as where Postgres' user cannot read the environment of Patroni.
        """
        time.sleep(_SETTLED_S)
        for region, patroni in self._running.items():
            if patroni.poll() is not None:
                raise EmbeddedError(log_tail(self._folders[region] / "patroni.log"))

    def kill(self, address: str) -> None:
        """Kill that Patroni and every process of its Postgres."""
        region = self._region_of(address)
        patroni = self._running.pop(region)
        pids = [patroni.pid, *EmbeddedPostgres(self._folders[region], 0).processes()]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        patroni.wait()

    def address_of(self, region: str) -> str:
        """Where a region's Postgres listens."""
        return f"{LOOPBACK}:{self._ports[region][0]}"

    def stop(self) -> None:
        """Stop all of them; Patroni stops its Postgres."""
        for patroni in self._running.values():
            patroni.terminate()
        for patroni in self._running.values():
            patroni.wait()

    def _region_of(self, address: str) -> str:
        return next(region for region in REGIONS if self.address_of(region) == address)

    def _configuration(self, region: str) -> dict[str, Any]:
        postgres, rest, raft = self._ports[region]
        folder = self._folders[region]
        login = {"username": USER, "password": self._password}
        return {
            "scope": "tidepool",
            "name": region,
            "raft": {
                "data_dir": str(folder / "raft"),
                "self_addr": f"{LOOPBACK}:{raft}",
                "partner_addrs": [f"{LOOPBACK}:{self._ports[other][2]}" for other in REGIONS if other != region],
            },
            "restapi": {"listen": f"{LOOPBACK}:{rest}", "connect_address": f"{LOOPBACK}:{rest}"},
            "bootstrap": {"dcs": DCS, "initdb": [{"encoding": "UTF8"}, "data-checksums", "no-sync"]},
            "postgresql": {
                "listen": f"{LOOPBACK}:{postgres}",
                "connect_address": f"{LOOPBACK}:{postgres}",
                "data_dir": str(folder / "postgres"),
                "pgpass": str(folder / "pgpass"),
                "bin_dir": str(postgres_binary("postgres").parent),
                "authentication": {"superuser": login, "replication": login, "rewind": login},
                "parameters": {"unix_socket_directories": "", "shared_buffers": "32MB", "fsync": "off"},
                "pg_hba": [f"host {what} all {LOOPBACK}/32 scram-sha-256" for what in ("all", "replication")],
            },
        }


def primary_of(url: str) -> str | None:
    """The address of the server that takes writes, while all others follow it on its timeline; None at other times."""
    facts = ask_members(members_of(url))
    taking = [one.address for one in facts if one.takes_writes]
    followed = all(one.region is not None for one in facts) and len({one.timeline for one in facts}) == 1
    return taking[0] if len(taking) == 1 and followed else None


def wait_until_so(is_so: Callable[[], object]) -> None:
    """Wait until something is so.

    Raises:
        TimeoutError: not within two minutes.
    """
    started_s = time.monotonic()
    while not is_so():
        if time.monotonic() - started_s > PATIENCE_S:
            raise TimeoutError(f"not so after {PATIENCE_S:g} s")
        time.sleep(0.1)


def measure(
    url: str, kill: Callable[[str], object], revive: Callable[[str], object], act: Callable[[], object]
) -> dict[str, Any]:
    """Lose the primary under a writer's load, and have it back. `kill` and `revive` take an address; `act` is what an
    operator does about it.
    """
    wait_until_so(lambda: primary_of(url))
    lost = str(primary_of(url))
    with Writer(url) as writer:
        time.sleep(STEADY_S)
        lost_s = time.monotonic()
        kill(lost)
        act()
        wait_until_so(lambda: writer.gap_s(lost_s) is not None)
        time.sleep(STEADY_S)
        revived_s = time.monotonic()
        revive(lost)
        wait_until_so(lambda: primary_of(url))
        back_s = time.monotonic() - revived_s
    gap_s = writer.gap_s(lost_s)
    assert gap_s is not None, "it was waited for"
    return {
        "write_gap_s": round(gap_s, 2),
        "acknowledged": len(writer.acknowledged),
        "missing": writer.missing(),
        "back_as_standby_s": round(back_s, 1),
    }


def by_patroni(home: Path, python: Path) -> dict[str, Any]:
    """One loss, decided by Patroni."""
    trio = PatroniTrio(home, python)
    try:
        for region in REGIONS:
            trio.start(trio.address_of(region))
        trio.check()
        return measure(trio.url, trio.kill, trio.start, lambda: None)
    finally:
        trio.stop()


def by_hand(home: Path) -> dict[str, Any]:
    """One loss, decided by an operator."""
    cluster = PostgresCluster(home, REGIONS, fsync=False)
    cluster.prepare(lambda _url: None)
    url = cluster.url(REGIONS[0])
    regions = {f"{LOOPBACK}:{member.port}": region for region, member in cluster.members.items()}

    def act() -> None:
        time.sleep(OPERATOR_S)
        chosen = next(one for one in REGIONS[1:] if not decide(url, one).losses)
        fail_over(url, chosen, accept_loss=False, report=lambda _line: None)

    running = {region: Supervisor([cluster.child(region)], report=lambda _line: None) for region in REGIONS}
    try:
        for supervisor in running.values():
            supervisor.start()

        def revive(address: str) -> None:
            running[regions[address]] = Supervisor([cluster.child(regions[address])], report=lambda _line: None)
            running[regions[address]].start()

        return measure(url, lambda address: running[regions[address]].kill(), revive, act)
    finally:
        for supervisor in running.values():
            supervisor.stop()


def main(
    patroni: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Python that has patroni; default: by hand only.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Losses of each kind.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Measure how long writes are away when the primary is lost, and count what is lost with it."""
    rows = []
    for number in range(rounds):
        with work_folder() as folder:
            rows.append({"by": "hand", "round": number + 1, **by_hand(folder)})
        if patroni is not None:
            with work_folder() as folder:
                rows.append({"by": "Patroni", "round": number + 1, **by_patroni(folder, patroni.absolute())})
    if as_json:
        print_json(rows)
    else:
        names = ("by", "round", "write_gap_s", "acknowledged", "missing", "back_as_standby_s")
        print_table("Loss of the primary", same(*names), rows)
    if any(row["missing"] for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
