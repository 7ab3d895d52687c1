"""Gathers the facts of an installation: one function for each server, which the checks then judge."""

import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

import httpx2 as httpx
import redis
from alembic.runtime.migration import MigrationContext
from redis.backoff import NoBackoff
from redis.retry import Retry

import migrations
from controlplane.planner.runs import loop_periods_s
from controlplane.settings import Settings
from controlplane.store.blobs.open import open_blobs
from controlplane.store.fleet import NodePulse, node_pulses
from controlplane.store.keys import find_key, good_keys_by_role
from controlplane.store.log_position import read_log_position
from controlplane.store.loop_runs import read_loop_runs
from controlplane.store.server_facts import read_server
from controlplane.store.session import Database, make_engine
from controlplane.store.tables import Role
from controlplane.store.terms import read_term
from dataplane.protocol.version import tidepool_version
from ops.client.home import keys_file
from ops.doctor import machine, servers
from ops.doctor.examine import Examination
from ops.doctor.finding import Finding, failure
from ops.failover.members import ask_members, members_of

_TIMEOUT_S = 5
_NODES_AT_ONCE = 16
_DATE_ERROR_S = 1.0
"""HTTP tells the time to the second."""


def machine_examinations(home: Path, *, is_node: bool) -> Mapping[str, Examination]:
    """What can be said of this machine alone."""
    programs = machine.read_programs()
    return {
        "programs": lambda: [machine.check_python(programs), machine.check_package(programs)],
        "disks": lambda: [
            machine.check_disk(machine.read_space(home), "disk of the home folder"),
            machine.check_disk(machine.read_temporary_space(), "disk for temporary files"),
        ],
        "shared memory": lambda: [machine.check_shared_memory(machine.read_shared_memory(), is_node=is_node)],
        "GPUs": lambda: [machine.check_gpus(machine.read_gpus(), is_node=is_node)],
    }


def control_examinations(settings: Settings, url: str) -> Mapping[str, Examination]:
    """What the servers and processes of an installation say."""
    patient = settings.model_copy(update={"database_timeout_s": _TIMEOUT_S, "database_pool_size": 1})

    def on_database(look: Callable[[Database], list[Finding]]) -> Examination:
        def run() -> list[Finding]:
            database = Database(make_engine(patient))
            try:
                return look(database)
            finally:
                database.close()

        return run

    replica = {} if settings.database_replica_url is None else {"replica": on_database(_examine_replica(patient))}
    members = members_of(settings.database_url.get_secret_value())
    cluster = {"cluster": lambda: [servers.check_members(ask_members(members))]} if len(members) > 1 else {}
    return (
        replica
        | cluster
        | {
            "database": on_database(_examine_server),
            "schema": on_database(_examine_schema),
            "term": on_database(_examine_term),
            "redis": lambda: _examine_redis(settings),
            "keys": on_database(lambda database: _examine_keys(database, settings)),
            "loops": on_database(lambda database: _examine_loops(database, settings)),
            "nodes": on_database(lambda database: _examine_nodes(database, settings)),
            "file store": lambda: [_examine_files(settings)],
            "gateway": lambda: [examine_port(url, "gateway", "TIDEPOOL_URL")],
        }
    )


def stopped_stack(home: Path) -> Mapping[str, Examination]:
    """In place of what the servers of `tidepool up` would say, that it does not run."""
    stopped = failure("tidepool up", f"it is not running on {home} (TIDEPOOL_HOME)", "start it, and examine it again")
    return {"tidepool up": lambda: [stopped]}


def examine_port(url: str, what: str, setting: str) -> Finding:
    """Whether the port of an address, which a setting names, accepts connections."""
    address = urlsplit(url)
    port = address.port or (443 if address.scheme == "https" else 80)
    error = machine.connect_error(address.hostname or "", port)
    return machine.check_port(f"{address.hostname}:{port}", error, what=what, setting=setting)


def _examine_server(database: Database) -> list[Finding]:
    with database.transaction() as session:
        read_server(session)  # the first question connects, and would blur the clock
        before_s = time.time()
        facts = read_server(session)
        after_s = time.time()
    clock = servers.Clock(ahead_s=facts.now_s - (before_s + after_s) / 2, error_s=(after_s - before_s) / 2)
    return [
        servers.check_postgres_version(facts),
        servers.check_primary(facts),
        servers.check_connections(facts),
        servers.check_replication(facts),
        servers.check_archive(facts),
        servers.check_clock("database", clock),
    ]


def _examine_replica(settings: Settings) -> Callable[[Database], list[Finding]]:
    assert settings.database_replica_url is not None
    of_replica = settings.model_copy(update={"database_url": settings.database_replica_url})

    def run(primary: Database) -> list[Finding]:
        with primary.transaction() as session:
            written = read_log_position(session)  # before the standby is asked, which may only be further
        replica = Database(make_engine(of_replica))
        try:
            with replica.transaction() as session:
                is_standby, replayed = read_server(session).is_standby, read_log_position(session)
        finally:
            replica.close()
        behind_s = 0.0 if replayed.bytes >= written.bytes else replayed.replayed_ago_s or 0.0
        return [servers.check_replica(is_standby=is_standby, behind_s=behind_s, limit_s=settings.replica_lag_max_s)]

    return run


