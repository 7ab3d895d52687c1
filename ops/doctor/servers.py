"""Checks of Postgres, Redis, the keys, the loops, the nodes and the store for files; each takes facts and no more."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from controlplane.policies.failover import MemberFacts
from controlplane.policies.readiness import Loop, LoopFacts, choose_late_loops
from controlplane.store.schema import too_old
from controlplane.store.server_facts import ServerFacts, Standby
from ops.doctor.finding import Finding, failure, good, warning

POSTGRES_MIN = 15
REDIS_MIN = 7
CLOCK_WARNING_S = 1.0
CLOCK_LIMIT_S = 5.0
LAG_WARNING_S = 1.0
LAG_LIMIT_S = 10.0
CONNECTIONS_SHARE_MAX = 0.8
_NAMES_SHOWN = 5
_LOCAL = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, kw_only=True)
class Clock:
    """How far another clock is ahead of this machine's, and by how much that may be wrong."""

    ahead_s: float
    error_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """A node: its version, how long ago its last heartbeat came (None: never), whether it is lost while it is silent,
    and how its port answered from here. `clock` None: it does not tell the time.
    """

    name: str
    version: str | None
    silent_s: float | None
    missed: bool
    error: str | None = None
    clock: Clock | None = None


@dataclass(frozen=True, kw_only=True)
class Secrets:
    """What is set, without the secrets themselves. `node_key`: whether it is set, and whether the database knows it;
    `keys_mode`: permission bits of keys.json, None where there is none.
    """

    admin_keys: int
    node_key_set: bool
    node_key_good: bool
    node_keys_unbound: bool
    database_url: str
    redis_url: str
    keys_mode: int | None = None
    nodes: int = 0


def check_schema_revision(found: str | None, known: Sequence[str]) -> Finding:
    """The schema fits this version."""
    if (fault := too_old(found, known)) is not None:
        return failure("schema", fault, "run `tidepool migrate`; processes of the previous release may go on meanwhile")
    if found not in known:
        todo = "upgrade this machine: it runs an older release than the one that migrated the database"
        return warning("schema", f"{found}, newer than this release's {known[0]}", todo)
    return good("schema", str(found))


def check_postgres_version(facts: ServerFacts) -> Finding:
    """The server is of a release that is known to work."""
    major, minor = divmod(facts.version, 10_000)
    if major < POSTGRES_MIN:
        return failure("postgres", f"{major}.{minor}", f"upgrade it to PostgreSQL {POSTGRES_MIN} or newer")
    return good("postgres", f"{major}.{minor}")


def check_redis_version(version: str) -> Finding:
    """The server is of a release that is known to work. Valkey says which Redis it is compatible with."""
    if int(version.partition(".")[0]) < REDIS_MIN:
        return failure("redis", version, f"upgrade it to Redis {REDIS_MIN} or newer, or to Valkey 8 or newer")
    return good("redis", version)


def check_clock(what: str, clock: Clock) -> Finding:
    """A clock agrees with this machine's, as far as the time of the question tells."""
    wrong_s = max(0.0, abs(clock.ahead_s) - clock.error_s)
    found = f"{abs(clock.ahead_s):.3f} s {'ahead' if clock.ahead_s >= 0 else 'behind'} (limit {CLOCK_LIMIT_S:g} s)"
    todo = "run an NTP client (chrony, systemd-timesyncd) on both machines, and see which of the two is wrong"
    if wrong_s > CLOCK_LIMIT_S:
        return failure(f"clock of {what}", found, todo)
    if wrong_s > CLOCK_WARNING_S:
        return warning(f"clock of {what}", found, todo)
    return good(f"clock of {what}", found)


def check_primary(facts: ServerFacts) -> Finding:
    """The database may be written."""
    if facts.is_standby:
        todo = "name the primary in TIDEPOOL_DATABASE_URL: all hosts, with target_session_attrs=read-write"
        return failure("primary", "this server is a standby, which cannot be written", todo)
    if not facts.fsync:
        return failure("primary", "fsync is off: a power cut loses what was acknowledged", "set fsync = on")
    return good("primary", "it can be written")


