"""Every loop notes how it ended."""

import pytest
from sqlalchemy import create_engine, text
from structlog.testing import capture_logs

from controlplane.errors import UnavailableError
from controlplane.planner import schedule
from controlplane.planner.runs import loop_periods_s, note, noted
from controlplane.planner.schedule import Parts
from controlplane.policies.lifecycle import PlanState
from controlplane.policies.readiness import Loop, LoopFacts
from controlplane.settings import Settings
from controlplane.store.blobs.base import BlobStore
from controlplane.store.loop_runs import read_loop_runs
from controlplane.store.plans import newest_scheduled
from controlplane.store.session import Database
from ops.local.ports import free_port
from tests.controlplane.world import World


def facts_of(database: Database, loop: Loop) -> LoopFacts:
    with database.transaction() as session:
        now_s, loops = read_loop_runs(session)
    [facts] = [facts for facts in loops if facts.loop == loop]
    assert facts.since_s <= now_s
    return facts


def test_every_loop_has_a_period_and_none_has_run_yet(database: Database, settings: Settings) -> None:
    with database.transaction() as session:
        _, loops = read_loop_runs(session)
    assert {facts.loop for facts in loops} == set(Loop) == loop_periods_s(settings).keys()
    assert {facts.last_success_s for facts in loops} == {None}


def test_a_success_and_then_a_failure(database: Database) -> None:
    with noted(database, Loop.SCALE):
        pass
    before = facts_of(database, Loop.SCALE)
    with pytest.raises(ValueError, match="one\ntwo"), noted(database, Loop.SCALE):
        raise ValueError("one\ntwo")
    after = facts_of(database, Loop.SCALE)
    assert before.last_error is None
    assert after.last_success_s == before.last_success_s
    assert after.last_success_s is not None
    assert after.last_failure_s is not None
    assert after.last_failure_s >= after.last_success_s
    assert after.last_error == "ValueError: one two"
    assert after.last_process


def test_a_run_that_did_not_do_what_it_is_for_is_a_failure(database: Database) -> None:
    with noted(database, Loop.PLAN) as run:
        run.error = "no solver answered"
    facts = facts_of(database, Loop.PLAN)
    assert (facts.last_success_s, facts.last_error) == (None, "no solver answered")


def test_a_database_that_is_away_ends_no_loop() -> None:
    away = Database(create_engine(f"postgresql+psycopg://127.0.0.1:{free_port()}/x"))
    with capture_logs() as logs:
        note(away, Loop.BEAT)
    away.close()
    assert [(each["event"], each["loop"]) for each in logs] == [("a run was not noted", Loop.BEAT)]


@pytest.fixture
def parts(world: World, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch) -> Parts:
    """Tasks of this process use the test's database."""
    parts = Parts(settings=world.settings, database=world.database, live=world.live, blobs=blobs)
    monkeypatch.setattr(schedule, "parts", lambda: parts)
    monkeypatch.setattr(schedule.run_scale, "delay", lambda: None)
    return parts


def test_latency_is_compared_though_profiles_are_not_corrected(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis is away, which the comparison does not need."""
    compared: list[Database] = []

    def away(*_: object, **__: object) -> None:
        raise UnavailableError("redis")

    def compare(database: Database, *_: object, **__: object) -> dict[str, str]:
        compared.append(database)
        return {}

    monkeypatch.setattr(schedule, "correct", away)
    monkeypatch.setattr(schedule, "compare", compare)
    with pytest.raises(UnavailableError):
        schedule.run_correct()
    assert compared == [parts.database]


def test_every_scheduled_loop_notes_its_success(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule.run_forecast_some, "apply_async", lambda *_: None)
    schedule.run_measure()
    schedule.run_scale()
    schedule.run_predict()
    schedule.run_expire()
    schedule.run_sweep()
    schedule.run_correct()
    schedule.run_plan()
    schedule.run_pulse(Loop.WORKER)
    schedule.run_forecast_some([("tide", "us-east")], 1_000_000_800)
    schedule.note_beat()
    done = {
        Loop.MEASURE,
        Loop.SCALE,
        Loop.PREDICT,
        Loop.EXPIRE,
        Loop.SWEEP,
        Loop.CORRECT,
        Loop.PLAN,
        Loop.WORKER,
        Loop.FORECASTER,
        Loop.BEAT,
    }
    for loop in done:
        assert facts_of(parts.database, loop).last_success_s is not None, loop


@pytest.mark.parametrize(("loop", "table"), [(Loop.EXPIRE, "request_log"), (Loop.SWEEP, "demand_buckets")])
def test_a_job_that_fails_makes_its_loop_fail_and_is_named(parts: Parts, loop: Loop, table: str) -> None:
    with parts.database.transaction() as session:
        session.execute(text(f"ALTER TABLE {table} RENAME TO elsewhere"))
    {Loop.EXPIRE: schedule.run_expire, Loop.SWEEP: schedule.run_sweep}[loop]()
    facts = facts_of(parts.database, loop)
    assert facts.last_success_s is None
    assert str(facts.last_error).startswith(f"{table.removesuffix('_buckets')}: ProgrammingError: ")


def test_an_hour_without_a_plan_is_a_failure_of_the_loop(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ArithmeticError("no solver")

    monkeypatch.setattr("controlplane.planner.plan.draft_plan", broken)
    schedule.run_plan()
    with parts.database.transaction() as session:
        plan = newest_scheduled(session)
    assert plan is not None
    assert plan.state == PlanState.FAILED
    facts = facts_of(parts.database, Loop.PLAN)
    assert facts.last_success_s is None
    assert facts.last_error == plan.reason


def test_pulses_go_to_both_queues() -> None:
    sent = schedule.celery.conf.beat_schedule.values()
    queues = {entry["args"][0]: entry["options"]["queue"] for entry in sent if entry["task"] == "pulse"}
    assert queues == {Loop.WORKER: schedule.MAIN_QUEUE, Loop.FORECASTER: schedule.FORECAST_QUEUE}