def _examine_schema(database: Database) -> list[Finding]:
    with database.transaction() as session:
        found = MigrationContext.configure(session.connection()).get_current_revision()
    return [servers.check_schema_revision(found, migrations.revisions())]


def _examine_term(database: Database) -> list[Finding]:
    with database.transaction() as session:
        row = read_term(session)
    return [] if row is None else [servers.check_term(row.term, row.reported)]


def _examine_redis(settings: Settings) -> list[Finding]:
    limits = {"socket_timeout": float(_TIMEOUT_S), "socket_connect_timeout": float(_TIMEOUT_S)}
    with redis.Redis.from_url(settings.redis_url.get_secret_value(), retry=Retry(NoBackoff(), 0), **limits) as client:
        version = str(client.info("server")["redis_version"])
        before_s = time.time()
        seconds, micros = client.time()
        after_s = time.time()
    clock = servers.Clock(ahead_s=seconds + micros / 1e6 - (before_s + after_s) / 2, error_s=(after_s - before_s) / 2)
    return [servers.check_redis_version(version), servers.check_clock("redis", clock)]


def _examine_keys(database: Database, settings: Settings) -> list[Finding]:
    node_key = settings.node_key.get_secret_value()
    with database.transaction() as session:
        counts = good_keys_by_role(session)
        known = find_key(session, node_key) if node_key else None
        nodes = len(node_pulses(session))
    file = keys_file(settings.home.expanduser())
    secrets = servers.Secrets(
        admin_keys=counts.get(Role.ADMIN, 0),
        node_key_set=bool(node_key),
        node_key_good=known is not None and known.role == Role.NODE,
        node_keys_unbound=settings.node_keys_unbound,
        database_url=settings.database_url.get_secret_value(),
        redis_url=settings.redis_url.get_secret_value(),
        keys_mode=file.stat().st_mode & 0o777 if file.exists() else None,
        nodes=nodes,
    )
    return servers.check_secrets(secrets)


def _examine_loops(database: Database, settings: Settings) -> list[Finding]:
    with database.transaction() as session:
        now_s, loops = read_loop_runs(session)
    return servers.check_loops(loops, now_s, loop_periods_s(settings))


def _examine_nodes(database: Database, settings: Settings) -> list[Finding]:
    with database.transaction() as session:
        rows = node_pulses(session)
    verify: bool | str = True if settings.tls_ca_file is None else str(settings.tls_ca_file)
    asking = httpx.Client(timeout=machine.CONNECT_TIMEOUT_S, trust_env=False, verify=verify)
    with asking as client, ThreadPoolExecutor(_NODES_AT_ONCE) as threads:
        nodes = list(threads.map(lambda row: _ask_node(client, row), rows))
    found = [
        servers.check_heartbeats(nodes, settings.heartbeat_stale_s),
        servers.check_node_ports(nodes),
        servers.check_node_clocks(nodes),
        servers.check_node_versions(nodes, tidepool_version()),
    ]
    return [each for each in found if each is not None]


def _ask_node(client: httpx.Client, row: NodePulse) -> servers.NodeFacts:
    """The node with how its port answered; one that has sent no heartbeat is not asked."""
    facts = servers.NodeFacts(name=row.name, version=row.version, silent_s=row.silent_s, missed=row.missed)
    if facts.silent_s is None:
        return facts
    try:
        before_s = time.time()
        answer = client.get(f"{row.url}/livez")
        after_s = time.time()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return replace(facts, error=str(error) or type(error).__name__)
    date = answer.headers.get("date")
    if date is None:
        return facts
    ahead_s = parsedate_to_datetime(date).timestamp() - (before_s + after_s) / 2
    return replace(facts, clock=servers.Clock(ahead_s=ahead_s, error_s=_DATE_ERROR_S + (after_s - before_s) / 2))


def _examine_files(settings: Settings) -> Finding:
    """Store, read and delete a small file."""
    stores = (settings.files_url or str(settings.home.expanduser() / "files"), settings.files_copy_url)
    where = " and ".join(store for store in stores if store)
    name, content = f"doctor-{uuid.uuid4().hex}", b"written by tidepool doctor"
    try:
        blobs = open_blobs(settings)
        with blobs.writing(name) as stream:
            stream.write(content)
        try:
            with blobs.open(name) as stream:
                read = stream.read()
        finally:
            blobs.delete(name)
    except Exception as error:  # a disk's, a bucket's or a setting's: each says what is wrong
        return servers.check_files(str(error) or type(error).__name__, where)
    return servers.check_files(None if read == content else "what was read is not what was written", where)
