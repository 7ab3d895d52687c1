"""Steps of batches: tries are counted and end, and no tenant's batches delay another's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from controlplane.dispatcher.ingest import VALIDATE
from controlplane.dispatcher.steps import Step, Stepper
from controlplane.policies.lifecycle import BatchState
from controlplane.store.batch_attempts import Due, begin_attempt, hold_batch, lock_batch, note_failure
from controlplane.store.batch_tables import Batch
from controlplane.store.batches import move_batch
from controlplane.store.blobs.base import BlobStore
from tests.controlplane.world import World


class DeathError(BaseException):
    """The process ends here."""


def step_that(fails: Callable[[Session, Batch], Any]) -> Step:
    """Validation that asks `fails` first."""

    def take(session: Session, batch: Batch, *_: Any) -> Callable[[], None]:
        fails(session, batch)
        return partial(move_batch, session, batch, BatchState.IN_PROGRESS)

    return Step(Due.VALIDATION, take)


def refuse(session: Session, _batch: Batch) -> None:
    """What Postgres says of a value that it does not take."""
    session.execute(text("SELECT CAST(:value AS jsonb)"), {"value": '"a\\u0000b"'})


def time_out(session: Session, _batch: Batch) -> None:
    session.execute(text("SET LOCAL statement_timeout = 1"))
    session.execute(text("SELECT pg_sleep(60)"))


def errors_of(batch: Batch) -> list[Any]:
    assert batch.errors is not None
    data: list[Any] = batch.errors["data"]
    return data


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (refuse, "Postgres refuses it (unsupported Unicode escape sequence)"),
        (time_out, "Postgres refuses it (canceling statement due to statement timeout)"),
        (lambda _session, _batch: 1 / 0, "an internal error (ZeroDivisionError)"),
    ],
)
def test_a_batch_that_cannot_be_moved_on_fails_with_its_reason(
    world: World, blobs: BlobStore, fails: Callable[[Session, Batch], Any], reason: str
) -> None:
    batch_id = world.add_batch()
    waits_s = []
    for attempt in range(1, 5):
        assert (world.batch(batch_id).state, world.batch(batch_id).attempts) == ("validating", attempt - 1)
        assert world.step(step_that(fails), blobs, batch_attempts_max=4) == batch_id
        assert world.step(step_that(fails), blobs, batch_attempts_max=4) is None, "the next try waits"
        with world.database.transaction() as session:
            waits_s.append(session.scalar(text("SELECT round(extract(epoch FROM not_before - now())) FROM batches")))
        world.no_delay()
    assert waits_s[:3] == sorted(set(waits_s[:3])), "each time longer"
    [error] = errors_of(world.batch(batch_id))
    assert (world.batch(batch_id).state, error["code"]) == ("failed", "attempts_exhausted")
    assert reason in error["message"]
    assert world.step(step_that(fails), blobs) is None


def test_a_batch_that_ends_its_dispatchers_fails_too(world: World, blobs: BlobStore) -> None:
    def die(_session: Session, _batch: Batch) -> None:
        raise DeathError

    batch_id = world.add_batch()
    for _ in range(3):
        world.no_delay()
        with pytest.raises(DeathError):
            world.step(step_that(die), blobs, batch_attempts_max=3)
    world.no_delay()
    assert world.step(step_that(die), blobs, batch_attempts_max=3) == batch_id
    [error] = errors_of(world.batch(batch_id))
    assert (world.batch(batch_id).state, error["code"]) == ("failed", "attempts_exhausted")
    assert "the dispatcher ended on it" in error["message"]


def test_success_begins_the_count_anew(world: World, blobs: BlobStore) -> None:
    batch_id = world.add_batch()
    assert world.step(step_that(refuse), blobs) == batch_id
    assert world.batch(batch_id).attempts == 1
    world.no_delay()
    assert world.step(step_that(lambda *_: None), blobs) == batch_id
    assert (world.batch(batch_id).attempts, world.batch(batch_id).not_before) == (0, None)


def test_postgres_that_ends_connections_counts_for_no_batch(world: World, blobs: BlobStore) -> None:
    def terminate(session: Session, _batch: Batch) -> None:
        session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    batch_id = world.add_batch()
    for _ in range(5):
        world.no_delay()
        with pytest.raises(OperationalError):
            world.step(step_that(terminate), blobs, batch_attempts_max=1)
    assert (world.batch(batch_id).state, world.batch(batch_id).attempts) == ("validating", 0)


def test_an_outage_that_lasts_counts_for_no_batch(
    world: World, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure cannot be written down where it happens."""

    def away(*_: Any) -> Any:
        raise OperationalError("SELECT 1", None, psycopg.OperationalError("away"))

    def fail(*_: Any) -> None:
        monkeypatch.setattr(world.database, "transaction", away)
        away()

    batch_id = world.add_batch()
    settings = world.settings.model_copy(update={"batch_attempts_max": 1})
    stepper = Stepper(step_that(fail), world.database, blobs, settings)
    for _ in range(3):
        world.no_delay()
        for _ in range(2):
            with pytest.raises(OperationalError):
                stepper.one()
        monkeypatch.undo()
        assert stepper.one() is None, "the next try waits"
        assert (world.batch(batch_id).state, world.batch(batch_id).attempts) == ("validating", 0)