def check_term(term: int, reported: int) -> Finding:
    """No node has seen a newer primary than this one."""
    if reported > term:
        todo = (
            "see which server is the primary: TIDEPOOL_DATABASE_URL leads to one that was replaced. Only if this one"
            " was restored from an older backup on purpose: `tidepool term raise`"
        )
        return failure("term", f"{term}, and nodes have seen {reported}: they do not obey this primary", todo)
    return good("term", str(term))


def check_connections(facts: ServerFacts) -> Finding:
    """Postgres has room for more processes."""
    found = f"{facts.connections} of {facts.connections_max}"
    if facts.connections > CONNECTIONS_SHARE_MAX * facts.connections_max:
        todo = "raise max_connections, lower TIDEPOOL_DATABASE_POOL_SIZE, or run fewer processes"
        return warning("connections", found, todo)
    return good("connections", found)


def check_replication(facts: ServerFacts) -> Finding:
    """Standbys follow closely, and those that commits wait for are there."""
    if facts.is_standby:
        return good("replication", "see the primary")
    waits_for = [each for each in facts.standbys if each.sync_state in {"sync", "quorum"}]
    if facts.quorum and not waits_for and all(each.sync_state is not None for each in facts.standbys):
        todo = "start a standby that synchronous_standby_names names: until then no batch is accepted"
        return failure("replication", f"no standby of {facts.quorum!r} is there: commits wait", todo)
    if not facts.standbys:
        todo = "fine on one machine; else add a standby, or back up often with `tidepool backup`"
        return warning("replication", "no standby: the loss of this server loses what the last backup lacks", todo)
    found = ", ".join(map(_standby_text, facts.standbys))
    if any(each.sync_state is None for each in facts.standbys):
        return warning("replication", found, "GRANT pg_monitor to the user of TIDEPOOL_DATABASE_URL to see their state")
    lag_s = max(each.lag_s or 0.0 for each in facts.standbys)
    todo = "look at the standby's disk and network, and at long queries there"
    if lag_s > LAG_LIMIT_S:
        return failure("replication", f"{found} (limit {LAG_LIMIT_S:g} s)", todo)
    if lag_s > LAG_WARNING_S or any(each.state != "streaming" for each in facts.standbys):
        return warning("replication", found, todo)
    if not facts.quorum:
        todo = "set synchronous_standby_names = 'ANY 1 (...)', so that what is acknowledged is on two servers"
        return warning("replication", f"{found}; commits wait for none of them", todo)
    return good("replication", found)


def _standby_text(standby: Standby) -> str:
    lag = "" if standby.lag_s is None else f", {standby.lag_s:.3f} s behind"
    return f"{standby.name or 'a standby'} {standby.state or 'in an unknown state'} ({standby.sync_state or '?'}{lag})"


def check_members(members: Sequence[MemberFacts]) -> Finding:
    """Of the servers that TIDEPOOL_DATABASE_URL names one takes writes, and the others follow it."""
    silent = [one.address for one in members if one.region is None]
    primaries = [one for one in members if one.takes_writes]
    found = ", ".join(_member_text(one) for one in members)
    if len(primaries) > 1:
        newest = max(primaries, key=lambda one: one.timeline)
        old = ", ".join(one.address for one in primaries if one is not newest)
        return failure("cluster", found, f"stop {old}: {newest.address} was promoted after it; then pg_rewind it")
    if not primaries:
        return failure("cluster", found, "promote a standby: `tidepool failover REGION --dry-run` says what is lost")
    if silent:
        return warning("cluster", found, f"see why {', '.join(silent)} does not answer: one more loss may stop writes")
    if not all(one.timeline for one in members):
        return warning("cluster", found, "GRANT pg_monitor to the user of TIDEPOOL_DATABASE_URL to see all timelines")
    if stray := [one.address for one in members if one.timeline != primaries[0].timeline]:
        return warning(
            "cluster", found, f"{', '.join(stray)} does not follow the primary: pg_rewind it, or copy it anew"
        )
    return good("cluster", found)


