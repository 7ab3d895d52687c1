"""The servers of a Postgres cluster: what each says of itself, and what it is told."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psycopg
import psycopg.conninfo
from psycopg import sql

from controlplane.database_address import CONNECT_TIMEOUT_S, libpq_url
from controlplane.policies.failover import MemberFacts, standbys_waited_for

PROMOTED_WITHIN_S = 60
_ANSWERS_WITHIN_MS = 5_000
_DETACHED_WITHIN_S = 10.0
_LOOK_EVERY_S = 0.02
_ASK_EVERY_S = 0.25
_CUT_OFF_CLASSES = ("08", "57")
"""Classes of SQLSTATE of errors that end a statement from outside: of the connection, and of an operator's or the
server's intervention.
"""
_FACTS = """
    SELECT current_setting('cluster_name') AS region,
        current_setting('synchronous_standby_names') AS standbys,
        NOT standby AS takes_writes,
        CASE WHEN standby THEN NULL
            ELSE ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int END AS timeline,
        pg_wal_lsn_diff(CASE WHEN standby
            THEN greatest(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn()) ELSE pg_current_wal_lsn() END, '0/0')
            AS received_bytes,
        extract(epoch FROM pg_last_xact_replay_timestamp()) AS replayed_at_s
    FROM pg_is_in_recovery() AS standby
"""
_RECEIVED_TIMELINE = """
    SELECT max(('x' || left(name, 8))::bit(32)::int) FROM pg_ls_waldir() WHERE name ~ '^[0-9A-F]{24}$'
"""
"""Of the newest segment that a standby has: its last checkpoint may be of an older timeline for minutes."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One server. `parameters` are libpq's of a connection to it alone."""

    address: str
    parameters: Mapping[str, str]

    def facts(self) -> MemberFacts:
        """What it says of itself; only its address where it does not answer in time, or has no `cluster_name`."""
        try:
            with self._connect() as connection:
                row = connection.execute(_FACTS).fetchone()
                assert row is not None
                region, standbys, takes_writes, timeline, received, replayed = row
                if not takes_writes:
                    timeline = _received_timeline(connection)
        except psycopg.OperationalError:
            return MemberFacts(address=self.address)
        return MemberFacts(
            address=self.address,
            region=region or self.address,
            takes_writes=takes_writes,
            timeline=timeline,
            received_bytes=int(received),
            replayed_at_s=None if replayed is None else float(replayed),
            waits_for=standbys_waited_for(standbys),
        )

    def promote(self) -> float:
        """Make it the primary; returns after how many seconds it was one. It is asked itself where the answer is no,
        and until a minute has passed where none comes. An interrupt does not take a promotion back, which is waited
        for then too; a second one ends that.

        Raises:
            psycopg.Error: it may not, is no standby, or was not heard to be one within a minute.
            TimeoutError: it is not one after a minute. It may become one yet.
        """
        started_s, was_told = time.monotonic(), False
        connection = self._connect()
        try:
            with connection:
                connection.execute("SET statement_timeout TO 0")
                was_told = True
                row = connection.execute("SELECT pg_promote(true, %s)", [PROMOTED_WITHIN_S]).fetchone()
        except psycopg.OperationalError as error:
            if not (_was_cut_off(error) and self._takes_writes_by(started_s + PROMOTED_WITHIN_S)):
                raise
        except KeyboardInterrupt:
            if not (was_told and self._takes_writes_by(started_s + PROMOTED_WITHIN_S)):
                raise
        else:
            if not (row and row[0]) and not self.facts().takes_writes:
                raise TimeoutError(
                    f"{self.address} was told to become the primary and is none after {PROMOTED_WITHIN_S} s; it may"
                    " become one yet: see its log, and `tidepool failover --dry-run`"
                )
        return time.monotonic() - started_s

    def _takes_writes_by(self, deadline_s: float) -> bool:
        """Whether it is heard to be the primary by then; it is asked at least once."""
        while not self.facts().takes_writes:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_ASK_EVERY_S)
        return True

    def source(self) -> str:
        """The address that a standby receives from, with the password.

        Raises:
            psycopg.Error: its user may not ask, or it does not answer.
        """
        with self._connect() as connection:
            row = connection.execute("SELECT current_setting('primary_conninfo')").fetchone()
        return str(row[0]) if row else ""

    def detach(self) -> None:
        """Have a standby receive nothing from its primary any more.

        Raises:
            psycopg.Error: it may not.
            TimeoutError: it still receives after some seconds.
        """
        with self._connect() as connection:
            _point(connection, "")
            deadline_s = time.monotonic() + _DETACHED_WITHIN_S
            while connection.execute("SELECT 1 FROM pg_stat_get_wal_receiver() WHERE pid IS NOT NULL").fetchone():
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"{self.address} still receives from its primary")
                time.sleep(_LOOK_EVERY_S)

    def attach(self, conninfo: str) -> None:
        """Have a standby receive from the primary at that address again.

        Raises:
            psycopg.Error: it may not.
        """
        with self._connect() as connection:
            _point(connection, conninfo)

    def follow(self, primary: "Member", conninfo: str) -> None:
        """Have a standby follow another primary, with the user and the password of `conninfo`, which it had before; or
        with this command's where that is empty.

        Raises:
            psycopg.Error: it may not.
        """
        own = psycopg.conninfo.make_conninfo(**{**self.parameters, "dbname": ""})
        address = {"host": primary.parameters["host"], "port": primary.parameters["port"]}
        self.attach(psycopg.conninfo.make_conninfo(conninfo or own, **address))

    def _connect(self) -> psycopg.Connection[Any]:
        parameters: dict[str, Any] = {**self.parameters, "options": f"-c statement_timeout={_ANSWERS_WITHIN_MS}"}
        return psycopg.connect(**parameters, autocommit=True)


