"""`tidepool doctor` on real servers; what hangs and what breaks becomes a finding."""

import threading
from pathlib import Path
from typing import Any

import pytest

from controlplane.settings import Settings
from ops.client.home import remember
from ops.doctor.examine import examine
from ops.doctor.finding import Finding, Level, good
from ops.local.ports import free_port
from ops.local.stack import lock_home
from tests.ops.cli.conftest import fleet, restored_logs, run, served
from tests.ops.cli.running import Run, join

__all__ = ["fleet", "restored_logs", "run", "served"]


@pytest.fixture
def doctor(settings: Settings, monkeypatch: pytest.MonkeyPatch, restored_logs: None) -> None:
    """The environment of a control machine of the test's servers."""
    monkeypatch.setenv("TIDEPOOL_DATABASE_URL", settings.database_url.get_secret_value())
    monkeypatch.setenv("TIDEPOOL_REDIS_URL", settings.redis_url.get_secret_value())


def by_check(answer: Any) -> dict[str, dict[str, Any]]:
    return {each["check"]: each for each in answer["findings"]}


def test_an_installation(fleet: Run, doctor: None, database: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    join(database, "n1")
    monkeypatch.setenv("TIDEPOOL_NODE_KEY", "tp-node-unknown")
    monkeypatch.setenv("TIDEPOOL_DATABASE_REPLICA_URL", database.engine.url.render_as_string(hide_password=False))
    told = fleet("doctor", "--json", "--timeout", 60)
    found = by_check(told.json)
    levels = {name: each["level"] for name, each in found.items()}
    for name in ("python", "postgres", "schema", "redis", "admin key", "gateway", "file store", "clock of database"):
        assert levels.get(name) == "ok", found.get(name)
    assert (levels["node key"], levels["heartbeats"]) == ("failure", "warning"), told.err
    assert found["replica"]["found"] == "it is a primary"
    assert levels["primary"] == "failure", "the tests' server does not sync to its disk"
    assert all(each["todo"] for each in found.values() if each["level"] != "ok")
    assert (told.status, "checks failed" in told.err) == (1, True)
    assert told.json["counts"]["ok"] == sum(level == "ok" for level in levels.values())
    assert "tp-node-unknown" not in told.out + told.err


def test_a_database_that_is_away_fails_and_the_rest_is_examined(
    run: Run, doctor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEPOOL_DATABASE_URL", "postgresql://me:hidden@127.0.0.1:1/none")
    told = run("doctor", "--json", "--timeout", 60)
    found = by_check(told.json)
    assert found["database"]["level"] == "failure"
    assert found["redis"]["level"] == "ok"
    assert "hidden" not in told.out + told.err
    assert told.status == 1


def test_a_node_needs_no_database(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEPOOL_AGENT_CONTROL_URL", "http://127.0.0.1:1")
    told = run("doctor", "--node", "--json", "--timeout", 60)
    assert {"python", "GPUs", "shared memory", "gateway"} <= set(by_check(told.json))
    gateway = by_check(told.json)["gateway"]
    assert (gateway["level"], "TIDEPOOL_AGENT_CONTROL_URL" in gateway["todo"]) == ("failure", True)


def test_a_stack_that_is_stopped_is_one_failure_and_not_one_of_each_server(
    run: Run, restored_logs: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TIDEPOOL_DATABASE_URL", raising=False)
    remember(tmp_path, "postgres", free_port())
    told = run("doctor", "--json", "--timeout", 60)
    failures = [each for each in told.json["findings"] if each["level"] == "failure"]
    assert [each["check"] for each in failures] == ["tidepool up"]
    assert f"not running on {tmp_path}" in failures[0]["found"]
    with lock_home(tmp_path):
        assert "database" in by_check(run("doctor", "--json", "--timeout", 60).json)


def test_what_hangs_is_a_finding_and_holds_nobody_up() -> None:
    never, told = threading.Event(), []

    def hang() -> list[Finding]:
        never.wait()
        return []

    def breaks() -> list[Finding]:
        raise OSError("cannot reach postgresql://me:hidden@db\nand more")

    found = examine(
        {"disk": hang, "net": breaks, "rest": lambda: [good("rest", "well")]},
        timeout_s=5.0,
        report=lambda name, done, of: told.append((name, done, of)),
    )
    never.set()
    assert [(each.check, each.level) for each in found] == [
        ("disk", Level.FAILURE),
        ("net", Level.FAILURE),
        ("rest", Level.OK),
    ]
    assert "no answer within 5 s" in found[0].found
    assert found[1].found == "cannot reach postgresql://me:***@db"
    assert {name for name, _, _ in told} == {"net", "rest"}
