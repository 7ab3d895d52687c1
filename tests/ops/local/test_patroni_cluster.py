"""Patroni and etcd are drilled with the settings that are recommended, and a lost region is replaced."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml

from controlplane.database_address import libpq_url
from ops.local.etcd_cluster import TIMES
from ops.local.patroni_cluster import DCS, PatroniCluster
from ops.local.supervisor import Supervisor

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "ops/docs/postgres-over-regions.md").read_text()
PATRONI = ROOT / ".clients/patroni/bin/python"
REGIONS = ("region-1", "region-2", "region-3")
PATIENCE_S = 120.0


def wait_until(is_so: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_the_documentation_recommends_what_is_drilled() -> None:
    page: dict[str, Any] = yaml.safe_load(PAGE.partition("```yaml\n")[2].partition("```")[0])
    assert page["bootstrap"]["dcs"] == DCS
    assert all(f"--{name}={value}" in PAGE for name, value in TIMES.items())


def test_the_settings_keep_patronis_own_rule() -> None:
    assert DCS["ttl"] >= 20, "Patroni takes no less"
    assert DCS["loop_wait"] + 2 * DCS["retry_timeout"] <= DCS["ttl"]
    assert TIMES["election-timeout"] < 1000 * DCS["retry_timeout"], "the loss of etcd's leader demotes nobody"


def test_patroni_stops_before_the_etcd_that_it_tells(tmp_path: Path) -> None:
    cluster = PatroniCluster(tmp_path, REGIONS, python=PATRONI)
    etcd, patroni = cluster.children("region-2")
    assert patroni.after == (etcd.name,)
    assert "--name=region-2" in etcd.argv


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[PatroniCluster, dict[str, Supervisor]]]:
    """A cluster that runs, and the supervisors of its regions."""
    if not PATRONI.exists():
        pytest.skip("Patroni and etcd are not installed: make .clients/patroni/.ready")
    cluster = PatroniCluster(tmp_path, REGIONS, python=PATRONI, fsync=False)
    cluster.prepare(lambda _url: None)
    running = {region: Supervisor(cluster.children(region)) for region in REGIONS}
    try:
        for supervisor in running.values():
            supervisor.start()
        wait_until(cluster.primary)
        yield cluster, running
    finally:
        for supervisor in running.values():
            supervisor.stop()


@pytest.mark.slow
def test_a_region_lost_with_its_etcd_is_replaced_and_rejoins(
    cluster: tuple[PatroniCluster, dict[str, Supervisor]],
) -> None:
    servers, running = cluster
    lost = str(servers.primary())
    url = libpq_url(servers.url(lost))
    acknowledged = []

    def write() -> bool:
        with suppress(psycopg.Error), psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS written (row int)")
            connection.execute("INSERT INTO written VALUES (%s)", [len(acknowledged)])
            acknowledged.append(len(acknowledged))
            return True
        return False

    for _ in range(20):
        wait_until(write)
    running[lost].kill()
    servers.members[lost].kill()
    wait_until(write)
    running[lost] = Supervisor(servers.children(lost))
    running[lost].start()
    wait_until(servers.primary)
    assert servers.primary() != lost
    with psycopg.connect(url) as connection:
        rows = {row[0] for row in connection.execute("SELECT row FROM written")}
    assert rows >= set(acknowledged)
