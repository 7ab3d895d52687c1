"""Patroni and etcd are drilled with the settings that are recommended, and a lost region is replaced."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
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


class Running:
    """A cluster of which each child has a supervisor of its own."""

    def __init__(self, home: Path) -> None:
        self.cluster = PatroniCluster(home, REGIONS, python=PATRONI, fsync=False)
        self.cluster.prepare(lambda _url: None)
        self.url = libpq_url(self.cluster.url(REGIONS[0]))
        self.acknowledged: list[int] = []
        self._supervisors: dict[str, dict[str, Supervisor]] = {}
        for region in REGIONS:
            self.start(region)

    def start(self, region: str) -> None:
        children = {child.name: replace(child, after=()) for child in self.cluster.children(region)}
        self._supervisors[region] = {name: Supervisor([child]) for name, child in children.items()}
        for supervisor in self._supervisors[region].values():
            supervisor.start()

    def lose(self, region: str) -> None:
        """Kill all that the region has."""
        for supervisor in self._supervisors[region].values():
            supervisor.kill()
        self.cluster.members[region].kill()

    def lose_etcd(self) -> None:
        for region, supervisors in self._supervisors.items():
            supervisors[f"etcd-{region}"].kill()

    def write(self) -> bool:
        """Write one more row; whether it was acknowledged."""
        row = len(self.acknowledged)
        with suppress(psycopg.Error), psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS written (row int)")
            connection.execute("INSERT INTO written VALUES (%s)", [row])
            self.acknowledged.append(row)
            return True
        return False

    def missing(self) -> set[int]:
        """The acknowledged rows that the first server that answers does not have."""
        with psycopg.connect(self.url, target_session_attrs="any") as connection:
            return set(self.acknowledged) - {row[0] for row in connection.execute("SELECT row FROM written")}

    def stop(self) -> None:
        for supervisors in self._supervisors.values():
            for supervisor in reversed(supervisors.values()):
                supervisor.stop()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    if not PATRONI.exists():
        pytest.skip("Patroni and etcd are not installed: make .clients/patroni/.ready")
    running = Running(tmp_path)
    try:
        wait_until(running.cluster.primary)
        yield running
    finally:
        running.stop()


@pytest.mark.slow
def test_a_region_lost_with_its_etcd_is_replaced_and_rejoins(running: Running) -> None:
    lost = str(running.cluster.primary())
    for _ in range(20):
        wait_until(running.write)
    running.lose(lost)
    wait_until(running.write)
    running.start(lost)
    wait_until(running.cluster.primary)
    assert running.cluster.primary() != lost
    assert running.missing() == set()


@pytest.mark.slow
def test_without_etcd_the_primary_goes_on_as_long_as_it_reaches_every_other_server(running: Running) -> None:
    primary = str(running.cluster.primary())
    running.lose_etcd()
    lost_s = time.monotonic()
    while time.monotonic() < lost_s + DCS["ttl"] + DCS["loop_wait"]:
        assert running.write(), "Patroni made it read-only"
        time.sleep(0.5)
    assert running.cluster.facts()[primary].takes_writes
    running.lose(next(region for region in REGIONS if region != primary))
    wait_until(lambda: not running.write())
    wait_until(lambda: running.missing() == set())
