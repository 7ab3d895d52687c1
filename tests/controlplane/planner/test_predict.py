"""Predictions of batches' ends, from what Postgres knows of their lines, their speed and the instances."""

import pytest
from sqlalchemy import select, text

from controlplane.dispatcher.finalize import FINALIZE
from controlplane.planner.predict import predict
from controlplane.policies.lifecycle import BatchState
from controlplane.store import queue
from controlplane.store.batch_ends import read_risk, read_speeds, write_speeds
from controlplane.store.batch_tables import Batch, BatchSpeed
from controlplane.store.batches import cancel_batch, forget_requests
from controlplane.store.blobs.base import BlobStore
from controlplane.store.queue import Outcome
from tests.controlplane.world import World, claim_waiting


def run(world: World, statement: str) -> None:
    with world.database.transaction() as session:
        session.execute(text(statement))


def ready(world: World) -> None:
    """An instance that is ready, on a node that is alive; its profile says 1,000 input tokens/s."""
    world.join("n1")
    world.place("n1")
    run(world, "UPDATE instances SET observed = 'ready'")


def complete(world: World, count: int) -> None:
    """Complete so many lines of each batch."""
    with world.database.transaction() as session:
        held = claim_waiting(session, count)
        queue.finish(session, [Outcome(claim=each, status_code=200, body={}) for each in held])


def look(world: World, passed_s: float = 0.0) -> dict[str, int]:
    """Predict, so many seconds after the last time."""
    run(world, f"UPDATE batch_speeds SET at = at - {passed_s} * interval '1 s'")
    return predict(world.database, world.settings)


def left_s(world: World, batch_id: str) -> float:
    with world.database.transaction() as session:
        seconds = session.scalar(
            text("SELECT extract(epoch FROM predicted_end_at - now()) FROM batches WHERE id = :id"), {"id": batch_id}
        )
    assert seconds is not None
    return float(seconds)


def risk(world: World) -> tuple[int, float]:
    with world.database.transaction() as session:
        return read_risk(session)


def test_from_the_first_look_to_the_measured_speed(world: World) -> None:
    batch_id = world.add_batch(lines=100, window_s=86_400)
    assert look(world) == {"running": 1, "at_risk": 1, "changed": 1}
    batch = world.batch(batch_id)
    assert (batch.at_risk, batch.predicted_end_at) == (True, None)
    assert batch.end_reason == "no instance of 'tide' takes batch requests"
    assert risk(world) == (1, 0.0)
    ready(world)
    assert look(world, 10)["at_risk"] == 0
    assert "at most" in str(world.batch(batch_id).end_reason)
    complete(world, 20)
    look(world, 1000)
    assert left_s(world, batch_id) == pytest.approx(4000.0, rel=0.1)
    assert "80 lines of 'tide' are left; 0.0" in str(world.batch(batch_id).end_reason)


def test_a_batch_that_cannot_end_in_time_is_counted(world: World) -> None:
    ready(world)
    world.add_batch(lines=100, window_s=500)
    look(world)
    complete(world, 10)
    look(world, 100)
    count, late_s = risk(world)
    assert count == 1
    assert 300 < late_s < 600, "900 seconds of work, and less than 500 are left"


def test_the_speed_outlives_the_batch_it_was_measured_of(world: World, blobs: BlobStore) -> None:
    ready(world)
    first = world.add_batch(lines=30)
    look(world)
    complete(world, 30)
    for state in (BatchState.FINALIZING, BatchState.COMPLETED):
        assert world.step(FINALIZE, blobs) == first
        assert world.batch(first).state == state
    second = world.add_batch(lines=90)
    look(world, 1000)
    assert left_s(world, second) == pytest.approx(3000.0, rel=0.1)


def test_a_batch_is_finalized_while_speeds_are_measured(world: World) -> None:
    """Neither waits for the other, also where the batch has the first lines of a model."""
    batch_id = world.add_batch(lines=1)
    look(world)
    complete(world, 1)
    columns = "batch_number, part, completed, failed, input_tokens, output_tokens"
    run(world, f"INSERT INTO batch_counts (model, {columns}) SELECT 'another', {columns} FROM batch_counts")
    with world.database.transaction() as measuring:
        speeds = read_speeds(measuring)
        with world.database.transaction() as session:
            session.execute(text("SET LOCAL lock_timeout = '1s'"))
            forget_requests(session, session.get_one(Batch, batch_id))
        write_speeds(measuring, {"another": speeds["tide"], **speeds})
    with world.database.transaction() as session:
        assert {row.model: row.ended for row in session.scalars(select(BatchSpeed))} == {"another": 1, "tide": 1}


def test_cancelled_lines_have_not_completed(world: World) -> None:
    ready(world)
    cancelled, other = world.add_batch(lines=500), world.add_batch(lines=10)
    look(world)
    with world.database.transaction() as session:
        cancel_batch(session, cancelled, tenant="acme")
    look(world, 10)
    assert "none has finished recently" in str(world.batch(other).end_reason)


def test_only_what_has_moved_is_written(world: World) -> None:
    ready(world)
    for _ in range(3):
        world.add_batch(lines=1000, window_s=86_400)
    assert look(world)["changed"] == 3
    assert look(world, 10)["changed"] == 0, "nothing finished, and the most that the instances make is the same"
    complete(world, 1)
    assert look(world, 10)["changed"] == 3


@pytest.mark.parametrize("kind", ["IW", "NIW"])
def test_instances_of_interactive_requests_do_not_count(world: World, kind: str) -> None:
    ready(world)
    run(world, f"UPDATE instances SET kind = '{kind}'")
    world.add_batch(lines=1)
    assert look(world)["at_risk"] == (kind == "IW")


def test_an_instance_that_starts_is_waited_for(world: World) -> None:
    world.join("n1")
    world.place("n1")
    batch_id = world.add_batch(lines=1)
    assert look(world)["at_risk"] == 0
    assert world.batch(batch_id).end_reason == "an instance of 'tide' is starting"
    run(world, "UPDATE instances SET observed = 'ready'")
    run(world, "UPDATE nodes SET last_seen_at = now() - interval '1 h'")
    assert look(world, 10)["at_risk"] == 1, "its node is gone"


def test_batches_that_have_ended_are_left_alone(world: World) -> None:
    batch_id = world.add_batch(lines=1)
    with world.database.transaction() as session:
        cancel_batch(session, batch_id, tenant="acme")
    assert look(world) == {"running": 0, "at_risk": 0, "changed": 0}
    with world.database.transaction() as session:
        assert session.get_one(Batch, batch_id).end_reason is None
