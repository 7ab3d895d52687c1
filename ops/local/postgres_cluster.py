"""A Postgres for each region on one machine: a primary and standbys, of which a commit waits for one.

Each region's server keeps its port and its data in a folder of the region. Which one is the primary is written nowhere:
it is the one that is no standby, of the newest timeline where a lost primary has come back.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from psycopg.conninfo import make_conninfo

from controlplane.database_address import psycopg_url
from controlplane.policies.failover import MemberFacts
from ops.client.home import password, remember, remembered_port, write_secret
from ops.failover.members import ask_members, members_of
from ops.local.embedded import INITDB_TIMEOUT_S, USER, EmbeddedError, EmbeddedPostgres, unprivileged
from ops.local.ports import LOOPBACK, free_port
from ops.local.processes import Child
from ops.local.supervisor import Supervisor
from ops.local.wheels import postgres_binary

Reach = Callable[[str, str, int], int]
"""`(caller's region, called region, port)` -> the port by which the one reaches the other's Postgres."""


_KEEPING = {"wal_keep_size": "1GB"}
"""How much of its log a server keeps for standbys that are away."""


class ClusterMember(EmbeddedPostgres):
    """The server of a region, which waits for one of `others` at each commit."""

    def __init__(self, home: Path, region: str, port: int, others: Sequence[str], *, fsync: bool) -> None:
        options = {"cluster_name": region, "wal_receiver_timeout": "10s", **_KEEPING}
        if others:
            names = ", ".join(f'"{name}"' for name in others)
            options["synchronous_standby_names"] = f"ANY 1 ({names})"
        super().__init__(home, port, fsync=fsync, options=options)
        self.region = region

    def ready(self) -> bool:
        """Whether it answers; the database comes from the primary."""
        return self.ping()

    def kill(self) -> None:
        """Kill every process of it, as when its machine loses its power."""
        for pid in list(self.processes()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def is_standby(self) -> bool:
        """Whether it starts as a standby."""
        return (self.data / "standby.signal").exists()

    def timeline(self) -> int:
        """The timeline of its last checkpoint."""
        command = [str(postgres_binary("pg_controldata")), "-D", str(self.data)]
        told = subprocess.run(command, capture_output=True, text=True, check=True, env={"LC_ALL": "C"}).stdout
        found = re.search(r"TimeLineID:\s+(\d+)", told)
        assert found is not None, "pg_controldata tells the timeline"
        return int(found[1])

    def follow(self, conninfo: str) -> None:
        """Start as a standby of the server at that address."""
        quoted = conninfo.replace("'", "''")
        configuration = self.data / "postgresql.auto.conf"
        kept = [line for line in configuration.read_text().splitlines() if not line.startswith("primary_conninfo")]
        write_secret(configuration, "\n".join([*kept, f"primary_conninfo = '{quoted}'", ""]))
        (self.data / "standby.signal").touch()
        self.own(self.data)

    def copy_from(self, conninfo: str) -> None:
        """Become a copy of a primary that runs: what is there is rewound where that is possible, else copied anew.

        Raises:
            EmbeddedError: it cannot be copied.
        """
        if not (self.is_made() and self._rewound(conninfo)):
            shutil.rmtree(self.data, ignore_errors=True)
            options = ["--checkpoint=fast", *([] if self._fsync else ["--no-sync"]), "--pgdata", str(self.data)]
            command = [str(postgres_binary("pg_basebackup")), "--dbname", conninfo, *options]
            done = subprocess.run(command, timeout=INITDB_TIMEOUT_S, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise EmbeddedError(f"the primary's data could not be copied to {self.data}: {done.stderr.strip()}")

    def _rewound(self, conninfo: str) -> bool:
        """Take back what a former primary wrote and nobody else has; False: its log does not reach so far back."""
        self._drop_stale_pid_file()
        program = postgres_binary("pg_rewind")
        options = ["--target-pgdata", str(self.data), *([] if self._fsync else ["--no-sync"])]
        command = unprivileged([str(program), *options, "--source-server", conninfo], program, self.data)
        return subprocess.run(command, timeout=INITDB_TIMEOUT_S, capture_output=True, check=False).returncode == 0


class PostgresCluster:
    """The servers of the regions, in the regions' folders of `home`."""

    def __init__(self, home: Path, regions: Sequence[str], *, fsync: bool = True, reach: Reach | None = None) -> None:
        self._fsync = fsync
        self._reach = reach or (lambda _caller, _called, port: port)
        self.members: dict[str, ClusterMember] = {}
        for region in regions:
            folder = region_home(home, region)
            port = remembered_port(folder, ClusterMember.name) or free_port()
            others = [other for other in regions if other != region]
            self.members[region] = ClusterMember(folder, region, port, others, fsync=fsync)

    def prepare(self, first: Callable[[str], object]) -> None:
        """Make what is missing while no server runs: a first primary, and standbys of it. `first` is called with the
        primary's address at each start. A former primary of an older timeline is rewound.

        Raises:
            EmbeddedError: a server runs on the data, or they belong to someone else.
            SupervisorError: the primary does not start.
        """
        primary = self._primary_at_rest()
        primary.prepare()
        rest = [member for member in self.members.values() if member is not primary]
        for member in rest:
            member.home.mkdir(parents=True, exist_ok=True)
            remember(member.home, member.name, member.port, password(primary.home, primary.name))
        copies = [member for member in rest if not (member.is_made() and member.is_standby())]
        alone = self.alone()
        with Supervisor([replace(alone.child(), ready=alone.ready)], report=lambda _line: None):
            first(alone.url())
            for member in copies:
                member.copy_from(self._conninfo(member, primary, primary.port))
        for member in rest:
            member.follow(self._conninfo(member, primary))

    def alone(self) -> EmbeddedPostgres:
        """The primary of servers that do not run, as a server by itself: its commits wait for no standby."""
        primary = self._primary_at_rest()
        return EmbeddedPostgres(primary.home, primary.port, fsync=self._fsync, options=_KEEPING)

    def rejoin(self, region: str) -> None:
        """Have a server that does not run follow whoever is the primary now, if there is one; prepares its start.

        Raises:
            EmbeddedError: a server runs on the data, or they belong to someone else, or cannot be copied.
        """
        member = self.members[region]
        facts = ask_members(members_of(self.url(region)))
        primary = next((self.members[one.region] for one in facts if one.takes_writes and one.region), None)
        member.prepare()
        if primary is None or primary is member:
            return
        if not member.is_standby():
            member.copy_from(self._conninfo(member, primary, primary.port))
        member.follow(self._conninfo(member, primary))

    def children(self, region: str) -> list[Child]:
        """The supervisor's records of a region's server, which finds its place in the cluster before each start, and of
        what else decides who is the primary.
        """
        return [replace(self.members[region].child(), prepare=lambda: self.rejoin(region))]

    def url(self, region: str) -> str:
        """SQLAlchemy's address of the primary, whichever it is, as a region's processes reach it; the region's
        own server is named first.
        """
        near = sorted(self.members.values(), key=lambda member: member.region != region)
        hosts = ",".join(f"{LOOPBACK}:{self._reach(region, member.region, member.port)}" for member in near)
        own = self.members[region]
        return psycopg_url(f"postgresql://{USER}:{password(own.home, own.name)}@{hosts}/{USER}?sslmode=disable")

    def facts(self) -> dict[str, MemberFacts]:
        """What each region's server says of itself, asked at its own port."""
        own = [member.url("postgres") for member in self.members.values()]
        return dict(zip(self.members, ask_members([members_of(url)[0] for url in own]), strict=True))

    def primary(self) -> str | None:
        """The region of the server that takes writes, while all others follow it; None at other times."""
        facts = self.facts()
        taking = [region for region, one in facts.items() if one.takes_writes]
        followed = all(one.region is not None for one in facts.values())
        whole = followed and len({one.timeline for one in facts.values()}) == 1
        return taking[0] if len(taking) == 1 and whole else None

    def _primary_at_rest(self) -> ClusterMember:
        """The primary of servers that do not run: the first one before there is any."""
        made = [member for member in self.members.values() if member.is_made() and not member.is_standby()]
        return max(made, key=ClusterMember.timeline, default=next(iter(self.members.values())))

    def _conninfo(self, caller: ClusterMember, called: ClusterMember, port: int | None = None) -> str:
        port = port or self._reach(caller.region, called.region, called.port)
        secret = password(called.home, called.name)
        names: Mapping[str, str] = {"application_name": caller.region, "sslmode": "disable", "connect_timeout": "3"}
        return make_conninfo(host=LOOPBACK, port=port, user=USER, password=secret, dbname="postgres", **names)


def region_home(home: Path, region: str) -> Path:
    """The folder of a region's servers, logs and keys."""
    return home.expanduser().resolve() / "regions" / region


def regions_at(home: Path) -> tuple[str, ...]:
    """The regions whose servers a home holds; none where it is one of a single region."""
    return tuple(sorted(folder.name for folder in region_home(home, "").glob("*") if folder.is_dir()))
