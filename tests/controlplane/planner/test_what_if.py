"""What-if runs as a worker does them: simulated, cancelled, stopped, out of time, and left by a dead worker."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from controlplane.planner.expire import expire, sweep
from controlplane.planner.what_if import run as running
from controlplane.planner.what_if import simulation
from controlplane.planner.what_if.changes import WhatIfChanges
from controlplane.planner.what_if.facts import write_facts
from controlplane.policies.facts import Endpoint
from controlplane.settings import Settings
from controlplane.store.blobs.base import BlobStore
from controlplane.store.demand import IW, DemandRow, put_demand
from controlplane.store.what_if import WhatIfRun, add_run, cancel_run, claim_run, get_run
from tests.controlplane.world import PATIENCE_S, World

HOUR_S = 3600
UNTIL_S = 12 * HOUR_S
DEMAND_FROM_S = UNTIL_S - 2 * HOUR_S
START = "import os, sys, time; sys.stderr.write('{\"share\": 0.25}\\n'); sys.stderr.flush(); "


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """A node heard of once stays alive, however slow the machine is."""
    return settings.model_copy(update={"heartbeat_stale_s": HOUR_S})


@pytest.fixture
def fleet(world: World) -> World:
    """A node in each of two regions, an instance in one, and two hours of demand there."""
    for node, region in (("n1", "us-east"), ("n2", "us-west")):
        world.join(node, region=region)
    world.place("n1")
    rows = [
        DemandRow(endpoint=Endpoint(model="tide", region="us-east"), kind=IW, start_s=start_s, tokens_per_s=200.0)
        for start_s in range(DEMAND_FROM_S, UNTIL_S, 60)
    ]
    with world.database.transaction() as session:
        put_demand(session, rows)
    return world


def queue(world: World, changes: dict[str, Any] | None = None) -> str:
    with world.database.transaction() as session:
        return add_run(session, name="x", created_by="me", hours=1, changes=changes or {}, queued_max=9).id


def read(world: World, run_id: str) -> WhatIfRun:
    with world.database.transaction() as session:
        return get_run(session, run_id)


def run_next(world: World, settings: Settings) -> bool:
    return running.run_next(world.database, world.live, settings)


def wait_until(true: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < until_s
        time.sleep(0.05)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[subprocess.Popen[bytes]]]:
    """Stand-ins for the simulation: a Python program in its place, and the processes that were started."""

    def instead(program: str) -> list[subprocess.Popen[bytes]]:
        started: list[subprocess.Popen[bytes]] = []

        def start(*_: object) -> subprocess.Popen[bytes]:
            started.append(subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, process_group=0))
            return started[-1]

        monkeypatch.setattr(simulation, "_started", start)
        return started

    return instead


def test_a_fleet_is_simulated_with_changes(fleet: World, settings: Settings) -> None:
    """Twice the demand makes twice the requests; the same changes give the same events."""
    double = {"demand": [{"factor": 2.0}], "strategy": "reactive"}
    plain, doubled, again = queue(fleet), queue(fleet, double), queue(fleet, double)
    for _ in range(3):
        assert run_next(fleet, settings)
    assert not run_next(fleet, settings)
    runs = [read(fleet, run_id) for run_id in (plain, doubled, again)]
    assert [(run.state, run.progress, run.error) for run in runs] == [("completed", 1.0, None)] * 3
    results = [run.result for run in runs]
    assert results[0]
    assert results[1]
    assert (results[0]["strategy"], results[1]["strategy"]) == ("lt-i", "reactive")
    assert results[1]["requests"] == pytest.approx(2 * results[0]["requests"], rel=0.3)
    assert results[0]["totals"]["gpu_hours"]["serving"] > 0
    assert results[0]["demand_from_s"] == UNTIL_S - HOUR_S == DEMAND_FROM_S + results[0]["series"]["start_s"]
    assert runs[1].event_log_hash == runs[2].event_log_hash != runs[0].event_log_hash


def test_a_region_is_lost(fleet: World, settings: Settings) -> None:
    run_id = queue(fleet, {"lost_regions": [{"region": "us-east", "after_h": 0.5, "down_h": 0.25}]})
    assert run_next(fleet, settings)
    run = read(fleet, run_id)
    assert run.result is not None, run.error
    assert run.result["totals"]["node_failures"] == 1


def test_what_changes_is_in_the_facts(fleet: World, settings: Settings, tmp_path: Path) -> None:
    changes = WhatIfChanges.model_validate(
        {
            "capacity": [{"region": "us-east", "factor": 3.0}, {"region": "us-west", "factor": 0.0}],
            "prices": [{"gpu_type": "H800", "cost_per_hour": 0.5}],
            "lost_regions": [{"region": "us-east", "after_h": 0.5, "down_h": 0.25}],
        }
    )
    path = write_facts(tmp_path, fleet.database, fleet.live, settings, changes, hours=1).path
    facts = json.loads(path.read_text())["fleet"]
    assert [node["region"] for node in facts["nodes"]] == ["us-east"] * 3
    assert facts["prices"]["H800"] == 0.5
    assert facts["lost_regions"] == [{"region": "us-east", "after_s": 1800, "down_s": 900}]
    assert len(facts["instances"]) == 1
    assert facts["settings"]["spot_enabled"] is settings.spot_enabled
    assert facts["settings"]["scale_strategy"] == settings.scale_strategy
    assert (facts["nodes"][0]["regroups"], facts["nodes"][0]["layout_held"]) == (False, False)
    secret = settings.database_url.get_secret_value()
    assert secret not in path.read_text()


@pytest.mark.parametrize(("hours", "from_s"), [(1, UNTIL_S - HOUR_S), (2, DEMAND_FROM_S), (24, DEMAND_FROM_S)])
def test_the_simulation_begins_with_demand_that_is_known(
    fleet: World, settings: Settings, tmp_path: Path, hours: int, from_s: int
) -> None:
    facts = write_facts(tmp_path, fleet.database, fleet.live, settings, WhatIfChanges(), hours=hours)
    assert facts.demand_from_s == from_s


def test_a_region_without_nodes_fails_in_words(fleet: World, settings: Settings) -> None:
    run_id = queue(fleet, {"capacity": [{"factor": 0.0}]})
    assert run_next(fleet, settings)
    run = read(fleet, run_id)
    assert run.state == "failed"
    assert "no node" in (run.error or "")


def test_too_much_demand_names_the_limit(fleet: World, settings: Settings) -> None:
    run_id = queue(fleet)
    run_next(fleet, settings.model_copy(update={"what_if_demand_minutes_max": 1}))
    assert "what_if_demand_minutes_max" in (read(fleet, run_id).error or "")


def test_memory_is_bounded(fleet: World, settings: Settings) -> None:
    run_id = queue(fleet)
    run_next(fleet, settings.model_copy(update={"what_if_memory_bytes_max": 2**20}))
    assert read(fleet, run_id).state == "failed"


def test_a_run_that_takes_too_long_is_ended(
    fleet: World, settings: Settings, programs: Callable[[str], list[subprocess.Popen[bytes]]]
) -> None:
    run_id, started = queue(fleet), programs(START + "time.sleep(600)")
    run_next(fleet, settings.model_copy(update={"what_if_time_max_s": 0}))
    run = read(fleet, run_id)
    assert (run.state, started[0].poll()) == ("failed", -signal.SIGKILL)
    assert "what_if_time_max_s" in (run.error or "")


def test_a_cancelled_run_ends(
    fleet: World, settings: Settings, programs: Callable[[str], list[subprocess.Popen[bytes]]]
) -> None:
    run_id, started = queue(fleet), programs(START + "time.sleep(600)")
    worker = threading.Thread(target=run_next, args=(fleet, settings))
    worker.start()
    wait_until(lambda: read(fleet, run_id).progress == 0.25)
    with fleet.database.transaction() as session:
        cancel_run(session, run_id)
    worker.join(PATIENCE_S)
    assert (read(fleet, run_id).state, started[0].poll()) == ("cancelled", -signal.SIGKILL)


def test_a_worker_that_stops_ends_its_run(
    fleet: World,
    settings: Settings,
    programs: Callable[[str], list[subprocess.Popen[bytes]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_id, started = queue(fleet), programs(START + "time.sleep(600)")
    monkeypatch.setattr(running, "is_stopping", lambda: True)
    assert not run_next(fleet, settings), "no other is begun"
    run = read(fleet, run_id)
    assert (run.state, started[0].poll()) == ("failed", -signal.SIGKILL)
    assert "stopped" in (run.error or "")


def test_a_run_of_a_dead_worker_fails(fleet: World, settings: Settings, blobs: BlobStore) -> None:
    run_id = queue(fleet)
    with fleet.database.transaction() as session:
        assert claim_run(session, running_max=1) is not None
        assert claim_run(session, running_max=1) is None
    assert expire(fleet.database, blobs, settings).counts["what_if_runs"] == 0
    with fleet.database.transaction() as session:
        session.execute(text("UPDATE what_if_runs SET heard_at = now() - interval '5 min'"))
    assert expire(fleet.database, blobs, settings).counts["what_if_runs"] == 1
    assert "died" in (read(fleet, run_id).error or "")


def test_a_simulation_ends_when_nobody_reads_its_progress() -> None:
    reader, writer = os.pipe()
    program = (
        "from types import SimpleNamespace as N\nfrom ops.cli import simulate\nsimulate._REPORT_EVERY_S = 0.0\n"
        "told = simulate._ProgressLines(N(traffic=N(duration_s=9.0)))\nwhile True: told(1.0, 1)"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stderr=writer)
    os.close(writer)
    assert b"share" in os.read(reader, 100)
    os.close(reader)
    assert child.wait(PATIENCE_S) != 0


def test_old_runs_are_deleted(fleet: World, settings: Settings, blobs: BlobStore) -> None:
    old, new = queue(fleet), queue(fleet)
    with fleet.database.transaction() as session:
        session.execute(
            text("UPDATE what_if_runs SET created_at = now() - interval '31 d' WHERE id = :id"), {"id": old}
        )
    sweep(fleet.database, blobs, settings, now_s=time.time())
    with fleet.database.transaction() as session:
        assert [row.id for row in session.query(WhatIfRun)] == [new]