def test_a_dispatcher_that_was_paused_leaves_a_batch_to_the_later_attempt(world: World) -> None:
    world.add_batch()
    begun = []
    for _ in range(2):
        world.no_delay()
        with world.database.transaction() as session:
            begun += [begin_attempt(session, Due.VALIDATION)]
    with world.database.transaction() as session:
        assert [hold_batch(session, each) is None for each in begun if each is not None] == [True, False]
        world.no_delay()
        with world.database.transaction() as other:
            assert begin_attempt(other, Due.VALIDATION) is None, "it is held"


@pytest.mark.parametrize("counts", [True, False])
def test_a_failure_that_is_noted_late_leaves_the_later_attempt_alone(world: World, *, counts: bool) -> None:
    batch_id = world.add_batch()
    begun = []
    for _ in range(2):
        world.no_delay()
        with world.database.transaction() as session:
            begun += [begin_attempt(session, Due.VALIDATION)]
    first, last = begun
    assert first is not None
    assert last is not None
    with world.database.transaction() as session:
        assert hold_batch(session, last) is not None
        with world.database.transaction() as other:
            note_failure(other, first, Due.VALIDATION, reason="it failed", counts=counts, attempts_max=2)
        assert lock_batch(session, last) is not None
    assert (world.batch(batch_id).state, world.batch(batch_id).attempts) == ("validating", 2)


@pytest.mark.parametrize("poisoned", [0, 500])
def test_poisoned_batches_of_a_tenant_delay_no_other(world: World, blobs: BlobStore, poisoned: int) -> None:
    """Whichever tenant is first, and whatever was tried before, the good one is among the next two."""
    for _ in range(poisoned):
        world.add_batch(tenant="mallory")
    stepper = Stepper(
        step_that(lambda session, batch: batch.tenant == "mallory" and refuse(session, batch)),
        world.database,
        blobs,
        world.settings.model_copy(update={"batch_attempts_max": 1}),
    )
    for tenant in ("acme", "zoe", "acme"):
        good = world.add_batch(tenant=tenant)
        assert good in [stepper.one() for _ in range(2)]
        assert world.batch(good).state == "in_progress"
    tried = 3
    while stepper.one() is not None:
        tried += 1
    with world.database.transaction() as session:
        states = dict(session.execute(text("SELECT state, count(*) FROM batches GROUP BY state")).all())
    assert states == {"in_progress": 3} | ({"failed": poisoned} if poisoned else {})
    assert tried <= poisoned + 3, "nothing is tried in vain"


def test_of_one_tenant_fresh_batches_go_before_those_that_failed(world: World, blobs: BlobStore) -> None:
    bad = [world.add_batch() for _ in range(3)]
    stepper = Stepper(
        step_that(lambda s, batch: batch.id in bad and refuse(s, batch)), world.database, blobs, world.settings
    )
    assert [stepper.one() for _ in range(4)] == [*bad, None]
    world.no_delay()
    good = world.add_batch()
    assert stepper.one() == good


def test_two_dispatchers_take_different_batches(world: World, blobs: BlobStore) -> None:
    first, second = world.add_batch(), world.add_batch()
    taken: list[str] = []

    def meanwhile(_session: Session, batch: Batch) -> None:
        taken.append(batch.id)
        if batch.id == first:
            assert world.step(step_that(meanwhile), blobs) == second

    assert world.step(step_that(meanwhile), blobs) == first
    assert taken == [first, second]


def test_a_batch_that_is_cancelled_between_its_turn_and_its_step_is_left_alone(
    world: World, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = world.add_batch()

    def hold(session: Session, begun: Batch) -> Batch | None:
        with world.database.transaction() as other:
            move_batch(other, other.get_one(Batch, begun.id), BatchState.CANCELLING)
        return hold_batch(session, begun)

    monkeypatch.setattr("controlplane.dispatcher.steps.hold_batch", hold)
    assert world.step(VALIDATE, blobs) == batch_id
    assert world.batch(batch_id).state == "cancelling"