def _member_text(member: MemberFacts) -> str:
    if member.region is None:
        return f"{member.address} silent"
    timeline = f"timeline {member.timeline}" if member.timeline else "an unknown timeline"
    return f"{member.region} {'primary' if member.takes_writes else 'standby'} on {timeline}"


def check_replica(*, is_standby: bool, behind_s: float, limit_s: float) -> Finding:
    """The region's standby, from which gateways read while no primary is there, follows closely."""
    if not is_standby:
        todo = (
            "name a standby of this region in TIDEPOOL_DATABASE_REPLICA_URL: this one is lost together with the primary"
        )
        return warning("replica", "it is a primary", todo)
    found = f"{behind_s:.1f} s behind (limit {limit_s:g} s)"
    if behind_s > limit_s:
        return failure("replica", found, "look at its disk and network: gateways do not read from it meanwhile")
    return good("replica", found)


def check_archive(facts: ServerFacts) -> Finding:
    """The WAL archive, which restoring to a moment needs, takes what it is given."""
    if facts.archive_fails:
        todo = "see the server's log for what archive_command says; until it works WAL fills the server's disk"
        return failure("WAL archive", "the last file could not be archived", todo)
    if not facts.archiving:
        return good("WAL archive", "off: a restore brings back the last backup, and no moment after it")
    return good("WAL archive", "on")


def check_secrets(secrets: Secrets) -> list[Finding]:
    """Keys exist, and servers that others can reach have passwords."""
    found = []
    if not secrets.admin_keys:
        found.append(
            failure("admin key", "none is good", "run `tidepool init --force` on a machine of the control plane")
        )
    else:
        found.append(good("admin key", f"{secrets.admin_keys} good"))
    found.append(_node_key(secrets))
    for name, url in (("database", secrets.database_url), ("redis", secrets.redis_url)):
        address = urlsplit(url)
        if not address.password and (address.hostname or "") not in _LOCAL:
            todo = f"give it a password, or client certificates, and name it in TIDEPOOL_{name.upper()}_URL"
            found.append(warning(f"password of {name}", f"none, and {address.hostname} is another machine", todo))
    if secrets.keys_mode is not None and secrets.keys_mode & 0o077:
        mode = f"keys.json may be read by others (mode {secrets.keys_mode:04o})"
        found.append(failure("keys.json", mode, "chmod 600 it, and rotate its keys: `tidepool key rotate`"))
    if secrets.node_keys_unbound and secrets.nodes > 1:
        todo = "give each node a key of its own (`tidepool key create NODE --role node --node NODE`), and unset it"
        found.append(warning("node keys", "TIDEPOOL_NODE_KEYS_UNBOUND: a node may speak for another", todo))
    return found


def _node_key(secrets: Secrets) -> Finding:
    if not secrets.node_key_set:
        todo = "export TIDEPOOL_NODE_KEY=$(tidepool key secret node) for gateways and dispatchers"
        return warning("node key", "TIDEPOOL_NODE_KEY is not set in this environment", todo)
    if not secrets.node_key_good:
        todo = "set the secret of a good key of role node; `tidepool key list` shows them"
        return failure("node key", "the database does not know TIDEPOOL_NODE_KEY, or it was revoked", todo)
    return good("node key", "set, and good")


def check_loops(loops: tuple[LoopFacts, ...], now_s: float, periods_s: Mapping[Loop, float]) -> list[Finding]:
    """Beat, workers, forecasters, dispatchers and what they run have succeeded of late."""
    late = choose_late_loops(loops, now_s, periods_s)
    if not late:
        waiting = sum(facts.last_success_s is None for facts in loops)
        still = f"none is late ({waiting} of {len(loops)} have not succeeded yet)"
        return [good("loops", still if waiting else f"all {len(loops)} succeeded of late")]
    by_name = {facts.loop: facts for facts in loops}
    return [failure(f"loop {loop}", _late_text(by_name[loop], now_s), _LOOP_TODO.get(loop, _RUN_TODO)) for loop in late]


