"""Checks of servers, keys, loops and nodes, on facts that are given."""

from dataclasses import replace
from typing import Any

import pytest

from controlplane.policies.failover import MemberFacts
from controlplane.policies.readiness import Loop, LoopFacts
from controlplane.store.server_facts import ServerFacts, Standby
from ops.doctor import servers
from ops.doctor.finding import Level

OK, WARNING, FAILURE = Level.OK, Level.WARNING, Level.FAILURE
SERVER = ServerFacts(
    version=180006,
    now_s=1e9,
    is_standby=False,
    connections=10,
    connections_max=100,
    fsync=True,
    quorum="ANY 1 (a, b)",
    archiving=True,
    archive_fails=False,
)
STANDBY = Standby(name="a", state="streaming", sync_state="quorum", lag_s=0.01)
SECRETS = servers.Secrets(
    admin_keys=1,
    node_key_set=True,
    node_key_good=True,
    node_keys_unbound=False,
    database_url="postgresql+psycopg://tidepool:secret@db/tidepool",
    redis_url="redis://:secret@cache:6379/0",
    keys_mode=0o600,
    nodes=2,
)
NODE = servers.NodeFacts(name="n1", version="1", silent_s=1.0, missed=True)


@pytest.mark.parametrize(("found", "level"), [("0003", OK), ("0002", FAILURE), (None, FAILURE), ("0004", WARNING)])
def test_the_schema_fits_or_is_named(found: str | None, level: Level) -> None:
    assert servers.check_schema_revision(found, ("0003", "0002", "0001")).level == level


def test_versions_of_servers() -> None:
    assert servers.check_postgres_version(SERVER).found == "18.6"
    assert servers.check_postgres_version(replace(SERVER, version=140012)).level == FAILURE
    assert servers.check_redis_version("7.2.4").level == OK
    assert servers.check_redis_version("6.2.14").level == FAILURE


@pytest.mark.parametrize(
    ("ahead_s", "error_s", "level"),
    [(0.5, 0.0, OK), (-1.5, 0.0, WARNING), (1.5, 1.0, OK), (-5.5, 0.1, FAILURE), (6.0, 5.5, OK)],
)
def test_clocks_are_judged_as_far_as_they_are_known(ahead_s: float, error_s: float, level: Level) -> None:
    found = servers.check_clock("database", servers.Clock(ahead_s=ahead_s, error_s=error_s))
    assert (found.level, "limit 5 s" in found.found) == (level, True)


def test_only_a_primary_that_writes_to_its_disk_will_do() -> None:
    assert servers.check_primary(SERVER).level == OK
    assert servers.check_primary(replace(SERVER, is_standby=True)).level == FAILURE
    assert servers.check_primary(replace(SERVER, fsync=False)).level == FAILURE


@pytest.mark.parametrize(
    ("change", "standbys", "level"),
    [
        ({}, (STANDBY,), OK),
        ({}, (), FAILURE),
        ({}, (replace(STANDBY, sync_state="async"),), FAILURE),
        ({"quorum": ""}, (), WARNING),
        ({"quorum": ""}, (replace(STANDBY, sync_state="async"),), WARNING),
        ({}, (replace(STANDBY, lag_s=2.0),), WARNING),
        ({}, (STANDBY, replace(STANDBY, lag_s=11.0)), FAILURE),
        ({}, (replace(STANDBY, state="catchup"),), WARNING),
        ({}, (Standby(name="a", state=None, sync_state=None, lag_s=None),), WARNING),
        ({"is_standby": True}, (), OK),
    ],
)
def test_replication(change: dict[str, Any], standbys: tuple[Standby, ...], level: Level) -> None:
    assert servers.check_replication(replace(SERVER, **change, standbys=standbys)).level == level


@pytest.mark.parametrize(
    ("is_standby", "behind_s", "level"), [(True, 0.0, OK), (True, 5.1, FAILURE), (False, 0.0, WARNING)]
)
def test_the_replica_follows_its_primary(is_standby: bool, behind_s: float, level: Level) -> None:
    assert servers.check_replica(is_standby=is_standby, behind_s=behind_s, limit_s=5.0).level == level


def test_a_cluster_has_one_primary_and_all_others_follow_it() -> None:
    primary = MemberFacts(address="a:5432", region="us-east", takes_writes=True, timeline=2)
    standby = MemberFacts(address="b:5432", region="us-west", timeline=2)
    assert servers.check_members([primary, standby]).level == OK
    assert servers.check_members([standby]).level == FAILURE
    assert servers.check_members([primary, MemberFacts(address="b:5432")]).level == WARNING
    assert servers.check_members([primary, replace(standby, timeline=1)]).level == WARNING
    untold = servers.check_members([primary, replace(standby, timeline=0)])
    assert (untold.level, "GRANT pg_monitor" in untold.todo) == (WARNING, True)
    replaced = servers.check_members([replace(primary, timeline=1), replace(standby, takes_writes=True)])
    assert replaced.level == FAILURE
    assert replaced.todo.startswith("stop a:5432: b:5432 was promoted")