def _was_cut_off(error: psycopg.OperationalError) -> bool:
    """Whether a statement may have done its work, though no answer came. libpq's own errors have no SQLSTATE."""
    return error.sqlstate is None or error.sqlstate.startswith(_CUT_OFF_CLASSES)


def _received_timeline(connection: psycopg.Connection[Any]) -> int:
    """The timeline of the log that a standby has received; 0: its user may not ask."""
    try:
        row = connection.execute(_RECEIVED_TIMELINE).fetchone()
    except psycopg.errors.InsufficientPrivilege:
        return 0
    return int(row[0] or 0) if row else 0


def _point(connection: psycopg.Connection[Any], conninfo: str) -> None:
    connection.execute(sql.SQL("ALTER SYSTEM SET primary_conninfo = {}").format(sql.Literal(conninfo)))
    connection.execute("SELECT pg_reload_conf()")


def without_secrets(conninfo: str) -> str:
    """A standby's `primary_conninfo` to be shown: what libpq calls a secret is left out."""
    try:
        options = psycopg.pq.Conninfo.parse(conninfo.encode())
    except psycopg.Error:
        return "an address that libpq does not read here"
    shown = {option.keyword.decode(): option.val for option in options if option.val and option.dispchar != b"*"}
    return psycopg.conninfo.make_conninfo(**{name: value.decode() for name, value in shown.items()})


def members_of(url: str) -> list[Member]:
    """The servers that an address names, in its order. `url`: as `controlplane.database_address` returns it."""
    given = {name: str(value) for name, value in psycopg.conninfo.conninfo_to_dict(libpq_url(url)).items()}
    hosts = given.pop("host", "").split(",")
    ports = given.pop("port", "5432").split(",")
    ports = ports if len(ports) == len(hosts) else ports * len(hosts)
    given.pop("target_session_attrs", None)
    given["connect_timeout"] = str(CONNECT_TIMEOUT_S)
    return [
        Member(address=f"{host}:{port}", parameters={**given, "host": host, "port": port})
        for host, port in zip(hosts, ports, strict=True)
    ]


def ask_members(members: Sequence[Member]) -> list[MemberFacts]:
    """The facts of all, asked at once, in the same order."""
    with ThreadPoolExecutor(max(1, len(members))) as pool:
        return list(pool.map(Member.facts, members))