_RUN_TODO = "see the log of `tidepool worker`: beat starts this loop and a worker runs it"
_LOOP_TODO = {
    Loop.BEAT: "start `tidepool beat`; without it nothing is scaled, planned or expired",
    Loop.WORKER: "start `tidepool worker`",
    Loop.FORECASTER: "start `tidepool forecaster`",
    Loop.DISPATCHER: "start `tidepool dispatcher`; without it no batch goes on",
}


def _late_text(facts: LoopFacts, now_s: float) -> str:
    if facts.last_success_s is None:
        text = "it has never succeeded"
    else:
        text = f"it last succeeded {now_s - facts.last_success_s:.0f} s ago"
    failed = facts.last_failure_s is not None and facts.last_failure_s > (facts.last_success_s or 0.0)
    return f"{text}; {facts.last_error}" if failed and facts.last_error else text


def check_heartbeats(nodes: Sequence[NodeFacts], stale_s: float) -> Finding:
    """Nodes that shall serve send heartbeats."""
    if not nodes:
        return warning("heartbeats", "no node has joined", "start an agent: `tidepool agent` (deploy.md)")
    silent = [node for node in nodes if node.silent_s is None or node.silent_s > stale_s]
    found = f"{len(silent)} of {len(nodes)} nodes are silent for more than {stale_s:g} s: {_names(silent)}"
    todo = "see the agent's log there; `tidepool node delete NODE` where it is gone for good, drain it where it is off"
    if any(node.missed for node in silent):
        return failure("heartbeats", found, todo)
    if silent:
        return warning("heartbeats", f"{found}; they were drained, shut down, or never heard of", todo)
    return good("heartbeats", f"{len(nodes)} nodes")


def check_node_ports(nodes: Sequence[NodeFacts]) -> Finding | None:
    """Agents that send heartbeats can be reached from here; None where there are none."""
    asked = [node for node in nodes if node.silent_s is not None]
    closed = [node for node in asked if node.error is not None]
    if closed:
        todo = "open the way from gateways and dispatchers to the agents' ports, or see TIDEPOOL_AGENT_ADVERTISE_URL"
        return failure("agents' ports", f"{_names(closed)}: {closed[0].error}", todo)
    return good("agents' ports", f"{len(asked)} answer") if asked else None


def check_node_clocks(nodes: Sequence[NodeFacts]) -> Finding | None:
    """The nodes' clocks agree with this machine's: the worst of them; None where no node tells its time."""
    told = [(abs(node.clock.ahead_s), node) for node in nodes if node.clock is not None]
    if not told:
        return None
    _, worst = max(told, key=lambda pair: pair[0])
    assert worst.clock is not None
    return check_clock(f"nodes (worst: {worst.name})", worst.clock)


def check_node_versions(nodes: Sequence[NodeFacts], ours: str | None) -> Finding | None:
    """Nodes run this release, or are about to."""
    others = [node for node in nodes if node.version is not None and node.version != ours]
    if others:
        versions = ", ".join(sorted({str(node.version) for node in others}))
        todo = "finish the upgrade: two neighbouring releases run side by side, and no more than two"
        return warning("nodes' versions", f"{versions} on {_names(others)}; here {ours}", todo)
    return good("nodes' versions", f"{ours} everywhere") if nodes else None


def check_files(error: str | None, where: str) -> Finding:
    """Files can be stored, read and deleted."""
    if error is not None:
        return failure(
            "file store", f"{where}: {error}", "see who may write there; batches cannot be accepted without it"
        )
    return good("file store", f"{where} can be written, read and deleted from")


def _names(nodes: Sequence[NodeFacts]) -> str:
    more = len(nodes) - _NAMES_SHOWN
    return ", ".join(node.name for node in nodes[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