def test_a_primary_that_was_replaced_is_named() -> None:
    assert servers.check_term(2, 0).level == servers.check_term(2, 2).level == Level.OK
    replaced = servers.check_term(2, 3)
    assert replaced.level == Level.FAILURE
    assert "nodes have seen 3" in replaced.found


def test_an_archive_that_refuses_is_a_failure_and_none_is_not() -> None:
    assert servers.check_archive(SERVER).level == OK
    assert servers.check_archive(replace(SERVER, archiving=False)).level == OK
    assert servers.check_archive(replace(SERVER, archive_fails=True)).level == FAILURE


def test_connections_run_out_with_notice() -> None:
    assert servers.check_connections(SERVER).level == OK
    assert servers.check_connections(replace(SERVER, connections=81)).level == WARNING


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, {}),
        ({"admin_keys": 0}, {"admin key": FAILURE}),
        ({"node_key_set": False}, {"node key": WARNING}),
        ({"node_key_good": False}, {"node key": FAILURE}),
        ({"keys_mode": 0o644}, {"keys.json": FAILURE}),
        ({"keys_mode": None}, {}),
        ({"database_url": "postgresql+psycopg://tidepool@db/tidepool"}, {"password of database": WARNING}),
        ({"database_url": "postgresql+psycopg://tidepool@127.0.0.1/tidepool"}, {}),
        ({"redis_url": "redis://cache:6379/0"}, {"password of redis": WARNING}),
        ({"node_keys_unbound": True}, {"node keys": WARNING}),
        ({"node_keys_unbound": True, "nodes": 1}, {}),
    ],
)
def test_secrets(change: dict[str, Any], wrong: dict[str, Level]) -> None:
    found = servers.check_secrets(replace(SECRETS, **change))
    assert {each.check: each.level for each in found if each.level != OK} == wrong
    assert "secret@" not in str(found)


def test_a_late_loop_is_named_with_its_error() -> None:
    periods = dict.fromkeys(Loop, 15.0)
    fresh = tuple(LoopFacts(loop=loop, since_s=0.0, last_success_s=1000.0) for loop in Loop)
    assert [each.level for each in servers.check_loops(fresh, 1010.0, periods)] == [OK]
    young = replace(fresh[0], since_s=1005.0, last_success_s=None)
    assert servers.check_loops((young, *fresh[1:]), 1010.0, periods)[0].found == (
        f"none is late (1 of {len(Loop)} have not succeeded yet)"
    )
    failed = replace(fresh[1], last_success_s=100.0, last_failure_s=900.0, last_error="no disk")
    (late,) = servers.check_loops((fresh[0], failed), 1010.0, periods)
    assert (late.check, late.level, late.found) == ("loop beat", FAILURE, "it last succeeded 910 s ago; no disk")


def test_nodes_that_are_silent() -> None:
    assert servers.check_heartbeats([], 5.0).level == WARNING
    assert servers.check_heartbeats([NODE], 5.0).level == OK
    silent = replace(NODE, name="n2", silent_s=6.0)
    assert servers.check_heartbeats([NODE, silent], 5.0).level == FAILURE
    assert servers.check_heartbeats([NODE, replace(silent, missed=False)], 5.0).level == WARNING
    many = [replace(silent, name=f"n{index}", silent_s=None) for index in range(8)]
    assert servers.check_heartbeats(many, 5.0).found.endswith("n0, n1, n2, n3, n4 and 3 more")


def test_nodes_ports_clocks_and_versions() -> None:
    far = replace(NODE, name="n2", error="timed out", clock=servers.Clock(ahead_s=-9.0, error_s=1.0), version="2")
    ports, clocks = servers.check_node_ports([NODE, far]), servers.check_node_clocks([NODE, far])
    versions = servers.check_node_versions([NODE, far], "1")
    assert [each and each.level for each in (ports, clocks, versions)] == [FAILURE, FAILURE, WARNING]
    assert clocks is not None
    assert "n2" in clocks.check
    assert [each and each.level for each in (servers.check_node_ports([NODE]),)] == [OK]
    assert servers.check_node_clocks([NODE]) is None
    assert servers.check_node_ports([]) is servers.check_node_versions([], "1") is None


def test_files() -> None:
    assert servers.check_files(None, "s3://b").level == OK
    assert servers.check_files("denied", "s3://b").level == FAILURE
